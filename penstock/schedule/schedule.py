"""Schedules: tables made from rows, or read from a CSV file in PyTorch's compute-only form."""

import csv
import inspect
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike

from penstock.errors import ScheduleError
from penstock.schedule.proof import verify
from penstock.schedule.table import AHEAD_MARK, FROZEN_MARK, TEACHER_MARK, Action, Cell, Table, actions_of, named_placement

MAX_CSV_BYTES = 2**25  # of a file
MAX_TABLE_CELLS, MAX_TABLE_ROWS = 500_000, 10_000
FilePath = str | PathLike[str]
Placement = str | Sequence[int] | None  # `loop`, `V`, the rank of every stage, or None: read off the rows

RowRule = Callable[[int, int, int], Iterable[Cell | str]]  # rank, P, M -> the cells of the rank's row
TableRule = Callable[[int, int], "Schedule"]  # P, M -> the table
ScheduleRule = RowRule | TableRule


class Schedule(Table):
    """A table built by a rule, from rows or from a file. It is not proved until `verify` accepts it."""

    @classmethod
    def from_csv(cls, path: FilePath, placement: Placement = None, name: str | None = None) -> "Schedule":
        """Read a table from the CSV file at `path` and prove it. Empty cells (bubbles) are skipped.

        `placement`: as in `from_rows`.
        `name`: the name of the schedule, by default `path`.

        Raises OSError if the file cannot be read. Raises ScheduleError for a file that is not text, for a cell that is not an
        action, and for a table that `verify` refuses: one that is incomplete or deadlocks.
        """
        schedule = from_rows(name or str(path), read_csv_cells(path), placement)
        verify(schedule)
        return schedule


def read_csv_cells(path: FilePath) -> list[list[str]]:
    """Return the cells of the CSV file at `path`, a row for each line. Raises ScheduleError if it is too large or not text."""
    with open(path, "rb") as file:
        data = file.read(MAX_CSV_BYTES + 1)
    if len(data) > MAX_CSV_BYTES:
        raise ScheduleError(f"{path} has more than {MAX_CSV_BYTES:,} bytes, the most that a CSV table may have")
    try:
        return parse_csv_cells(str(path), data.decode("utf-8-sig"))
    except UnicodeError as error:
        raise ScheduleError(f"{path} is damaged, or no CSV table: {error}") from error


def parse_csv_cells(name: str, text: str) -> list[list[str]]:
    """Return the cells of CSV `text`, a row for each line. Raises ScheduleError, with `name`, if it is too large or not CSV."""
    rows, count = list[list[str]](), 0
    try:
        for row in csv.reader(io.StringIO(text, newline="")):
            rows.append(row)
            count += max(1, len(row))
            if count > MAX_TABLE_CELLS or len(rows) > MAX_TABLE_ROWS:
                problem = f"{name} has more than {MAX_TABLE_CELLS:,} cells or {MAX_TABLE_ROWS:,} rows"
                raise ScheduleError(f"{problem}, the most that a table may have: it has a row for each rank")
        return rows
    except csv.Error as error:  # a cell of 131,072 characters, for instance
        raise ScheduleError(f"{name} is damaged, or no CSV table: {error}") from error


def from_rows(name: str, rows: Sequence[Iterable[Cell | str]], placement: Placement = None) -> Schedule:
    """Return a schedule with these rows; the numbers of stages, microbatches and slices follow from the actions.

    `rows`: the cells of each rank: an action, a pair of actions that may overlap, the text of either, or the mark of a stage
    (see `Table.csv_rows`).
    `placement`: `loop`, `V`, or the rank of every stage; by default a stage is on the first rank that has an action of it.

    Raises ScheduleError for text that is not an action, and for a stage without actions.

        >>> from_rows("mine", [["0F0", "0B0"], ["1F0", "1B0"]]).placement
        (0, 1)
    """
    marks: dict[str, set[int]] = {FROZEN_MARK: set(), TEACHER_MARK: set(), AHEAD_MARK: set()}
    cells = [list(_parse_row(name, rank, row, marks)) for rank, row in enumerate(rows)]
    table = tuple(tuple(action for cell in row for action in actions_of(cell)) for row in cells)
    overlaps = frozenset(cell for row in cells for cell in row if not isinstance(cell, Action))
    stages = 1 + max((action.stage for row in table for action in row), default=-1)
    microbatches = 1 + max((action.microbatch for row in table for action in row), default=-1)
    slices = 1 + max((action.slice for row in table for action in row), default=0)
    for name_of_index, count in (("stage", stages), ("microbatch", microbatches), ("slice", slices)):
        if count > MAX_TABLE_CELLS:
            raise ScheduleError(
                f"{name} has {name_of_index} {count - 1:,}, and so more cells than a table may have, {MAX_TABLE_CELLS:,}"
            )
    if placement is None:
        placement = _placement_from_rows(name, table, stages)
    elif isinstance(placement, str):
        placement = named_placement(placement, stages, len(table))
    teachers = marks[TEACHER_MARK] | marks[AHEAD_MARK]
    if len(teachers) > 1:
        raise ScheduleError(f"{name} has teachers from stages {', '.join(map(str, sorted(teachers)))} on: mark one at most")
    return Schedule(
        name,
        tuple(placement),
        microbatches,
        table,
        overlaps,
        slices,
        frozenset(marks[FROZEN_MARK]),
        next(iter(teachers), None),
        bool(marks[AHEAD_MARK]),
    )


