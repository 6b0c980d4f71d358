"""Lab 16: a transformer cut by hand and by tracing.

This is the program of PyTorch's pipeline tutorial. First the lab cuts a transformer by hand: each stage deletes the modules of
other stages, and its own keep their names. Then it cuts the same model by tracing: an example microbatch runs through it, and
the traced graph is cut into stages of about equal time. Both train on two ranks, and are compared with one process. The first
rank reads the tokens, the last one the targets, and a list receives the loss of every microbatch.

    penstock lab 16
    python -m penstock.learn.labs.lab16_transformer
    torchrun --nproc-per-node 2 -m penstock.learn.labs.lab16_transformer

Try: `if hidden.sum() > 0:` in the forward. Which of the two cuts still works?
"""

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import penstock as ps
from penstock.learn.lab_helpers import check, on_ranks, say

RANKS = 2
VOCABULARY, WIDTH, HEADS, LAYERS = 50, 32, 4, 4
ROWS, TIME, MICROBATCHES, STEPS = 12, 8, 4, 3
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs")  # of the tutorial


def main() -> None:
    """Train both cuts, and the cut by hand by the tutorial's schedules; compare names and losses with one process."""
    say(f"Lab 16: a transformer of {LAYERS} layers over {RANKS} ranks\n")
    results, names = on_ranks(train_all_ways, RANKS), set(LabTransformer().state_dict())
    uncut_losses = results[0].uncut_losses
    for cut_method in ("by hand", "traced"):
        say(f"Cut {cut_method}:")
        for rank, result in enumerate(results):
            say(f"  rank {rank} has {', '.join(result.module_names[cut_method])}")
        names_on_ranks = [name for result in results for name in result.parameter_names[cut_method]]
        check(
            sorted(names_on_ranks) == sorted(names),
            f"each of the {len(names)} names of the uncut model is on one rank: checkpoints fit any cut",
            f"{len(names ^ set(names_on_ranks))} names are on no rank, or are new ones",
        )
    losses = results[-1].microbatch_losses
    say(f"\nStep 1, the losses of its {MICROBATCHES} microbatches: {', '.join(f'{loss:.4f}' for loss in losses[0])}")
    say("  pipe.step(tokens, target=targets, losses=losses)  # losses: a list, filled on the ranks that pass one")
    say("The first rank reads only the tokens, the last one only the targets; the other ranks may pass None.\n")
    for name in ("by hand", "traced", *SCHEDULES):
        check(
            all(result.step_losses[name] == uncut_losses for result in results),
            f"{name}: {STEPS} losses with the bits of one process",
            f"{name}: the losses are {results[0].step_losses[name]}, those of one process {uncut_losses}",
        )
    mean = sum(losses[0]) / MICROBATCHES
    check(
        abs(mean - uncut_losses[0]) < 1e-5,
        "the microbatches have one size here, so the mean of their losses is the batch's",
        f"the mean of the microbatches' losses is {mean}, the loss of the batch {uncut_losses[0]}",
    )
    say("A cut by hand needs a model that runs without some of its modules, and somebody who knows it. A traced cut needs only")
    say("a forward that does the same for all data. A Sequential is cut between its layers, which needs neither (lab 13).")
    say(
        f"\nMeasured: in {STEPS} steps the loss goes from {uncut_losses[0]:.4f} to {uncut_losses[-1]:.4f}, with the same bits "
        f"in one process, cut by hand, traced, and by {len(SCHEDULES)} schedules."
    )


class LabTransformer(nn.Module):
    """Decoder layers between an embedding and a head. It also runs with some of them missing, as a stage cut by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        layers = (nn.TransformerDecoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True) for _ in range(LAYERS))
        self.layers = nn.ModuleDict({str(number): layer for number, layer in enumerate(layers)})  # names that stay
        self.norm: nn.Module | None = nn.LayerNorm(WIDTH)
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, time, vocabulary) of `tokens` (batch, time); without embedding or head, hidden states."""
        hidden = tokens if self.embedding is None else self.embedding(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden, hidden)
        hidden = hidden if self.norm is None else self.norm(hidden)
        return hidden if self.head is None else self.head(hidden)


