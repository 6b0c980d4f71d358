"""Helpers of the puzzles' checks: load the learner's file, build its tables, run it on ranks, compare tensors."""

from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from penstock import python_file
from penstock.errors import LostRankError, PenstockError, ScheduleError
from penstock.learn.equal_stages import simulate_equal_stages
from penstock.python_file import MAX_ACTIONS, one_line_error_of_file
from penstock.schedule import Schedule, Timeline, from_rows, verify

if TYPE_CHECKING:
    from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])
TIMEOUT_SECONDS = 20.0  # of ranks that wait for each other


class CheckPassed(NamedTuple):
    """The result of a check whose target is met."""

    text: str
    timeline: Timeline | None = None


class CheckFailed(Exception):
    """The target is missed: the reason with numbers, and the timeline of the learner's table if there is one."""

    def __init__(self, text: str, timeline: Timeline | None = None) -> None:
        super().__init__(text)
        self.timeline = timeline


class WaitsForMessage(Exception):
    """A rank waits in a call, its text, that another rank does not take part in."""


def solution(function: F) -> F:
    """Mark a function as a solution: the learner gets its signature and docstring, and writes its body."""
    return function


def load_file(path: Path) -> Any:
    """Run the learner's file and return its module. Raises CheckFailed, with the line, if it cannot be run."""
    try:
        return python_file.load_file(path)
    except PenstockError as error:
        raise CheckFailed(str(error)) from error


def require_answer(answer: Any, call: str) -> Any:
    """Return the learner's `answer`. Raises CheckFailed, naming `call`, if the function is not written yet."""
    if answer is None or answer is ...:
        raise CheckFailed(f"{call} returned nothing yet: write it, and check again")
    return answer


# ---- tables


def build_table(
    name: str, rule: Callable[..., Iterable[str]], ranks: int, microbatches: int, placement: Any = None, *sizes: int
) -> Schedule:
    """Build and verify the table of `rule(rank, ranks, microbatches, *sizes)`. Raises CheckFailed with its error."""
    rows = []
    for rank in range(ranks):
        arguments = rank, ranks, microbatches, *sizes
        call = f"{name}({', '.join(map(str, arguments))})"
        rows.append(list(islice(require_answer(rule(*arguments), call), MAX_ACTIONS + 1)))
        if len(rows[-1]) > MAX_ACTIONS:
            raise CheckFailed(f"{call} yields more than {MAX_ACTIONS} actions: does it ever end?")
    where = f"{ranks} ranks, {microbatches} microbatches"
    try:
        schedule = from_rows(f"your table ({where})", rows, placement)
        if schedule.microbatches != microbatches:
            raise CheckFailed(f"your table has {schedule.microbatches} microbatches, it should have {microbatches} ({where})")
        verify(schedule)
    except ScheduleError as error:
        raise CheckFailed(str(error).replace("; ", "\n    ")) from error
    return schedule


def check_targets(name: str, max_time: float, max_in_flight: float, schedule: Schedule) -> Timeline:
    """Simulate a table with F = I = W = 1. Raises CheckFailed if its time or its microbatches in flight are more."""
    timeline = simulate_equal_stages(schedule)
    peak = max(timeline.peak_memory)
    misses = [f"{timeline.makespan:g} units of time, the target is {max_time:g}"] if timeline.makespan > max_time + 1e-9 else []
    misses += [f"{peak:g} microbatches in flight, the target is {max_in_flight:g}"] if peak > max_in_flight + 1e-9 else []
    if misses:
        sizes = f"{schedule.ranks} ranks, {schedule.microbatches} microbatches"
        raise CheckFailed(f"{name} of {sizes}: {'; '.join(misses)}", timeline)
    return timeline


# ---- ranks


def run_on_ranks(function: Callable[..., Any], ranks: int, answers: Any, *args: Any) -> list[Any]:
    """Run `function(answers, *args)` on every rank and return the results. Raises CheckFailed if a rank raises."""
    from penstock.launcher.launch import launch

    path = Path(answers.__file__)
    try:
        results = launch(_run_on_rank, ranks, function, path, *args)
    except CheckFailed:
        raise
    except PenstockError as error:
        raise CheckFailed(str(error)) from error
    if any(isinstance(result, WaitsForMessage) for result in results):
        raise CheckFailed("; ".join(f"rank {rank} {_position(result)}" for rank, result in enumerate(results)))
    return results


def _position(result: Any) -> str:
    return f"waits in {result}" if isinstance(result, WaitsForMessage) else "has returned"


def _run_on_rank(function: Callable[..., Any], path: Path, *args: Any) -> Any:
    from penstock.comms.topology import init_distributed
    from penstock.comms.wait_errors import is_transport_error

    init_distributed(backend="gloo", timeout=TIMEOUT_SECONDS)
    try:
        return function(load_file(path), *args)
    except WaitsForMessage as error:
        return WaitsForMessage(*error.args)
    except (CheckFailed, PenstockError):
        raise
    except Exception as error:
        if is_transport_error(error):
            raise LostRankError("a rank waits for a message that no rank sends") from error
        raise CheckFailed(one_line_error_of_file(error, path)) from error


def check_equal(name: str, answer: Any, expected: "Tensor") -> None:
    """Raise CheckFailed unless `answer` is a tensor with the bits of `expected`."""
    import torch

    if not isinstance(answer, torch.Tensor):
        raise CheckFailed(f"{name} is {'missing' if answer is None else f'a {type(answer).__name__}'}, not a tensor")
    if answer.shape != expected.shape:
        raise CheckFailed(f"{name} has the shape {tuple(answer.shape)}, it should be {tuple(expected.shape)}")
    if not torch.equal(answer, expected):
        ratio = (answer.double().norm() / expected.double().norm()).item()
        difference = f"by {(answer - expected).abs().max().item():.3g} at most"
        raise CheckFailed(f"{name} differs from one process {difference}; its norm is {ratio:.4g} times the right one")
