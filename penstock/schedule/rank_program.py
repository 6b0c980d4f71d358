"""One rank's part of a program, with what its stages must know beforehand."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from penstock.schedule.program import Program, Step, lower
from penstock.schedule.table import Action, Kind
from penstock.schedule.verify import prove


@dataclass(frozen=True)
class Part:
    """The steps of a rank, and what follows from them for each action."""

    steps: tuple[Step, ...]
    split: frozenset[tuple[int, int]]  # (stage, microbatch) whose backward is I and W: its forward prepares for it
    weights: dict[Action, tuple[int, ...]]  # W -> the microbatches whose weights' gradients it adds
    last: frozenset[Action]  # the B or W with which a stage's gradients of this step are complete

    @property
    def stages(self) -> list[int]:
        """The rank's stages, in the order in which they come into use."""
        return list(dict.fromkeys(step.action.stage for step in self.steps))


class Parts:
    """A rank's parts of a proved program: of all of it, or of what of it a batch and a call need. Those are proved as well."""

    def __init__(self, program: Program, rank: int, merge: bool = False) -> None:
        self.program, self.rank, self.merge = program, rank, merge
        self._known: dict[object, Part] = {}

    def of(self, training: bool, pieces: int | None = None, without_backward: frozenset[int] = frozenset()) -> Part:
        """What is done for `pieces` microbatches (None: all), of which some are `without_backward`; if not training, all."""
        table = self.program.schedule
        pieces = table.microbatches if pieces is None else pieces
        key = training, pieces, without_backward if training else None
        if key not in self._known:
            if not training:
                table = table.keep(lambda action: action.kind is Kind.F)
            if pieces < table.microbatches:
                table = table.keep(lambda action: action.microbatch < pieces)
            if training and without_backward:
                table = table.keep(lambda action: action.kind is Kind.F or action.microbatch not in without_backward)
            program = self.program
            if table is not program.schedule:
                program = lower(table, skips=program.skips)
                prove(program)
            self._known[key] = part_of(program, self.rank, self.merge)
        return self._known[key]


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
