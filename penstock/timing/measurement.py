"""The costs of a measured step's actions, and predictions for other tables at these costs.

After an action a rank sends its result, takes its next input, and starts the next action. This is the engine's time, for
which `Costs` has no field. It is added to the cost of the action before it, and is also the first part of a message's
time, so `simulate` delays the rank and its messages alike. The rest of a message's time is `send`.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, islice, pairwise
from statistics import fmean, median
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.memory import ActivationSize
from penstock.schedule.schedule import Schedule, from_rows
from penstock.schedule.table import Kind, Skip
from penstock.schedule.transform import with_frozen_stages, with_full_backwards
from penstock.timing.costs import Costs
from penstock.timing.events import Event, MessageCost
from penstock.timing.replay import without_teacher
from penstock.timing.simulate import simulate
from penstock.timing.timeline import Timeline

Times = dict[Kind, tuple[float, ...]]  # kind -> seconds, of every stage
Samples = dict[object, list[float]]  # what was measured -> the seconds of each sample
UNLIKE_SIZES = 1.5  # times the smallest microbatch's time: if all take less, they count as equal
AGREEMENT = 0.2  # of its factor: the most by which an action of a microbatch may deviate


@dataclass(frozen=True)
class Measurement:
    """The measured costs of a partitioned model on its ranks: `Measurement.from_timelines(timeline)`. Times are in seconds."""

    schedule: Schedule  # the table that ran
    seconds: Times  # of an action
    engine_seconds: Times  # of the engine, from the end of that action to the start of a next one that need not wait
    message_seconds: tuple[float, ...]  # of a message beyond that, over each border between two stages
    layers: tuple[float, ...] = ()  # the size of each stage, in layers or any unit
    activation_sizes: tuple[ActivationSize, ...] = ()  # of each stage, in bytes; empty: not measured
    num_steps: int = 1  # that were measured
    microbatch_factors: tuple[float, ...] = ()  # each microbatch's time in the last step, in means; empty: equal
    pairs_send_together: bool = False  # the engine hands over what both of an overlapped pair made once both have run

    @property
    def assumes_equal_halves(self) -> bool:
        """Return whether no I and no W was measured, so that each counts as half of B."""
        return not any(action.kind is Kind.W for row in self.schedule.actions for action in row)

    @classmethod
    def from_timelines(cls, *timelines: Timeline, layers: Sequence[float] = ()) -> "Measurement":
        """Return the costs of one or several steps of the same table. `layers`: of each stage, by default equal.

        An action of a stage costs the median over its microbatches and steps. W costs the mean, since the last of several
        may have done the work of all. Where a stage never ran B, B is I + W. Where it never ran I and W, I is its share of B
        on other stages, or half if no stage ran it. A message's time is known if its receiver was idle when it was sent; a
        border without one gets the median of the others.
        Of a step with a teacher, the costs are the model's: those of the step without it.
        Raises ScheduleError for timelines of different tables, and if a stage ran no forward or no backward.
        """
        timelines = tuple(map(without_teacher, timelines))
        tables = [executed_table(timeline) for timeline in timelines]
        if not tables or any(table.actions != tables[0].actions for table in tables):
            raise ScheduleError("costs are measured on one table: give one timeline, or several of the same table")
        if not tables[0].num_stages:
            raise ScheduleError("nothing ran in this timeline: measure a step")
        table = tables[0]
        between, sends = engine_and_message_seconds(*timelines)
        sizes = next((timeline.activation_sizes for timeline in reversed(timelines) if timeline.memory_unit == "bytes"), ())
        layers = _checked_layers(layers, table.num_stages)
        seconds, factors = _action_seconds(timelines, table), factors_in_all_steps(timelines)
        return cls(
            table,
            seconds,
            between,
            sends,
            layers,
            sizes,
            len(timelines),
            factors,
            timelines[-1].pairs_send_together,
        )

    @property
    def costs(self) -> Costs:
        """The costs for `simulate`, of tables with the same stages. Each action includes the engine's time after it."""
        forward, backward, inputs, weights = (
            tuple(map(sum, zip(self.seconds[kind], self.engine_seconds[kind], strict=True))) for kind in Kind
        )
        act, keep = zip(*self.activation_sizes, strict=True) if self.activation_sizes else (1, None)
        return Costs(forward, inputs, weights, self.message_seconds, act=act, keep=keep, backward=backward)

    def predict(self, schedule: Schedule, layers: Sequence[float] = ()) -> Timeline:
        """Predict when every action of `schedule` would run on these ranks, with as many rows in a microbatch.

        If microbatches were unequal, those of `schedule` are the same, in the same order; more repeat from the first on.

        `layers`: the size of each of its stages, in the unit of those measured; by default as measured if there are as many
        stages, else equal. As in the engine, pairs run one action after the other, and I and W as one B unless that delays
        another rank. With `pairs_send_together` both of a pair end together.
        """
        table = with_full_backwards(self.without_frozen_backwards(schedule, layers))
        if not self.pairs_send_together:
            table = replace(table, overlaps=frozenset())
        recut = self.recut(table.num_stages, layers)
        factors = islice(cycle(self.microbatch_factors), table.microbatches)
        timeline = simulate(table, replace(recut.costs, microbatch_factors=list(factors)))
        rows = [
            [
                event._replace(end=event.end - min(_time_after(recut.engine_seconds, in_cell) for in_cell in cell))
                for cell in timeline.cells(rank)
                for event in cell
            ]
            for rank in range(timeline.ranks)
        ]
        borders = [
            MessageCost(latency=send + engine_time)
            for send, engine_time in zip(recut.message_seconds, recut.engine_seconds[Kind.F], strict=False)
        ]
        name, unit = f"{schedule.name}, predicted", "bytes" if recut.activation_sizes else ""
        return replace(
            timeline,
            name=name,
            rows=tuple(map(tuple, rows)),
            message_costs=tuple(borders),
            memory_unit=unit,
            microbatch_factors=(),  # the bytes are of one microbatch, and it is not known which
        )

    def without_frozen_backwards(self, schedule: Schedule, layers: Sequence[float] = ()) -> Schedule:
        """Return the table without backwards of the stages that lie in the frozen part of the model that was measured.

        `layers`: as in `predict`.
        """
        frozen = self.schedule.forward_only
        if not frozen or schedule.forward_only:
            return schedule
        if schedule.num_stages != self.schedule.num_stages or layers:
            share = sum(self.layers[stage] for stage in frozen) / sum(self.layers)
            new = _checked_layers(layers, schedule.num_stages)
            ends = enumerate(accumulate(size / sum(new) for size in new))
            frozen = frozenset(stage for stage, end in ends if end <= share * (1 + 1e-9))
        return with_frozen_stages(schedule, frozen)

    def idle_before_arrival(self, gap: "ActionGap") -> bool:
        """Return whether the rank was idle before its message came; else the engine alone took the time."""
        low, high = gap.border
        return gap.idle_before_arrival(
            self.message_seconds[low] + _time_after(self.engine_seconds, gap.needed) if high == low + 1 else 0.0
        )

    def recut(self, stages: int, layers: Sequence[float] = ()) -> "Measurement":
        """Return the costs of the same model in `stages` stages: every layer takes along its share of its stage's time.

        Time with another cause, a slow rank or the loss, moves with the layers too, and so does memory. If the number of stages
        differs, the engine's time and that of a message are the medians.
        """
        keeps_stages = stages == self.schedule.num_stages
        layers = self.layers if keeps_stages and not layers else _checked_layers(layers, stages)
        if keeps_stages and layers == self.layers:
            return self
        seconds = {kind: _spread_over_new_stages(times, self.layers, layers) for kind, times in self.seconds.items()}
        parts = [_spread_over_new_stages(amounts, self.layers, layers) for amounts in zip(*self.activation_sizes, strict=True)]
        moved = replace(
            self, seconds=seconds, layers=layers, activation_sizes=tuple(map(ActivationSize, *parts)) if parts else ()
        )
        if keeps_stages:
            return moved
        between = {kind: (median(times),) * stages for kind, times in self.engine_seconds.items()}
        crossing = [
            send for send, ends in zip(self.message_seconds, pairwise(self.schedule.placement), strict=True) if len({*ends}) > 1
        ]
        send = (median(crossing or [0.0]),) * (stages - 1)
        return replace(moved, engine_seconds=between, message_seconds=send)


