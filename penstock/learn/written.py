"""A schedule somebody has written as a Python function: read into a table, or what is wrong with it in one line."""

import itertools
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from penstock.errors import ScheduleError
from penstock.schedule import Action, Schedule

MOST = 10_000  # actions of a rank; a function that yields more does not end


def table_of(name: str, source: str, ranks: int, microbatches: int) -> Schedule:
    """The table that `schedule(rank, ranks, microbatches)`, defined in the Python text `source`, yields for every rank.

    A stage lives on the first rank that has an action of it. Raises ScheduleError, with `name` and where possible the line,
    for text that cannot be run, a function that raises, and what is no action; the table itself is for `verify` to judge.
    """
    rule = _rule(name, source)
    rows = [_row(name, rule, rank, ranks, microbatches) for rank in range(ranks)]
    homes: dict[int, int] = {}  # stage -> rank
    for rank, row in enumerate(rows):
        for action in row:
            homes.setdefault(action.stage, rank)
    for stage in range(len(homes)):
        if stage not in homes:
            raise ScheduleError(f"{name}: stage {stage} is on no rank; number the stages from 0 without a gap")
    placement = tuple(homes[stage] for stage in range(len(homes)))
    return Schedule(name, placement, microbatches, tuple(map(tuple, rows)))


def _rule(name: str, source: str) -> Callable[..., Any]:
    """The function `schedule` of `source`."""
    defined: dict[str, Any] = {"__name__": "written"}
    try:
        exec(compile(source, name, "exec"), defined)
    except Exception as error:
        raise ScheduleError(_fault(error, name)) from error
    rule = defined.get("schedule")
    if not callable(rule):
        raise ScheduleError(f"{name} has no function schedule(rank, ranks, microbatches)")
    return rule


def _row(name: str, rule: Callable[..., Any], rank: int, ranks: int, microbatches: int) -> list[Action]:
    """The actions `rule` yields for `rank`."""
    call = f"schedule({rank}, {ranks}, {microbatches})"
    try:
        cells = rule(rank, ranks, microbatches)
        texts = list(itertools.islice(cells, MOST + 1)) if isinstance(cells, Iterable) else None
    except Exception as error:
        raise ScheduleError(f"{_fault(error, name)}, in {call}") from error
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


def _fault(error: Exception, name: str) -> str:
    """`error` in one line, with the line of `name` it came from."""
    if isinstance(error, SyntaxError) and error.filename == name:
        return f"{name}, line {error.lineno}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
    where = f"{name}, line {lines[-1]}" if lines else name
    return f"{where}: {type(error).__name__}: {' '.join(str(error).split())}"
