"""Weight gradients put off and taken as one product, on the MLP: our tables beside all of the peer's schedules."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from engines import SHARED, EngineCase, OneProcessEngine, Peer, Penstock, TrainingEngine
from explain import ratio, step_times
from measure import RankMeasurements, laps, warm_up
from subjects import Perceptron
from tables import Row, show

import penstock as ps

RANKS = 2
LAST = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs")  # ours with all W at the end
AS_IT_IS = ("zb-h1", "zb-h2", "interleaved-zb", "zb-v")
EXACT = 1e-12  # of the largest element of a gradient, in float64


def merge(counts: Sequence[int], repeats: int) -> list[Row]:
    """Measure for each of these numbers of microbatches, and print."""
    rows = [row for microbatches in counts for row in _rows(microbatches, repeats)]
    print("\nMerged weight gradients: MLP of 16 x 1024, batch 256, 2 ranks of one thread. Times in ms.")
    print("'peer's best / step': the peer's fastest schedule in the same turns. '+W': all W last. Gradients were checked.")
    show(rows, "M", "engine", "schedule", "step", "peer's best / step")
    return rows


def _rows(microbatches: int, repeats: int) -> list[Row]:
    cases = {("ours", f"{name} +W"): EngineCase(Perceptron(), name, RANKS, microbatches, True, True) for name in LAST}
    cases |= {("ours", name): EngineCase(Perceptron(), name, RANKS, microbatches, merge=True) for name in AS_IT_IS}
    cases |= {("peer", name): EngineCase(Perceptron(), name, RANKS, microbatches) for name in SHARED}
    records = ps.launch(_run, RANKS, cases, repeats)
    steps = {key: step_times(records, " ".join(key)) for key in cases}
    middle = {key: ratio([1.0] * repeats, steps[key]).middle for key in cases}
    best = min((key for key in cases if key[0] == "peer"), key=middle.__getitem__)
    return [
        {
            "M": microbatches,
            "engine": engine,
            "schedule": name,
            "step": 1e3 * middle[engine, name],
            "peer's best / step": ratio(steps[engine, name], steps[best]),
            "steps": steps[engine, name],
        }
        for engine, name in sorted(cases, key=middle.__getitem__)
    ]


def _run(cases: dict[tuple[str, str], EngineCase], repeats: int) -> RankMeasurements:
    rank = ps.comms.init_distributed().rank
    _check_exact([case for (engine, _), case in cases.items() if engine == "ours"], rank)
    engines: dict[str, TrainingEngine] = {
        " ".join(key): (Penstock if key[0] == "ours" else Peer)(case, rank) for key, case in cases.items()
    }
    warm_up(engines)
    record = RankMeasurements()
    for name, lap in laps(engines, repeats):
        record.laps.setdefault(name, []).append(lap)
    return record


def _check_exact(cases: list[EngineCase], rank: int) -> None:
    """Our gradients in float64 are those of the whole batch at once. Raises AssertionError if not."""
    cases = [replace(case, subject=Perceptron(dtype=torch.float64)) for case in cases]
    whole = OneProcessEngine(cases[0], 0, microbatches=1)
    whole.step()
    exact = {name: parameter.grad for module in whole.modules for name, parameter in module.named_parameters()}
    for case in cases:
        ours = Penstock(case, rank)
        ours.step()
        for name, parameter in ours.pipe.named_parameters():
            expected = exact[name]
            assert parameter.grad is not None
            assert expected is not None
            error = (parameter.grad - expected).abs().max() / expected.abs().max()
            assert error <= EXACT, f"{case.schedule}: the gradient of {name} is off by {error}"
