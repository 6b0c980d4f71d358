"""Pairs that overlap: a forward and a backward that stand next to each other in a table that was searched for without them."""

from collections.abc import Callable

from penstock.schedule.schedule import Schedule, from_rows
from penstock.schedule.table import Action, Cell, Kind, Pair, Table


def paired(table: Schedule, time: Callable[[Table], float], tries: int) -> Schedule:
    """`table` with neighbours made pairs, one after the other, where `time` does not get longer; at most `tries` are tried."""
    rows, best = [list(table.cells(rank)) for rank in range(table.ranks)], time(table)
    for row in rows:
        for at in reversed(range(len(row) - 1)):
            pair = _pair(*row[at : at + 2])
            if pair and tries > 0:
                tries -= 1
                row[at : at + 2] = [pair]
                tried = from_rows(table.name, rows, table.placement)
                if (shorter := time(tried)) <= best:
                    table, best = tried, shorter
                else:
                    row[at : at + 1] = pair
    return table


def _pair(one: Cell, other: Cell) -> Pair | None:
    """The two if they are a forward and a backward of different microbatches."""
    if not (isinstance(one, Action) and isinstance(other, Action)) or one.microbatch == other.microbatch:
        return None
    kinds = {one.kind, other.kind}
    return (one, other) if Kind.F in kinds and kinds & {Kind.B, Kind.I} else None
