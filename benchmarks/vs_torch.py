"""Penstock beside `torch.distributed.pipelining`: the same table, the same model, one run, steps in turns.

python benchmarks/vs_torch.py                       everything, about 25 minutes
python benchmarks/vs_torch.py --quick               the same tables in under five, with wide spreads
python benchmarks/vs_torch.py --only emulated --ranks 4 --repeats 40
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Literal

import tyro
from engines import SHARED, EngineCase
from explain import Spread, fed, ideal, ratio, step_times, times_of, typical_excess
from measure import RankMeasurements, run_cases
from split import split
from subjects import Emulated, Perceptron, Subject, TransformerSubject, Trivial
from tables import Row, show

import penstock as ps
from penstock.schedule import Kind, Timeline

FORWARD = 0.010  # seconds of all F of a microbatch on a rank of emulated devices; I and W take as long
SMALL, LARGE = 16, 65536  # widths of a message: 1 KB and 4 MB
COMPUTED = ("gpipe", "1f1b", "interleaved-1f1b", "zb-v")  # schedules with real compute
DRIVEN = ("gpipe", "1f1b", "zb-v")  # schedules of the trivial stage


@dataclass
class ComparisonOptions:
    """Compare Penstock with torch.distributed.pipelining."""

    only: Literal["emulated", "compute", "engine", "split"] | None = None  # one part; default all
    ranks: tuple[int, ...] = (2, 4, 8)  # numbers of emulated devices
    schedules: tuple[str, ...] = SHARED  # on emulated devices
    repeats: int = 10  # steps of each engine that count
    quick: bool = False  # 3 repeats, 4 emulated devices, fewer microbatches
    json: Path | None = None  # write all numbers there


def main(options: ComparisonOptions) -> None:
    """Run the parts asked for and print their tables."""
    if options.quick:
        options.ranks, options.repeats = (4,), 3
    parts = {
        "emulated": lambda: emulated(options),
        "compute": lambda: compute(options.repeats),
        "engine": lambda: engine(options.repeats),
        "split": lambda: split(options.repeats),
    }
    results = {name: part() for name, part in parts.items() if options.only in (None, name)}
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def emulated(options: ComparisonOptions) -> list[Row]:
    """Stages that sleep: what the schedule and the engine cost when devices are not the machine's cores."""
    rows: list[Row] = []
    for ranks in options.ranks:
        few = max(8, 2 * ranks)
        sizes = [(SMALL, few), (LARGE, few)] + ([(SMALL, 2 * few)] if ranks > 2 and not options.quick else [])
        cases = [_emulated(width, name, ranks, count) for width, count in sizes for name in options.schedules]
        rows += [_emulated_row(*pair) for pair in _run(cases, options.repeats)]
    print("\nEmulated devices: F, I and W sleep 10 ms a rank. Times in ms; 'fed' is simulate with the measured times and send.")
    print("Steps as a multiple of (ideal, fed).")
    show(rows, "P", "M", "schedule", "message", "send", "ideal", "fed", "ours", "peer", "ours x", "peer x", "peer / ours")
    print("\nWhat our step took beyond the ideal, in % of the ideal, along its critical path.")
    show(rows, "P", "M", "schedule", "message", "overshoot", "transport", "handing over", "between", "begin", "end", "sum")
    print("\nTime of an action / its nominal time, (ours, peer); without the first stage, whose I the peer leaves to W.")
    show(rows, "P", "M", "schedule", "message", *(kind.value for kind in Kind))
    print("\nThe median of peer / ours over these configurations where P is 4 or more, the least and the most:")
    show(list(_summary(rows)), "stages a rank", "message", "peer / ours", "of")
    return rows


def _emulated(width: int, schedule: str, ranks: int, microbatches: int) -> EngineCase:
    stages_per_rank = ps.schedule.build(schedule, ranks=ranks, microbatches=microbatches).num_stages // ranks
    return EngineCase(Emulated(width, FORWARD / stages_per_rank), schedule, ranks, microbatches)


def _summary(rows: list[Row]) -> Iterator[Row]:
    wanted = [row for row in rows if row["P"] >= 4]
    for several in sorted({row["V"] > 1 for row in wanted}):
        for message in sorted({row["message"] for row in wanted}):
            ratios = [row["peer / ours"].middle for row in wanted if (row["V"] > 1, row["message"]) == (several, message)]
            yield {
                "stages a rank": "2" if several else "1",
                "message": message,
                "peer / ours": Spread(min(ratios), median(ratios), max(ratios)),
                "of": len(ratios),
            }


def compute(repeats: int) -> list[Row]:
    """Real compute on two ranks, with one process beside it."""
    subjects: list[Subject] = [Perceptron(), TransformerSubject()]
    cases = [EngineCase(subject, schedule, 2, 8) for subject in subjects for schedule in COMPUTED]
    rows = [_compute_row(*pair) for pair in _run(cases, repeats, alone=True)]
    print("\nReal compute, one thread a rank. Times in ms; in one process: 'accumulated' over 8 microbatches, 'whole' batch.")
    print("Gain: 'accumulated' / step, each from the same turn.")
    show(rows, "P", "M", "schedule", "model", "fed", "ours", "peer", "accumulated", "whole", "ours x", "peer / ours")
    show(rows, "P", "M", "schedule", "model", "our gain", "peer's gain", "our gain over whole")
    return rows


