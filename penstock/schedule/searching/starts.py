"""Tables to begin a search with: published ones, one microbatch after the other, and those of ranks that run what they can."""

from collections.abc import Iterator, Sequence

from penstock.errors import ScheduleError
from penstock.schedule.catalog import FAMILIES, build
from penstock.schedule.schedule import Schedule
from penstock.schedule.searching.machine import Machine, Rows, in_order
from penstock.schedule.table import PLACEMENTS

DEPTHS = (1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0)


def families(placement: Sequence[int], microbatches: int) -> Iterator[Schedule]:
    """The published tables with these stages on these ranks."""
    stages, ranks = len(placement), max(placement) + 1
    for name, family in FAMILIES.items():
        if stages % ranks or PLACEMENTS[family.placement](stages, ranks) != tuple(placement):
            continue
        each = stages // ranks
        try:
            yield build(name, ranks, microbatches, None if each == family.stages_per_rank else each)
        except ScheduleError:  # not for so many stages on a rank
            continue


def in_groups(machine: Machine, size: int) -> Rows:
    """The F and I of groups of microbatches that go through the whole pipeline and back, one group after the other."""
    rows = []
    for stages in machine.stages_of:
        codes = list[int]()
        for first in range(0, machine.microbatches, size):
            together = min(size, machine.microbatches - first)
            for code in (*stages, *(machine.stages + stage for stage in reversed(stages))):
                codes += [code] * together
        rows.append(in_order(codes, machine.microbatches))
    return rows


def dispatched(machine: Machine, depth: Sequence[float]) -> Rows:
    """The F and I of ranks that always run what can begin first, an I before an F, the F of a later stage before an earlier.

    An F only begins if memory is left for the F of one microbatch on the later stages of its rank, without which a rank can
    fill up with what can never go on; and if fewer than `depth` of its stage are in flight.
    """
    count, stages = machine.microbatches, machine.stages
    later = [sum(machine.sizes[t].act for t in machine.stages_of[machine.placement[s]] if t > s) for s in range(stages)]
    free, held = [0.0] * machine.ranks, [0.0] * machine.ranks
    there, put_off = list(machine.there), [list[int]() for _ in range(machine.ranks)]
    done, rows = [0] * (2 * stages), [list[int]() for _ in range(machine.ranks)]
    left = 2 * stages * count

    def candidates(rank: int) -> Iterator[tuple[float, tuple[int, int], int]]:
        """When each F and I that memory allows can begin, in the order of preference."""
        for stage in machine.stages_of[rank]:
            for code in (stages + stage, stage):
                action = code * count + done[code]
                if done[code] == count or there[action] < 0 or any(there[slot] < 0 for slot in machine.also_needs[action]):
                    continue
                when = max([free[rank], there[action], *(there[slot] for slot in machine.also_needs[action])])
                if code < stages:
                    if done[stage] - done[stages + stage] >= depth[stage]:
                        continue
                    most = machine.limits[rank] - machine.change[action] - later[stage]
                    waits, freed = when, held[rank]
                    for weight in put_off[rank]:
                        if freed <= most:
                            break
                        freed += machine.change[weight]
                        waits = max(when, waits + machine.cost[weight]) if freed > most else waits + machine.cost[weight]
                    if freed > most:
                        continue
                    when = waits
                yield when, (-1 if code >= stages else 0, -stage), action

    while left:
        best = min(((*each, rank) for rank in range(machine.ranks) for each in candidates(rank)), default=None)
        if best is None:
            return []
        _, _, action, rank = best
        code, time = action // count, max([there[action], *(there[slot] for slot in machine.also_needs[action])])
        waiting = put_off[rank]
        while waiting:
            weight = waiting[0]
            most = machine.limits[rank] - machine.change[action] - (later[code] if code < stages else 0.0)
            if free[rank] + machine.cost[weight] > time and (code >= stages or held[rank] <= most):
                break
            free[rank] += machine.cost[weight]
            held[rank] += machine.change[weight]
            waiting.pop(0)
        free[rank] = max(free[rank], time) + machine.cost[action]
        held[rank] += machine.change[action]
        rows[rank].append(action)
        if code >= stages and not machine.whole:
            waiting.append(action + machine.first_back)
        for slot, _, transmission, latency in machine.sends[action]:
            there[slot] = free[rank] + transmission + latency
        done[code] += 1
        left -= 1
    return rows


def depths(machine: Machine) -> Iterator[list[float]]:
    """How many of every stage may be in flight: so many as its round trip takes, times something; and any number."""
    period = max(machine.work) / machine.microbatches
    yield [float("inf")] * machine.stages
    for factor in DEPTHS:
        depth = []
        for stage in range(machine.stages):
            trip = sum(machine.times[s] + machine.times[machine.stages + s] for s in range(stage, machine.stages))
            depth.append(max(1.0, factor * trip / period))
        yield depth


def of(machine: Machine) -> Iterator[Rows]:
    """All there are."""
    yield from map(machine.rows, families(machine.placement, machine.microbatches))
    yield from (in_groups(machine, size) for size in (1, 2, 3, 4) if size <= machine.microbatches)
    yield from (rows for depth in depths(machine) if (rows := dispatched(machine, depth)))
