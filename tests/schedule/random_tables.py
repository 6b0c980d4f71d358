"""Hypothesis strategies: valid tables of every kind, and tables with one thing wrong."""

import random
from collections.abc import Iterator
from dataclasses import replace

from executable_model import makes, takes
from hypothesis import strategies as st

from penstock.schedule import Action, Kind, Schedule, build, names


def whole_numbers(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(min_value=low, max_value=high)


@st.composite
def valid_tables(draw: st.DrawFn, ranks: int = 4, stages_per_rank: int = 3, microbatches: int = 4) -> Schedule:
    """Any placement, any order that respects the dependencies, each backward whole or in halves."""
    dice = draw(st.randoms(use_true_random=False))
    ranks, microbatches = draw(whole_numbers(1, ranks)), draw(whole_numbers(1, microbatches))
    stages = ranks * draw(whole_numbers(1, stages_per_rank))
    placement = tuple(dice.randrange(ranks) for _ in range(stages))
    halves = draw(st.sampled_from([0.0, 0.5, 1.0]))
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    for action in _any_order(stages, microbatches, halves, dice):
        rows[placement[action.stage]].append(action)
    return Schedule("random", placement, microbatches, tuple(map(tuple, rows)))


def _any_order(stages: int, microbatches: int, halves: float, dice: random.Random) -> list[Action]:
    left = []
    for stage in range(stages):
        for microbatch in range(microbatches):
            kinds = (Kind.F, Kind.I, Kind.W) if dice.random() < halves else (Kind.F, Kind.B)
            left += [Action(kind, stage, microbatch) for kind in kinds]
    done, there = [], set()
    while left:
        able = [index for index, action in enumerate(left) if there.issuperset(takes(action, stages))]
        action = left.pop(dice.choice(able))
        there.update(makes(action, stages))
        done.append(action)
    return done


@st.composite
def named_tables(draw: st.DrawFn, ranks: int = 4, microbatches: int = 4) -> Schedule:
    return build(draw(st.sampled_from(names())), draw(whole_numbers(1, ranks)), draw(whole_numbers(1, microbatches)))


@st.composite
def mutants(draw: st.DrawFn, tables: st.SearchStrategy[Schedule]) -> Schedule:
    """A valid table with one change."""
    table = draw(tables)
    rank = draw(st.sampled_from([rank for rank, row in enumerate(table.actions) if row]))
    row = list(table.actions[rank])
    here, there = (draw(st.sampled_from(range(len(row)))) for _ in range(2))
    change = draw(st.sampled_from(["swap", "swap", "swap next", "drop", "double", "move", "rank", "cell"]))
    if change == "swap next":
        there = min(here + 1, len(row) - 1)
    if change.startswith("swap"):
        row[here], row[there] = row[there], row[here]
    elif change == "drop":
        del row[here]
    elif change == "double":
        row.insert(there, row[here])
    elif change == "move":
        row.insert(there, row.pop(here))
    elif change == "rank":
        return _on_another_rank(table, rank, here, draw(st.sampled_from(range(table.ranks))))
    else:
        row[here] = draw(st.sampled_from(list(near(row[here]))))
    return with_row(table, rank, row)


def with_row(table: Schedule, rank: int, row: list[Action]) -> Schedule:
    return replace(table, actions=(*table.actions[:rank], tuple(row), *table.actions[rank + 1 :]))


def _on_another_rank(table: Schedule, rank: int, index: int, other: int) -> Schedule:
    rows = [list(row) for row in table.actions]
    rows[other].append(rows[rank].pop(index))
    return replace(table, actions=tuple(map(tuple, rows)))


def near(action: Action) -> Iterator[Action]:
    """The actions that differ by one step in one place."""
    kind, stage, microbatch = action
    yield from (Action(other, stage, microbatch) for other in Kind if other is not kind)
    yield from (Action(kind, stage + step, microbatch) for step in (-1, 1))
    yield from (Action(kind, stage, microbatch + step) for step in (-1, 1))


def all_mutants(table: Schedule) -> Iterator[Schedule]:
    """Every table one swap, drop, double or changed cell away."""
    for rank, row in enumerate(table.actions):
        for here, action in enumerate(row):
            for there in range(here):
                swapped = list(row)
                swapped[here], swapped[there] = swapped[there], swapped[here]
                yield with_row(table, rank, swapped)
            yield with_row(table, rank, [*row[:here], *row[here + 1 :]])
            yield with_row(table, rank, [*row[:here], action, *row[here:]])
            yield from (with_row(table, rank, [*row[:here], other, *row[here + 1 :]]) for other in near(action))
