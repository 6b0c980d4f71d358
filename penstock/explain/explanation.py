"""The explanation of a measured step: numbers, suggested improvements, and their text."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from penstock.schedule.memory import format_bytes
from penstock.schedule.schedule import Schedule
from penstock.schedule.table import Kind
from penstock.timing.causes import NOTABLE_SHARE
from penstock.timing.timeline import Timeline

ENGINE = "engine"  # the key of the engine's time among the shares
BLOCKED_SHARE = 0.5  # of what a slow rank costs: if its blocked collectives cost more, only they are named
FEW_MICROBATCHES_A_RANK = 2  # with fewer a step is mostly fill and drain


class Improvement(NamedTuple):
    """A sentence of the verdict on a step, and the step predicted without what the sentence names."""

    kind: str  # "straggler", "cut", "message", "order", "microbatches" or "schedule"; others in the traces of other programs
    text: str
    gain: float  # share of the step that would be saved
    timeline: Timeline  # predicted
    rank: int | None = None  # the rank that the sentence names


@dataclass(frozen=True)
class Straggler:
    """The rank that is slowest against its share of the model."""

    rank: int
    extra_seconds_per_action: float  # on average, over what its share of the model would take
    action_seconds: dict[Kind, tuple[float, float]]  # kind -> (measured, what its share of the model would take)
    step_seconds_lost: float  # how much shorter the step would be if it were as fast as the others
    timeline: Timeline  # that step, predicted


@dataclass(frozen=True)
class Alternative:
    """Another table for the same model and batch, predicted at the measured costs."""

    schedule: Schedule
    timeline: Timeline  # of a step, predicted
    microbatches_held: float  # microbatches whose activations the fullest rank holds at once
    assumes_equal_halves: bool  # the table has I and W but only B was measured: each half counts as half of B
    activation_bytes: float = 0.0  # of the activations on the fullest rank; 0: unknown

    @property
    def step_seconds(self) -> float:
        """The predicted seconds of a step."""
        return self.timeline.makespan


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`; `print` it. Times are in seconds, shares are of the time of all ranks together."""

    schedule: Schedule  # the table that ran
    step: float  # first action to last, measured
    shares: dict[str, float]  # of each kind of action, each cause of idle time, and the engine; they add up to 1
    causes: dict[str, float]  # of idle time, the engine's included; as the timeline has them
    between_steps: float  # seconds since the step before, on the rank where it was longest; 0: unknown
    averaging: float  # seconds from the last action until gradients are averaged, on the slowest rank; 0: one replica
    predicted_step: float  # seconds of the step, simulated at its measured costs
    microbatches_held: float  # microbatches whose activations the fullest rank held at once
    activation_bytes: tuple[float, ...]  # rank -> peak bytes of activations; empty: unknown
    straggler: Straggler | None
    even_stages_timeline: Timeline  # predicted for stages that take equally long
    doubled_microbatches: Alternative | None  # the same schedule with twice the microbatches, of the same size
    alternatives: tuple[Alternative, ...]  # all other schedules of the catalog for these ranks and microbatches
    fastest: Alternative | None  # the fastest of them, if notably faster than the table that ran
    fastest_in_same_memory: Alternative | None  # the fastest of those that hold no more, if it is not `fastest`
    num_steps: int = 1  # steps whose medians are the costs
    recut_call: str = ""  # that cuts the model anew; empty: unknown
    repairs: tuple[Improvement, ...] = ()  # faster messages, other orders of microbatches: the notably faster ones
    findings: tuple[Improvement, ...] = ()  # other causes of a longer step, from a trace of it
    teacher: tuple[float, float] | None = None  # seconds of its forwards on a rank, on average, and those it adds to the step

    def __str__(self) -> str:
        """Return a few lines: per cent, milliseconds, and the names of the table."""
        return "\n".join(_text_lines(self))

    @property
    def even_stages_seconds(self) -> float:
        """The predicted seconds of the step if all stages took equally long."""
        return self.even_stages_timeline.makespan

    @property
    def verdict(self) -> tuple[Improvement, ...]:
        """The suggestions that would make the step shorter, largest gain first: repairs of this step, then other schedules."""
        faults = [*_slow_rank_improvement(self), *_suggested_repairs(self), *self.findings]
        blocked = {finding.rank: finding.gain for finding in self.findings if finding.kind == "blocked"}
        slow = [fault for fault in faults if fault.kind == "straggler"]
        if any(blocked.get(fault.rank, 0.0) > BLOCKED_SHARE * fault.gain for fault in slow):
            faults = [fault for fault in faults if fault.kind not in ("straggler", "cut")]
        return tuple(
            improvement
            for improvements in (faults, _suggested_schedules(self))
            for improvement in sorted(improvements, key=lambda improvement: -improvement.gain)
        )

    @property
    def verdict_text(self) -> str:
        """The verdict in one line, as the terminal and the page show it."""
        sentences = "; ".join(improvement.text for improvement in self.verdict) or NOTHING_TO_GAIN
        return f"{sentences} ({self.verdict_basis})" if self.verdict_basis else sentences

    @property
    def verdict_basis(self) -> str:
        """The steps that the verdict speaks of, as text; empty if it is only the one that is shown."""
        basis = [f"at the medians of {self.num_steps} steps"] if self.num_steps > 1 else []
        return "; ".join([*basis, *([self.teacher_text] if self.teacher else [])])

    @property
    def teacher_text(self) -> str:
        """How much of a teacher's time was idle time; empty if there is none."""
        if self.teacher is None:
            return ""
        busy, added = self.teacher
        share = max(0.0, 1 - added / busy) if busy else 1.0
        return f"teacher: {format_ms(busy)} on a rank, {share:.0%} of it in idle time, the step {format_ms(added)} longer"

    @property
    def alternative_texts(self) -> dict[str, str]:
        """The line of each other schedule of the catalog, by name; of the faster if there are two with different V."""
        slowest_first = sorted(self.alternatives, key=lambda alternative: -alternative.step_seconds)
        return {alternative.schedule.name: _alternative_text(alternative, self) for alternative in slowest_first}


