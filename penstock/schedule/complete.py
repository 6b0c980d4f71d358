"""What a table must have before anything can be proved of it: every action once, in its place, and pairs that are pairs."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice, pairwise

from penstock.errors import ScheduleError
from penstock.schedule.table import Action, Kind, Table


def check_table(table: Table) -> None:
    """Raises ScheduleError unless every action and every pair is well formed, in its place, and none is missing."""
    wrong = next(chain(_out_of_place(table), _incomplete(table), _no_pairs(table)), None)
    if wrong is not None:
        raise ScheduleError(wrong)


def _out_of_place(table: Table) -> Iterator[str]:
    """Where not every action names a stage and a microbatch that exist, on the rank where the stage lives."""
    placement, ranks, stages, microbatches = table.placement, table.ranks, table.stages, table.microbatches
    if not ranks or not stages or microbatches < 1:
        yield f"{table.name} is empty: {ranks} ranks, {stages} stages, {microbatches} microbatches"
    for stage, home in enumerate(placement):
        if not 0 <= home < ranks:
            yield f"{table.name} places stage {stage} on rank {home}; the ranks are 0 to {ranks - 1}"
    for rank, row in enumerate(table.actions):
        for action in row:
            _, stage, microbatch = action
            if not 0 <= stage < stages:
                yield f"rank {rank} has {action}; the stages are 0 to {stages - 1}"
            if not 0 <= microbatch < microbatches:
                yield f"rank {rank} has {action}; the microbatches are 0 to {microbatches - 1}"
            if placement[stage] != rank:
                yield f"rank {rank} has {action}, but stage {stage} lives on rank {placement[stage]}"


def _incomplete(table: Table) -> Iterator[str]:
    """Where not every (stage, microbatch) has its F once, and its B once or its I and W once."""
    found = [{kind: set[int]() for kind in Kind} for _ in table.placement]  # stage, kind -> microbatches
    for row in table.actions:
        for kind, stage, microbatch in row:
            found[stage][kind].add(microbatch)
    if sum(len(microbatches) for each in found for microbatches in each.values()) < sum(map(len, table.actions)):
        action, times = Counter(chain.from_iterable(table.actions)).most_common(1)[0]
        yield f"rank {table.placement[action.stage]} has {action} {times} times; each action stands once"
    lacking = (action for stage, each in enumerate(found) for action in _missing(stage, each, table))
    if missing := [f"rank {table.placement[action.stage]} lacks {action}" for action in islice(lacking, 5)]:
        yield f"{table.name} is not complete: {', '.join(missing[:4])}{' and more' if missing[4:] else ''}"


def _missing(stage: int, found: dict[Kind, set[int]], table: Table) -> Iterator[Action]:
    """The actions that `stage` lacks. Raises ScheduleError for a backward that is there both whole and in halves."""
    forwards, full, inputs, weights = (found[kind] for kind in Kind)
    for microbatch in sorted(full & (inputs | weights)):
        whole, half = (Action(kind, stage, microbatch) for kind in (Kind.B, Kind.I if microbatch in inputs else Kind.W))
        raise ScheduleError(f"rank {table.placement[stage]} has {whole} and {half}: a full B is I and W at once")
    if inputs == weights and len(forwards) == len(full) + len(inputs) == table.microbatches:
        return
    for microbatch in range(table.microbatches):
        halves = microbatch in inputs or microbatch in weights
        for kind in (Kind.F, Kind.I, Kind.W) if halves else (Kind.F, Kind.B):
            if microbatch not in found[kind]:
                yield Action(kind, stage, microbatch)


def _no_pairs(table: Table) -> Iterator[str]:
    """Where overlapping actions do not stand next to each other, one a forward and one a backward, each in one pair."""
    side_by_side = {pair for row in table.actions for pair in pairwise(row)} if table.overlaps else set()
    for first, second in sorted(table.overlaps - side_by_side, key=str):
        yield f"{first} and {second} are no pair: no rank has {second} right after {first}"
    for first, second in table.overlaps:
        if {first.kind, second.kind} not in ({Kind.F, Kind.B}, {Kind.F, Kind.I}):
            yield f"{first} and {second} are no pair: a pair is a forward and a backward, B or I"
    for action, times in Counter(chain.from_iterable(table.overlaps)).items():
        if times > 1:
            yield f"{action} is in {times} pairs; each action is in one at most"
