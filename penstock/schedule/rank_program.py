"""One rank's lines of a program, and what its stages must know before they run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from penstock.schedule.program import Program, ProgramLine, lower
from penstock.schedule.proof import prove
from penstock.schedule.table import Action, Kind, Table

MAX_CACHED_PROGRAMS = 64  # batches differ in the number of microbatches, and in which of them have a backward
MAX_LARGER_PROGRAMS = 8  # programs of all ranks, for more microbatches than the pipeline has


@dataclass(frozen=True)
class RankProgram:
    """The program lines of a rank, and facts that follow from them."""

    lines: tuple[ProgramLine, ...]
    split_backwards: frozenset[tuple[int, int, int]]  # (stage, microbatch, slice) whose backward is I and W: F prepares for it
    last_backwards: frozenset[Action]  # the B or W with which a stage's gradients of this step are complete

    @cached_property
    def stages(self) -> list[int]:
        """The rank's stages, in the order of their first actions."""
        return list(dict.fromkeys(step.action.stage for step in self.lines))


class RankPrograms:
    """The programs of a rank, one for each kind of batch and call. Each is a part of a proved program, and proved as well.

    `build_larger(microbatches)`: builds a proved program of the same rule for more microbatches than `program` has.
    """

    def __init__(self, program: Program, rank: int, build_larger: Callable[[int], Program] | None = None) -> None:
        self.program, self.rank = program, rank
        self._build_larger = build_larger and lru_cache(MAX_LARGER_PROGRAMS)(build_larger)
        self._cached_program = lru_cache(MAX_CACHED_PROGRAMS)(self._lower_and_prove)

    def select(
        self,
        training: bool,
        num_microbatches: int | None = None,
        forward_only_microbatches: frozenset[int] = frozenset(),
        in_one_slice: bool = False,
    ) -> RankProgram:
        """Return the program for the first `num_microbatches` (None: all); if not training, for their forwards only.

        `forward_only_microbatches`: those without a backward. `in_one_slice`: microbatches are whole, whatever slices the table
        has. Programs are cached; one that was not used for long is built again.
        """
        if num_microbatches is None:
            num_microbatches = self.program.schedule.microbatches
        forward_only = forward_only_microbatches if training else frozenset()
        return self._cached_program(training, num_microbatches, forward_only, in_one_slice and self.program.schedule.slices > 1)

    def table(self, microbatches: int) -> Table:
        """Return the table whose first `microbatches` are run: the pipeline's, or a larger one of the same rule."""
        return self._program_with_at_least(microbatches).schedule

    def _program_with_at_least(self, microbatches: int) -> Program:
        if microbatches > self.program.schedule.microbatches and self._build_larger is not None:
            return self._build_larger(microbatches)
        return self.program

    def _lower_and_prove(
        self, training: bool, microbatches: int, forward_only_microbatches: frozenset[int], in_one_slice: bool
    ) -> RankProgram:
        program = self._program_with_at_least(microbatches)
        schedule = program.schedule
        slices = 1 if in_one_slice else schedule.slices

        def is_included(action: Action) -> bool:
            forward = action.kind is Kind.F
            has_backward = training and action.microbatch not in forward_only_microbatches
            return action.microbatch < microbatches and action.slice < slices and (forward or has_backward)

        if not training or microbatches < schedule.microbatches or forward_only_microbatches or in_one_slice:
            program = lower(replace(schedule.filter_actions(is_included), slices=slices), skips=program.skips)
            prove(program)
        steps = program.rank_lines(self.rank)
        row = [step.action for step in steps]
        return RankProgram(
            steps,
            frozenset((stage, microbatch, slice_) for kind, stage, microbatch, slice_ in row if kind is Kind.I),
            frozenset({action.stage: action for action in row if action.kind in (Kind.B, Kind.W)}.values()),
        )
