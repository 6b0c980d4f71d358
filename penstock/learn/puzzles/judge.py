"""Helpers of the puzzles' checks: load the learner's file, build its tables, run it on ranks, compare tensors."""

from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from penstock.errors import LostRankError, PenstockError, ScheduleError
from penstock.learn.python_schedule import MAX_ACTIONS, USER_CODE_ERRORS
from penstock.learn.python_schedule import one_line_error as one_line_error_of_file
from penstock.schedule import Costs, Schedule, Timeline, from_rows, simulate, verify

if TYPE_CHECKING:
    from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])
TIMEOUT_SECONDS = 20.0  # that ranks wait for each other


class Passed(NamedTuple):
    """The target is met."""

    text: str
    picture: Timeline | None = None


class Missed(Exception):
    """The target is missed: why, with numbers, and the picture of it where there is one."""

    def __init__(self, text: str, picture: Timeline | None = None) -> None:
        super().__init__(text)
        self.picture = picture


def yours(function: F) -> F:
    """Mark a function that the learner must write."""
    return function


def loaded(path: Path) -> Any:
    """Run the learner's file and return its module. Raises Missed, with the line, if it cannot be run."""
    module, place = ModuleType(path.stem), str(path.absolute())
    module.__file__ = place
    try:
        # not imported: Python would take what it has compiled for a file of the same length that was saved in the same second
        exec(compile(path.read_bytes(), place, "exec"), module.__dict__)
    except USER_CODE_ERRORS as error:
        raise Missed(fault(error, path)) from error
    return module


def fault(error: BaseException, path: Path) -> str:
    """Return `error` in one line, with the line of the file that raised it."""
    return one_line_error_of_file(error, path.name, str(path.absolute()))


def written(answer: Any, name: str) -> Any:
    """Return the learner's `answer`. Raises Missed if it is not written yet."""
    if answer is None or answer is ...:
        raise Missed(f"{name} returned nothing yet: write it, and check again")
    return answer


# ---- tables


def table(
    name: str, rule: Callable[..., Iterable[str]], ranks: int, microbatches: int, placement: Any = None, *more: int
) -> Schedule:
    """Build and prove the table of `rule(rank, ranks, microbatches, *more)`. Raises Missed with its error."""
    rows = []
    for rank in range(ranks):
        numbers = rank, ranks, microbatches, *more
        call = f"{name}({', '.join(map(str, numbers))})"
        rows.append(list(islice(written(rule(*numbers), call), MAX_ACTIONS + 1)))
        if len(rows[-1]) > MAX_ACTIONS:
            raise Missed(f"{call} yields more than {MAX_ACTIONS} actions: does it ever end?")
    where = f"{ranks} ranks, {microbatches} microbatches"
    try:
        schedule = from_rows(f"your table ({where})", rows, placement)
        if schedule.microbatches != microbatches:
            raise Missed(f"your table has {schedule.microbatches} microbatches where {microbatches} were asked for ({where})")
        verify(schedule)
    except ScheduleError as error:
        raise Missed(str(error).replace("; ", "\n    ")) from error
    return schedule


def timed(schedule: Schedule) -> Timeline:
    """Simulate a table with F = I = W = 1 on a rank; each of its V stages takes a V-th."""
    part = schedule.ranks / schedule.num_stages
    return simulate(schedule, Costs(part, part, part, act=part))


def meets(name: str, steps: float, in_flight: float, schedule: Schedule) -> Timeline:
    """Simulate a table. Raises Missed if it takes more than `steps`, or holds more than `in_flight` microbatches."""
    timeline = timed(schedule)
    peak = max(timeline.peak_memory)
    over = [f"{timeline.makespan:g} steps, the target is {steps:g}"] if timeline.makespan > steps + 1e-9 else []
    over += [f"{peak:g} microbatches in flight, the target is {in_flight:g}"] if peak > in_flight + 1e-9 else []
    if over:
        raise Missed(f"{name} of {schedule.ranks} ranks, {schedule.microbatches} microbatches: {'; '.join(over)}", timeline)
    return timeline


# ---- ranks


def on_ranks(work: Callable[..., Any], ranks: int, answers: Any, *args: Any) -> list[Any]:
    """Run `work(the learner's module, *args)` on every rank and return the results. Raises Missed for an error there."""
    from penstock.comms.launch.launcher import launch

    path = Path(answers.__file__)
    try:
        return launch(_on_rank, ranks, work, path, *args)
    except Missed:
        raise
    except PenstockError as error:
        raise Missed(str(error)) from error


def _on_rank(work: Callable[..., Any], path: Path, *args: Any) -> Any:
    from penstock.comms.process_groups import is_transport_error
    from penstock.comms.topology import init_distributed

    init_distributed(backend="gloo", timeout=TIMEOUT_SECONDS)
    try:
        return work(loaded(path), *args)
    except (Missed, PenstockError):
        raise
    except Exception as error:
        if is_transport_error(error):
            raise LostRankError("a rank waits for a message that no rank sends") from error
        raise Missed(fault(error, path)) from error


def equal(name: str, answer: Any, expected: "Tensor") -> None:
    """Raise Missed unless `answer` has the bits of `expected`."""
    import torch

    if not isinstance(answer, torch.Tensor):
        raise Missed(f"{name} is {'missing' if answer is None else f'a {type(answer).__name__}'}, not a tensor")
    if answer.shape != expected.shape:
        raise Missed(f"{name} has the shape {tuple(answer.shape)}, it should be {tuple(expected.shape)}")
    if not torch.equal(answer, expected):
        ratio = (answer.double().norm() / expected.double().norm()).item()
        apart = (answer - expected).abs().max().item()
        raise Missed(f"{name} differs from one process: by {apart:.3g} at most; its norm is {ratio:.4g} times the right one")