# ---- the verdict

NOTHING_TO_GAIN = f"no rank is slow, and no other schedule or cut would make the step {NOTABLE_SHARE:.0%} shorter"


def _slow_rank_improvement(explanation: Explanation) -> Iterator[Improvement]:
    if straggler := explanation.straggler:
        seconds = straggler.step_seconds_lost
        share = seconds / explanation.predicted_step
        text = f"rank {straggler.rank} is slow: {_format_seconds(seconds)}, {100 * share:.1f} % of the step"
        yield Improvement("straggler", text, share, straggler.timeline, straggler.rank)


def _suggested_repairs(explanation: Explanation) -> Iterator[Improvement]:
    """Yield another cut, faster messages, another order, more microbatches, each if notably faster."""
    if explanation.even_stages_seconds < (1 - NOTABLE_SHARE) * explanation.predicted_step:
        yield improvement("cut", "another cut", explanation.even_stages_timeline, explanation.predicted_step)
    yield from explanation.repairs

    table, doubled = explanation.schedule, explanation.doubled_microbatches
    if doubled and table.microbatches < FEW_MICROBATCHES_A_RANK * table.ranks:
        gain = 1 - doubled.step_seconds / 2 / explanation.predicted_step
        few = f"{_count(table.microbatches, 'microbatch is', 'microbatches are')} few for {_count(table.ranks, 'rank')}"
        text = f"{few}, {doubled.schedule.microbatches} of the same size: {-100 * gain:.1f} % a row"
        if gain > NOTABLE_SHARE:
            yield Improvement("microbatches", text, gain, doubled.timeline)


def _suggested_schedules(explanation: Explanation) -> Iterator[Improvement]:
    """Yield other schedules, each if it makes the step notably shorter."""
    for alternative, memory_note in ((explanation.fastest, " but more memory"), (explanation.fastest_in_same_memory, "")):
        if alternative:
            note = memory_note if alternative.microbatches_held > explanation.microbatches_held else ""
            change = f"another schedule{note}, {alternative.schedule.name}"
            yield improvement("schedule", change, alternative.timeline, explanation.predicted_step)


def improvement(kind: str, change: str, timeline: Timeline, step_seconds: float) -> Improvement:
    """Return the improvement of a step of `step_seconds` to that of `timeline` by a `change`."""
    gain = 1 - timeline.makespan / step_seconds
    return Improvement(kind, f"{change}: {-100 * gain:.1f} %", gain, timeline)


# ---- in words


def _text_lines(explanation: Explanation) -> Iterator[str]:
    if explanation.teacher is not None:
        yield f"{explanation.teacher_text}. Without it:"
    yield from _time_share_lines(explanation)
    yield from _improvement_lines(explanation)

    predicted, measured = explanation.predicted_step, explanation.step
    error = predicted / measured - 1 if measured else 0.0
    direction = "more" if error > 0 else "less"
    yield f"prediction: {format_ms(predicted)} at these costs, {abs(error):.1%} {direction} than measured"


