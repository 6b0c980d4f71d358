"""A plan: the partition and table to run, its planned step, and why it is not faster."""

import json
import math
from dataclasses import dataclass, fields, replace
from os import PathLike
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from penstock.errors import PenstockError, format_count
from penstock.lazy import lazy_method
from penstock.plan.schedule_timer import KINDS, ScheduleTimer
from penstock.plan.stage_costs import Recompute
from penstock.schedule.memory import format_bytes
from penstock.schedule.proof import verify
from penstock.schedule.schedule import Schedule, from_rows
from penstock.schedule.table import Kind
from penstock.timing.costs import Costs
from penstock.timing.measurement import Measurement
from penstock.timing.simulate import simulate
from penstock.timing.timeline import Timeline

FORMAT = "penstock plan 1"


@dataclass(frozen=True)
class Plan:
    """A partition, a table, and the stages to recompute: `Pipeline(model, loss_fn, plan=plan)` runs it. Seconds and bytes.

    `seconds` is the planned time of a step. `bound` is a lower bound for any partition, table and recomputation with these
    ranks and microbatches; `why` says why the step takes longer. `peak_memory` has the bytes of
    every rank: activations, parameters, gradients, optimizer state and messages.
    """

    schedule: Schedule
    cuts: tuple[str, ...]  # the layer that every stage but the first begins with
    recompute: tuple[Recompute, ...]  # of every stage
    microbatches: int
    seconds: float
    bound: float
    peak_memory: tuple[float, ...]
    why: str
    costs: Costs  # of its stages, for `simulate`
    batch: int  # rows, of all replicas
    dp: int = 1  # replicas; the rest is said of each
    layers: tuple[str, ...] = ()  # the names of all, in order; empty where they are not known
    teacher_cuts: tuple[str, ...] = ()  # as `cuts`, of the teacher whose stages come behind the model's
    teacher_layers: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of ranks that it uses."""
        return self.schedule.ranks

    @property
    def share_above_bound(self) -> float:
        """The share by which a step is longer than its bound: 0.1 is 10 %."""
        return max(0.0, self.seconds / self.bound - 1)

    @property
    def timeline(self) -> Timeline:
        """The planned step, without optimizer."""
        return replace(simulate(self.schedule, self.costs), memory_unit="bytes")

    @property
    def measurement(self) -> Measurement:
        """The planned costs of its stages in the form of a measurement, to predict other tables with."""
        stages = self.schedule.stages
        table, free = self.costs.action_costs(stages), dict.fromkeys(Kind, (0.0,) * stages)
        sends = tuple(map(sum, self.costs.message_costs(stages).values()))
        work = tuple(map(sum, zip(table[Kind.F], table[Kind.B], strict=True)))
        layers = work if all(work) else ()
        times = {kind: tuple(times) for kind, times in table.items()}
        sizes = self.costs.activation_sizes(stages)
        return Measurement(self.schedule, times, free, sends, layers=layers, activation_sizes=sizes)

    def __repr__(self) -> str:
        """Return one line; `str` returns a few, and a notebook draws the planned step."""
        size = f"{format_count(self.ranks, 'rank')}, {format_count(self.microbatches, 'microbatch', 'es')}"
        return f"<Plan {self.schedule.name}: {size}, {1e3 * self.seconds:.4g} ms a step>"

    _repr_html_ = lazy_method("penstock.view.notebook", "plan_html")

    def __str__(self) -> str:
        """Return the plan as a few lines of text."""
        recomputed = [f"stage {stage} ({way})" for stage, way in enumerate(self.recompute) if way]
        return (
            f"{self.schedule.name} on {format_count(self.ranks, 'rank')}{f', {self.dp} replicas' if self.dp > 1 else ''}, "
            f"{self.microbatches} microbatches{f' in {self.schedule.slices} slices' if self.schedule.slices > 1 else ''}: "
            f"{1e3 * self.seconds:.4g} ms a step, {self.share_above_bound:.1%} above what none can be below\n"
            f"cut before {', '.join(self.cuts) or 'nothing'}; recomputes {', '.join(recomputed) or 'nothing'}\n"
            f"{self._teacher_line()}"
            f"at the fullest {', '.join(map(format_bytes, self.peak_memory))}\n"
            f"{self.why}"
        )

    def _teacher_line(self) -> str:
        if self.schedule.teacher is None:
            return ""
        ranks = " ".join(map(str, self.schedule.placement[self.schedule.teacher :]))
        return f"the teacher cut before {', '.join(self.teacher_cuts) or 'nothing'}, its stages on ranks {ranks}\n"

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan to the JSON file at `path`."""
        costs = {field.name: getattr(self.costs, field.name) for field in fields(Costs)}
        costs = {name: value for name, value in costs.items() if value not in (None, {}, float("inf"))}
        table = {"name": self.schedule.name, "placement": self.schedule.placement, "rows": self.schedule.csv_rows()}
        data = {"format": FORMAT, **{name: getattr(self, name) for name in _PLAIN_FIELDS}, "schedule": table, "costs": costs}
        Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def robustness(plan: Plan, share: float = 0.1, draws: int = 200, seed: int = 0) -> tuple[float, float]:
    """Return the median and the largest of `draws` step times in which every action takes up to `share` more or less."""
    table, random, stages = ScheduleTimer(plan.schedule), Random(seed), plan.schedule.stages
    costs = [cost for kind in KINDS for cost in plan.costs.action_costs(stages)[kind]]
    delays = [seconds / table.slices + send for seconds, send in plan.costs.message_costs(stages).values()]
    makespans = [table.makespan_with_jitter(costs, [*delays, 0.0], share, random) for _ in range(draws)]
    averaging = plan.seconds - plan.timeline.makespan if plan.dp > 1 else 0.0  # comes after the actions of the table
    return median(makespans) + averaging, max(makespans) + averaging


