"""What a microbatch of any size takes on each stage, in time and memory, fitted to steps over lists.

A layer multiplies every token by its weights; attention compares every token with its row's others; the rest costs the same
for any microbatch. So an action is fitted by

    seconds = a * tokens + b * tokens * longest + c,    tokens = rows * longest

with a, b and c of 0 or more, by least squares of the relative deviations, in which outliers count less. The same of the bytes
that its activations take. The engine's time after an action, and a message's, are those of the last step.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from penstock.comms.control_group import ControlGroup
from penstock.engine.activation_memory import MemoryObserver
from penstock.engine.clock import ActionClock, measure_own_clock_skew
from penstock.engine.observers import ObservedStep, Observer
from penstock.engine.step import Engine
from penstock.errors import PenstockError
from penstock.schedule.table import Action, Kind
from penstock.timing.costs import Costs
from penstock.timing.events import Event
from penstock.timing.measurement import engine_and_message_seconds
from penstock.timing.timeline import Timeline

if TYPE_CHECKING:  # a pipeline that fits no costs, and its checkpoints, need no numpy
    import numpy as np

MAX_SAMPLES = 1024  # of one kind of action on one stage, the newest
Sample = tuple[int, int, float]  # rows, elements, and seconds or bytes
REWEIGHTINGS = 4
FEATURE_SETS = [list(features) for size in (1, 2, 3) for features in combinations(range(3), size)]
MAX_DEVIATION_RATIO = 0.99  # a larger set of features must bring the deviation down to this share


class MicrobatchFit(NamedTuple):
    """A fitted cost of a microbatch on a stage: the seconds of one kind of action, or the bytes of its activations."""

    per_token: float
    per_token_and_length: float
    constant: float
    error: float  # the median share by which the samples deviate
    samples: float  # how many

    def evaluate(self, rows: float, longest: float) -> float:
        """Return what a microbatch of `rows` takes, padded to `longest` tokens."""
        return rows * longest * (self.per_token + self.per_token_and_length * longest) + self.constant

    def format(self, unit: str, scale: float) -> str:
        """Return it as text, in a unit of which `scale` make a second or a byte."""
        token, pair, constant = (scale * value for value in self[:3])
        return (
            f"{token:.3g} {unit} a token + {pair:.3g} {unit} a token and length + {constant:.3g} {unit} (+- {self.error:.1%})"
        )


class MicrobatchSamples(Observer):
    """Sizes and costs of this rank's microbatches in its last steps over lists. `memory`: measures the first list of a kind.

    `num_stages`: of the model. Actions of a teacher, which come behind, are left out.
    """

    def __init__(self, memory: MemoryObserver, num_stages: int) -> None:
        self._memory, self._num_stages = memory, num_stages
        self._seconds: dict[tuple[Kind, int], deque[Sample]] = defaultdict(lambda: deque(maxlen=MAX_SAMPLES))
        self._bytes: dict[int, deque[Sample]] = defaultdict(lambda: deque(maxlen=MAX_SAMPLES))  # by stage
        self._teacher_outputs = deque[Sample](maxlen=MAX_SAMPLES)
        self._last_actions: Sequence[Action] = ()
        self._last_clock: ActionClock | None = None

    def after(self, step: ObservedStep, numbers: Sequence[float]) -> None:
        """Add the seconds of each action of a list's step; of one that was measured, the bytes of activations."""
        agreed = step.agreed
        if not step.call.is_list or not agreed.has_backward or len(agreed.pieces) != agreed.num_microbatches:
            return
        shapes = [(piece.rows or 1, piece.elements) for piece in agreed.pieces]
        if agreed.is_new_kind and self._memory.measurement is not None:
            for (stage, number), size in self._memory.measurement.sizes_by_microbatch.items():
                self._bytes[stage].append((*shapes[number], size.act))
            for number, num_bytes in self._memory.measurement.teacher_outputs.items():
                self._teacher_outputs.append((*shapes[number], num_bytes))
            return
        self._last_actions, self._last_clock = agreed.program.actions, step.clock
        for (kind, stage, number, _), (start, end, _) in zip(self._last_actions, step.clock.intervals(), strict=True):
            if stage < self._num_stages:
                self._seconds[kind, stage].append((*shapes[number], end - start))

    def summarize(self, rank: int, clock_offset: float) -> "SampleSummary":
        """Return the fits of this rank's stages, and the events of its last step. `clock_offset`: from here to rank 0."""
        import numpy as np

        events: list[Event] = []
        if self._last_clock is not None:
            self._last_clock.offset = clock_offset
            intervals = zip(self._last_actions, self._last_clock.intervals(), strict=True)
            events = [Event(rank, action, *times) for action, times in intervals if action.stage < self._num_stages]
        seconds = {key: fit_microbatches(*np.array(samples).T) for key, samples in self._seconds.items()}
        of_activations = {stage: fit_microbatches(*np.array(samples).T) for stage, samples in self._bytes.items()}
        outputs = {self._num_stages - 1: fit_microbatches(*np.array(self._teacher_outputs).T)} if self._teacher_outputs else {}
        return SampleSummary(seconds, of_activations, events, outputs)

    def gather_costs(self, control: ControlGroup, engine: Engine) -> "MicrobatchCosts":
        """Return the costs that fit the samples of all ranks, which all call it. Raises as `MicrobatchCosts.merge`."""
        position, offset = engine.position, measure_own_clock_skew(control, engine.clock_ids).offset
        summary = self.summarize(position.pipeline.rank, offset)
        summaries = control.all_gather_value(summary, "to fit the costs of microbatches")
        return MicrobatchCosts.merge(summaries, position.pipelines[0][0], engine.schedule.placement)


