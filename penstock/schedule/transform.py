"""Functions that make a table from another table."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from penstock.schedule.schedule import Schedule
from penstock.schedule.table import Action, Cell, Kind, OverlappedPair


def with_full_backwards(schedule: Schedule) -> Schedule:
    """Return `schedule` with each I and the W right after it merged into one B, unless that delays another rank.

    They are not merged if another rank waits for I's gradient: it would also wait for W. A proved table stays proved: B has the
    place and the inputs of I, and only this rank waits for it.
    """
    return schedule.with_cells(_cells_with_full_backwards(schedule, rank) for rank in range(schedule.ranks))


def _cells_with_full_backwards(schedule: Schedule, rank: int) -> Iterator[Cell]:
    cells = list(schedule.cells(rank))
    at = 0
    while at < len(cells):
        cell = cells[at]
        at += 1
        if isinstance(cell, Action) and cell.kind is Kind.I and cell._replace(kind=Kind.W) in cells[at : at + 1]:
            earlier = cell.stage - 1
            # I's gradient is needed by no other rank.
            stays = earlier < 0 or earlier in schedule.forward_only or schedule.placement[earlier] == rank
            cell, at = (cell._replace(kind=Kind.B), at + 1) if stays else (cell, at)
        yield cell


def without_teacher(schedule: Schedule) -> Schedule:
    """Return `schedule` without a teacher's stages and their forwards. A proved table stays proved."""
    if schedule.teacher is None:
        return schedule
    trained = schedule.num_trained_stages
    alone = schedule.filter_actions(lambda action: action.stage < trained)
    return replace(alone, placement=schedule.placement[:trained], teacher=None, ahead=False)


def with_overlapped_pairs(table: Schedule, makespan_of: Callable[[Schedule], float], tries: int) -> Schedule:
    """Return `table` with adjacent actions made pairs where the makespan does not grow; at most `tries` pairs are tried."""
    rows, best = [list(table.cells(rank)) for rank in range(table.ranks)], makespan_of(table)
    for row in rows:
        for at in reversed(range(len(row) - 1)):
            pair = _as_pair(*row[at : at + 2])
            if pair and tries > 0:
                tries -= 1
                row[at : at + 2] = [pair]
                candidate = table.with_cells(rows)
                if (shorter := makespan_of(candidate)) <= best:
                    table, best = candidate, shorter
                else:
                    row[at : at + 1] = pair
    return table


def _as_pair(first: Cell, second: Cell) -> OverlappedPair | None:
    """Return the two as a pair if they are a forward and a backward of different microbatches or slices; else None."""
    if not (isinstance(first, Action) and isinstance(second, Action)) or first[2:] == second[2:]:
        return None
    kinds = {first.kind, second.kind}
    return (first, second) if Kind.F in kinds and kinds & {Kind.B, Kind.I} else None


def with_frozen_stages(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Return the table without backwards of `stages`, the first ones of the model, none of which is trained.

    A proved table stays proved: nothing waits for these backwards but each other.
    """
    frozen = frozenset(stages)
    kept = schedule.filter_actions(lambda action: action.kind is Kind.F or action.stage not in frozen)
    return replace(kept, forward_only=frozen)