def _parse_row(name: str, rank: int, row: Iterable[Cell | str], marks: dict[str, set[int]]) -> Iterator[Cell]:
    """Yield the cells of a rank's row, and put the stages that have a mark into `marks`.

    Raises ScheduleError, with row and cell, for text that is not an action.
    """
    for number, value in enumerate(row):
        if isinstance(value, str) and (mark := _STAGE_MARK.fullmatch(value.strip())):
            marks[mark[2]].add(int(mark[1]))
            continue
        try:
            yield from parse_pytorch_csv_cell(value) if isinstance(value, str) else (value,)
        except ScheduleError as error:
            raise ScheduleError(f"{name}, row {rank + 1} (rank {rank}), cell {number + 1}: {error}") from error


def from_rule(
    rule: ScheduleRule, ranks: int, microbatches: int, name: str | None = None, placement: Placement = None
) -> Schedule:
    """Return the table of `rule`: a function of (rank, ranks, microbatches) that returns a row, or of (ranks, microbatches).

    The second kind returns the whole table, as `list_schedule` does. `name`: by default that of the function.
    `placement`: as in `from_rows`, for rows only.

    Raises ScheduleError as `from_rows`, and for a whole table of another number of ranks, or with a `placement`.
    """
    name = name or getattr(rule, "__name__", "a rule")
    if not makes_whole_table(rule):
        return from_rows(name, [list(rule(rank, ranks, microbatches)) for rank in range(ranks)], placement)  # type: ignore[call-arg, arg-type]
    table = rule(ranks, microbatches)  # type: ignore[call-arg]
    if not isinstance(table, Schedule):
        raise ScheduleError(f"{name}({ranks}, {microbatches}) returns a {type(table).__name__}: let it return a Schedule")
    if placement is not None:
        raise ScheduleError(f"{name} returns a whole table, which has its own placement: leave out placement")
    if table.ranks != ranks:
        raise ScheduleError(f"{name}({ranks}, {microbatches}) returns a table of {table.ranks} ranks: let it have {ranks}")
    return table


def makes_whole_table(rule: ScheduleRule) -> bool:
    """Return whether `rule` needs two arguments: ranks and microbatches."""
    try:
        parameters = inspect.signature(rule).parameters.values()
    except (TypeError, ValueError):  # some functions written in C
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [parameter for parameter in parameters if parameter.kind in positional and parameter.default is parameter.empty]
    return len(needed) == 2 and all(parameter.kind is not parameter.VAR_POSITIONAL for parameter in parameters)


def _placement_from_rows(name: str, table: Sequence[Sequence[Action]], stages: int) -> list[int]:
    """Return the rank of every stage: the first that has an action of it. Raises ScheduleError for a stage without actions."""
    homes = {action.stage: rank for rank in reversed(range(len(table))) for action in table[rank]}
    for stage in range(stages):
        if stage not in homes:
            problem = f"{name} has actions of stage {stages - 1}"
            raise ScheduleError(f"{problem}, but none of stage {stage}: give every stage its actions")
    return [homes[stage] for stage in range(stages)]


_STAGE_MARK = re.compile(rf"([0-9]{{1,9}})({FROZEN_MARK}|{AHEAD_MARK}|{TEACHER_MARK})")
_OVERLAP = re.compile(r"\((.*);(.*)\)OVERLAP_F_B")
_SHARDING_CELL = re.compile(r"[0-9]+(UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD)[0-9]*")  # PyTorch's cells for sharded weights


def parse_pytorch_csv_cell(text: str) -> Iterator[Cell]:
    """Yield the cell that PyTorch's compute-only form writes as `text`; nothing for a bubble, or for sharding of weights."""
    text = text.strip()
    if overlap := _OVERLAP.fullmatch(text):
        yield Action.parse(overlap[1]), Action.parse(overlap[2])
    elif text and not _SHARDING_CELL.fullmatch(text):
        yield Action.parse(text)