def engine(repeats: int) -> list[Row]:
    """Stages without compute: what the engine costs for each action."""
    rows: list[Row] = []
    for ranks in (1, 2):
        cases = [EngineCase(Trivial(), schedule, ranks, count) for schedule in DRIVEN for count in (8, 32)]
        rows += [_engine_row(*pair) for pair in _run(cases, repeats, alone=True)]
    print("\nA trivial stage: us for each action of a rank (step / actions), then its CPU time, of the main thread and of all.")
    print("'autograd': the CPU time of one process that runs the same stages with no engine.")
    names = "step ours", "step peer", "step peer / ours", "main ours", "main peer", "main peer / ours"
    show(rows, "P", "M", "schedule", *names, "all ours", "all peer", "autograd")
    return rows


def _run(cases: list[EngineCase], repeats: int, alone: bool = False) -> list[tuple[EngineCase, list[RankMeasurements]]]:
    """The cases, all of the same number of ranks, each with every rank's record."""
    everyone = ps.launch(run_cases, cases[0].ranks, cases, repeats, alone)
    return list(zip(cases, map(list, zip(*everyone, strict=True)), strict=True))


def _common(case: EngineCase, records: list[RankMeasurements]) -> Row:
    ours, peer = (step_times(records, name) for name in ("ours", "peer"))
    return {
        "P": case.ranks,
        "V": case.table().num_stages // case.ranks,
        "M": case.microbatches,
        "schedule": case.schedule,
        "ours": 1e3 * median(ours),
        "peer": 1e3 * median(peer),
        "peer / ours": ratio(ours, peer),
        "steps": {name: step_times(records, name) for name in records[0].laps},
    }


def _emulated_row(case: EngineCase, records: list[RankMeasurements]) -> Row:
    row = _common(case, records)
    bare, send = ideal(case), records[0].send
    with_measured = median(fed(case, timeline, send) for timeline in records[0].timelines)
    parts = {name.replace("_", " "): 100 * part / bare for name, part in typical_excess(case, records)._asdict().items()}
    multiples = {f"{name} x": (row[name] / bare / 1e3, row[name] / with_measured / 1e3) for name in ("ours", "peer")}
    times = {"send": 1e3 * send, "ideal": 1e3 * bare, "fed": 1e3 * with_measured}
    ran = records[0].timelines[-1], Timeline("peer", tuple(record.peer for record in records))
    taken = {kind.value: _taken(case, kind, ran) for kind in Kind}
    return row | {"message": case.subject.name} | times | multiples | parts | {"sum": sum(parts.values())} | taken


def _taken(case: EngineCase, kind: Kind, timelines: tuple[Timeline, ...]) -> tuple[float, ...] | None:
    """Mean time of the actions of `kind`, as a multiple of the nominal one; None if there are none."""
    assert case.subject.nominal is not None
    forward, inputs, weights = case.subject.nominal
    nominal = {Kind.F: forward, Kind.B: inputs + weights, Kind.I: inputs, Kind.W: weights}[kind]
    stages = range(1, case.table().num_stages)
    times = [[time for stage in stages for time in times_of(timeline, kind, stage)] for timeline in timelines]
    return tuple(fmean(duration) / nominal for duration in times) if all(times) else None


def _compute_row(case: EngineCase, records: list[RankMeasurements]) -> Row:
    row = _common(case, records)
    steps = row["steps"]
    with_measured = median(fed(case, timeline, records[0].send) for timeline in records[0].timelines)
    return row | {
        "model": case.subject.name,
        "fed": 1e3 * with_measured,
        "accumulated": 1e3 * median(steps["accumulated"]),
        "whole": 1e3 * median(steps["whole"]),
        "ours x": row["ours"] / with_measured / 1e3,
        "our gain": ratio(steps["ours"], steps["accumulated"]),
        "peer's gain": ratio(steps["peer"], steps["accumulated"]),
        "our gain over whole": ratio(steps["ours"], steps["whole"]),
    }


def _engine_row(case: EngineCase, records: list[RankMeasurements]) -> Row:
    row = _common(case, records)
    actions = len(case.table().actions[0])
    for name in ("ours", "peer"):
        laps = [lap for record in records for lap in record.laps[name]]
        row[f"step {name}"] = row[name] * 1e3 / actions
        row[f"main {name}"] = 1e6 * median(lap.main_thread for lap in laps) / actions
        row[f"all {name}"] = 1e6 * median(lap.process for lap in laps) / actions
    row["step peer / ours"], row["main peer / ours"] = row["peer / ours"], row["main peer"] / row["main ours"]
    row["autograd"] = 1e6 * median(lap.main_thread for lap in records[0].laps["accumulated"]) / actions / case.ranks
    return row


if __name__ == "__main__":
    main(tyro.cli(ComparisonOptions))