def executed_table(timeline: Timeline) -> Schedule:
    """Return the table that `timeline` ran, under its name."""
    name = timeline.name.removesuffix(", measured").removesuffix(", predicted")
    table = from_rows(name, [[event.action for event in row] for row in timeline.rows])
    return replace(table, overlaps=timeline.overlaps, forward_only=timeline.stage_chains.forward_only)


def _time_after(times: Times, event: Event | None) -> float:
    return times[event.action.kind][event.action.stage] if event else 0.0


def _checked_layers(layers: Sequence[float], stages: int) -> tuple[float, ...]:
    layers = tuple(layers) or (1.0,) * stages
    if len(layers) != stages or min(layers) <= 0:
        raise ScheduleError(f"layers is {list(layers)} for {stages} stages: give a number above 0 for each stage")
    return layers


def _spread_over_new_stages(times: Sequence[float], old: Sequence[float], new: Sequence[float]) -> tuple[float, ...]:
    """Return the times of the `new` stages, given `times` of the `old`, each spread evenly over its part of the model."""
    ends = [0.0, *(end / sum(old) for end in accumulate(old))]
    cuts = [0.0, *(end / sum(new) for end in accumulate(new))]
    spans = list(zip(pairwise(ends), times, strict=True))
    return tuple(
        sum(time * max(0.0, min(high, end) - max(low, start)) / (end - start) for (start, end), time in spans)
        for low, high in pairwise(cuts)
    )