class SampleSummary(NamedTuple):
    """The fits of one rank's stages, and the events of its last step."""

    seconds: Mapping[tuple[Kind, int], MicrobatchFit]
    bytes: Mapping[int, MicrobatchFit]
    events: Sequence[Event]
    teacher_outputs: Mapping[int, MicrobatchFit] = {}  # bytes, by the stage of the loss, on its rank


def fit_microbatches(rows: "np.ndarray", elements: "np.ndarray", seconds: "np.ndarray") -> MicrobatchFit:
    """Fit what was measured as `seconds`, or bytes; arguments have a number for each sample."""
    import numpy as np

    if not seconds.any():  # bytes that a frozen stage keeps
        return MicrobatchFit(0.0, 0.0, 0.0, 0.0, len(seconds))
    seconds = np.maximum(seconds, 1e-9)
    features = np.stack([elements, elements * elements / rows, np.ones_like(seconds)], axis=1)
    scales = features.max(axis=0)
    relative = features / scales / seconds[:, None]
    weights = np.ones_like(seconds)
    for _ in range(REWEIGHTINGS):
        solution = _solve_nonnegative(relative, weights)
        deviations = np.abs(relative @ solution - 1)
        error = float(np.median(deviations))
        weights = 1 / np.maximum(1, deviations / (3 * error + 1e-12))
    token, pair, constant = (solution / scales).tolist()
    return MicrobatchFit(token, pair, constant, error, len(seconds))


def _solve_nonnegative(relative: "np.ndarray", weights: "np.ndarray") -> "np.ndarray":
    """Return x of 0 or more for which `relative` @ x deviates least from 1; with few features, where more bring little."""
    import numpy as np

    products, sums = relative.T @ (weights[:, None] * relative), relative.T @ weights
    best, min_deviation = np.zeros(3), np.inf
    for features in FEATURE_SETS:
        x = np.zeros(3)
        x[features] = np.linalg.lstsq(products[np.ix_(features, features)], sums[features], rcond=None)[0]
        deviation = float(weights @ (relative @ x - 1) ** 2)
        if x.min() >= 0 and deviation < MAX_DEVIATION_RATIO * min_deviation:
            best, min_deviation = x, deviation
    return best


