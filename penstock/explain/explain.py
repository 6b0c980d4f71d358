"""The explanation of a measured step: where its time went, which rank slows it down, and what would make it shorter.

Every suggestion compares the simulator's prediction at the measured costs with its prediction for the table that ran, so
that what the simulator does not know cancels out. The explanation also says how far the latter is from the measured step.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean, median

from penstock.errors import ScheduleError
from penstock.explain.explanation import (
    ENGINE,
    Alternative,
    Explanation,
    Improvement,
    Straggler,
    format_ms,
    improvement,
)
from penstock.schedule.catalog import FAMILIES, build, names
from penstock.schedule.memory import format_bytes
from penstock.schedule.schedule import Schedule
from penstock.schedule.table import Kind
from penstock.schedule.transform import with_full_backwards
from penstock.timing.causes import NOTABLE_SHARE, Cause
from penstock.timing.measurement import Measurement, find_gaps
from penstock.timing.replay import replay, without_teacher
from penstock.timing.timeline import Timeline

STRAGGLER_SHARE = 0.05  # of the time of a rank's share: a rank that is slower by less is not named
SLOW_MESSAGE_SHARE = 0.25  # of the usual forward's time: a message that takes less is not named
MIN_BYTES_FOR_SPEED = 1_000_000  # of a message; the speed of a smaller one says little but latency
SLOW_LINK_FACTOR = 2  # times the usual message between other ranks: a link above this is slow


def explain(timeline: Timeline, measurement: Measurement | None = None) -> Explanation:
    """Return the explanation of a measured training step; `print` it.

    `timeline`: of the step; its times are in seconds.
    `measurement`: the costs, by default `Measurement.from_timelines(timeline)`, which expects every
    stage to take the same; it can be given the layers of each stage, and more steps.

    A step with a teacher is explained as it would have run without, with how much longer the teacher makes it.

    Raises ScheduleError if a stage ran no forward or no backward.
    """
    if timeline.stage_chains.teacher is not None:
        alone = without_teacher(timeline)
        teacher = (sum(timeline.busy) - sum(alone.busy)) / timeline.ranks, max(0.0, timeline.makespan - alone.makespan)
        return replace(explain(alone, measurement), teacher=teacher)

    costs = measurement or Measurement.from_timelines(timeline)
    step_costs = Measurement.from_timelines(timeline, layers=costs.layers) if costs.num_steps > 1 else costs
    table = costs.schedule
    predicted = costs.predict(table)
    microbatches_held, predicted_step = _max_microbatches_in_flight(table, predicted), predicted.makespan
    even = replace(costs, seconds={kind: (fmean(times),) * len(times) for kind, times in costs.seconds.items()})
    alternatives = tuple(_catalog_alternatives(costs))
    notable = [alternative for alternative in alternatives if alternative.step_seconds < (1 - NOTABLE_SHARE) * predicted_step]
    faster = _best_alternative(notable)
    frugal = _best_alternative([alternative for alternative in notable if alternative.microbatches_held <= microbatches_held])
    return Explanation(
        schedule=table,
        step=timeline.makespan,
        shares=time_shares(timeline, costs),
        causes={cause.value: share for cause, share in timeline.causes.items()},
        between_steps=max(timeline.between_steps, default=0.0),
        averaging=max(timeline.averaging, default=0.0),
        predicted_step=predicted_step,
        microbatches_held=microbatches_held,
        activation_bytes=_peak_bytes(predicted),
        straggler=_worst_straggler(costs, step_costs),
        even_stages_timeline=even.predict(table),
        doubled_microbatches=_doubled_microbatches_alternative(costs),
        alternatives=alternatives,
        fastest=faster,
        fastest_in_same_memory=None if frugal is faster else frugal,
        num_steps=costs.num_steps,
        recut_call=timeline.recut_call,
        repairs=(
            *_faster_messages(timeline, costs),
            *_ascending_order(costs, predicted_step),
            *_planned_order(costs, predicted_step),
        ),
    )


class MeasuredTimeline(Timeline):
    """The timeline of a step that ran."""

    time_unit = "s"

    def explain(self, measurement: Measurement | None = None) -> Explanation:
        """Return where the step's time went, which rank slows it down, and what would make it shorter; `print` it.

        `measurement`, and what is raised: as in `penstock.schedule.explain`.
        """
        return explain(self, measurement)


def time_shares(timeline: Timeline, measured: Measurement) -> dict[str, float]:
    """Return the share of (ranks x makespan) of each kind of action, each cause of idle time and the engine; they sum to 1.

    Idle time between two actions is the engine's if the second had all its inputs when the first ended. Otherwise its cause is
    that of `penstock.timing.causes`.
    """
    seconds = dict.fromkeys([*(kind.value for kind in Kind), *(cause.value for cause in Cause), ENGINE], 0.0)
    engine = {
        (gap.after.rank, gap.after.start) for gap in find_gaps(timeline) if gap.before and not measured.idle_before_arrival(gap)
    }
    for rank, row in enumerate(timeline.idle):
        for start, end, cause in row:
            seconds[ENGINE if (rank, end) in engine and cause is not Cause.SENDING else cause.value] += end - start
        for cell in timeline.cells(rank):
            for event in cell:
                seconds[event.action.kind.value] += (event.end - event.start) / len(cell)
    total = timeline.ranks * timeline.makespan
    return {name: time / total if total else 0.0 for name, time in seconds.items()}


def _peak_bytes(timeline: Timeline) -> tuple[float, ...]:
    """Return the peak bytes of activations on every rank; empty if they are not known in bytes."""
    return timeline.peak_memory if timeline.memory_unit == "bytes" else ()


# ---- what slows the step down


def _worst_straggler(measurement: Measurement, step_measurement: Measurement) -> Straggler | None:
    """Return the rank that takes longest against its share, of those slow in all steps and in `step_measurement`.

    Otherwise a rank could be named that would save no time in the step that the reader sees.
    """
    slow_in_step = {straggler.rank for straggler in _stragglers(step_measurement)}
    slow = [straggler for straggler in _stragglers(measurement) if straggler.rank in slow_in_step]
    return max(slow, key=lambda straggler: straggler.extra_seconds_per_action, default=None)


def _stragglers(measurement: Measurement) -> list[Straggler]:
    """Return the ranks that take notably longer than their share and make the step notably longer."""
    table = measurement.schedule
    predicted_step = measurement.predict(table).makespan
    stragglers = [_compare_with_share(measurement, rank, predicted_step) for rank in range(table.ranks) if table.actions[rank]]
    return [straggler for straggler in stragglers if straggler and straggler.step_seconds_lost > NOTABLE_SHARE * predicted_step]


def _compare_with_share(measurement: Measurement, rank: int, predicted_step: float) -> Straggler | None:
    """Return how `rank` compares with the others, stage for stage by their layers; None if it is not slower.

    Stages that have forwards only are not compared: a cut gives them more layers.
    """
    table, own_stages, layers = measurement.schedule, measurement.schedule.stages_of(rank), measurement.layers
    frozen = table.chains.forward_only
    other_stages = [stage for stage in range(table.num_stages) if stage not in own_stages and stage not in frozen]
    if not other_stages or not own_stages or not frozen.isdisjoint(own_stages):
        return None

    def shared(times: Sequence[float]) -> tuple[float, ...]:
        usual = median(times[stage] / layers[stage] for stage in other_stages)
        return tuple(layers[stage] * usual if stage in own_stages else time for stage, time in enumerate(times))

    fair = replace(measurement, seconds={kind: shared(times) for kind, times in measurement.seconds.items()})
    actions = table.actions[rank]
    took, fair_seconds = (sum(measured.seconds[kind][stage] for kind, stage, *_ in actions) for measured in (measurement, fair))
    if took - fair_seconds <= STRAGGLER_SHARE * fair_seconds:
        return None
    times = {
        kind: (
            fmean(measurement.seconds[kind][stage] for stage in own_stages),
            fmean(fair.seconds[kind][stage] for stage in own_stages),
        )
        for kind in dict.fromkeys(action.kind for action in actions)
    }
    shorter = fair.predict(table)
    return Straggler(rank, (took - fair_seconds) / len(actions), times, predicted_step - shorter.makespan, shorter)


def _faster_messages(timeline: Timeline, measurement: Measurement) -> Iterator[Improvement]:
    """Yield the step with a slow link at the usual speed, or else with messages that cost nothing, if notably faster."""
    waits = [(gap, gap.needed) for gap in find_gaps(timeline) if gap.idle_when_input_computed and gap.needed]
    seconds_by_link = defaultdict[tuple[int, int], list[float]](list)
    for gap, needed in waits:
        seconds_by_link[needed.rank, gap.after.rank].append(gap.seconds_since_input)
    links = {link: median(seconds) for link, seconds in seconds_by_link.items()}
    if not links:
        return
    slowest = max(links, key=lambda link: links[link])
    other_links = [seconds for link, seconds in links.items() if link != slowest]
    is_one_slow = bool(other_links) and links[slowest] > SLOW_LINK_FACTOR * median(other_links)
    usual, slow = (median(other_links), {slowest}) if is_one_slow else (0.0, set(links))

    if links[slowest] < SLOW_MESSAGE_SHARE * median(measurement.seconds[Kind.F]):
        return
    saved = {
        gap.after.action: gap.seconds_since_input - usual for gap, needed in waits if (needed.rank, gap.after.rank) in slow
    }
    shorter = replay(timeline, {}, saved)
    if timeline.makespan - shorter.makespan <= NOTABLE_SHARE * timeline.makespan:
        return
    has_one_link = is_one_slow or len({frozenset(link) for link in links}) == 1
    route = f"from rank {slowest[0]} to rank {slowest[1]}" if has_one_link else "between ranks"
    others, size, seconds = f", others {format_ms(usual)}" if usual else "", timeline.message_bytes, links[slowest]
    speed = f", {format_bytes(size)} at {size / seconds / 1e9:.2g} GB/s" if size >= MIN_BYTES_FOR_SPEED else ""
    change = f"messages {route} take {format_ms(seconds)} each{others}{speed}, without that"
    yield improvement("message", change, shorter, timeline.makespan)


def _ascending_order(measurement: Measurement, predicted_step: float) -> Iterator[Improvement]:
    """Yield the step with ascending microbatches on all ranks, if notably faster; name the first rank with another order."""
    table = measurement.schedule
    rows = []
    for row in table.actions:
        ascending = {key: iter(sorted(action for action in row if action[:2] == key)) for key in {action[:2] for action in row}}
        rows.append(tuple(next(ascending[action[:2]]) for action in row))
    changed_ranks = [rank for rank, row in enumerate(rows) if row != table.actions[rank]]
    if not changed_ranks:
        return
    try:
        timeline = measurement.predict(replace(table, actions=tuple(rows)))
    except ScheduleError:
        return
    if predicted_step - timeline.makespan > NOTABLE_SHARE * predicted_step:
        change = f"rank {changed_ranks[0]} runs microbatches out of order, in order"
        yield improvement("order", change, timeline, predicted_step)


def _planned_order(measurement: Measurement, predicted_step: float) -> Iterator[Improvement]:
    """Yield the step with microbatches of unequal sizes in their planned order, if notably faster."""
    if factors := measurement.microbatch_factors:
        from penstock.plan.microbatch_order import plan_order  # imports numpy, which a page in the browser does not have

        order = plan_order(factors, measurement.schedule, measurement.costs)
        reordered = replace(measurement, microbatch_factors=tuple(factors[index] for index in order))
        timeline = reordered.predict(measurement.schedule)
        if timeline.makespan < (1 - NOTABLE_SHARE) * predicted_step:
            change = 'microbatches take unlike times, in the planned order (order="planned")'
            yield improvement("order", change, timeline, predicted_step)


# ---- what would make it shorter


def _max_microbatches_in_flight(table: Schedule, timeline: Timeline) -> float:
    """Return the microbatches in flight on the fullest rank; an activation of one of its V stages counts 1/V."""
    return max(timeline.peak_in_flight) * table.ranks / table.num_stages


def _catalog_alternatives(measurement: Measurement) -> Iterator[Alternative]:
    """Yield the other schedules of the catalog at this P and M, with their default V and with that of the table."""
    table = measurement.schedule
    for name in names():
        for stages_per_rank in dict.fromkeys([FAMILIES[name].stages_per_rank, table.num_stages // table.ranks]):
            schedule = _build_or_none(measurement, name, table.microbatches, stages_per_rank)
            if schedule and schedule.actions != table.actions:
                yield _alternative_with_schedule(measurement, schedule)


def _best_alternative(alternatives: Sequence[Alternative]) -> Alternative | None:
    """Return the fastest; of those about as fast, the one that holds the least."""
    fastest = min((alternative.step_seconds for alternative in alternatives), default=0.0)
    near = [alternative for alternative in alternatives if alternative.step_seconds <= (1 + NOTABLE_SHARE) * fastest]
    return min(near, key=lambda alternative: (alternative.microbatches_held, alternative.step_seconds), default=None)


def _doubled_microbatches_alternative(measurement: Measurement) -> Alternative | None:
    """Return the same schedule with twice the microbatches; None if the table is not the catalog's."""
    table = measurement.schedule
    stages_per_rank = table.num_stages // table.ranks
    counts = (table.microbatches, 2 * table.microbatches)
    rebuilt, doubled = (_build_or_none(measurement, table.name, count, stages_per_rank) for count in counts)
    return (
        _alternative_with_schedule(measurement, doubled) if rebuilt and doubled and rebuilt.actions == table.actions else None
    )


def _alternative_with_schedule(measurement: Measurement, schedule: Schedule) -> Alternative:
    timeline, split = measurement.predict(schedule), any(action.kind is Kind.W for row in schedule.actions for action in row)
    return Alternative(
        schedule,
        timeline,
        _max_microbatches_in_flight(schedule, timeline),
        measurement.assumes_equal_halves and split,
        max(_peak_bytes(timeline), default=0.0),
    )


def _build_or_none(measurement: Measurement, name: str, microbatches: int, stages_per_rank: int) -> Schedule | None:
    """Return a table of the catalog as the engine runs it; None if there is none of that size."""
    if name not in FAMILIES:
        return None
    try:
        built = build(name, measurement.schedule.ranks, microbatches, stages_per_rank)
    except ScheduleError:
        return None
    return replace(with_full_backwards(measurement.without_frozen_backwards(built)), overlaps=frozenset())
