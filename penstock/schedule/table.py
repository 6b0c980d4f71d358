"""Actions, and the table of actions that is a schedule: plain data that can be proved, lowered, timed and run."""

import csv
import enum
import gc
import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from os import PathLike
from typing import NamedTuple, Self

from penstock.errors import ScheduleError, format_count
from penstock.lazy import lazy_method


class Kind(enum.Enum):
    """The kind of work that an action does. `B` is `I` and `W` at once."""

    F = "F"  # forward
    B = "B"  # full backward
    I = "I"  # backward to the input only  # noqa: E741 - the field's letter
    W = "W"  # backward to the weights only

    __hash__ = object.__hash__  # members are single objects; Enum's own hash is a Python call

    def __repr__(self) -> str:
        return self.value


# What other systems write in their tables -> why it is no action here, and what to do: docs/explanation/not-in-a-table.md.
NO_ACTIONS = {
    r"R|RC|RECOMP(UTE)?": "recomputation is no action: Pipeline(recompute='block') recomputes inside the backward",
    r"OPT(IM|IMIZER)?|STEP|UPDATE": "the optimizer is no action: call optimizer.step() after pipe.step()",
    r"OFF(LOAD)?|RELOAD|FETCH|PREFETCH|D2H|H2D": "offload is no action: save activations on the host in the model's forward",
    r"AR|AG|RS|A2A|ALL_?(REDUCE|GATHER|TO_?ALL)|REDUCE(_?SCATTER)?|BCAST|BROADCAST|BARRIER": (
        "a collective is no action: Pipeline(mesh=) averages, gathers and scatters inside actions"
    ),
    r"SEND(_[FB])?|RECV(_[FB])?|WAIT_SEND(_[FB])?": (
        "messages follow from the table: script_from_compute_comms_csv reads tables that have their own, to prove them"
    ),
}


def _why_no_action(text: str) -> str:
    """Return the end of an error: why the kind in `text` is no action; empty if it is an unknown one."""
    kind = re.sub(r"^[0-9]*|[0-9.,]*$", "", text.strip().upper())
    reason = next((reason for pattern, reason in NO_ACTIONS.items() if re.fullmatch(pattern, kind)), "")
    return f"; {reason} (see what a table cannot say, in the docs)" if reason else ""


class Action(NamedTuple):
    """An action: `kind` of work for one microbatch on one stage, written `2F3`.

    If microbatches are cut along their sequence, an action is for one slice: `2F3` for slice 0, `2F3.1` for slice 1.
    """

    kind: Kind
    stage: int
    microbatch: int
    slice: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch_text}"

    @property
    def microbatch_text(self) -> str:
        """The microbatch as text, with its slice unless that is 0: `3`, `3.1`."""
        return f"{self.microbatch}.{self.slice}" if self.slice else f"{self.microbatch}"

    def index_among_slices(self, slices: int) -> int:
        """Return the slice's index among those of all microbatches, each of K = `slices`; if K = 1, the microbatch."""
        return self.microbatch * slices + self.slice

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Return the action written as stage, kind, microbatch: `2F3`, or `2F3.1`. Raises ScheduleError for other text."""
        if cell := re.fullmatch(r"([0-9]{1,9})([FBIW])([0-9]{1,9})(?:\.([0-9]{1,9}))?", text.strip()):
            return cls(Kind(cell[2]), int(cell[1]), int(cell[3]), int(cell[4] or 0))
        quoted = repr(text) if len(text) < 60 else f"{text[:57]!r}.."
        expected = "expected stage, kind (F, B, I or W), microbatch, as in 2F3"
        raise ScheduleError(f"cannot read {quoted} as an action: {expected}{_why_no_action(text)}")


FROZEN_MARK, TEACHER_MARK, AHEAD_MARK = "FROZEN", "TEACHER", "TEACHER_AHEAD"  # of stages, in a CSV table

OverlappedPair = tuple[Action, Action]  # two actions that may run at the same time
Cell = Action | OverlappedPair  # one entry of a rank's row
Skip = tuple[int, int]  # (stage, later stage that is not the next one)


def actions_of(cell: Cell) -> tuple[Action, ...]:
    """Return the actions of a cell: one, or the two of a pair."""
    return (cell,) if isinstance(cell, Action) else cell


def cell_text(cell: Cell) -> str:
    """Return a cell as text: `2F3`, or `{2F3 5B1}` for a pair."""
    return str(cell) if isinstance(cell, Action) else f"{{{cell[0]} {cell[1]}}}"


class Chains(NamedTuple):
    """The chains that stages form: one of `num_stages` that are all trained, if nothing else is said."""

    num_stages: int  # of all chains
    forward_only: frozenset[int] = frozenset()  # stages that have F only: they owe no backward and get no gradient
    teacher: int | None = None  # the first stage of a second, frozen model, which ends with the last stage; it reads the batch
    ahead: bool = False  # the teacher's forwards are of the next batch; else the loss of this one waits for its outputs

    @property
    def loss_waits(self) -> bool:
        """Whether the loss of each microbatch waits for a teacher's output in the same table."""
        return self.teacher is not None and not self.ahead

    def links(self, skips: Collection[Skip] = ()) -> list[Skip]:
        """Return the (stage, receiving stage) between which outputs go forward, ascending, those to the loss last."""
        links = sorted({*pairwise(range(self.num_stages)), *skips})
        if self.teacher is None:
            return links
        links.remove((self.teacher - 1, self.teacher))
        return links if self.ahead else [*links, (self.num_stages - 1, self.teacher - 1)]


