"""Read a schedule that is a Python function into a table; report its errors in one line.

Reading runs the file: call this only for a file that the user has named.
"""

import itertools
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from penstock.errors import ScheduleError
from penstock.schedule import Action, Costs, Schedule

MOST = 10_000  # actions of a rank; a function that yields more does not end
FAULTS = Exception, SystemExit  # of a user's file: a `sys.exit` in it must not end the reader


def table_in(path: str, ranks: int, microbatches: int) -> Schedule:
    """Run the Python file `path` and return its table for these ranks and microbatches. Raises ScheduleError."""
    try:
        source = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ScheduleError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return table_of(path, source, ranks, microbatches)


def table_of(name: str, source: str, ranks: int, microbatches: int) -> Schedule:
    """Return the table that `schedule(rank, ranks, microbatches)` in the Python text `source` yields.

    The functions of the puzzles work too: `row`, of the same parameters, and `rows(ranks, microbatches, costs)`.
    A stage lives on the first rank that has an action of it. Raises ScheduleError, with `name` and where possible the line,
    for text that cannot be run, a function that raises, and what is no action; the table itself is for `verify` to judge.
    """
    rule_name, rule = _rule(name, source)
    rows = [_row(name, rule_name, rule, rank, ranks, microbatches) for rank in range(ranks)]
    homes: dict[int, int] = {}  # stage -> rank
    for rank, row in enumerate(rows):
        for action in row:
            homes.setdefault(action.stage, rank)
    for stage in range(len(homes)):
        if stage not in homes:
            raise ScheduleError(f"{name}: stage {stage} is on no rank; number the stages from 0 without a gap")
    placement = tuple(homes[stage] for stage in range(len(homes)))
    return Schedule(name, placement, microbatches, tuple(map(tuple, rows)))


def _rule(name: str, source: str) -> tuple[str, Callable[[int, int, int], Any]]:
    """Return the name of the function in `source`, and a function (rank, ranks, microbatches) -> row."""
    defined: dict[str, Any] = {"__name__": "written"}
    try:
        exec(compile(source, name, "exec"), defined)
    except FAULTS as error:
        raise ScheduleError(fault(error, name)) from error
    for rule_name in ("schedule", "row"):
        if callable(rule := defined.get(rule_name)):
            return rule_name, rule
    if callable(rows := defined.get("rows")):
        return "rows", lambda rank, ranks, count: rows(ranks, count, Costs(ones := [1.0] * ranks, ones, ones))[rank]
    raise ScheduleError(f"{name} has no function schedule(rank, ranks, microbatches)")


def _row(name: str, rule_name: str, rule: Callable[..., Any], rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Return the actions that `rule` yields for `rank`."""
    call = f"{rule_name}({rank}, {ranks}, {microbatches})" if rule_name != "rows" else f"rows({ranks}, {microbatches}, costs)"
    try:
        cells = rule(rank, ranks, microbatches)
        texts = list(itertools.islice(cells, MOST + 1)) if isinstance(cells, Iterable) else None
    except FAULTS as error:
        raise ScheduleError(f"{fault(error, name)}, in {call}") from error
    if texts is None:
        raise ScheduleError(f"{name}: {call} returns {cells!r}: let it yield actions, as in yield f'{{rank}}F0'")
    if len(texts) > MOST:
        raise ScheduleError(f"{name}: {call} yields more than {MOST} actions: does it ever end?")
    return [_action(name, call, number, text) for number, text in enumerate(texts, start=1)]


def _action(name: str, call: str, number: int, text: object) -> Action:
    try:
        return Action.parse(str(text))
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error}; it is number {number} of what {call} yields") from None


def fault(error: BaseException, name: str, file: str = "") -> str:
    """`error` in one line, with the line of `name` it came from; `file` is what the import system calls that, if another."""
    file = file or name
    if isinstance(error, SyntaxError) and error.filename == file:
        return f"{name}, line {error.lineno}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f"{name}, line {lines[-1]}" if lines else name
    return f"{where}: {type(error).__name__}: {' '.join(str(error).split())}"
