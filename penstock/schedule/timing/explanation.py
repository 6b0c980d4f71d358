"""What is said of a measured step, in numbers and in words."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from penstock.schedule.schedule import Schedule
from penstock.schedule.table import Kind
from penstock.schedule.timing.timeline import Timeline

ENGINE = "engine"
NOTABLE = 0.01  # of a step: what is less is not advised


class Finding(NamedTuple):
    """One sentence of the verdict on a step, and the step as it would be without what it names."""

    about: str  # "straggler", "schedule" or "cut"
    text: str
    gain: float  # share of the step that would be saved
    timeline: Timeline  # predicted
    rank: int | None = None  # of a straggler


@dataclass(frozen=True)
class Straggler:
    """The rank whose actions take longest against its share of the model."""

    rank: int
    longer: float  # seconds an action, on average
    times: dict[Kind, tuple[float, float]]  # of the kinds it ran: seconds of an action, and what its share would take
    loss: float  # seconds the step would be shorter if it were as fast as the others
    timeline: Timeline  # that step, predicted


@dataclass(frozen=True)
class Alternative:
    """Another way to run the step."""

    schedule: Schedule
    timeline: Timeline  # of a step, predicted
    held: float  # microbatches whose activations are held at once, by the rank that holds the most
    halved: bool  # it runs I and W, which were not measured: each counts as half of B
    bytes: float = 0.0  # what these activations take, on the rank where it is most; 0: not known

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.timeline.makespan


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; `print` it. Times in seconds, shares of the time of all ranks together."""

    schedule: Schedule  # the table that ran
    step: float  # first action to last, measured
    shares: dict[str, float]  # kinds of action, causes of idle time and the engine: they add up to 1
    causes: dict[str, float]  # of all idle time, the engine's as well: those of the timeline
    between: float  # seconds before it, since the step before, on the rank that took longest; 0: not known
    averaging: float  # seconds after it until gradients were averaged, on the rank that took longest; 0: there is one replica
    predicted: float  # the step, by the costs measured on it
    held: float  # microbatches whose activations were held at once, by the rank that held the most
    bytes: tuple[float, ...]  # what these activations took on every rank; empty: not known
    straggler: Straggler | None
    evened: Timeline  # the step, predicted for stages that take the same
    more: Alternative | None  # twice the microbatches, of the same size
    others: tuple[Alternative, ...]  # of the catalog, all that there are for these ranks and microbatches
    faster: Alternative | None  # the fastest of them, if faster than this
    frugal: Alternative | None  # the fastest of those that hold no more, if that is another

    def __str__(self) -> str:
        """A few lines: per cent, milliseconds, and the names of the table."""
        return "\n".join(_lines(self))

    @property
    def even(self) -> float:
        """Seconds of the step for stages that take the same, predicted."""
        return self.evened.makespan

    @property
    def verdict(self) -> tuple[Finding, ...]:
        """What would make the step shorter, each in a sentence: the slow rank first, then what gains most."""
        return (*_slow(self), *sorted(_others(self), key=lambda each: -each.gain))

    @property
    def verdict_told(self) -> str:
        """The verdict in one line, as the terminal and the page say it."""
        return "; ".join(each.text for each in self.verdict) or NOTHING_TO_GAIN

    @property
    def others_told(self) -> dict[str, str]:
        """What each other schedule of the catalog would come to, by its name; of one that may be cut in two ways the faster."""
        return {each.schedule.name: _about(each, self) for each in sorted(self.others, key=lambda each: -each.seconds)}


# ---- the verdict

NOTHING_TO_GAIN = f"no rank is slow, and no other schedule or cut would make the step {NOTABLE:.0%} shorter"


def _slow(told: Explanation) -> Iterator[Finding]:
    if slow := told.straggler:
        lost = slow.loss / told.predicted
        text = f"rank {slow.rank} is slow: {_short(slow.loss)}, {100 * lost:.1f} % of the step"
        yield Finding("straggler", text, lost, slow.timeline, slow.rank)


