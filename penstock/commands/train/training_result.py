"""The result of a training, and what is evaluated for it at its end: the loss on the held-out part, and a sample of text."""

import math
from dataclasses import dataclass, field

from penstock.commands.train.data import TextDataset
from penstock.commands.train.setup import Setup

VALIDATION_BATCHES = 8
SAMPLE_BYTES = 160
TEMPERATURE = 0.7


@dataclass
class TrainResult:
    """The result of a run, on rank 0; it grows step by step."""

    ranks: int
    reordered: bool = False  # sums over replicas or `tp` have another order than in one process
    losses: list[float] = field(default_factory=list)  # of every step
    seconds: list[float] = field(default_factory=list)
    idle_shares: list[float] = field(default_factory=list)
    peak_memory: float = 0.0  # bytes, the fullest rank's
    rows_per_step: int = 0
    tokens_per_step: int = 0
    preempted: bool = False  # stopped before the last step; the steps so far are saved
    validation_loss: float = math.nan
    prompt: str = ""
    sample: str = ""
    planned_bubble: float = 0.0  # of the table with equal stages, a backward twice as long as a forward
    planned_idle: float = 0.0  # of the same table: idle share of all ranks' time
    clock_error: float = 0.0  # seconds by which the clocks of several machines may differ
    planned: str = ""  # planned and measured time of a step; the first line is printed
    explanation: str = ""  # where the time of the last steps went; the first line is the verdict
    crowding: str = ""  # a warning that ranks share cores


def validation_loss(setup: Setup) -> float:
    """Return the mean loss over the held-out part."""
    losses, rows = 0.0, 0
    for batch in setup.source.validation(setup.config.batch, VALIDATION_BATCHES):
        inputs, target = setup.share(batch)
        _, loss = setup.pipe.eval(inputs, target=target)
        losses, rows = losses + loss.item() * len(batch[0]), rows + len(batch[0])
    return losses / rows


def sample(setup: Setup) -> tuple[str, str]:
    """Return held-out text and the model's continuation of it; two empty strings for a model of images."""
    if not isinstance(setup.source, TextDataset):
        return "", ""
    prompt = setup.source.held_out[: setup.source.context].long()[None]  # (1, context)
    text = setup.pipe.generate(prompt, max_new_tokens=SAMPLE_BYTES, temperature=TEMPERATURE, seed=setup.config.seed)
    prompt_text, continuation = (
        bytes(part.tolist()).decode(errors="replace") for part in text[0].split([prompt.shape[1], SAMPLE_BYTES])
    )
    return prompt_text, continuation
