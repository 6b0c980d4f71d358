"""Find delays that only traces show: pauses of the host, blocked collectives, work between steps.

Each delay is an `Improvement` for the verdict: the step replayed without it. Collectives in actions,
and the parts of gaps, cannot be shortened alone: they are described in sentences.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median

from penstock.integrations.rank_trace import RankTrace, TimedAction
from penstock.integrations.trace_events import CollectiveCall, Range, within
from penstock.schedule import Action, Event, Improvement, Kind, Timeline
from penstock.timing.causes import NOTABLE_SHARE
from penstock.timing.replay import replay
from penstock.view.record import Record

RankStep = Sequence[TimedAction]

PAUSE_FACTOR = 1.5  # an action that takes this many times its kind and stage's median was paused
MIN_PAUSE_SECONDS = 0.001
RARE_SHARE = 0.25  # of the actions of a kind and stage; if more are long, they are not pauses
CLOSE_SECONDS = 0.0002  # at most, between the end of a receive and the start of the collective that it blocked
SHORT_REST_SHARE = 0.5  # of its wait, at most, that a blocked collective takes after it
MAX_NAMED_ACTIONS = 3  # in a sentence
MIN_GAP_SHARE = 0.005  # of the time between actions; smaller parts are not named
MIN_LOOP_SHARE = 0.1  # of the time between steps; smaller parts are not named


def find_delays(record: Record, traces: Sequence[RankTrace], usual: Sequence[RankStep]) -> Iterator[Improvement]:
    """Yield the causes that made steps notably longer. `usual`: each rank's actions in the median step of `record`."""
    improvements = [
        *_pauses(record),
        *_blocked_collectives(record.usual, traces, usual),
        *_work_between_steps(record, traces),
    ]
    yield from (improvement for improvement in improvements if improvement.gain > NOTABLE_SHARE)


def describe_delays(record: Record, traces: Sequence[RankTrace], usual: Sequence[RankStep]) -> Iterator[str]:
    """Yield sentences on the collectives in the median step, and on the parts of its gaps."""
    inside = [call for trace, row in zip(traces, usual, strict=True) for call in _collectives_in(trace, row)]
    if inside:
        share = sum(call.end - call.began for call in inside) / (sum(record.usual.busy) or 1.0)
        yield f"collectives in actions: {_describe_collectives(inside)}, {share:.1%} of the actions' time"
    whole_steps = [[timed._replace(start=row[0].start, end=row[-1].end)] for row in usual for timed in row[:1]]
    in_step = (call for trace, row in zip(traces, whole_steps, strict=True) for call in _collectives_in(trace, row))
    inside_actions = set(inside)
    if outside := [call for call in in_step if call not in inside_actions]:
        yield f"collectives between actions: {_describe_collectives(outside)}"
    shares = _gap_shares(traces, usual)
    if total := sum(shares.values()):
        listed = ", ".join(
            f"{name} {seconds / total:.0%}" for name, seconds in shares.items() if seconds >= MIN_GAP_SHARE * total
        )
        yield f"between actions {1e3 * total:.1f} ms on all ranks: {listed}"


def _describe_collectives(collectives: Sequence[CollectiveCall]) -> str:
    """Return how many collectives of each name there are, and the milliseconds of all."""
    counts, seconds = Counter(call.name for call in collectives), sum(call.end - call.began for call in collectives)
    listed = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    return f"{listed}, together {1e3 * seconds:.1f} ms"


# ---- pauses


def _pauses(record: Record) -> Iterator[Improvement]:
    """Yield the pauses of the rank that lost most: actions much longer than others of their kind and stage."""
    seconds = defaultdict[tuple[Kind, int], list[float]](list)
    for event in (event for step in record.steps for event in step.events):
        seconds[event.action[:2]].append(event.end - event.start)
    usual = {key: median(times) for key, times in seconds.items()}
    limits = {key: max(PAUSE_FACTOR * time, time + MIN_PAUSE_SECONDS) for key, time in usual.items()}
    rare = {key for key, times in seconds.items() if sum(time > limits[key] for time in times) <= RARE_SHARE * len(times)}

    def is_paused(event: Event) -> bool:
        return event.action[:2] in rare and event.end - event.start > limits[event.action[:2]]

    best: Improvement | None = None
    for row in record.usual.rows:
        extra = {event.action: event.end - event.start - usual[event.action[:2]] for event in row if is_paused(event)}
        if extra:
            timeline, rank = replay(record.usual, extra), row[0].rank
            gain = 1 - timeline.makespan / record.usual.makespan
            count = sum(any(map(is_paused, step.rows[rank])) for step in record.steps)
            finding = f"rank {rank} pauses in {_name_actions(extra)}, {1e3 * sum(extra.values()):.0f} ms longer than usual"
            cause = f"garbage collection, or what else stops its host; in {count} of {len(record.steps)} steps"
            text = f"{finding} ({cause}), without that: {-100 * gain:.1f} %"
            best = max(best or Improvement("", "", 0.0, timeline), Improvement("pause", text, gain, timeline, rank), key=_gain)
    if best and best.kind:
        yield best


def _gain(improvement: Improvement) -> float:
    return improvement.gain


def _name_actions(actions: Iterable[Action]) -> str:
    """Return the names of a few actions, and how many more there are."""
    names = [str(action) for action in actions]
    num_more = len(names) - MAX_NAMED_ACTIONS
    return ", ".join(names[:MAX_NAMED_ACTIONS]) + (f" and {num_more} more" if num_more > 0 else "")


