"""Hypothesis strategies: valid tables of every kind, and tables with one thing wrong."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from executable_model import Value, makes, takes
from hypothesis import strategies as st

from penstock.schedule import Action, Kind, Schedule, Skip, build, names


def whole_numbers(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(min_value=low, max_value=high)


@st.composite
def valid_tables(
    draw: st.DrawFn, ranks: int = 4, stages_per_rank: int = 3, microbatches: int = 4, pairs: bool = True
) -> Schedule:
    """Any placement, any order that respects the dependencies, each backward whole or in halves, some actions in pairs."""
    dice = random.Random(draw(whole_numbers(0, 2**32 - 1)))
    ranks, microbatches = draw(whole_numbers(1, ranks)), draw(whole_numbers(1, microbatches))
    stages = ranks * draw(whole_numbers(1, stages_per_rank))
    placement = tuple(dice.randrange(ranks) for _ in range(stages))
    halves, overlap = draw(st.sampled_from([0.0, 0.5, 1.0])), draw(st.sampled_from([0.0, 0.5, 1.0])) if pairs else 0.0
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    overlaps = set()
    for group in _any_order(placement, microbatches, halves, overlap, dice):
        rows[placement[group[0].stage]] += group
        if len(group) == 2:
            overlaps.add(group)
    return Schedule("random", placement, microbatches, tuple(map(tuple, rows)), frozenset(overlaps))


def _any_order(
    placement: Sequence[int], microbatches: int, halves: float, overlap: float, dice: random.Random
) -> Iterator[tuple[Action, ...]]:
    """Actions one by one as they become able to run; two of one rank at once where both are."""
    stages, left = len(placement), list[Action]()
    for stage in range(stages):
        for microbatch in range(microbatches):
            kinds = (Kind.F, Kind.I, Kind.W) if dice.random() < halves else (Kind.F, Kind.B)
            left += [Action(kind, stage, microbatch) for kind in kinds]
    wanted = {action: takes(action, stages) for action in left}
    there: set[Value] = set()
    while left:
        able = [action for action in left if there.issuperset(wanted[action])]
        first = dice.choice(able)
        partners = [action for action in able if _may_overlap(first, action, placement)] if dice.random() < overlap else []
        group = (first, dice.choice(partners)) if partners else (first,)
        for action in group:
            left.remove(action)
            there.update(makes(action, stages))
        yield group


def _may_overlap(first: Action, second: Action, placement: Sequence[int]) -> bool:
    kinds = {first.kind.value, second.kind.value}
    return placement[first.stage] == placement[second.stage] and kinds in ({"F", "B"}, {"F", "I"})


@st.composite
def named_tables(draw: st.DrawFn, ranks: int = 4, microbatches: int = 4) -> Schedule:
    return build(draw(st.sampled_from(names())), draw(whole_numbers(1, ranks)), draw(whole_numbers(1, microbatches)))


def every_skip(stages: int) -> list[Skip]:
    return [(start, end) for end in range(stages) for start in range(end - 1)]


def some_skips(stages: int) -> st.SearchStrategy[frozenset[Skip]]:
    """None, some or all of the skips that a model of so many stages can have."""
    every = every_skip(stages)
    return st.frozensets(st.sampled_from(every)) | st.just(frozenset(every)) if every else st.just(frozenset())


@st.composite
def with_skips(draw: st.DrawFn, tables: st.SearchStrategy[Schedule]) -> tuple[Schedule, frozenset[Skip]]:
    """A table, and the skips of a model to be run by it."""
    schedule = draw(tables)
    return schedule, draw(some_skips(schedule.stages))


@st.composite
def mutants(draw: st.DrawFn, tables: st.SearchStrategy[Schedule]) -> Schedule:
    """A valid table with one change."""
    table = draw(tables)
    rank = draw(st.sampled_from([rank for rank, row in enumerate(table.actions) if row]))
    row = list(table.actions[rank])
    here, there = (draw(st.sampled_from(range(len(row)))) for _ in range(2))
    change = draw(st.sampled_from(["swap", "swap", "swap next", "drop", "double", "move", "rank", "cell", "pair", "turn"]))
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
    elif change == "pair":
        return replace(table, overlaps=table.overlaps ^ {pair for pair in pairwise(row) if pair[0] == row[here]})
    elif change == "turn":
        turned = {draw(st.sampled_from(sorted(table.overlaps, key=str)))} if table.overlaps else set()
        return replace(table, overlaps=table.overlaps - turned | {pair[::-1] for pair in turned})
    elif change == "rank":
        return _on_another_rank(table, rank, here, draw(st.sampled_from(range(table.ranks))))
    else:
        row[here] = draw(st.sampled_from(list(near(row[here]))))
    mutant = with_row(table, rank, row)
    return standing(mutant) if draw(st.booleans()) else mutant


def standing(table: Schedule) -> Schedule:
    """The table without the pairs that have come apart."""
    return replace(table, overlaps=table.overlaps & {pair for row in table.actions for pair in pairwise(row)})


def with_row(table: Schedule, rank: int, row: list[Action]) -> Schedule:
    return replace(table, actions=(*table.actions[:rank], tuple(row), *table.actions[rank + 1 :]))


def _on_another_rank(table: Schedule, rank: int, index: int, other: int) -> Schedule:
    rows = [list(row) for row in table.actions]
    rows[other].append(rows[rank].pop(index))
    return replace(table, actions=tuple(map(tuple, rows)))


def near(action: Action) -> Iterator[Action]:
    """The actions that differ by one step in one place."""
    kind, stage, microbatch, _ = action
    yield from (Action(other, stage, microbatch) for other in Kind if other is not kind)
    yield from (Action(kind, stage + step, microbatch) for step in (-1, 1))
    yield from (Action(kind, stage, microbatch + step) for step in (-1, 1))


def all_mutants(table: Schedule) -> Iterator[Schedule]:
    """Every table one swap, drop, double, changed cell or pair away."""
    for rank, row in enumerate(table.actions):
        for here, action in enumerate(row):
            for there in range(here):
                swapped = list(row)
                swapped[here], swapped[there] = swapped[there], swapped[here]
                yield with_row(table, rank, swapped)
            yield with_row(table, rank, [*row[:here], *row[here + 1 :]])
            yield with_row(table, rank, [*row[:here], action, *row[here:]])
            yield from (with_row(table, rank, [*row[:here], other, *row[here + 1 :]]) for other in near(action))
        for pair in pairwise(row):
            yield replace(table, overlaps=table.overlaps ^ {pair})
