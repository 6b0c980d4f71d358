"""Lab 16: a transformer cut by hand and by tracing.

This is the program of PyTorch's pipeline tutorial. A transformer whose pieces may be None is cut by hand: each stage deletes
what is not its own, and what stays keeps its name. Then the same model is cut by tracing: an example microbatch goes through
it, and the graph of what it does is cut where the times are even. Both train on two ranks, beside one process; the first rank
reads the tokens, the last one the targets, and a list gets the loss of every microbatch.

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
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs")  # those of the tutorial


def main() -> None:
    """Both cuts, their names, the losses of microbatches, and the schedules of the tutorial."""
    say(f"Lab 16: a transformer of {LAYERS} layers over {RANKS} ranks\n")
    results, names = on_ranks(both_cuts, RANKS), set(LabTransformer().state_dict())
    alone_losses = results[0].alone
    for way in ("by hand", "traced"):
        say(f"Cut {way}:")
        for rank, result in enumerate(results):
            say(f"  rank {rank} has {', '.join(result.pieces[way])}")
        names_on_ranks = [name for result in results for name in result.names[way]]
        check(
            sorted(names_on_ranks) == sorted(names),
            f"each of the {len(names)} names of the uncut model is on one rank: checkpoints fit any cut",
            f"{len(names ^ set(names_on_ranks))} names are on no rank, or are new ones",
        )
    losses = results[-1].losses
    say(f"\nStep 1, the losses of its {MICROBATCHES} microbatches: {', '.join(f'{loss:.4f}' for loss in losses[0])}")
    say("  pipe.step(tokens, target=targets, losses=each)  # a list, filled on the ranks that give one")
    say("The first rank reads only the tokens, the last one only the targets; the others may pass None.\n")
    for name in ("by hand", "traced", *SCHEDULES):
        check(
            all(result.trained[name] == alone_losses for result in results),
            f"{name}: {STEPS} losses with the bits of one process",
            f"{name}: the losses are {results[0].trained[name]}, those of one process {alone_losses}",
        )
    mean = sum(losses[0]) / MICROBATCHES
    check(
        abs(mean - alone_losses[0]) < 1e-5,
        "the microbatches are of one size here, so the mean of their losses is the batch's",
        f"the mean of the microbatches' losses is {mean}, the loss of the batch {alone_losses[0]}",
    )
    say("A cut by hand needs a model whose pieces may be missing, and somebody who knows it. A traced cut needs neither, only")
    say("a forward that does the same for all data. A Sequential is cut between its layers: it needs nothing (lab 13).")
    say(
        f"\nMeasured: in {STEPS} steps the loss goes from {alone_losses[0]:.4f} to {alone_losses[-1]:.4f}, with the same bits "
        f"in one process, cut by hand, traced, and by {len(SCHEDULES)} schedules."
    )


class LabTransformer(nn.Module):
    """Decoder layers between an embedding and a head. A stage cut by hand leaves out what the others have."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        layers = (nn.TransformerDecoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True) for _ in range(LAYERS))
        self.layers = nn.ModuleDict({str(number): layer for number, layer in enumerate(layers)})  # names that stay
        self.norm: nn.Module | None = nn.LayerNorm(WIDTH)
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) tokens -> (batch, time, vocabulary) logits."""
        hidden = tokens if self.embedding is None else self.embedding(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden, hidden)
        hidden = hidden if self.norm is None else self.norm(hidden)
        return hidden if self.head is None else self.head(hidden)


def by_hand(uncut: LabTransformer, stages: int) -> list[nn.Module]:
    """For every stage a copy of the model without what belongs to the others."""
    parts = []
    for stage in range(stages):
        part = copy.deepcopy(uncut)
        for number in range(LAYERS):
            if number * stages // LAYERS != stage:
                del part.layers[str(number)]
        if stage > 0:
            part.embedding = None
        if stage < stages - 1:
            part.norm = part.head = None
        parts.append(part)
    return [*parts]


def model() -> LabTransformer:
    """The uncut model, the same on every rank."""
    torch.manual_seed(0)
    return LabTransformer()


def batch() -> tuple[Tensor, Tensor]:
    """(rows, time) tokens, and as targets the tokens that follow them."""
    tokens = torch.randint(VOCABULARY, (ROWS, TIME), generator=torch.Generator().manual_seed(1))
    return tokens, (tokens + 1) % VOCABULARY


def tokenwise(logits: Tensor, target: Tensor) -> Tensor:
    """The mean cross-entropy over all tokens."""
    return cross_entropy(logits.flatten(0, 1), target.flatten())


class CutResult(NamedTuple):
    """What one rank has found, by the way of cutting."""

    pieces: dict[str, list[str]]  # of its stage
    names: dict[str, list[str]]  # of its parameters
    losses: list[list[float]]  # step -> of each microbatch, cut by hand
    trained: dict[str, list[float]]  # way or schedule -> the losses
    alone: list[float]  # the same, by one process


def both_cuts() -> CutResult:
    """Train in every way, on this rank."""
    ps.comms.init_distributed()
    tokens, _ = batch()
    pipes = {
        "by hand": ps.Pipeline(by_hand(model(), RANKS), tokenwise, "gpipe", MICROBATCHES),
        "traced": ps.Pipeline(model(), tokenwise, "gpipe", MICROBATCHES, example_args=(tokens[: ROWS // MICROBATCHES],)),
    }
    names = {way: [*pipe.state_dict()] for way, pipe in pipes.items()}
    pieces = {way: sorted({".".join(name.split(".")[: 1 + name.startswith("layers")]) for name in names[way]}) for way in pipes}
    losses: list[list[float]] = []
    trained = {way: train(pipe, losses) for way, pipe in pipes.items()}
    for name in SCHEDULES:
        table = ps.schedule.build(name, ranks=RANKS, microbatches=MICROBATCHES)
        trained[name] = train(ps.Pipeline(by_hand(model(), table.num_stages), tokenwise, table), losses)
    return CutResult(pieces, names, losses, trained, alone())


def train(pipe: ps.Pipeline, losses: list[list[float]]) -> list[float]:
    """The losses of some steps; those of their microbatches are added to `losses`."""
    optimizer = torch.optim.Adam(pipe.parameters(), lr=3e-3)
    tokens, targets = batch()
    trained = []
    for _ in range(STEPS):
        value: list[Tensor] = []
        loss = pipe.step(tokens, target=targets, losses=value)
        losses.append([step_loss.item() for step_loss in value])
        optimizer.step()
        optimizer.zero_grad()
        trained.append(loss.item())
    return trained


def alone() -> list[float]:
    """The same training in one process, in the same microbatches."""
    uncut = model()
    optimizer = torch.optim.Adam(uncut.parameters(), lr=3e-3)
    trained = []
    for _ in range(STEPS):
        total = torch.zeros(())
        for tokens, target in zip(*(microbatch.chunk(MICROBATCHES) for microbatch in batch()), strict=True):
            loss = tokenwise(uncut(tokens), target)
            loss.backward(torch.full_like(loss, 1 / MICROBATCHES))
            total += loss.detach() / MICROBATCHES
        optimizer.step()
        optimizer.zero_grad()
        trained.append(total.item())
    return trained


if __name__ == "__main__":
    main()
