"""Planned steps against the default: what the plan says, and what emulated devices take.

python benchmarks/plan.py                       emulated devices, four and eight of them: some minutes
python benchmarks/plan.py --ranks 4 --rounds 1
python benchmarks/plan.py --models              five large models as costs, on eight ranks: planned only

A model of layers that sleep, the last one for longer, as a vocabulary makes it, is planned for ranks with much memory and with
little. The plan and the default are run in turn; each counts with its fastest step. The default is 1f1b on the cut whose
slowest stage is the fastest, with everything recomputed if it does not fit.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

import torch
import tyro
from planned_models import MODELS, even_cut, limit_of
from tables import Row, show
from torch import Tensor, nn

import penstock as ps
from penstock.engine.build import Planned
from penstock.learn.devices import DIM
from penstock.learn.emulated_device import EmulatedDevice
from penstock.partition.balance import starts
from penstock.plan import Layer, Layers
from penstock.plan.candidate import Terms
from penstock.schedule import Schedule
from penstock.schedule.catalog import FAMILIES

BLOCK, HEAD = (0.005, 0.005, 0.005), (0.012, 0.012, 0.012)  # seconds of F, I and W
ROWS, MICROBATCHES = 2, 8  # rows of a microbatch
ACTIVATION, KEEP, OUTPUT = 10e6, 5e6, 2e6  # bytes, of a layer that says so
OVERSLEPT = 0.0001  # seconds by which a sleep is longer
SEND, ACTION = 0.0002, 0.0002  # seconds of a message, and of the engine, as `penstock bench` has them
MODEL_RANKS, MODEL_BATCH, MODEL_COUNTS, MODEL_STATE = 8, 32, (8, 16, 32), 6.0


@dataclass
class Options:
    """Plan, run, and compare with the default."""

    ranks: tuple[int, ...] = (4, 8)
    shares: tuple[float, ...] = (1.0, 0.6, 0.35)  # of 1f1b's memory
    rounds: int = 3
    steps: int = 3  # of each configuration, in a round
    effort: Literal["quick", "normal", "long"] = "normal"
    models: bool = False
    json: Path | None = None


class Asleep(EmulatedDevice):
    """An emulated device that needs its own output for its backward, and so sleeps once more if that is recomputed."""

    def forward(self, hidden: Tensor) -> Tensor:
        """(rows, dim) -> the same."""
        return self.busy(hidden) * self.weight


def seconds_of(ranks: int) -> list[tuple[float, float, float]]:
    """Of every layer: almost three for each rank."""
    return [BLOCK] * (3 * ranks - 2) + [HEAD]


def model_of(ranks: int) -> nn.Sequential:
    """The layers, asleep."""
    return nn.Sequential(*(Asleep(*seconds, parameters=DIM) for seconds in seconds_of(ranks)))


def layers_of(ranks: int) -> Layers:
    """What they cost, each sleep a little longer than told; and what they would hold."""
    times = [tuple(each + OVERSLEPT for each in seconds) for seconds in seconds_of(ranks)]
    rest = ACTIVATION, KEEP, 0.0, OUTPUT
    return Layers.of([Layer(str(number), f, i, w, *rest) for number, (f, i, w) in enumerate(times)], ROWS)


class Default(NamedTuple):
    """What a pipeline takes from a plan."""

    schedule: Schedule
    microbatches: int
    cuts: list[str]
    recompute: tuple[Literal["stage"] | None, ...]


def default_of(layers: Layers, ranks: int, limit: float) -> Default:
    """1f1b on an even cut, recomputing everything if it does not fit."""
    begins = starts([layer.seconds for layer in layers.samples[-1].layers], ranks)[1:]
    fits = limit >= limit_of(layers, ranks, ROWS * MICROBATCHES, MICROBATCHES, 1.0, 0.0)
    table = ps.schedule.build("1f1b", ranks, MICROBATCHES)
    return Default(table, MICROBATCHES, [layers.names[begin] for begin in begins], (None if fits else "stage",) * ranks)


def run_plans(plans: Sequence[Planned], ranks: int, steps: int) -> list[float]:
    """What `penstock.launch` calls on every rank: the fastest step of each, by the first start and the last end."""
    fastest = []
    for plan in plans:
        pipe = ps.Pipeline(model_of(ranks), nn.functional.mse_loss, plan=plan)
        inputs, target = torch.randn(2, ROWS * MICROBATCHES, DIM)
        times = []
        for _ in range(steps + 1):  # in the first the ranks agree on the shapes
            pipe.step(inputs, target=target)
            times.append(pipe.timeline().makespan)
        fastest.append(min(times[1:]))
    return fastest


def emulated(options: Options) -> list[Row]:
    """Every number of ranks and share of memory."""
    rows: list[Row] = []
    for ranks in options.ranks:
        layers = layers_of(ranks)
        for share in options.shares:
            limit = limit_of(layers, ranks, ROWS * MICROBATCHES, MICROBATCHES, share, 0.0)
            planned = ps.plan.plan(
                layers,
                ranks,
                limit,
                batch=ROWS * MICROBATCHES,
                microbatches=MICROBATCHES,
                effort=options.effort,
                send=SEND,
                action=ACTION,
            )[0]
            if planned.ranks < ranks:
                continue  # the default has all
            plans = planned, default_of(layers, ranks, limit)
            rounds = [ps.launch(run_plans, ranks, plans, ranks, options.steps)[0] for _ in range(options.rounds)]
            took, default = map(min, zip(*rounds, strict=True))
            rows.append(
                {
                    "P": ranks,
                    "memory": f"{share:.0%}",
                    "schedule": planned.schedule.name,
                    "planned ms": 1e3 * planned.seconds,
                    "measured ms": 1e3 * took,
                    "error %": 100 * (took / planned.seconds - 1),
                    "default ms": 1e3 * default,
                    "less %": 100 * (1 - took / default),
                }
            )
    return rows


def large_models(options: Options) -> list[Row]:
    """Large models: the plan beside the best family on an even cut, with all recomputed or nothing."""
    rows: list[Row] = []
    for name, make in MODELS.items():
        for share in (0.25, 0.35, 0.45):
            layers = make()
            limit = limit_of(layers, MODEL_RANKS, MODEL_BATCH, 16, share, MODEL_STATE)
            terms, begin = Terms((limit,) * MODEL_RANKS, MODEL_STATE), time.perf_counter()
            found = ps.plan.plan(
                layers,
                MODEL_RANKS,
                limit,
                batch=MODEL_BATCH,
                microbatches=MODEL_COUNTS,
                optimizer=MODEL_STATE,
                effort=options.effort,
            )[0]
            took = time.perf_counter() - begin
            even = even_cut(layers, terms, MODEL_BATCH, MODEL_COUNTS, [each for each in FAMILIES if each != "naive"])
            rows.append(
                {
                    "model": name,
                    "memory": f"{share:.0%}",
                    "even cut ms": 1e3 * even,
                    "planned ms": 1e3 * found.seconds,
                    "faster %": 100 * (even / found.seconds - 1),
                    "above bound %": 100 * (found.seconds / found.bound - 1),
                    "schedule": found.schedule.name,
                    "planning s": took,
                }
            )
            show(rows[-1:], *rows[-1])
    print(f"faster in the median by {median(row['faster %'] for row in rows):.1f} %")
    return rows


def main(options: Options) -> None:
    """Plan, run, tell."""
    rows = large_models(options) if options.models else emulated(options)
    show(rows, *rows[0])
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options))