def receiving_stages(stages: int | Chains, skips: Collection[Skip] = ()) -> dict[Kind, list[list[int]]]:
    """Return kind -> stage -> the stages that receive that action's result, ascending: outputs go forward, gradients back.

    `stages`: their number, or the chains that they form.
    """
    chains = Chains(stages) if isinstance(stages, int) else stages
    forward, backward, nowhere = ([list[int]() for _ in range(chains.num_stages)] for _ in range(3))
    for start, end in chains.links(skips):
        forward[start].append(end)
        if not chains.forward_only & {start, end}:
            backward[end].append(start)
    return {Kind.F: forward, Kind.B: backward, Kind.I: backward, Kind.W: nowhere}


def sending_stages(stages: int | Chains, skips: Collection[Skip] = ()) -> dict[Kind, list[list[int]]]:
    """Return kind -> stage -> the stages whose results that action receives, ascending: the reverse of `receiving_stages`."""
    senders = {}
    for kind, receivers in receiving_stages(stages, skips).items():
        senders[kind] = [list[int]() for _ in receivers]
        for sender, ends in enumerate(receivers):
            for receiver in ends:
                senders[kind][receiver].append(sender)
    return senders


def dependencies(
    action: Action, stages: int | Chains, skips: Collection[Skip] = (), slices: int = 1
) -> Iterator[tuple[Action, ...]]:
    """Yield what `action` waits for: for each dependency, the alternatives that satisfy it (I stands for B).

    F(s,m) waits for F(s-1,m). B or I(s,m) waits for F(s,m), and for B or I(s+1,m). W(s,m) waits for I(s,m). With a skip (s,t),
    F(t,m) also waits for F(s,m), and B or I(s,m) for B or I(t,m). All of these are of one slice. With K `slices`, a token
    attends to earlier ones: F(s,m,k) also waits for F(s,m,k-1), and B or I(s,m,k) for B or I(s,m,k+1).

    `stages`: their number, or the chains that they form. A teacher's first F waits for nothing; unless it runs ahead, the
    last F of the trained model, which computes the loss, also waits for the teacher's last.
    """
    kind, stage, microbatch, slice_ = action
    num_stages, frozen, teacher, ahead = Chains(stages) if isinstance(stages, int) else stages
    if kind is Kind.F:
        if stage > 0 and stage != teacher:
            yield (Action(Kind.F, stage - 1, microbatch, slice_),)
        for start, end in skips:
            if end == stage:
                yield (Action(Kind.F, start, microbatch, slice_),)
        if teacher is not None and stage == teacher - 1 and not ahead:
            yield (Action(Kind.F, num_stages - 1, microbatch, slice_),)
        if slice_:
            yield (Action(Kind.F, stage, microbatch, slice_ - 1),)
    elif kind is Kind.W:
        yield (Action(Kind.I, stage, microbatch, slice_),)
    else:
        yield (Action(Kind.F, stage, microbatch, slice_),)
        if stage < num_stages - 1 and stage + 1 not in frozen:
            yield Action(Kind.B, stage + 1, microbatch, slice_), Action(Kind.I, stage + 1, microbatch, slice_)
        for start, end in skips:
            if start == stage and end not in frozen:
                yield Action(Kind.B, end, microbatch, slice_), Action(Kind.I, end, microbatch, slice_)
        if slice_ < slices - 1:
            yield Action(Kind.B, stage, microbatch, slice_ + 1), Action(Kind.I, stage, microbatch, slice_ + 1)


