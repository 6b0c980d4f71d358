"""One rank's lines of a program, and what its stages must know before they run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from penstock.schedule.program import Program, ProgramLine, lower
from penstock.schedule.proof import prove
from penstock.schedule.table import Action, Chains, Kind, Table

MAX_CACHED_PROGRAMS = 64  # batches differ in the number of microbatches, and in which of them have a backward
MAX_LARGER_PROGRAMS = 8  # programs of all ranks, for more microbatches than the pipeline has


class TeacherForwards(NamedTuple):
    """The forwards of a teacher that a step runs."""

    ahead: bool  # of the next batch, for the losses of the next step; else of this one
    microbatches: int


@dataclass(frozen=True)
class RankProgram:
    """The program lines of a rank, and facts that follow from them."""

    lines: tuple[ProgramLine, ...]
    split_backwards: frozenset[tuple[int, int, int]]  # (stage, microbatch, slice) whose backward is I and W: F prepares for it
    last_backwards: frozenset[Action]  # the B or W with which a stage's gradients of this step are complete
    chains: Chains

    @cached_property
    def actions(self) -> list[Action]:
        """The actions of the lines."""
        return [line.action for line in self.lines]

    @cached_property
    def first_action_text(self) -> str:
        """The first action, for an error about what comes before it."""
        return str(self.actions[0]) if self.actions else "the others end it"

    @cached_property
    def last_action_text(self) -> str:
        """The last action, for an error about what comes after it."""
        return str(self.actions[-1]) if self.actions else "nothing"

    @cached_property
    def stages(self) -> list[int]:
        """The rank's stages, in the order of their first actions."""
        return list(dict.fromkeys(action.stage for action in self.actions))


class RankPrograms:
    """The programs of a rank, one for each kind of batch and call. Each is a part of a proved program, and proved as well.

    `build_larger(microbatches)`: builds a proved program of the same rule for more microbatches than `program` has.
    `add_teacher(table, ahead)`: builds a proved program of a table and the forwards of the pipeline's teacher.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        build_larger: Callable[[int], Program] | None = None,
        add_teacher: Callable[[Table, bool], Program] | None = None,
        links: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.program, self.rank = program, rank
        self.links = program.links if links is None else links  # channels that any program may need, as (source, destination)
        self._build_larger = build_larger and lru_cache(MAX_LARGER_PROGRAMS)(build_larger)
        self._add_teacher = add_teacher and lru_cache(MAX_LARGER_PROGRAMS)(add_teacher)
        self._cached_program = lru_cache(MAX_CACHED_PROGRAMS)(self._lower_and_prove)

    def select(
        self,
        training: bool,
        num_microbatches: int | None = None,
        forward_only_microbatches: frozenset[int] = frozenset(),
        in_one_slice: bool = False,
        teacher: TeacherForwards | None = None,
    ) -> RankProgram:
        """Return the program for the first `num_microbatches` (None: all); if not training, for their forwards only.

        `forward_only_microbatches`: those without a backward. `in_one_slice`: microbatches are whole, whatever slices the table
        has. `teacher`: its forwards that run as well. Programs are cached; one that was not used for long is built again.
        """
        if num_microbatches is None:
            num_microbatches = self.program.schedule.microbatches
        forward_only = forward_only_microbatches if training else frozenset()
        in_one_slice = in_one_slice and self.program.schedule.slices > 1
        return self._cached_program(training, num_microbatches, forward_only, in_one_slice, teacher)

    @property
    def has_teacher(self) -> bool:
        """Whether the pipeline has a teacher."""
        return self._add_teacher is not None

    def table(self, microbatches: int) -> Table:
        """Return the table whose first `microbatches` are run: the pipeline's, or a larger one of the same rule."""
        return self._program_with_at_least(microbatches).schedule

    def table_with_teacher(self, microbatches: int) -> Table:
        """Return the same with the forwards of the pipeline's teacher for the losses of this batch."""
        assert self._add_teacher is not None
        return self._add_teacher(self.table(microbatches), False).schedule

    def _program_with_at_least(self, microbatches: int) -> Program:
        if microbatches > self.program.schedule.microbatches and self._build_larger is not None:
            return self._build_larger(microbatches)
        return self.program

    def _lower_and_prove(
        self,
        training: bool,
        microbatches: int,
        forward_only_microbatches: frozenset[int],
        in_one_slice: bool,
        teacher: TeacherForwards | None,
    ) -> RankProgram:
        program = self._program_with_at_least(max(microbatches, teacher.microbatches if teacher else 0))
        if teacher is not None and self._add_teacher is not None:
            program = self._add_teacher(program.schedule, teacher.ahead)
        schedule = program.schedule
        slices = 1 if in_one_slice else schedule.slices

        def is_included(action: Action) -> bool:
            if teacher is not None and action.stage >= schedule.num_trained_stages:
                return action.microbatch < teacher.microbatches
            forward = action.kind is Kind.F
            has_backward = training and action.microbatch not in forward_only_microbatches
            return action.microbatch < microbatches and action.slice < slices and (forward or has_backward)

        is_part = not training or microbatches < schedule.microbatches or forward_only_microbatches or in_one_slice
        if is_part or (teacher is not None and teacher.microbatches < schedule.microbatches):
            program = lower(replace(schedule.filter_actions(is_included), slices=slices), skips=program.skips)
            prove(program)
        steps = program.rank_lines(self.rank)
        row = [step.action for step in steps]
        return RankProgram(
            steps,
            frozenset((stage, microbatch, slice_) for kind, stage, microbatch, slice_ in row if kind is Kind.I),
            frozenset({action.stage: action for action in row if action.kind in (Kind.B, Kind.W)}.values()),
            schedule.chains,
        )
