"""What other steps would take, told from the costs of one, and what they take.

python benchmarks/prediction.py                     everything, about eight minutes
python benchmarks/prediction.py --ranks 4 --rounds 1 --steps 7 --json out.json

A model of 32 layers that sleep is cut over 2, 4 and 8 ranks, evenly and not. One configuration is measured; with its costs
all others are predicted, and run, in rounds, so that nothing is disturbed all the time. At the end one rank of four is slowed,
and what `explain` says of it is printed beside what the step lost.
"""

import json
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
import tyro
from tables import Row, show
from torch import nn

import penstock as ps
from penstock.explain.explain import MeasuredTimeline
from penstock.learn.devices import DIM, EmulatedLayer
from penstock.schedule import Schedule, Timeline
from penstock.timing.measurement import Measurement

LAYERS = 32
SECONDS = 0.003, 0.003, 0.002  # of F, I and W of a layer
ROWS = 2  # of a microbatch
SLOW_RANK, SLOWER = 2, 0.005  # one of four, and by how many seconds an action
DIFFERENT = 0.05  # two schedules whose steps differ by more than this are to be told apart


@dataclass
class PredictionOptions:
    """Predict the steps of emulated devices from the costs of one configuration, and measure them."""

    ranks: tuple[int, ...] = (2, 4, 8)
    schedules: tuple[str, ...] = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
    microbatches: tuple[int, ...] = (8, 16)
    source: str = "zb-h1"  # the schedule whose costs are measured, with 8 microbatches, evenly cut
    source_ranks: int = 4
    rounds: int = 3
    steps: int = 2  # of each configuration that count, in a round
    json: Path | None = None  # write all numbers there


