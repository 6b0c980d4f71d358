"""One rank's part of a program, with what its stages must know beforehand."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from penstock.schedule.actions import Action, Kind
from penstock.schedule.program import Program, Step


@dataclass(frozen=True)
class Part:
    """The steps of a rank, and what follows from them for each action."""

    steps: tuple[Step, ...]
    split: frozenset[tuple[int, int]]  # (stage, microbatch) whose backward is I and W: its forward prepares for it
    weights: dict[Action, tuple[int, ...]]  # W -> the microbatches whose weights' gradients it adds
    last: frozenset[Action]  # the B or W with which a stage's gradients of this step are complete


def part_of(program: Program, rank: int, merge: bool = False) -> Part:
    """The part of `rank`. With `merge`, the last of several W of one stage that stand next to each other does for all."""
    steps = program.steps[rank]
    row = [step.action for step in steps]
    return Part(
        steps,
        frozenset((stage, microbatch) for kind, stage, microbatch in row if kind is Kind.I),
        dict(_weights(row, merge)),
        frozenset({action.stage: action for action in row if action.kind in (Kind.B, Kind.W)}.values()),
    )


def _weights(row: Sequence[Action], merge: bool) -> list[tuple[Action, tuple[int, ...]]]:
    if not merge:
        return [(action, (action.microbatch,)) for action in row if action.kind is Kind.W]
    weights: list[tuple[Action, tuple[int, ...]]] = []
    for (kind, _), run in groupby(row, key=lambda action: action[:2]):
        actions = list(run)
        if kind is Kind.W:
            weights += [(action, ()) for action in actions[:-1]]
            weights.append((actions[-1], tuple(action.microbatch for action in actions)))
    return weights