def _short(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _others(told: Explanation) -> Iterator[Finding]:
    if told.even < (1 - NOTABLE) * told.predicted:
        yield _instead("cut", "another cut", told.evened, told)
    for other, more in ((told.faster, " but more memory"), (told.frugal, "")):
        if other:
            holds = more if other.held > told.held else ""
            yield _instead("schedule", f"another schedule{holds}, {other.schedule.name}", other.timeline, told)


def _instead(about: str, what: str, timeline: Timeline, told: Explanation) -> Finding:
    gain = 1 - timeline.makespan / told.predicted
    return Finding(about, f"{what}: {-100 * gain:.1f} %", gain, timeline)


# ---- in words


def _lines(told: Explanation) -> Iterator[str]:
    table, now, work = told.schedule, told.predicted, {kind.value: told.shares[kind.value] for kind in Kind}
    size = f"{_many(table.ranks, 'rank')}, {_many(table.stages, 'stage')}, {_many(table.microbatches, 'microbatch', 'es')}"
    yield f"{table.name}, {size}: {_ms(told.step)} from the first action to the last. Of the ranks' time:"
    yield f"  busy   {sum(work.values()):6.1%}  {_listed(work)}"
    yield f"  idle   {sum(told.causes.values()):6.1%}  {_listed(told.causes)}"
    yield f"  engine {told.shares[ENGINE]:6.1%}  of it: between actions, with nothing to wait for"
    if told.averaging:
        yield f"averaging gradients: {_ms(told.averaging)} after the last action, which the table does not hide"
    if told.between:
        share = told.between / (told.between + told.step)
        yield f"between steps {_ms(told.between)}, {share:.1%} of the loop: the optimizer, the next batch, what else it does"
    if told.bytes:
        most, least = max(told.bytes), min(told.bytes)
        where = "every rank" if most == least else f"rank {told.bytes.index(most)}, the least {bytes_told(least)}"
        yield f"memory of activations: up to {bytes_told(most)} on {where}"
    yield _about_straggler(told.straggler, now)
    if told.even < (1 - NOTABLE) * now:
        yield f"another cut: {_against(told.even, now)} if all stages took the same"
    else:
        yield "another cut: would gain nothing, the stages are as even as the table needs"
    if told.more:
        many = f"more microbatches: {told.more.schedule.microbatches} of the same size"
        yield f"{many}, {_against(told.more.seconds / 2, now)} for as many rows; {_memory(told.more, told)}"
    if told.faster:
        yield f"another schedule: {_about(told.faster, told)}"
    else:
        yield f"another schedule: none of the catalog would be {NOTABLE:.0%} faster"
    if told.frugal:
        yield f"another that holds no more: {_about(told.frugal, told)}"
    far = now / told.step - 1 if told.step else 0.0
    yield f"prediction: {_ms(now)} at these costs, {abs(far):.1%} {'more' if far > 0 else 'less'} than measured"


def _about_straggler(straggler: Straggler | None, now: float) -> str:
    if straggler is None:
        return "straggler: none, no rank takes notably longer than its share of the model"
    times = ", ".join(f"{kind.value} {1e3 * took:.1f} instead of {_ms(fair)}" for kind, (took, fair) in straggler.times.items())
    return (
        f"straggler: rank {straggler.rank} takes {_ms(straggler.longer)} an action longer than its share of the model "
        f"({times}), which costs the step {_ms(straggler.loss)} ({straggler.loss / now:.1%})"
    )


def _about(other: Alternative, told: Explanation) -> str:
    table = other.schedule
    cut = "" if table.stages == told.schedule.stages else f" ({_many(table.stages // table.ranks, 'stage')} a rank)"
    halved = ", if I and W each take half of B" if other.halved else ""
    return f"{table.name}{cut}: {_against(other.seconds, told.predicted)}{halved}; {_memory(other, told)}"


def _memory(other: Alternative, told: Explanation) -> str:
    then, now = ((other.held, other.bytes), (told.held, max(told.bytes, default=0.0)))
    sizes = [f" ({bytes_told(size)})" if size else "" for _, size in (then, now)]
    return f"a rank holds up to {_many(then[0], 'microbatch', 'es')}{sizes[0]}, now {now[0]:g}{sizes[1]}"


def _against(seconds: float, now: float) -> str:
    gain = 1 - seconds / now if now else 0.0
    return f"{_ms(seconds)}, {abs(gain):.1%} {'less' if gain >= 0 else 'more'}"


def _listed(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in parts.items() if share)


def _many(count: float, what: str, plural: str = "s") -> str:
    return f"{count:g} {what}{'' if count == 1 else plural}"


def bytes_told(size: float) -> str:
    """A number of bytes as people read it: `12.3 MB`."""
    factor, unit = next((each for each in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if size >= each[0]), (1.0, "bytes"))
    return f"{size / factor:.4g} {unit}"


def bytes_meant(text: str) -> float | None:
    """The bytes that people mean by `text`, `2GB`, `2GiB` or `2e9` for instance; None for anything else."""
    found = re.fullmatch(r"\s*(\d+\.?\d*(?:E\d+)?)\s*(?:(?:([TGMK])(I?))?B)?\s*", text.upper())
    return float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2] or " ") if found else None


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