def _time_share_lines(explanation: Explanation) -> Iterator[str]:
    table = explanation.schedule
    size = ", ".join(
        (
            _count(table.ranks, "rank"),
            _count(table.num_stages, "stage"),
            _count(table.microbatches, "microbatch", "microbatches"),
        )
    )
    yield f"{table.name}, {size}: {format_ms(explanation.step)} from the first action to the last. Of the ranks' time:"

    busy = {kind.value: explanation.shares[kind.value] for kind in Kind}
    yield f"  busy   {sum(busy.values()):6.1%}  {_list_shares(busy)}"
    yield f"  idle   {sum(explanation.causes.values()):6.1%}  {_list_shares(explanation.causes)}"
    yield f"  engine {explanation.shares[ENGINE]:6.1%}  of it: between actions, with nothing to wait for"

    if explanation.averaging:
        seconds = format_ms(explanation.averaging)
        yield f"averaging gradients: {seconds} after the last action, which the table does not hide"
    if between := explanation.between_steps:
        share = between / (between + explanation.step)
        yield f"between steps {format_ms(between)}, {share:.1%} of the loop: the optimizer, the next batch, what else it does"
    if sizes := explanation.activation_bytes:
        max_size, min_size = max(sizes), min(sizes)
        place = "every rank" if max_size == min_size else f"rank {sizes.index(max_size)}, the least {format_bytes(min_size)}"
        yield f"memory of activations: up to {format_bytes(max_size)} on {place}"


def _improvement_lines(explanation: Explanation) -> Iterator[str]:
    predicted = explanation.predicted_step
    yield _straggler_text(explanation.straggler, predicted)

    if explanation.even_stages_seconds < (1 - NOTABLE_SHARE) * predicted:
        call = f"; {explanation.recut_call} cuts anew" if explanation.recut_call else ""
        yield f"another cut: {_compare(explanation.even_stages_seconds, predicted)} if all stages took the same{call}"
    else:
        yield "another cut: would gain nothing, the stages are as even as the table needs"

    if doubled := explanation.doubled_microbatches:
        comparison = _compare(doubled.step_seconds / 2, predicted)
        count = f"{doubled.schedule.microbatches} of the same size"
        yield f"more microbatches: {count}, {comparison} for as many rows; {_memory_text(doubled, explanation)}"

    if explanation.fastest:
        yield f"another schedule: {_alternative_text(explanation.fastest, explanation)}"
    else:
        yield f"another schedule: none of the catalog would be {NOTABLE_SHARE:.0%} faster"
    if explanation.fastest_in_same_memory:
        yield f"another that holds no more: {_alternative_text(explanation.fastest_in_same_memory, explanation)}"


def _straggler_text(straggler: Straggler | None, predicted_step: float) -> str:
    if straggler is None:
        return "straggler: none, no rank takes notably longer than its share of the model"
    times = ", ".join(
        _instead_of(kind, seconds, fair_seconds) for kind, (seconds, fair_seconds) in straggler.action_seconds.items()
    )
    extra, lost_text = _format_short(straggler.extra_seconds_per_action), _format_short(straggler.step_seconds_lost)
    return (
        f"straggler: rank {straggler.rank} takes {extra} an action longer than its share of the model "
        f"({times}), which costs the step {lost_text} ({straggler.step_seconds_lost / predicted_step:.1%})"
    )


def _instead_of(kind: Kind, seconds: float, fair_seconds: float) -> str:
    digits = 1 if min(seconds, fair_seconds) >= 1e-3 else 4
    return f"{kind.value} {1e3 * seconds:.{digits}f} instead of {1e3 * fair_seconds:.{digits}f} ms"


def _alternative_text(alternative: Alternative, explanation: Explanation) -> str:
    table = alternative.schedule
    cut = ""
    if table.num_stages != explanation.schedule.num_stages:
        cut = f" ({_count(table.num_stages // table.ranks, 'stage')} a rank)"
    assumption = ", if I and W each take half of B" if alternative.assumes_equal_halves else ""
    comparison = _compare(alternative.step_seconds, explanation.predicted_step)
    return f"{table.name}{cut}: {comparison}{assumption}; {_memory_text(alternative, explanation)}"


def _memory_text(alternative: Alternative, explanation: Explanation) -> str:
    then_bytes, now_bytes = alternative.activation_bytes, max(explanation.activation_bytes, default=0.0)
    bytes_then, bytes_now = (f" ({format_bytes(size)})" if size else "" for size in (then_bytes, now_bytes))
    held_text = _count(alternative.microbatches_held, "microbatch", "microbatches")
    return f"a rank holds up to {held_text}{bytes_then}, now {explanation.microbatches_held:g}{bytes_now}"


def _compare(seconds: float, predicted_step: float) -> str:
    gain = 1 - seconds / predicted_step if predicted_step else 0.0
    return f"{format_ms(seconds)}, {abs(gain):.1%} {'less' if gain >= 0 else 'more'}"


def _list_shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if share)


def _count(number: float, noun: str, plural: str = "") -> str:
    return f"{number:g} {noun if number == 1 else plural or noun + 's'}"


def format_ms(seconds: float) -> str:
    """Return seconds as text in milliseconds: `1.5 ms`."""
    return f"{1e3 * seconds:.1f} ms"


def _format_short(seconds: float) -> str:
    """Return a short time as text in milliseconds, in microseconds below a tenth of one: never 0.0 ms."""
    return format_ms(seconds) if seconds >= 1e-4 else f"{1e6 * seconds:.3g} µs"


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