# ---- from events to costs


class ActionGap(NamedTuple):
    """The time between two actions of a rank: from the end of `before` to the start of `after`."""

    before: Event | None  # None: `after` is the first of its rank
    after: Event
    needed: Event | None  # the last to end of those that `after` needs from other ranks

    @property
    def border(self) -> Skip:
        """The two stages of the message that was needed last; the same stage twice if none was."""
        stage, source_stage = self.after.action.stage, (self.needed or self.after).action.stage
        return min(stage, source_stage), max(stage, source_stage)

    @property
    def idle_when_input_computed(self) -> bool:
        """Return whether the rank was already idle when its last input was computed."""
        return self.needed is not None and (self.before is None or self.needed.end >= self.before.end)

    @property
    def seconds_since_input(self) -> float:
        """The seconds from the end of the action that made the last input to the start of `after`."""
        return self.after.start - self.needed.end if self.needed else 0.0

    def idle_before_arrival(self, latency_seconds: float) -> bool:
        """Return whether the rank was idle before its message arrived, `latency_seconds` after it was computed."""
        if self.needed is None or self.before is None:
            return self.before is None
        return self.needed.end + latency_seconds > self.before.end


def find_gaps(timeline: Timeline) -> Iterator[ActionGap]:
    """Yield the gap before every action or pair of actions, rank by rank."""
    for rank in range(timeline.ranks):
        previous: Event | None = None
        for cell in timeline.cells(rank):
            yield ActionGap(previous, cell[0], timeline.last_remote_need(cell))
            previous = cell[0]


def microbatch_factors(timeline: Timeline) -> tuple[float, ...]:
    """Return each microbatch's time as a multiple of the mean, if they are unequal in size; else nothing.

    Microbatches whose sizes the engine recorded are unequal only if those are; of other steps the times alone are known.

    The factor is the median over its forwards and backwards, each relative to the mean of its kind and stage. A microbatch that
    is slow on a single rank is not larger: most actions of each microbatch must agree.
    """
    sizes = timeline.microbatch_sizes
    if sizes and max(sizes) <= UNLIKE_SIZES * min(sizes):
        return ()
    times: dict[tuple[Kind, int], list[tuple[int, float]]] = defaultdict(list)
    for event, duration in _durations(timeline):
        if event.action.kind is not Kind.W:  # one W may do the work of several
            times[event.action[:2]].append((event.action.microbatch, duration))
    ratios: dict[int, list[float]] = defaultdict(list)
    for samples in times.values():
        mean = fmean(duration for _, duration in samples)
        for microbatch, duration in samples:
            ratios[microbatch].append(duration / mean if mean else 1.0)
    medians = {microbatch: median(values) for microbatch, values in sorted(ratios.items())}
    if not medians or max(medians.values()) <= UNLIKE_SIZES * min(medians.values()) or not min(medians.values()):
        return ()
    deviations = [median(abs(value / medians[microbatch] - 1) for value in values) for microbatch, values in ratios.items()]
    mean = fmean(medians.values())
    return tuple(value / mean for value in medians.values()) if max(deviations) < AGREEMENT else ()


def factors_in_all_steps(timelines: Sequence[Timeline]) -> tuple[float, ...]:
    """Return the factors of the last of these steps if all have unequal microbatches; one slow moment does not make a size."""
    factors = [microbatch_factors(timeline) for timeline in timelines]
    return factors[-1] if all(factors) else ()


