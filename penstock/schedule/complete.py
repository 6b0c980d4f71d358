"""What a table must have before anything can be proved of it: every action once, in its place, and pairs that are pairs."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from penstock.errors import ScheduleError
from penstock.schedule.table import Action, Kind, Table


def check_table(schedule: Table) -> None:
    """Raises ScheduleError unless every action and every pair is well formed, in its place, and none is missing."""
    _check_places(schedule)
    _check_complete(schedule)
    _check_pairs(schedule)


def _check_places(schedule: Table) -> None:
    """Every action names a stage and a microbatch that exist, on the rank where the stage lives."""
    placement, stages, microbatches = schedule.placement, schedule.stages, schedule.microbatches
    if not schedule.ranks or not stages or microbatches < 1:
        raise ScheduleError(f"{schedule.name} is empty: {schedule.ranks} ranks, {stages} stages, {microbatches} microbatches")
    for stage, home in enumerate(placement):
        if not 0 <= home < schedule.ranks:
            raise ScheduleError(f"{schedule.name} places stage {stage} on rank {home}; the ranks are 0 to {schedule.ranks - 1}")
    for rank, row in enumerate(schedule.actions):
        for action in row:
            _, stage, microbatch = action
            if not 0 <= stage < stages:
                raise ScheduleError(f"rank {rank} has {action}; the stages are 0 to {stages - 1}")
            if not 0 <= microbatch < microbatches:
                raise ScheduleError(f"rank {rank} has {action}; the microbatches are 0 to {microbatches - 1}")
            if placement[stage] != rank:
                raise ScheduleError(f"rank {rank} has {action}, but stage {stage} lives on rank {placement[stage]}")


Found = dict[Kind, set[int]]  # of one stage: the microbatches that have an action of this kind


def _check_complete(schedule: Table) -> None:
    """Every (stage, microbatch) has its F once, and its B once or its I and W once."""
    found: list[Found] = [{kind: set() for kind in Kind} for _ in schedule.placement]
    for row in schedule.actions:
        for kind, stage, microbatch in row:
            found[stage][kind].add(microbatch)
    if sum(len(microbatches) for each in found for microbatches in each.values()) < sum(map(len, schedule.actions)):
        action, times = Counter(action for row in schedule.actions for action in row).most_common(1)[0]
        rank = schedule.placement[action.stage]
        raise ScheduleError(f"rank {rank} has {action} {times} times; each action stands once")
    missing = []
    for stage, each in enumerate(found):
        for action in _missing(stage, each, schedule):
            missing.append(f"rank {schedule.placement[stage]} lacks {action}")
            if len(missing) > 4:
                raise ScheduleError(f"{schedule.name} is not complete: {', '.join(missing[:4])} and more")
    if missing:
        raise ScheduleError(f"{schedule.name} is not complete: {', '.join(missing)}")


def _missing(stage: int, found: Found, schedule: Table) -> Iterator[Action]:
    """The actions that `stage` lacks. Raises ScheduleError for a backward that is there both whole and in halves."""
    forwards, full, inputs, weights = (found[kind] for kind in Kind)
    for microbatch in sorted(full & (inputs | weights)):
        whole, half = (Action(kind, stage, microbatch) for kind in (Kind.B, Kind.I if microbatch in inputs else Kind.W))
        raise ScheduleError(f"rank {schedule.placement[stage]} has {whole} and {half}: a full B is I and W at once")
    if inputs == weights and len(forwards) == len(full) + len(inputs) == schedule.microbatches:
        return
    for microbatch in range(schedule.microbatches):
        halves = microbatch in inputs or microbatch in weights
        for kind in (Kind.F, Kind.I, Kind.W) if halves else (Kind.F, Kind.B):
            if microbatch not in found[kind]:
                yield Action(kind, stage, microbatch)


def _check_pairs(schedule: Table) -> None:
    """Overlapping actions stand next to each other, one a forward and one a backward, each in one pair."""
    side_by_side = {pair for row in schedule.actions for pair in pairwise(row)} if schedule.overlaps else set()
    for first, second in sorted(schedule.overlaps - side_by_side, key=str):
        raise ScheduleError(f"{first} and {second} are no pair: no rank has {second} right after {first}")
    for first, second in schedule.overlaps:
        if {first.kind, second.kind} not in ({Kind.F, Kind.B}, {Kind.F, Kind.I}):
            raise ScheduleError(f"{first} and {second} are no pair: a pair is a forward and a backward, B or I")
    for action, times in Counter(action for pair in schedule.overlaps for action in pair).items():
        if times > 1:
            raise ScheduleError(f"{action} is in {times} pairs; each action is in one at most")