_PLAIN_FIELDS = (
    *("batch", "dp", "microbatches", "layers", "cuts", "teacher_layers", "teacher_cuts", "recompute"),
    *("seconds", "bound", "peak_memory", "why"),
)


def is_plan_file(path: str | PathLike[str]) -> bool:
    """Return whether the file at `path` is a plan."""
    try:
        with open(path, encoding="utf-8") as file:
            return is_plan_text(file.read(200))
    except (OSError, UnicodeError):
        return False


def is_plan_text(text: str) -> bool:
    """Return whether the `text` of a file, or its beginning, is that of a plan."""
    return FORMAT in text[:200]


def load(path: str | PathLike[str]) -> Plan:
    """Read what `Plan.save` wrote, and prove its table. Raises PenstockError for anything else."""
    try:
        return parse_plan(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise PenstockError(f"cannot read a plan from {path}: {error.strerror}") from error


def parse_plan(text: str | bytes, name: str) -> Plan:
    """Return the plan in the `text` of a file called `name`. Raises PenstockError for anything else."""
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r}, not {FORMAT!r}")
        return _plan_from_json(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = error if isinstance(error, ValueError) else repr(error)
        raise PenstockError(f"{name} is no plan of `penstock plan`: {why}") from error


def _plan_from_json(data: dict[str, Any]) -> Plan:
    """Return the plan in `data`. Raises ValueError, KeyError or TypeError for data of something else."""
    table = data["schedule"]
    schedule = from_rows(str(table["name"]), table["rows"], tuple(map(int, table["placement"])))
    verify(schedule)
    recompute, cuts = tuple(data["recompute"]), tuple(map(str, data["cuts"]))
    teacher_cuts, teacher_layers = (tuple(map(str, data.get(name, ()))) for name in ("teacher_cuts", "teacher_layers"))
    num_stages = schedule.num_trained_stages
    if len(cuts) != num_stages - 1 or len(recompute) != num_stages or not {*recompute} <= {None, "stage", "block"}:
        raise ValueError(f"it has {len(cuts)} cuts and recompute={list(recompute)} for {num_stages} stages")
    if len(teacher_cuts) != max(0, schedule.stages - num_stages - 1):
        raise ValueError(f"it has {len(teacher_cuts)} cuts of a teacher for {schedule.stages - num_stages} stages")
    if schedule.microbatches != data["microbatches"]:
        raise ValueError(f"it has {data['microbatches']} microbatches, its table {schedule.microbatches}")
    costs, peaks = Costs(**data["costs"]), tuple(map(float, data["peak_memory"]))
    simulate(schedule, costs)
    seconds, bound, batch, dp = float(data["seconds"]), float(data["bound"]), int(data["batch"]), int(data.get("dp", 1))
    if not (0 < seconds < math.inf and 0 < bound < math.inf and batch > 0 and dp > 0):
        raise ValueError(f"seconds={seconds}, bound={bound}, batch={batch}, dp={dp}: all are above 0")
    if len(peaks) != schedule.ranks or not all(0 <= peak < math.inf for peak in peaks):
        raise ValueError(f"peak_memory={list(peaks)}: bytes of each of {schedule.ranks} ranks")
    layers, why = tuple(map(str, data.get("layers", ()))), str(data["why"])
    whole = seconds, bound, peaks, why, costs, batch, dp, layers, teacher_cuts, teacher_layers
    return Plan(schedule, cuts, recompute, schedule.microbatches, *whole)
