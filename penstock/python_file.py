"""Run a Python file that the user has named, and read a schedule in it into a table. Report its errors in one line."""

import itertools
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.errors import PenstockError, ScheduleError
from penstock.schedule import Action, Costs, Schedule
from penstock.schedule.schedule import from_rule, makes_whole_table

MAX_ACTIONS = 10_000  # of a rank; a function that yields more is taken to be endless
USER_CODE_ERRORS = Exception, SystemExit  # `sys.exit` in a user's file must not end this process


def load_file(path: Path) -> Any:
    """Run the file and return its module. Raises PenstockError, with the line, if it cannot be run."""
    module, absolute_path = ModuleType(path.stem), str(path.absolute())
    module.__file__ = absolute_path
    try:
        # Not imported: the bytecode cache would hide an edit of equal length within the same second.
        exec(compile(path.read_bytes(), absolute_path, "exec"), module.__dict__)
    except USER_CODE_ERRORS as error:
        raise PenstockError(one_line_error_of_file(error, path)) from error
    return module


def table_from_file(path: str, ranks: int, microbatches: int) -> Schedule:
    """Run the Python file `path` and return its table for these ranks and microbatches. Raises ScheduleError."""
    try:
        source = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ScheduleError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return table_from_source(path, source, ranks, microbatches)


def table_from_source(name: str, source: str, ranks: int, microbatches: int) -> Schedule:
    """Return the table of the Python text `source`, in which `schedule(rank, ranks, microbatches)` yields a rank's actions.

    `schedule(ranks, microbatches)` may return a whole `Schedule` instead, as `list_schedule` makes. Also accepts the functions
    of the puzzles: `row`, of a rank as well, and `rows(ranks, microbatches, costs)`. A stage is placed on the first rank that
    has an action of it, unless the table says otherwise. Does not verify the table. Raises ScheduleError, with `name`
    and if possible the line, if the text cannot be run, the function raises, or it yields something that is no action.
    """
    rule_name, rule = _rule(name, source)
    if rule_name == "schedule" and makes_whole_table(rule):
        try:
            return replace(from_rule(rule, ranks, microbatches), name=name)
        except ScheduleError as error:
            raise ScheduleError(f"{name}: {error}") from error
        except USER_CODE_ERRORS as error:
            raise ScheduleError(f"{one_line_error(error, name)}, in schedule({ranks}, {microbatches})") from error
    rows = [_row(name, rule_name, rule, rank, ranks, microbatches) for rank in range(ranks)]
    rank_of: dict[int, int] = {}  # stage -> rank
    for rank, row in enumerate(rows):
        for action in row:
            rank_of.setdefault(action.stage, rank)
    for stage in range(len(rank_of)):
        if stage not in rank_of:
            raise ScheduleError(f"{name}: stage {stage} is on no rank; number the stages from 0 without a gap")
    placement = tuple(rank_of[stage] for stage in range(len(rank_of)))
    return Schedule(name, placement, microbatches, tuple(map(tuple, rows)))


def _rule(name: str, source: str) -> tuple[str, Callable[..., Any]]:
    """Return the name of the function in `source`, and the function; for `rows`, one of (rank, ranks, microbatches)."""
    namespace: dict[str, Any] = {"__name__": "schedule"}
    try:
        exec(compile(source, name, "exec"), namespace)
    except USER_CODE_ERRORS as error:
        raise ScheduleError(one_line_error(error, name)) from error
    for rule_name in ("schedule", "row"):
        if callable(rule := namespace.get(rule_name)):
            return rule_name, rule
    if callable(rows := namespace.get("rows")):
        return "rows", lambda rank, ranks, count: rows(ranks, count, Costs(ones := [1.0] * ranks, ones, ones))[rank]
    raise ScheduleError(f"{name} has no function schedule(rank, ranks, microbatches), nor schedule(ranks, microbatches)")


def _row(name: str, rule_name: str, rule: Callable[..., Any], rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Return the actions that `rule` yields for `rank`."""
    call = f"{rule_name}({rank}, {ranks}, {microbatches})" if rule_name != "rows" else f"rows({ranks}, {microbatches}, costs)"
    try:
        cells = rule(rank, ranks, microbatches)
        texts = list(itertools.islice(cells, MAX_ACTIONS + 1)) if isinstance(cells, Iterable) else None
    except USER_CODE_ERRORS as error:
        raise ScheduleError(f"{one_line_error(error, name)}, in {call}") from error
    if texts is None:
        raise ScheduleError(f"{name}: {call} returns {cells!r}: let it yield actions, as in yield f'{{rank}}F0'")
    if len(texts) > MAX_ACTIONS:
        raise ScheduleError(f"{name}: {call} yields more than {MAX_ACTIONS} actions: does it ever end?")
    return [_action(name, call, number, text) for number, text in enumerate(texts, start=1)]


def _action(name: str, call: str, number: int, text: object) -> Action:
    try:
        return Action.parse(str(text))
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error}; it is action {number} that {call} yields") from None


def one_line_error(error: BaseException, name: str, file: str = "") -> str:
    """Return `error` in one line, with the line of the file that raised it.

    `name`: of the file, in the text. `file`: its path in tracebacks, if another.
    """
    file = file or name
    if isinstance(error, SyntaxError) and error.filename == file:
        return f"{name}, line {error.lineno}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f"{name}, line {lines[-1]}" if lines else name
    return f"{where}: {type(error).__name__}: {' '.join(str(error).split())}"


def one_line_error_of_file(error: BaseException, path: Path) -> str:
    """Return `error` in one line, with the line of the file, which `load_file` has run, that raised it."""
    return one_line_error(error, path.name, str(path.absolute()))
