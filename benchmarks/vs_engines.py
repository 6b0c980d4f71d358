"""Penstock beside the pipeline engines of DeepSpeed, picotron and torch (`Schedule1F1B`): training steps in turns, over Gloo.

python benchmarks/vs_engines.py --picotron CLONE      about seven minutes
python benchmarks/vs_engines.py --ranks 4 --repeats 30
python benchmarks/vs_engines.py --only compute

All run 1F1B on the same stages, batch and loss, each with SGD of its own, and a step contains the optimizer's. Before anything
is timed, the losses of three steps and the weights after them are compared. Nothing else needs DeepSpeed or picotron: what is
missing is left out.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import tyro
from engines import EngineCase, TrainingEngine
from explain import ideal, ratio, step_times
from measure import RankMeasurements, begin_peak, laps, peak_bytes_of_process, reset_peak, warm_up
from subjects import Emulated, Perceptron, Subject, TransformerSubject, Trivial
from tables import Row, show
from torch import Tensor
from training_engines import engine_classes, print_missing_engines

import penstock as ps

FORWARD_SECONDS = 0.010  # of F on an emulated device; I and W take as long
SMALL, LARGE = 16, 65536  # widths of a message: 1 KB and 4 MB
CHECKED_STEPS = 3


@dataclass
class RivalOptions:
    """Compare Penstock with other engines of pipelines."""

    only: Literal["emulated", "compute"] | None = None  # one part; default both
    ranks: tuple[int, ...] = (2, 4, 8)  # numbers of emulated devices
    picotron: Path | None = None  # the folder of a clone of picotron
    repeats: int = 12  # steps of each engine that count
    json: Path | None = None  # write all numbers there


def run_cases(cases: list[EngineCase], repeats: int, picotron: Path | None) -> list[RankMeasurements]:
    """Run on every rank; return the steps that it measured for each case."""
    rank = ps.comms.init_distributed().rank
    return [_run(case, rank, repeats, picotron) for case in cases]


def _run(case: EngineCase, rank: int, repeats: int, picotron: Path | None) -> RankMeasurements:
    engines = {name: make(case, rank) for name, make in engine_classes(picotron).items()}
    record = RankMeasurements()
    check_same_training(engines)
    for name, lap in laps(engines, repeats):
        record.laps.setdefault(name, []).append(lap)
    return record


def peak_bytes_of_step(case: EngineCase, name: str, picotron: Path | None) -> int:
    """Return what one engine takes in this process, which has no other, at the peak of a step after the first ones."""
    rank = ps.comms.init_distributed().rank
    make = engine_classes(picotron)[name]
    warm_up({name: make(EngineCase(Trivial(), "1f1b", case.ranks, 8), rank)})  # its code is not counted
    before = begin_peak()
    engine = make(case, rank)
    warm_up({name: engine})
    reset_peak()
    engine.step()
    return peak_bytes_of_process() - before


def check_same_training(engines: dict[str, TrainingEngine]) -> None:
    """Train each engine for some steps. Raises AssertionError if losses or weights differ by more than rounding."""
    before = [weight.detach().clone() for weight in weights_of(engines["ours"])]
    losses = {name: [engine.step() for _ in range(CHECKED_STEPS)] for name, engine in engines.items()}

    assert not all(map(torch.equal, before, weights_of(engines["ours"]))), "the weights have not changed"
    for name, engine in engines.items():
        torch.testing.assert_close(weights_of(engine), weights_of(engines["ours"]))
        for ours, other in zip(losses["ours"], losses[name], strict=True):
            if ours is not None and other is not None:  # torch's is on the last rank
                torch.testing.assert_close(other, ours, check_dtype=False)


def weights_of(engine: TrainingEngine) -> list[Tensor]:
    """Return this rank's parameters."""
    return [parameter for module in engine.modules for parameter in module.parameters()]


def main(options: RivalOptions) -> None:
    """Run the parts that are asked for and print their tables."""
    print_missing_engines(options.picotron)
    os.environ |= {"OMP_NUM_THREADS": "1"}
    engines, rows = list(engine_classes(options.picotron)), list(measured_rows(options))
    print("\n1F1B, a training step with the optimizer's, in ms; 'ideal' is `simulate` for the nominal times.")
    print("Ratios above 1: Penstock is faster. Median and quartiles of pairs of steps from the same turn.")
    show(rows, "P", "M", "model", "ideal", *engines, *(f"{name} / ours" for name in engines if name != "ours"))
    print("\nPeak memory of a step in MB, weights, gradients and momentum included: the rank with the most.")
    show(rows, "P", "M", "model", *(f"{name} MB" for name in engines))
    print("\nProcessor time of a step in ms, all threads of all ranks.")
    show(rows, "P", "M", "model", *(f"{name} CPU" for name in engines))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


def measured_rows(options: RivalOptions) -> Iterator[Row]:
    """Run all cases, those with as many ranks in one launch."""
    cases: dict[int, list[EngineCase]] = {}
    computed: list[Subject] = [Perceptron(), TransformerSubject()]
    if options.only != "compute":
        for ranks in options.ranks:
            cases[ranks] = [
                EngineCase(Emulated(width, FORWARD_SECONDS), "1f1b", ranks, max(8, 2 * ranks)) for width in (SMALL, LARGE)
            ]
    if options.only != "emulated":
        cases.setdefault(2, []).extend(EngineCase(subject, "1f1b", 2, 8) for subject in computed)
    for ranks, group in sorted(cases.items()):
        for case, *records in zip(group, *ps.launch(run_cases, ranks, group, options.repeats, options.picotron), strict=True):
            peaks = {name: max(ps.launch(peak_bytes_of_step, ranks, case, name, options.picotron)) for name in records[0].laps}
            yield row_of(case, records, peaks)


def row_of(case: EngineCase, records: list[RankMeasurements], peak_bytes: dict[str, int]) -> Row:
    """Return all that is printed of a case."""
    steps = {name: step_times(records, name) for name in peak_bytes}
    processor_seconds = {name: sum(median(lap.process for lap in record.laps[name]) for record in records) for name in steps}
    return {
        "P": case.ranks,
        "M": case.microbatches,
        "model": case.subject.name,
        "ideal": 1e3 * ideal(case) if case.subject.nominal else None,
        **{name: 1e3 * median(seconds) for name, seconds in steps.items()},
        **{f"{name} / ours": ratio(steps["ours"], seconds) for name, seconds in steps.items() if name != "ours"},
        **{f"{name} CPU": 1e3 * seconds for name, seconds in processor_seconds.items()},
        **{f"{name} MB": peak / 1e6 for name, peak in peak_bytes.items()},
    }


if __name__ == "__main__":
    main(tyro.cli(RivalOptions))
