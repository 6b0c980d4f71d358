"""What a microbatch of any size takes on each stage, fitted to the actions of steps over lists.

A layer multiplies every token by its weights; attention compares every token with its row's others; the rest costs the same
for any microbatch. So an action is fitted by

    seconds = a * tokens + b * tokens * longest + c,    tokens = rows * longest

with a, b and c of 0 or more, by least squares of the relative deviations, in which outliers count less.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.errors import PenstockError
from penstock.schedule.table import Action, Kind
from penstock.schedule.timing.simulate import Costs

if TYPE_CHECKING:  # a pipeline that fits no costs, and its checkpoints, need no numpy
    import numpy as np

MAX_SAMPLES = 1024  # of one kind of action on one stage, the newest
REWEIGHTINGS = 4
FEATURE_SETS = [list(features) for size in (1, 2, 3) for features in combinations(range(3), size)]
LEAST_GAIN = 0.99  # a larger set of features must bring the deviation down to this share


class ActionFit(NamedTuple):
    """What one kind of action takes on a stage, in seconds."""

    per_token: float
    per_token_and_length: float
    constant: float
    error: float  # the median share by which the samples deviate
    samples: float  # how many

    def seconds(self, rows: float, longest: float) -> float:
        """Return what it takes for a microbatch of `rows`, padded to `longest` tokens."""
        return rows * longest * (self.per_token + self.per_token_and_length * longest) + self.constant

    def __str__(self) -> str:
        """All in microseconds."""
        token, pair, constant = (1e6 * value for value in self[:3])
        return f"{token:.3g} us a token + {pair:.3g} us a token and length + {constant:.3g} us (+- {self.error:.1%})"


class MicrobatchSizes(Protocol):
    """The microbatches of a step, in the order in which they ran."""

    @property
    def rows(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def elements(self) -> Sequence[int]: ...  # noqa: D102


class ActionSamples:
    """The actions of this rank's last steps over lists: how large their microbatch was, and what they took."""

    def __init__(self) -> None:
        self._samples: dict[tuple[Kind, int], deque[tuple[int, int, float]]] = defaultdict(lambda: deque(maxlen=MAX_SAMPLES))

    def add(
        self, actions: Sequence[Action], intervals: Sequence[tuple[float, float, float]], microbatches: MicrobatchSizes
    ) -> None:
        """After a step: what each action took until its messages were sent. `intervals`: its start, its end, and that."""
        for (kind, stage, number, _), (start, _, sent) in zip(actions, intervals, strict=True):
            self._samples[kind, stage].append((microbatches.rows[number], microbatches.elements[number], sent - start))

    def fit(self) -> dict[tuple[Kind, int], ActionFit]:
        """Return the fit of each kind of action on each stage of this rank."""
        import numpy as np

        return {key: fit_action(*np.array(samples).T) for key, samples in self._samples.items()}


def fit_action(rows: "np.ndarray", elements: "np.ndarray", seconds: "np.ndarray") -> ActionFit:
    """Fit what an action takes; arguments have a number for each sample."""
    import numpy as np

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
    return ActionFit(token, pair, constant, error, len(seconds))


def _solve_nonnegative(relative: "np.ndarray", weights: "np.ndarray") -> "np.ndarray":
    """Return x of 0 or more for which `relative` @ x deviates least from 1; with few features, where more bring little."""
    import numpy as np

    products, sums = relative.T @ (weights[:, None] * relative), relative.T @ weights
    best, least = np.zeros(3), np.inf
    for features in FEATURE_SETS:
        x = np.zeros(3)
        x[features] = np.linalg.lstsq(products[np.ix_(features, features)], sums[features], rcond=None)[0]
        deviation = float(weights @ (relative @ x - 1) ** 2)
        if x.min() >= 0 and deviation < LEAST_GAIN * least:
            best, least = x, deviation
    return best