@dataclass(frozen=True)
class MicrobatchCosts:
    """The cost of a microbatch of any size, as `pipe.plan_costs()` returns it.

        costs = pipe.plan_costs()
        costs(4, 100)  # seconds of 4 rows, padded to 100 tokens, on the rank that takes longest
        costs.bytes(4, 100)  # of its activations, on the rank where they take most
        groups = ps.plan.group_rows(lengths, microbatches=16, cost=costs, limit="2GB")
        print(costs)  # of each stage, with the errors

    `fits`: of each kind of action that has run, by stage, with the engine's time after it. `placement`: stage -> rank.
    `message_seconds`: over each border between stages. `activations`: of each stage whose memory was measured.
    `teacher_outputs`: bytes of a teacher's output, which waits on the rank of the loss; by the last stage, if there is one.
    """

    fits: Mapping[tuple[Kind, int], MicrobatchFit]
    placement: tuple[int, ...]
    message_seconds: Sequence[float] = ()
    activations: Mapping[int, MicrobatchFit] = field(default_factory=dict)
    teacher_outputs: Mapping[int, MicrobatchFit] = field(default_factory=dict)

    @classmethod
    def merge(cls, summaries: Sequence[SampleSummary], ranks: Sequence[int], placement: Sequence[int]) -> "MicrobatchCosts":
        """Return the means over all ranks that have a stage. Raises PenstockError while one has none.

        `summaries`: of all ranks. `ranks`: those of one pipeline, whose messages count.
        """
        seconds = _mean_fits([summary.seconds for summary in summaries])
        activations = _mean_fits([summary.bytes for summary in summaries])
        teacher_outputs = _mean_fits([summary.teacher_outputs for summary in summaries])
        cls(seconds, tuple(placement))._coefficient_sums_by_rank  # noqa: B018 - raises
        timeline = Timeline("", tuple(tuple(summaries[rank].events) for rank in ranks))
        engine_seconds, message_seconds = engine_and_message_seconds(timeline)
        fits = {
            (kind, stage): fit._replace(constant=fit.constant + engine_seconds[kind][stage])
            for (kind, stage), fit in seconds.items()
        }
        return cls(fits, tuple(placement), message_seconds, activations, teacher_outputs)

    @cached_property
    def _coefficient_sums_by_rank(self) -> list[list[float]]:
        """The coefficients of every rank: sums over its actions."""
        sums = [[0.0, 0.0, 0.0] for _ in range(max(self.placement) + 1)]
        for stage, rank in enumerate(self.placement):
            for fit in (part for kind in (Kind.F, Kind.B) for part in self._fits_of_action(kind, stage)):
                sums[rank] = [total + value for total, value in zip(sums[rank], fit[:3], strict=True)]
        return sums

    def _fits_of_action(self, kind: Kind, stage: int) -> list[MicrobatchFit]:
        """Return the fits that add up to a forward, or to a whole backward: of B, else of I and W, or none."""
        has_backward = any((part, stage) in self.fits for part in (Kind.B, Kind.I, Kind.W))
        if kind is Kind.B and (Kind.F, stage) in self.fits and not has_backward:
            return []  # a frozen stage
        kinds: tuple[Kind, ...] = (kind,) if kind is not Kind.B or (kind, stage) in self.fits else (Kind.I, Kind.W)
        if any((part, stage) not in self.fits for part in kinds):
            raise PenstockError(
                "there is nothing to fit costs to yet: run two steps over lists of as many microbatches (step_microbatches); "
                "the first of a kind, which is slower, does not count"
            )
        return [self.fits[part, stage] for part in kinds]

    def __call__(self, rows: float, longest: float) -> float:
        """Return the seconds of all actions of one microbatch on the rank that takes longest for it."""
        tokens = rows * longest
        return max(
            token * tokens + pair * tokens * longest + constant for token, pair, constant in self._coefficient_sums_by_rank
        )

    def bytes(self, rows: float, longest: float) -> float:
        """Return the bytes that one microbatch takes on the rank with the most: its activations, or a teacher's output.

        Raises as `activation_bytes`.
        """
        return max(self.activation_bytes(rows, longest), self.teacher_output_bytes(rows, longest))

    def activation_bytes(self, rows: float, longest: float) -> float:
        """Return the bytes that the activations of one microbatch take on the rank where they take most.

        Raises PenstockError where a stage was not measured: it is compiled, or no list was the first of as many microbatches.
        """
        if set(self.activations) != set(range(len(self.placement))):
            raise PenstockError(
                f"of {len(self.placement)} stages the activations of {len(self.activations)} were measured: compiled stages "
                "cannot be, others are in the first step over a list. Give limits in padded tokens"
            )
        by_rank = [0.0] * (max(self.placement) + 1)
        for stage, rank in enumerate(self.placement):
            by_rank[rank] += self.activations[stage].evaluate(rows, longest)
        return max(by_rank)

    def teacher_output_bytes(self, rows: float, longest: float) -> float:
        """Return the bytes of a teacher's output of one microbatch, until its loss takes it; 0 without a teacher."""
        return sum(fit.evaluate(rows, longest) for fit in self.teacher_outputs.values())

    @property
    def error(self) -> float:
        """The share by which an action deviates from its fit: the median of its samples, the mean over actions."""
        return fmean(fit.error for fit in self.fits.values())

    def step_costs(self, microbatches: Sequence[tuple[float, float]]) -> Costs:
        """Return the costs of a step over (rows, longest) of each microbatch, in the order in which they run.

            step_costs = costs.step_costs([(4, 30), (9, 31), (5, 60), (2, 20)])
            predicted = ps.schedule.simulate(pipe.schedule, step_costs).makespan

        Activations count by padded tokens; one of the mean size is 1.
        """

        def seconds(kind: Kind, stage: int) -> list[float]:
            fits = self._fits_of_action(kind, stage)
            return [sum(fit.evaluate(*size) for fit in fits) for size in microbatches]

        forwards, backwards = ([seconds(kind, stage) for stage in range(len(self.placement))] for kind in (Kind.F, Kind.B))
        shares = [self._input_share(stage, microbatches) for stage in range(len(self.placement))]
        inputs = [[share * both for both in row] for share, row in zip(shares, backwards, strict=True)]
        weights = [[(1 - share) * both for both in row] for share, row in zip(shares, backwards, strict=True)]
        tokens = [rows * longest for rows, longest in microbatches]
        factors = [count / fmean(tokens) for count in tokens]
        return Costs(forwards, inputs, weights, send=self.message_seconds or 0, backward=backwards, microbatch_factors=factors)

    def _input_share(self, stage: int, microbatches: Sequence[tuple[float, float]]) -> float:
        """Return which share of a backward is I; half where no I and W have run."""
        if (Kind.I, stage) not in self.fits or (Kind.W, stage) not in self.fits:
            return 0.5
        inputs, weights = (sum(self.fits[kind, stage].evaluate(*size) for size in microbatches) for kind in (Kind.I, Kind.W))
        return inputs / (inputs + weights)

    def __str__(self) -> str:
        """Return a line for each stage and kind of action, and for the activations of each stage."""
        lines = sorted((stage, kind.value, fit.format("us", 1e6)) for (kind, stage), fit in self.fits.items())
        for name, fits in (("activations", self.activations), ("teacher's output", self.teacher_outputs)):
            lines += sorted((stage, name, fit.format("bytes", 1)) for stage, fit in fits.items())
        return "\n".join(f"stage {stage} {name}: {text}" for stage, name, text in lines)


Key = TypeVar("Key")


def _mean_fits(fits: Sequence[Mapping[Key, MicrobatchFit]]) -> dict[Key, MicrobatchFit]:
    """Return the mean of each key's fits."""
    by_key = defaultdict[Key, list[MicrobatchFit]](list)
    for key, fit in (item for rank_fits in fits for item in rank_fits.items()):
        by_key[key].append(fit)
    return {key: MicrobatchFit._make(map(fmean, zip(*same, strict=True))) for key, same in by_key.items()}
