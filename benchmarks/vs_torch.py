"""Penstock beside `torch.distributed.pipelining`: the same table, the same model, one run, steps in turns.

python benchmarks/vs_torch.py                       everything, about ten minutes
python benchmarks/vs_torch.py --quick               the same tables in two minutes, with wide spreads
python benchmarks/vs_torch.py --only emulated --ranks 4 --repeats 40
"""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import tyro
from engines import Case
from explain import fed, ideal, ratio, step_times, typical_excess
from measure import Record, run_cases
from subjects import Emulated, Perceptron, Subject, Transformer, Trivial

import penstock as ps

SCHEDULES = ("gpipe", "1f1b")
Row = dict[str, Any]


@dataclass
class Options:
    """Compare Penstock with torch.distributed.pipelining."""

    only: Literal["emulated", "compute", "engine"] | None = None  # one part; default all
    ranks: tuple[int, ...] = (2, 4, 8)  # numbers of emulated devices
    repeats: int = 20  # steps of each engine that count
    quick: bool = False  # 2 emulated devices only, 5 repeats
    json: Path | None = None  # write all numbers there


def main(options: Options) -> None:
    """Run the parts asked for and print their tables."""
    if options.quick:
        options.ranks, options.repeats = (2,), 5
    parts = {"emulated": emulated, "compute": compute, "engine": engine}
    results = {name: part(options) for name, part in parts.items() if options.only in (None, name)}
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def emulated(options: Options) -> list[Row]:
    """Stages that sleep: what the schedule and the engine cost when devices are not the machine's cores."""
    rows: list[Row] = []
    for ranks in options.ranks:
        subjects = Emulated(width=16), Emulated(width=65536)
        microbatches = 16 if ranks >= 8 else 8
        cases = [Case(subject, schedule, ranks, microbatches) for subject in subjects for schedule in SCHEDULES]
        rows += [_emulated_row(*pair) for pair in _run(cases, options.repeats)]
    print("\nEmulated devices: F sleeps 10 ms, B 20 ms. Times in ms; 'fed' is simulate with the measured times and send.")
    print("Steps as a multiple of (ideal, fed).")
    show(rows, "P", "M", "schedule", "message", "send", "ideal", "fed", "ours", "peer", "ours x", "peer x", "peer / ours")
    print("\nWhat our step took beyond the ideal, in % of the ideal, along its critical path.")
    show(rows, "P", "M", "schedule", "message", "overshoot", "transport", "handing over", "between", "begin", "end", "sum")
    return rows


def compute(options: Options) -> list[Row]:
    """Real compute on two ranks, with one process beside it."""
    subjects: list[Subject] = [Perceptron(), Transformer()]
    cases = [Case(subject, schedule, 2, 8) for subject in subjects for schedule in SCHEDULES]
    rows = [_compute_row(*pair) for pair in _run(cases, options.repeats, alone=True)]
    print("\nReal compute, one thread a rank. Times in ms; 'pieces' and 'whole': one process, 8 microbatches or one batch.")
    print("Gain: 'pieces' / step, each from the same turn.")
    show(rows, "P", "M", "schedule", "model", "fed", "ours", "peer", "pieces", "whole", "ours x", "peer / ours")
    show(rows, "P", "M", "schedule", "model", "our gain", "peer's gain", "our gain over whole")
    return rows


def engine(options: Options) -> list[Row]:
    """Stages without compute: what the engine costs for each action."""
    rows: list[Row] = []
    for ranks in (1, 2):
        cases = [Case(Trivial(), schedule, ranks, count) for schedule in SCHEDULES for count in (8, 32)]
        rows += [_engine_row(*pair) for pair in _run(cases, options.repeats, alone=True)]
    print("\nA trivial stage: us for each action of a rank (step / 2 M), then its CPU time, of the main thread and of all.")
    print("'autograd': the CPU time of one process that runs the same stages with no engine.")
    names = "step ours", "step peer", "step peer / ours", "main ours", "main peer", "main peer / ours"
    show(rows, "P", "M", "schedule", *names, "all ours", "all peer", "autograd")
    return rows


def _run(cases: list[Case], repeats: int, alone: bool = False) -> list[tuple[Case, list[Record]]]:
    """The cases, all of the same number of ranks, each with every rank's record."""
    everyone = ps.launch(run_cases, cases[0].ranks, cases, repeats, alone)
    return list(zip(cases, map(list, zip(*everyone, strict=True)), strict=True))


def _common(case: Case, records: list[Record]) -> Row:
    ours, peer = (step_times(records, name) for name in ("ours", "peer"))
    return {
        "P": case.ranks,
        "M": case.microbatches,
        "schedule": case.schedule,
        "ours": 1e3 * median(ours),
        "peer": 1e3 * median(peer),
        "peer / ours": ratio(ours, peer),
        "steps": {name: step_times(records, name) for name in records[0].laps},
    }


def _emulated_row(case: Case, records: list[Record]) -> Row:
    row = _common(case, records)
    bare, send = ideal(case), records[0].send
    with_measured = median(fed(case, timeline, send) for timeline in records[0].timelines)
    parts = {name.replace("_", " "): 100 * part / bare for name, part in typical_excess(case, records)._asdict().items()}
    multiples = {f"{name} x": (row[name] / bare / 1e3, row[name] / with_measured / 1e3) for name in ("ours", "peer")}
    times = {"send": 1e3 * send, "ideal": 1e3 * bare, "fed": 1e3 * with_measured}
    return row | {"message": case.subject.name} | times | multiples | parts | {"sum": sum(parts.values())}


def _compute_row(case: Case, records: list[Record]) -> Row:
    row = _common(case, records)
    steps = row["steps"]
    with_measured = median(fed(case, timeline, records[0].send) for timeline in records[0].timelines)
    return row | {
        "model": case.subject.name,
        "fed": 1e3 * with_measured,
        "pieces": 1e3 * median(steps["pieces"]),
        "whole": 1e3 * median(steps["whole"]),
        "ours x": row["ours"] / with_measured / 1e3,
        "our gain": ratio(steps["ours"], steps["pieces"]),
        "peer's gain": ratio(steps["peer"], steps["pieces"]),
        "our gain over whole": ratio(steps["ours"], steps["whole"]),
    }


def _engine_row(case: Case, records: list[Record]) -> Row:
    row = _common(case, records)
    actions = 2 * case.microbatches
    for name in ("ours", "peer"):
        laps = [lap for record in records for lap in record.laps[name]]
        row[f"step {name}"] = row[name] * 1e3 / actions
        row[f"main {name}"] = 1e6 * median(lap.main_thread for lap in laps) / actions
        row[f"all {name}"] = 1e6 * median(lap.process for lap in laps) / actions
    row["step peer / ours"], row["main peer / ours"] = row["peer / ours"], row["main peer"] / row["main ours"]
    row["autograd"] = 1e6 * median(lap.main_thread for lap in records[0].laps["pieces"]) / actions / case.ranks
    return row


def show(rows: list[Row], *columns: str) -> None:
    """Print these columns of the rows, aligned."""
    lines = [columns, *(tuple(_text(row[column]) for column in columns) for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
    if type(value) is tuple:
        return " ".join(f"{each:.3f}" for each in value)
    return str(value)


if __name__ == "__main__":
    main(tyro.cli(Options))