@dataclass(frozen=True)
class MicrobatchCosts:
    """What a microbatch of any size takes: `pipe.plan_costs()`.

        costs = pipe.plan_costs()
        costs(4, 100)  # seconds of 4 rows, padded to 100 tokens, on the rank that takes longest
        groups = ps.plan.group_rows(lengths, microbatches=16, cost=costs)
        print(costs)  # of each stage, with the errors

    `fits`: of each kind of action that has run, by stage. `placement`: stage -> rank.
    """

    fits: Mapping[tuple[Kind, int], ActionFit]
    placement: tuple[int, ...]

    @classmethod
    def merge(cls, fits: Sequence[Mapping[tuple[Kind, int], ActionFit]], placement: Sequence[int]) -> "MicrobatchCosts":
        """Return the means over all ranks that have a stage. Raises PenstockError while one has none."""
        by_action = defaultdict[tuple[Kind, int], list[ActionFit]](list)
        for key, fit in (item for rank_fits in fits for item in rank_fits.items()):
            by_action[key].append(fit)
        means = {key: ActionFit._make(map(fmean, zip(*same, strict=True))) for key, same in by_action.items()}
        costs = cls(means, tuple(placement))
        costs._coefficient_sums_by_rank  # noqa: B018 - raises
        return costs

    @cached_property
    def _coefficient_sums_by_rank(self) -> list[list[float]]:
        """Rank -> the sums of its actions' coefficients."""
        sums = [[0.0, 0.0, 0.0] for _ in range(max(self.placement) + 1)]
        for stage, rank in enumerate(self.placement):
            for fit in (part for kind in (Kind.F, Kind.B) for part in self._fits_of_action(kind, stage)):
                sums[rank] = [total + value for total, value in zip(sums[rank], fit[:3], strict=True)]
        return sums

    def _fits_of_action(self, kind: Kind, stage: int) -> list[ActionFit]:
        """Return the fits that add up to a forward, or to a whole backward: of B, else of I and W."""
        kinds = (kind,) if kind is not Kind.B or (kind, stage) in self.fits else (Kind.I, Kind.W)
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

    @property
    def error(self) -> float:
        """The share by which an action deviates from its fit: the median of its samples, the mean over actions."""
        return fmean(fit.error for fit in self.fits.values())

    def step_costs(self, microbatches: Sequence[tuple[float, float]]) -> Costs:
        """Return the costs of a step over (rows, longest) of each microbatch, in the order in which they run.

            step_costs = costs.step_costs([(4, 30), (9, 31), (5, 60), (2, 20)])
            predicted = ps.schedule.simulate(pipe.schedule, step_costs).makespan

        A microbatch takes the same multiple of the mean on every stage: that of its sum over all stages.
        """
        stages = range(len(self.placement))

        def seconds(kind: Kind) -> list[list[float]]:
            parts = [self._fits_of_action(kind, stage) for stage in stages]
            return [[sum(fit.seconds(*size) for fit in fits) for size in microbatches] for fits in parts]

        forwards, backwards = seconds(Kind.F), seconds(Kind.B)
        totals = [sum(column) for column in zip(*forwards, *backwards, strict=True)]
        backward = list(map(fmean, backwards))
        inputs = [self._input_share(stage, microbatches) * both for stage, both in zip(stages, backward, strict=True)]
        weights = [both - part for both, part in zip(backward, inputs, strict=True)]
        factors = [total / fmean(totals) for total in totals]
        return Costs(list(map(fmean, forwards)), inputs, weights, microbatch_factors=factors)

    def _input_share(self, stage: int, microbatches: Sequence[tuple[float, float]]) -> float:
        """Return which share of a backward is I; half where no I and W have run."""
        if (Kind.I, stage) not in self.fits or (Kind.W, stage) not in self.fits:
            return 0.5
        inputs, weights = (sum(self.fits[kind, stage].seconds(*size) for size in microbatches) for kind in (Kind.I, Kind.W))
        return inputs / (inputs + weights)

    def __str__(self) -> str:
        """Return a line for each stage and kind of action."""
        lines = sorted((stage, kind.value, str(fit)) for (kind, stage), fit in self.fits.items())
        return "\n".join(f"stage {stage} {kind}: {text}" for stage, kind, text in lines)