def _durations(timeline: Timeline) -> Iterator[tuple[Event, float]]:
    """Yield every event with its seconds; each of a pair has half of theirs."""
    for cell in timeline.all_cells():
        yield from ((event, (event.end - event.start) / len(cell)) for event in cell)


def _action_seconds(timelines: Sequence[Timeline], table: Schedule) -> Times:
    """Return the seconds of every kind of action on every stage. Raises ScheduleError if one ran no forward or backward.

    The backwards of stages that have forwards only take 0.
    """
    samples: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        factors = microbatch_factors(timeline) or (1.0,) * table.microbatches
        for event, duration in _durations(timeline):
            samples[event.action[:2]].append(duration / factors[event.action.microbatch])
    seconds = {key: fmean(times) if key[0] is Kind.W else median(times) for key, times in samples.items()}
    split = [stage for stage in range(table.num_stages) if {(Kind.I, stage), (Kind.W, stage)} <= seconds.keys()]
    halves = {stage: (seconds[Kind.I, stage], seconds[Kind.W, stage]) for stage in split}
    share = median([inputs / (inputs + weights) if inputs + weights else 0.5 for inputs, weights in halves.values()] or [0.5])
    if table.num_stages and not any(kind is not Kind.F for kind, _ in seconds):
        raise ScheduleError(
            "no stage ran a backward, as in an evaluation: take the timeline after a training step, pipe.step(..), and before "
            "the next pipe.eval(..)"
        )
    costs = []
    for stage in range(table.num_stages):
        if stage in table.chains.forward_only:
            seconds.setdefault((Kind.B, stage), 0.0)
        if (Kind.F, stage) not in seconds or (stage not in halves and (Kind.B, stage) not in seconds):
            missing = "backward" if (Kind.F, stage) in seconds else "forward"
            raise ScheduleError(f"stage {stage} ran no {missing}: measure a step")
        full = sum(halves[stage]) if stage in halves else seconds[Kind.B, stage]
        inputs, weights = halves.get(stage, (share * full, full - share * full))
        costs.append((seconds[Kind.F, stage], seconds.get((Kind.B, stage), full), inputs, weights))
    return dict(zip(Kind, zip(*costs, strict=True), strict=True))


def _engine_seconds(engines: Iterable[ActionGap], stages: int) -> Times:
    """Return the engine's time after every action, from gaps that are not waits; without samples, of its kind, or of all."""
    samples: Samples = defaultdict(list)
    for gap in engines:
        if gap.before:
            kind, stage, *_ = gap.before.action
            for key in ((kind, stage), kind, None):
                samples[key].append(max(0.0, gap.after.start - gap.before.end))
    return {kind: tuple(_first_median(samples, (kind, stage), kind, None) for stage in range(stages)) for kind in Kind}


def engine_and_message_seconds(*timelines: Timeline) -> tuple[Times, tuple[float, ...]]:
    """Return the engine's seconds after an action, and those of a message over each border, in steps of one table."""
    table, gaps = executed_table(timelines[0]), [gap for timeline in timelines for gap in find_gaps(timeline)]
    waits = [gap for gap in gaps if gap.idle_when_input_computed]
    messages = _median_by_border(((gap, gap.seconds_since_input) for gap in waits), table)
    between = _engine_seconds(
        (gap for gap in gaps if not gap.idle_before_arrival(messages.get(gap.border, 0.0))), table.num_stages
    )
    sends = _median_by_border(((gap, gap.seconds_since_input - _time_after(between, gap.needed)) for gap in waits), table)
    return between, tuple(sends.values())


def _median_by_border(samples: Iterable[tuple[ActionGap, float]], table: Schedule) -> dict[Skip, float]:
    """Return the median over each border of two stages, at least 0; without samples, of its two ranks, or of all."""
    samples_by_key: Samples = defaultdict(list)
    for gap, seconds in samples:
        for key in (gap.border, _ranks_at(gap.border, table), None):
            samples_by_key[key].append(max(0.0, seconds))
    borders = pairwise(range(table.num_stages))
    return {border: _first_median(samples_by_key, border, _ranks_at(border, table), None) for border in borders}


def _first_median(samples: Samples, *keys: object) -> float:
    """Return the median of the first of `keys` that has samples; 0 if none has."""
    return next((median(samples[key]) for key in keys if key in samples), 0.0)


def _ranks_at(border: Skip, table: Schedule) -> frozenset[int]:
    """Return the ranks on the two sides of `border`."""
    return frozenset(table.placement[stage] for stage in border)
