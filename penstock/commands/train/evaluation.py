"""Evaluate a trained model: its loss on the held-out part, and a sample of text."""

from penstock.commands.train.data import TextDataset
from penstock.commands.train.setup import Setup

VALIDATION_BATCHES = 8
SAMPLE_BYTES = 160
TEMPERATURE = 0.7


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
