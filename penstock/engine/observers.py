"""The base class of checks and measurements of a step: when the step calls them, and which numbers of theirs ranks compare.

    start     before the step         numbers for the row that all ranks exchange; may refuse the step
    compare   all rows have arrived   these numbers of every rank
    wrap      before the actions      the functions that run an action, receive and send
    end       after the actions       a number for the last row; may raise
    after     the step has ended      that number of every rank; may raise if it does so on all ranks

The pipeline gives its engine a list of observers. A class that does not define a moment costs nothing there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.batch.agreement import NUM_STEP_NUMBERS, Agreed
from penstock.batch.call import Call, LocalBatch
from penstock.comms.control_group import MAX_ROW_NUMBERS
from penstock.engine.actions import ActionFunctions, StepActions
from penstock.engine.clock import ActionClock
from penstock.engine.report import RankSummary
from penstock.schedule.program import Transfer

Rows = Sequence[Sequence[float]]  # numbers of every rank


class StepFunctions(NamedTuple):
    """What a rank's program calls, each of which an observer may wrap."""

    actions: ActionFunctions
    receive: Callable[[Transfer], Any]  # waits for a message
    send: Callable[[Transfer, Any], None]


@dataclass
class ObservedStep:
    """One step of one rank, as far as it has come."""

    call: Call
    batch: LocalBatch
    is_new_on_rank: bool  # whether this rank trains on such a batch for the first time; `agreed.is_new_kind`: of all ranks
    clock: ActionClock
    actions: StepActions
    agreed: Agreed = field(init=False)  # from `compare` on

    @property
    def has_agreed(self) -> bool:
        """Whether all ranks' rows have arrived."""
        return "agreed" in vars(self)


class Observer:
    """Is called at five moments of each step of one rank. All ranks have the same observers, in the same order.

    A number that ranks compare in every step: set `num_numbers`, return as many from `start`, look at all ranks' in `compare`.
    All observers together have MAX_ROW_NUMBERS - NUM_STEP_NUMBERS of them.
    """

    num_numbers = 0  # that `start` returns
    only_in_new_steps = False  # whether it is called in the first step of each kind alone; then it has no numbers

    def start(self, step: ObservedStep) -> Sequence[float]:
        """Return this rank's numbers for the first row."""
        return ()

    def compare(self, step: ObservedStep, rows: Rows) -> None:
        """Look at what `start` has returned on every rank."""

    def wrap(self, step: ObservedStep, functions: StepFunctions) -> StepFunctions:
        """Return `functions` with what is to be done around them. Also called for an early forward alone."""
        return functions

    def end(self, step: ObservedStep) -> float:
        """Return this rank's number for the last row."""
        return 0.0

    def after(self, step: ObservedStep, numbers: Sequence[float]) -> None:
        """Look at what `end` has returned on every rank (0 if it is not defined)."""


class Observers:
    """The observers of one engine: of each moment those that define it, in all steps and in those that are not new."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._in_new_steps, self._in_old_steps = _Moments(observers, True), _Moments(observers, False)
        self._moments = self._in_new_steps  # of the step that runs

    def start(self, step: ObservedStep) -> list[float]:
        """Return all numbers for the first row."""
        self._moments = self._in_new_steps if step.is_new_on_rank else self._in_old_steps
        numbers: list[float] = []
        for observer in self._moments.start:
            numbers += observer.start(step)
        assert len(numbers) == self._moments.num_numbers  # else they would be read as others'
        return numbers

    def compare(self, step: ObservedStep, rows: Rows) -> None:
        """Give each observer its numbers of every rank."""
        self._moments = self._in_new_steps if step.agreed.is_new_kind else self._in_old_steps
        for observer, numbers in self._moments.compare:
            observer.compare(step, [row[numbers] for row in rows])

    def wrap(self, step: ObservedStep, functions: StepFunctions) -> StepFunctions:
        """Return `functions`, wrapped by all."""
        for observer in self._moments.wrap:
            functions = observer.wrap(step, functions)
        return functions

    def end(self, step: ObservedStep) -> list[float]:
        """Return all numbers for the last row."""
        return [observer.end(step) for observer in self._moments.end]

    def after(self, step: ObservedStep, rows: Rows) -> None:
        """Give each observer its number of every rank."""
        zeros = [0.0] * len(rows)
        for observer, index in self._moments.after:
            observer.after(step, zeros if index is None else [row[index] for row in rows])


class _Moments:
    """The observers that define each moment; in steps that are not new, without those that look on at new ones only."""

    def __init__(self, observers: Sequence[Observer], is_new: bool) -> None:
        active = [observer for observer in observers if is_new or not observer.only_in_new_steps]

        def defining(moment: str) -> list[Any]:
            return [observer for observer in active if getattr(type(observer), moment) is not getattr(Observer, moment)]

        self.start, self.wrap, self.end = defining("start"), defining("wrap"), defining("end")
        self.after = [(observer, self.end.index(observer) if observer in self.end else None) for observer in defining("after")]
        assert not any(observer.only_in_new_steps and observer.num_numbers for observer in observers)
        self.compare, first, comparing = list[tuple[Any, slice]](), 0, defining("compare")
        for observer in observers:
            numbers = slice(first, first + observer.num_numbers)
            first = numbers.stop
            if observer in comparing:
                self.compare.append((observer, numbers))
        self.num_numbers = first
        assert (
            max(NUM_STEP_NUMBERS + first, len(RankSummary._fields) + len(self.end)) <= MAX_ROW_NUMBERS
        )  # of the two rows of a step
