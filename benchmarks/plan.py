"""PlanLike steps against the default: what the plan says, and what emulated devices take.

python benchmarks/plan.py                       emulated devices, four and eight of them: some minutes
python benchmarks/plan.py --ranks 4 --rounds 1
python benchmarks/plan.py --real                ten models on two ranks whose layers compute, measured here: five minutes
python benchmarks/plan.py --models              five large models as costs, on eight ranks: planned only

A model of layers that sleep, the last one for longer, as a vocabulary makes it, is planned for ranks with much memory and with
little. The plan and the default are run in turn; each counts with its median. The default is 1f1b on the cut whose
slowest stage is the fastest, with everything recomputed if it does not fit. The best plans of some families run too: of every
pair of which one is planned to take 5 % more, it is counted whether it does.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

import torch
import tyro
from planned_models import UniformLayerChain, large_models, limit_of
from real_models import REAL_MODELS, Task
from tables import Row, show
from torch import Tensor, nn

import penstock as ps
from penstock.comms.system import count_cores
from penstock.learn.devices import DIM, EmulatedDevice
from penstock.options import PlanLike
from penstock.partition.balance import balanced_starts
from penstock.plan import LayerCost, ModelProfile, Plan
from penstock.plan.partition_search import Limits, PartitionSearch
from penstock.plan.planning import Effort
from penstock.plan.schedule_timer import ScheduleTimer
from penstock.schedule import Schedule

BLOCK, HEAD = (0.020, 0.020, 0.020), (0.048, 0.048, 0.048)  # seconds of F, I and W
ROWS, MICROBATCHES = 2, 8  # rows of a microbatch
ACTIVATION, KEEP, OUTPUT = 10e6, 5e6, 2e6  # bytes, of a layer that says so
OVERSLEPT = 0.0001  # seconds by which a sleep is longer
PAIRED, NOTABLE_SHARE = ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zb-v"), 0.05
SEND, ACTION = 0.0002, 0.0002  # seconds of a message, and of the engine, as `penstock bench` has them


Pairs = list[bool]  # of each two plans, whether the one that is planned to be faster is


@dataclass
class PlanOptions:
    """Plan, run, and compare with the default."""

    ranks: tuple[int, ...] = (4, 8)
    shares: tuple[float, ...] = (1.0, 0.6, 0.35)  # of 1f1b's memory
    rounds: int = 3
    steps: int = 2  # of each configuration, in a round
    seconds: float = 120  # for each number of ranks and share of memory: no round begins later
    effort: Effort = "normal"
    real: bool = False
    quick: bool = False  # with `real`: the best plan and 1f1b alone
    models: bool = False
    json: Path | None = None


class SleepingDevice(EmulatedDevice):
    """An emulated device that needs its own output for its backward, and so sleeps once more if that is recomputed."""

    def forward(self, hidden: Tensor) -> Tensor:
        """(rows, dim) -> the same."""
        return self.busy(hidden) * self.weight


def seconds_of(ranks: int) -> list[tuple[float, float, float]]:
    """Of every layer: almost three for each rank."""
    return [BLOCK] * (3 * ranks - 2) + [HEAD]


def model_of(ranks: int) -> nn.Sequential:
    """The layers, asleep."""
    return nn.Sequential(*(SleepingDevice(*seconds, parameters=DIM) for seconds in seconds_of(ranks)))


def layers_of(ranks: int) -> ModelProfile:
    """What they cost, each sleep a little longer than told; and what they would hold."""
    times = [tuple(duration + OVERSLEPT for duration in seconds) for seconds in seconds_of(ranks)]
    rest = ACTIVATION, KEEP, 0.0, OUTPUT
    return ModelProfile.from_layers([LayerCost(str(number), f, i, w, *rest) for number, (f, i, w) in enumerate(times)], ROWS)


class Fixed(NamedTuple):
    """What a pipeline takes from a plan, and what its step is planned to take."""

    schedule: Schedule
    microbatches: int
    cuts: list[str]
    recompute: tuple[Literal["stage"] | None, ...]
    layers: list[str]  # by name
    seconds: float


def default_of(layers: ModelProfile, ranks: int, batch: int, terms: Limits) -> Fixed:
    """1f1b on an even cut, recomputing everything if it does not fit."""
    way: Literal["stage"] | None
    table = ps.schedule.build("1f1b", ranks, MICROBATCHES)
    for way in (None, "stage"):
        line = UniformLayerChain(layers.costs_at(batch / MICROBATCHES), way)
        begins = tuple(balanced_starts(line.layer_seconds, ranks))
        found = PartitionSearch(line, ScheduleTimer(table), terms).evaluate(begins)
        if not found.excess_bytes:
            break
    cuts, seconds = [layers.layer_names[begin] for begin in begins[1:]], found.seconds
    return Fixed(table, MICROBATCHES, cuts, (way,) * ranks, layers.layer_names, seconds)


def asleep(ranks: int) -> Task:
    """Layers that sleep."""
    return Task(model_of(ranks), nn.functional.mse_loss, *torch.randn(2, ROWS * MICROBATCHES, DIM))


def run_plans(plans: Sequence[PlanLike], make: Callable[[int], Task], steps: int) -> list[float]:
    """What `penstock.launch` calls on every rank: the median step of each, by the first start and the last end."""
    usual = []
    for plan in plans:
        task = make(ps.comms.init_distributed().world_size)
        pipe = ps.Pipeline(task.model, task.loss_fn, plan=plan, **task.example(plan.microbatches))
        times = []
        for _ in range(steps + 1):  # in the first the ranks agree on the shapes
            pipe.step(task.inputs, target=task.target, **task.keywords)
            pipe.zero_grad()
            times.append(pipe.timeline().makespan)
        usual.append(median(times[1:]))
    return usual


def emulated(options: PlanOptions) -> tuple[list[Row], Pairs]:
    """Every number of ranks and share of memory: the plan beside the default; and pairs of the best of some families."""
    rows, pairs = [], []
    for ranks, share in product(options.ranks, options.shares):
        layers, batch = layers_of(ranks), ROWS * MICROBATCHES
        limit = limit_of(layers, ranks, batch, MICROBATCHES, share)
        terms = Limits((limit,) * ranks, send=SEND, action=ACTION)
        found = planned(layers, batch, terms, options.effort)
        row, more = compared(found, default_of(layers, ranks, batch, terms), asleep, options)
        rows.append({"P": ranks, "memory": f"{share:.0%}", **row})
        pairs += more
    return rows, pairs


def real(options: PlanOptions) -> tuple[list[Row], Pairs]:
    """Models on two ranks whose layers compute, measured here."""
    rows, pairs = list[Row](), list[bool]()
    for name, make in REAL_MODELS.items():
        ranks = ps.launch(measured, 2, make)
        layers, beside = ModelProfile.mean_of([layers for layers, _ in ranks]), ranks[0][1]
        terms = Limits((math.inf,) * 2, send=beside.send, bandwidth=beside.bandwidth, action=beside.action, cores=count_cores())
        batch = len(make(2).inputs)
        families = ("1f1b",) if options.quick else PAIRED
        plans = planned(layers, batch, terms, "quick", families)
        row, more = compared(plans, default_of(layers, 2, batch, terms), make, options)
        rows.append({"model": name, **row})
        show(rows[-1:], *rows[-1])
        pairs += more
    print(f"the best plans' steps take {median(row['error %'] for row in rows):+.1f} % longer than planned, in the median")
    return rows, pairs


def measured(make: Callable[[int], Task]) -> tuple[ModelProfile, ps.plan.Overheads]:
    """On both ranks at once, as they will compute."""
    ps.comms.init_distributed()
    task, beside = make(2), ps.plan.measure_overheads()
    first = slice(len(task.inputs) // MICROBATCHES)
    example = (task.inputs[first],), task.keywords
    return beside.subtract_from(ps.plan.measure(task.model, *example, loss_fn=task.loss_fn, target=task.target[first])), beside


def planned(layers: ModelProfile, batch: int, terms: Limits, effort: Effort, families: Sequence[str] = PAIRED) -> list[Plan]:
    """The best plan, and those of some families."""
    make = partial(
        ps.plan.plan,
        layers,
        len(terms.memory_bytes),
        terms.memory_bytes,
        batch=batch,
        microbatches=MICROBATCHES,
        optimizer=0.0,
        send=terms.send,
        bandwidth=terms.bandwidth,
        action=terms.action,
        cores=terms.cores,
        fewer=False,
    )
    plans = make(effort=effort)[:1]
    for name in families:
        with suppress(ps.PenstockError):  # it does not fit
            plans += make(schedules=[name], effort="quick")[:1]
    return plans


def compared(plans: Sequence[Plan], default: Fixed, make: Callable[[int], Task], options: PlanOptions) -> tuple[Row, Pairs]:
    """All run in turn: the first plan beside the default, and every pair of which one is planned to be notably faster."""
    every: list[Plan | Fixed] = [*plans, default]
    rounds, begin = list[list[float]](), time.perf_counter()
    while len(rounds) < options.rounds and (not rounds or time.perf_counter() - begin < options.seconds):
        rounds.append(ps.launch(run_plans, default.schedule.ranks, every, make, options.steps)[0])
        told = ", ".join(
            f"{1e3 * took:.0f} ({took / result.seconds - 1:+.1%})" for took, result in zip(rounds[-1], every, strict=True)
        )
        print(
            f"{default.schedule.ranks} ranks, round {len(rounds)} of {options.rounds}: {told} ms", file=sys.stderr, flush=True
        )
    took = list(map(median, zip(*rounds, strict=True)))
    seconds = [result.seconds for result in every]
    pairs = [
        (took[one] < took[other]) == (seconds[one] < seconds[other])
        for one, other in combinations(range(len(every)), 2)
        if max(seconds[one], seconds[other]) > (1 + NOTABLE_SHARE) * min(seconds[one], seconds[other])
    ]
    row: Row = {
        "schedule": plans[0].schedule.name,
        "planned ms": 1e3 * seconds[0],
        "measured ms": 1e3 * took[0],
        "error %": 100 * (took[0] / seconds[0] - 1),
        "default ms": 1e3 * took[-1],
        "less %": 100 * (1 - took[0] / took[-1]),
        "largest error %": max((100 * (value / said - 1) for value, said in zip(took, seconds, strict=True)), key=abs),
    }
    return row, pairs


def main(options: PlanOptions) -> None:
    """Plan, run, tell."""
    rows, pairs = (large_models(options.effort), []) if options.models else (real if options.real else emulated)(options)
    show(rows, *rows[0])
    if pairs:
        print(f"of {len(pairs)} pairs that are planned to differ by {NOTABLE_SHARE:.0%} or more, {sum(pairs)} are told right")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(PlanOptions))