class PredictionCase(NamedTuple):
    """One configuration."""

    schedule: str
    ranks: int
    microbatches: int
    even: bool = True

    def table(self) -> Schedule:
        """Its table."""
        return ps.schedule.build(self.schedule, ranks=self.ranks, microbatches=self.microbatches)

    def layers(self) -> list[int]:
        """How many layers each stage has. Unevenly cut, of every two stages the first has a third, rounded down."""
        stages = self.table().num_stages
        size = LAYERS // stages
        return [size] * stages if self.even else [2 * size // 3, 2 * size - 2 * size // 3] * (stages // 2)


class Ran(NamedTuple):
    """The steps of one case."""

    seconds: list[float]  # from the first rank's start to the last one's end
    timelines: list[Timeline]

    @property
    def around(self) -> float:
        """Seconds before the first action and after the last, the median."""
        return median(step - line.makespan for step, line in zip(self.seconds, self.timelines, strict=True))


def run_cases(cases: list[PredictionCase], steps: int) -> list[Ran]:
    """What `penstock.launch` calls on every rank."""
    ps.comms.init_distributed()
    return [_run(case, steps) for case in cases]


def _run(case: PredictionCase, steps: int) -> Ran:
    stages = [nn.Sequential(*(EmulatedLayer(DIM, *SECONDS) for _ in range(size))) for size in case.layers()]
    pipe = ps.Pipeline(stages, nn.functional.mse_loss, schedule=case.table())
    inputs, target = torch.randn(2, ROWS * case.microbatches, DIM)
    ran = Ran([], [])
    for step in range(steps + 1):  # in the first the ranks agree on the shapes
        dist.barrier()
        begin = time.perf_counter()
        pipe.step(inputs, target=target)
        laps: list[tuple[float, float] | None] = [None] * case.ranks
        lap = begin, time.perf_counter()
        dist.all_gather_object(laps, lap)
        timeline = pipe.timeline()
        if step:
            begins, ends = zip(*filter(None, laps), strict=True)
            ran.seconds.append(max(ends) - min(begins))
            ran.timelines.append(timeline)
    return ran


class Slower(nn.Module):
    """Each action that passes takes longer."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, dim) -> the same, later."""
        time.sleep(SLOWER)
        hidden = hidden.view_as(hidden)
        hidden.register_hook(lambda _: time.sleep(SLOWER))
        return hidden


def run_fair_and_slow(steps: int) -> list[MeasuredTimeline]:
    """On each of four ranks: the fastest step where all are alike, and where one is slow; their steps in turns."""
    stages = [[nn.Sequential(*(EmulatedLayer(DIM, *SECONDS) for _ in range(2))) for _ in range(4)] for _ in range(2)]
    stages[1][SLOW_RANK].append(Slower())
    pipes = [ps.Pipeline(stage, nn.functional.mse_loss, "1f1b", 8) for stage in stages]
    inputs, target = torch.randn(2, ROWS * 8, DIM)
    timelines: list[list[MeasuredTimeline]] = [[], []]
    for _ in range(steps + 1):
        for pipe, into in zip(pipes, timelines, strict=True):
            pipe.step(inputs, target=target)
            into.append(pipe.timeline())
    return [min(several[1:], key=lambda timeline: timeline.makespan) for several in timelines]


def _straggler(steps: int) -> None:
    fair, slow = ps.launch(run_fair_and_slow, 4, steps)[0]
    named, lost = slow.explain().straggler, 1e3 * (slow.makespan - fair.makespan)
    print(
        f"\nOf four ranks rank {SLOW_RANK} is slower by {1e3 * SLOWER:g} ms an action, and the step by {lost:.1f} ms. Named: ",
        end="",
    )
    print(
        "nobody"
        if named is None
        else f"rank {named.rank}, {1e3 * named.extra_seconds_per_action:.1f} ms and {1e3 * named.step_seconds_lost:.1f} ms",
        end="",
    )
    print(f"; where all are alike: {'nobody' if fair.explain().straggler is None else 'one, wrongly'}")


def main(options: PredictionOptions) -> None:
    """Measure one configuration and the others, predict these, print all and what it comes to."""
    source = PredictionCase(options.source, options.source_ranks, 8)
    cases = [
        PredictionCase(name, ranks, count, even)
        for ranks in options.ranks
        for count, even in _sizes(options)
        for name in options.schedules
    ]
    ran: dict[PredictionCase, Ran] = {case: Ran([], []) for case in [source, *cases]}
    for _ in range(options.rounds):
        _add(ran, source.ranks, [source], 2 * options.steps)
        for ranks in options.ranks:
            _add(ran, ranks, [case for case in cases if case.ranks == ranks], options.steps)
    rows = [_row(case, ran[case], source, ran[source]) for case in cases]
    print("Times of a step in ms, from the first rank's start to the last one's end; errors of the prediction in %.")
    show(
        rows, "P", "M", "cut", "schedule", "fastest", "predicted", "error", "median", "most", "median predicted", "median error"
    )
    for which, took, told in (("fastest step", "fastest", "predicted"), ("median step", "median", "median predicted")):
        print(f"\nBy the {which} of each configuration, and costs from the {which}s of the source:")
        _summary(rows, took, told)
    _straggler(5 * options.steps)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


def _add(ran: dict[PredictionCase, Ran], ranks: int, cases: list[PredictionCase], steps: int) -> None:
    for case, result in zip(cases, ps.launch(run_cases, ranks, cases, steps)[0], strict=True):
        ran[case].seconds.extend(result.seconds)
        ran[case].timelines.extend(result.timelines)


def _sizes(options: PredictionOptions) -> list[tuple[int, bool]]:
    return [*((count, True) for count in options.microbatches), (options.microbatches[0], False)]


def _row(case: PredictionCase, ran: Ran, source: PredictionCase, known: Ran) -> Row:
    row: Row = {"P": case.ranks, "M": case.microbatches, "cut": "even" if case.even else "uneven", "schedule": case.schedule}
    best = known.timelines[known.seconds.index(min(known.seconds))]
    took = {"": min(ran.seconds), "median ": median(ran.seconds)}
    steps = {"": [best], "median ": known.timelines}
    for which, timelines in steps.items():
        measured = Measurement.from_timelines(*timelines, layers=source.layers())
        told = measured.predict(case.table(), case.layers()).makespan + known.around
        row |= {f"{which}predicted": 1e3 * told, f"{which}error": 100 * (told / took[which] - 1)}
    return row | {"fastest": 1e3 * took[""], "median": 1e3 * took["median "], "most": 1e3 * max(ran.seconds)}


def _summary(rows: list[Row], took: str, told: str) -> None:
    errors = sorted(100 * abs(row[told] / row[took] - 1) for row in rows)
    print(f"  {len(errors)} configurations: error median {median(errors):.1f} %, max {errors[-1]:.1f} %")
    groups: dict[tuple[int, int, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["P"], row["M"], row["cut"]].append(row)
    pairs = [pair for group in groups.values() for pair in combinations(group, 2)]
    different = [(a, b) for a, b in pairs if abs(a[took] - b[took]) > DIFFERENT * min(a[took], b[took])]
    right = sum((a[took] < b[took]) == (a[told] < b[told]) for a, b in different)
    if different:
        share = right / len(different)
        print(
            f"  the faster of two schedules that differ by more than {DIFFERENT:.0%}: {right} of {len(different)} ({share:.1%})"
        )


if __name__ == "__main__":
    main(tyro.cli(PredictionOptions))