def loop_placement(num_stages: int, ranks: int) -> tuple[int, ...]:
    """Return stage -> rank, round robin: stage s is on rank s mod P."""
    return tuple(stage % ranks for stage in range(num_stages))


def v_placement(num_stages: int, ranks: int) -> tuple[int, ...]:
    """Return stage -> rank, down the ranks and back up, repeatedly: 0, 1, .., P-1, P-1, .., 1, 0."""
    fold = (*range(ranks), *reversed(range(ranks)))
    return tuple(fold[stage % (2 * ranks)] for stage in range(num_stages))


PLACEMENTS: dict[str, Callable[[int, int], tuple[int, ...]]] = {"loop": loop_placement, "V": v_placement}


def named_placement(name: str, num_stages: int, ranks: int) -> tuple[int, ...]:
    """Return stage -> rank. Raises ScheduleError unless `name` is one of PLACEMENTS."""
    if name not in PLACEMENTS:
        raise ScheduleError(f"unknown placement {name!r}: use {' or '.join(PLACEMENTS)}, or the rank of every stage")
    return PLACEMENTS[name](num_stages, ranks)


@dataclass(frozen=True)
class Table:
    """The ordered actions of every rank, and the rank of every stage. Frozen, hashable, comparable."""

    name: str
    placement: tuple[int, ...]  # stage -> rank
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]  # rank -> its actions, in order
    overlaps: frozenset[OverlappedPair] = frozenset()  # adjacent actions that may run at the same time
    slices: int = 1  # K, the slices of a microbatch along its sequence
    forward_only: frozenset[int] = frozenset()  # frozen stages at the model's beginning, which have F only; see `Chains`
    teacher: int | None = None  # the first stage of a second model, all of whose stages have F only
    ahead: bool = False  # the teacher's forwards are of the next batch

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", tuple(self.placement))
        object.__setattr__(self, "actions", tuple(map(tuple, self.actions)))
        object.__setattr__(self, "overlaps", frozenset(self.overlaps))
        object.__setattr__(self, "forward_only", frozenset(self.forward_only))

    @property
    def ranks(self) -> int:
        """The number of ranks, P."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """The number of stages on all ranks together, S."""
        return len(self.placement)

    @property
    def stages(self) -> int:
        """The number of stages, S: the same as `num_stages`."""
        return self.num_stages

    @property
    def num_trained_stages(self) -> int:
        """The number of stages of the model that is trained, without those of a teacher."""
        return self.num_stages if self.teacher is None else self.teacher

    @cached_property
    def chains(self) -> Chains:
        """The chains that the stages form: what waits for what."""
        of_teacher = range(self.num_trained_stages, self.num_stages)
        return Chains(self.num_stages, self.forward_only.union(of_teacher), self.teacher, self.ahead)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages on `rank`, ascending."""
        return tuple(stage for stage, home in enumerate(self.placement) if home == rank)

    def has_weights_in_backward_order(self, stage: int) -> bool:
        """Return whether W on `stage` come in the order of I; a B counts as both."""
        row = [action for action in self.actions[self.placement[stage]] if action.stage == stage]
        inputs, weights = ([act[2:] for act in row if act.kind in (Kind.B, half)] for half in (Kind.I, Kind.W))
        return inputs == weights

    def filter_actions(self, is_included: Callable[[Action], bool]) -> Self:
        """Return the same table with only the `is_included` actions, e.g. the forwards for an evaluation.

        Leaving out actions together with all that depends on them never creates a deadlock, so a proved table stays proved.
        """
        return replace(
            self,
            actions=tuple(tuple(filter(is_included, row)) for row in self.actions),
            overlaps=frozenset(pair for pair in self.overlaps if all(map(is_included, pair))),
        )

    def with_cells(self, rows: Iterable[Iterable[Cell]]) -> Self:
        """Return a table of the same stages and microbatches with these cells on each rank."""
        cells = [tuple(row) for row in rows]
        return replace(
            self,
            actions=tuple(tuple(action for cell in row for action in actions_of(cell)) for row in cells),
            overlaps=frozenset(cell for row in cells for cell in row if not isinstance(cell, Action)),
        )

    def cells(self, rank: int) -> Iterator[Cell]:
        """Return the cells of `rank` in order: single actions, and actions that may overlap as a pair."""
        row = iter(self.actions[rank])
        return self._join_pairs(row) if self.overlaps else row

    def _join_pairs(self, row: Iterator[Action]) -> Iterator[Cell]:
        for action in row:
            yield (action, next(row)) if action in self._first_actions_of_pairs else action

    @cached_property
    def _first_actions_of_pairs(self) -> frozenset[Action]:
        return frozenset(first for first, _ in self.overlaps)

    def csv_rows(self) -> list[list[str]]:
        """Return the cells of every rank in PyTorch's compute-only form: `2F3`, `(2F3;5B1)OVERLAP_F_B`.

        A row begins with a mark for each of its stages with which a teacher begins, `4TEACHER` or `4TEACHER_AHEAD`, and that
        are frozen, `0FROZEN`.
        """
        return [
            [
                *self._stage_marks(rank),
                *(str(cell) if isinstance(cell, Action) else f"({cell[0]};{cell[1]})OVERLAP_F_B" for cell in self.cells(rank)),
            ]
            for rank in range(self.ranks)
        ]

    def _stage_marks(self, rank: int) -> Iterator[str]:
        for stage in self.stages_of(rank):
            if stage in self.forward_only:
                yield f"{stage}{FROZEN_MARK}"
            if stage == self.teacher:
                yield f"{stage}{AHEAD_MARK if self.ahead else TEACHER_MARK}"

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write `csv_rows` to the file at `path`, a line for each rank. Raises OSError if it cannot be written."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(self.csv_rows())

    def digest(self) -> str:
        """Return a fingerprint of placement, microbatches and cells, the same in every process."""
        text = f"{self.placement};{self.microbatches};{self.csv_rows()}"
        return hashlib.sha256(text.encode()).hexdigest()

    def __repr__(self) -> str:
        """Return one line; `str` returns the table, and a notebook draws it."""
        counts = (self.ranks, "rank"), (self.num_stages, "stage"), (self.microbatches, "microbatch", "es")
        size = ", ".join(format_count(*count) for count in counts)
        return f"<{type(self).__name__} {self.name}: {size}{f' in {self.slices} slices' if self.slices > 1 else ''}>"

    _repr_html_ = lazy_method("penstock.view.notebook", "schedule_html")

    def __str__(self) -> str:
        """Return the table as an aligned grid: a row for each rank, overlapping pairs in braces."""
        rows = [[cell_text(cell) for cell in self.cells(rank)] for rank in range(self.ranks)]
        width = max((len(cell) for row in rows for cell in row), default=1)
        return "\n".join(f"rank {rank} | {' '.join(cell.rjust(width) for cell in row)}" for rank, row in enumerate(rows))


def check_is_table(schedule: object) -> None:
    """Raise ScheduleError unless `schedule` is a table; its name, for example, is not."""
    if not isinstance(schedule, Table):
        raise ScheduleError(f"{schedule!r} is no table: penstock.schedule.build(name, ranks=.., microbatches=..) makes one")


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Pause garbage collection inside: it takes half of the time, and the many small tuples of a table have no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