def cut_by_hand(uncut: LabTransformer, stages: int) -> list[nn.Module]:
    """Return for each stage a copy of the model without the modules of other stages."""
    stage_modules = []
    for stage in range(stages):
        stage_module = copy.deepcopy(uncut)
        for number in range(LAYERS):
            if number * stages // LAYERS != stage:
                del stage_module.layers[str(number)]
        if stage > 0:
            stage_module.embedding = None
        if stage < stages - 1:
            stage_module.norm = stage_module.head = None
        stage_modules.append(stage_module)
    return [*stage_modules]


def model() -> LabTransformer:
    """Build the uncut model, the same on every rank."""
    torch.manual_seed(0)
    return LabTransformer()


def batch() -> tuple[Tensor, Tensor]:
    """Return tokens (rows, time) and targets (rows, time), which are the tokens plus 1."""
    tokens = torch.randint(VOCABULARY, (ROWS, TIME), generator=torch.Generator().manual_seed(1))
    return tokens, (tokens + 1) % VOCABULARY


def mean_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy over all tokens."""
    return cross_entropy(logits.flatten(0, 1), target.flatten())


class CutResult(NamedTuple):
    """The results of one rank."""

    module_names: dict[str, list[str]]  # cut method -> names of its stage's modules
    parameter_names: dict[str, list[str]]  # cut method -> names of its stage's parameters
    microbatch_losses: list[list[float]]  # of every step that ran, the losses of its microbatches
    step_losses: dict[str, list[float]]  # cut method or schedule -> the losses of its steps
    uncut_losses: list[float]  # of the steps in one process


def train_all_ways() -> CutResult:
    """Train by both cuts, by the schedules and in one process."""
    ps.comms.init_distributed()
    tokens, _ = batch()
    pipes = {
        "by hand": ps.Pipeline(cut_by_hand(model(), RANKS), mean_token_loss, "gpipe", MICROBATCHES),
        "traced": ps.Pipeline(model(), mean_token_loss, "gpipe", MICROBATCHES, example_args=(tokens[: ROWS // MICROBATCHES],)),
    }
    parameter_names = {cut_method: [*pipe.state_dict()] for cut_method, pipe in pipes.items()}
    module_names = {
        cut_method: sorted({".".join(name.split(".")[: 1 + name.startswith("layers")]) for name in names})
        for cut_method, names in parameter_names.items()
    }
    losses: list[list[float]] = []
    step_losses = {cut_method: train(pipe, losses) for cut_method, pipe in pipes.items()}
    for name in SCHEDULES:
        table = ps.schedule.build(name, ranks=RANKS, microbatches=MICROBATCHES)
        step_losses[name] = train(ps.Pipeline(cut_by_hand(model(), table.num_stages), mean_token_loss, table), losses)
    return CutResult(module_names, parameter_names, losses, step_losses, train_uncut())


def train(pipe: ps.Pipeline, microbatch_losses: list[list[float]]) -> list[float]:
    """Train, and append each step's losses of microbatches to `microbatch_losses`. Returns the losses of the steps."""
    optimizer = torch.optim.Adam(pipe.parameters(), lr=3e-3)
    tokens, targets = batch()
    step_losses = []
    for _ in range(STEPS):
        losses: list[Tensor] = []
        step_loss = pipe.step(tokens, target=targets, losses=losses)
        microbatch_losses.append([loss.item() for loss in losses])
        optimizer.step()
        optimizer.zero_grad()
        step_losses.append(step_loss.item())
    return step_losses


def train_uncut() -> list[float]:
    """Train in one process, in the same microbatches. Returns the losses of the steps."""
    uncut = model()
    optimizer = torch.optim.Adam(uncut.parameters(), lr=3e-3)
    step_losses = []
    for _ in range(STEPS):
        total = torch.zeros(())
        for tokens, target in zip(*(tensor.chunk(MICROBATCHES) for tensor in batch()), strict=True):
            loss = mean_token_loss(uncut(tokens), target)
            loss.backward(torch.full_like(loss, 1 / MICROBATCHES))
            total += loss.detach() / MICROBATCHES
        optimizer.step()
        optimizer.zero_grad()
        step_losses.append(total.item())
    return step_losses


if __name__ == "__main__":
    main()