# ---- head-of-line blocking


def _blocked_collectives(step: Timeline, traces: Sequence[RankTrace], usual: Sequence[RankStep]) -> Iterator[Improvement]:
    """Yield, for each rank, collectives that waited behind an earlier receive which their action did not need."""
    for rank, (trace, row) in enumerate(zip(traces, usual, strict=True)):
        receives = [(span, timed.action) for timed in row for span in timed.receives]
        messages = [*receives, *((span, None) for span in trace.events.transfers)]
        waits, reasons = defaultdict[Action, float](float), list[str]()
        for timed in row:
            for collective in _collectives_in(trace, [timed]) if messages else ():
                for span, receiver in messages:
                    if receiver != timed.action and span.end > timed.start and _is_blocked_by(collective, span):
                        waits[timed.action] = max(
                            waits[timed.action], span.end - max(collective.posted, span.start, timed.start)
                        )
                        message = f"the receive of {receiver}" if receiver else "a message"
                        reasons.append(f"{collective.name} waits for {message}")
        if waits:
            timeline = replay(step, waits)
            gain = 1 - timeline.makespan / step.makespan
            finding = f"rank {rank} is blocked for {1e3 * sum(waits.values()):.0f} ms in {_name_actions(waits)}: {reasons[0]}"
            text = f"{finding}, posted before it is needed (head-of-line blocking), posted later: {-100 * gain:.1f} %"
            yield Improvement("blocked", text, gain, timeline, rank)


def _is_blocked_by(collective: CollectiveCall, message: Range) -> bool:
    """Return whether `collective` was posted during `message`, and continued right after its end."""
    if not message.start <= collective.posted < message.end:
        return False
    if collective.began > collective.posted:  # on a device
        return 0 <= collective.began - message.end <= CLOSE_SECONDS
    delay = collective.end - message.end
    return 0 <= delay <= max(CLOSE_SECONDS, SHORT_REST_SHARE * (message.end - collective.posted))


def _collectives_in(trace: RankTrace, row: RankStep) -> Iterator[CollectiveCall]:
    """Yield the collectives that began in the actions of `row`."""
    collectives = trace.events.collectives
    for timed in row:
        begin = bisect_left(collectives, timed.start, key=lambda collective: collective.began)
        yield from collectives[begin : bisect_right(collectives, timed.end, key=lambda collective: collective.began)]


# ---- between steps


def _work_between_steps(record: Record, traces: Sequence[RankTrace]) -> Iterator[Improvement]:
    """Yield the time between steps in which no rank is in the pipeline, with the work of the busiest rank in it."""
    between = median([next_step.start - step.end for step, next_step in pairwise(record.steps)] or [0.0])
    if between <= 0:
        return
    busiest = max(range(len(traces)), key=lambda rank: sum(_loop_work(traces[rank], len(record.steps)).values()))
    parts = sorted(_loop_work(traces[busiest], len(record.steps)).items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in parts if seconds >= MIN_LOOP_SHARE * between)
    gain = between / (between + record.usual.makespan)
    details = f": on rank {busiest} {listed}" if listed else ""
    yield Improvement(
        "between steps", f"between steps {1e3 * between:.1f} ms, {gain:.1%} of the loop{details}", gain, record.usual
    )


def _loop_work(trace: RankTrace, steps: int) -> dict[str, float]:
    """Return the seconds a step that the rank's data loader and optimizer take."""
    loader_seconds = sum(span.end - span.start for span in trace.events.loader_calls)
    optimizer = sum(step.span.end - step.span.start for step in trace.events.optimizer)
    return {"data loader": loader_seconds / steps, f"optimizer{_fusion(trace)}": optimizer / steps}


def _fusion(trace: RankTrace) -> str:
    """Return the number of operations of an optimizer step, as text; empty if the optimizer is fused."""
    steps = [step for step in trace.events.optimizer if step.operations]
    if not steps or any(step.is_fused for step in steps):
        return ""
    return f" (not fused, {median(step.operations for step in steps):.0f} operations)"


# ---- gaps


def _gap_shares(traces: Sequence[RankTrace], usual: Sequence[RankStep]) -> dict[str, float]:
    """Return the seconds between actions, over all ranks, by what ran: waits, sends, FSDP, kernels, other host code."""
    shares = dict.fromkeys(("waiting for messages", "sending", *traces[0].events.sharding, "device", "host"), 0.0)
    for trace, row in zip(traces, usual, strict=True):
        kernels = sorted(trace.events.kernels.values())
        for previous, next_action in pairwise(row):
            gap = Range(previous.end, next_action.start)
            for name, ranges in (
                ("waiting for messages", next_action.receives),
                ("sending", [Range(previous.end, previous.sent)] if previous.sent else []),
                *((name, within(ranges, gap)) for name, ranges in trace.events.sharding.items()),
                ("device", kernels[bisect_left(kernels, (gap.start,)) : bisect_left(kernels, (gap.end,))]),
            ):
                for span in ranges:
                    part = Range(max(gap.start, span.start), min(gap.end, span.end))
                    if part.start < part.end:
                        shares[name] += part.end - part.start
                        gap = Range(part.end, gap.end)
            shares["host"] += max(0.0, gap.end - gap.start)
    return {name: seconds for name, seconds in shares.items() if seconds}
