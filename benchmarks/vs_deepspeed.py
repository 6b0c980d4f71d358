"""Penstock beside DeepSpeed's pipeline engine and torch's `Schedule1F1B`: training steps in turns, in one run, over Gloo.

python benchmarks/vs_deepspeed.py                   about five minutes
python benchmarks/vs_deepspeed.py --ranks 4 --repeats 30
python benchmarks/vs_deepspeed.py --only compute

All run 1F1B on the same stages, batch and loss, each with SGD of its own, and a step contains the optimizer's. Before anything
is timed, the losses of three steps and the weights after them are compared. Nothing else needs DeepSpeed: install it in an
environment of its own.
"""

import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from engines import EngineCase, Peer, Penstock, TrainingEngine
from explain import ideal, ratio, step_times
from measure import RankMeasurements, begin_peak, laps, peak_bytes_of_process, reset_peak, warm_up
from subjects import Emulated, Perceptron, Subject, TransformerSubject, Trivial
from tables import Row, show
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import penstock as ps

FORWARD_SECONDS = 0.010  # of F on an emulated device; I and W take as long
SMALL, LARGE = 16, 65536  # widths of a message: 1 KB and 4 MB
CHECKED_STEPS = 3
INSTALL = "run `DS_BUILD_OPS=0 pip install deepspeed` in an environment of its own that has Penstock"
Loss = Callable[[Any, Any], Tensor]


@dataclass
class RivalOptions:
    """Compare Penstock with DeepSpeed's pipeline engine."""

    only: Literal["emulated", "compute"] | None = None  # one part; default both
    ranks: tuple[int, ...] = (2, 4, 8)  # numbers of emulated devices
    repeats: int = 12  # steps of each engine that count
    json: Path | None = None  # write all numbers there


class WithOptimizer:
    """An engine whose step contains the optimizer's."""

    def __init__(self, engine: TrainingEngine) -> None:
        self.engine, self.modules = engine, engine.modules
        self.optimizer = optimizer_of(self.modules)

    def step(self) -> Tensor | None:
        """Train on the batch once; the batch's loss where the engine has it."""
        loss = self.engine.step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class DeepSpeed:
    """DeepSpeed's pipeline engine, as its documentation sets it up; microbatches are cut beforehand."""

    def __init__(self, case: EngineCase, rank: int) -> None:
        stages, (inputs, target) = case.subject.stages(case.ranks), case.subject.batch(case.microbatches)
        self.modules: list[nn.Module] = [stages[rank]]
        batches = list(zip(inputs.chunk(case.microbatches), target.chunk(case.microbatches), strict=True))
        self.engine = make_engine(stages, case.subject.loss, optimizer_of(self.modules), batches)
        self.batches = import_deepspeed().utils.RepeatingLoader(batches)

    def step(self) -> Tensor:
        """Train on the batch once; every rank has the loss."""
        return self.engine.train_batch(data_iter=self.batches)


def make_engine(
    stages: list[nn.Module],
    loss_fn: Loss,
    optimizer: Optimizer,
    batches: list[tuple[Tensor, Tensor]],
    max_norm: float = 0.0,
    **options: Any,
) -> Any:
    """Return this rank's engine of DeepSpeed. `batches`: a step's microbatches. `options`: of its `PipelineModule`."""
    deepspeed = import_deepspeed()
    deepspeed.init_distributed(dist_backend="gloo")  # takes the process group that is there
    own = [stage if index == dist.get_rank() else nn.Identity() for index, stage in enumerate(stages)]  # as `LayerSpec` does
    with redirect_stdout(io.StringIO()):  # it prints its layers
        module = deepspeed.pipe.PipelineModule(own, len(own), loss_fn=loss_fn, partition_method="uniform", **options)
    config = {
        "train_micro_batch_size_per_gpu": len(batches[0][0]),
        "gradient_accumulation_steps": len(batches),
        "gradient_clipping": max_norm,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine


def import_deepspeed() -> Any:
    """Return the module. Raises SystemExit with what to install if it is missing."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        deepspeed = import_module("deepspeed")
    except ImportError as error:
        raise SystemExit(f"{error}: {INSTALL}, and start this with its python") from None
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # an all-reduce for inference, which would be compiled now
    return deepspeed


def optimizer_of(modules: list[nn.Module]) -> SGD:
    """Return the optimizer that all engines get."""
    return SGD([parameter for module in modules for parameter in module.parameters()], lr=0.01, momentum=0.9)


ENGINES: dict[str, Callable[[EngineCase, int], TrainingEngine]] = {
    "ours": lambda case, rank: WithOptimizer(Penstock(case, rank)),
    "deepspeed": DeepSpeed,
    "torch": lambda case, rank: WithOptimizer(Peer(case, rank)),
}


def run_cases(cases: list[EngineCase], repeats: int) -> list[RankMeasurements]:
    """Run on every rank; return the steps that it measured for each case."""
    rank = ps.comms.init_distributed().rank
    return [_run(case, rank, repeats) for case in cases]


def _run(case: EngineCase, rank: int, repeats: int) -> RankMeasurements:
    engines, record = {name: make(case, rank) for name, make in ENGINES.items()}, RankMeasurements()
    check_same_training(engines)
    for name, lap in laps(engines, repeats):
        record.laps.setdefault(name, []).append(lap)
    return record


def peak_bytes_of_step(case: EngineCase, name: str) -> int:
    """Return what one engine takes in this process, which has no other, at the peak of a step after the first ones."""
    rank = ps.comms.init_distributed().rank
    warm_up({name: ENGINES[name](EngineCase(Trivial(), "1f1b", case.ranks, 8), rank)})  # its code is not counted
    before = begin_peak()
    engine = ENGINES[name](case, rank)
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
    import_deepspeed()
    os.environ |= {"OMP_NUM_THREADS": "1"}
    rows = list(measured_rows(options))
    print("\n1F1B, a training step with the optimizer's, in ms; 'ideal' is `simulate` for the nominal times.")
    print("Ratios above 1: Penstock is faster. Median and quartiles of pairs of steps from the same turn.")
    show(rows, "P", "M", "model", "ideal", *ENGINES, "deepspeed / ours", "torch / ours")
    print("\nPeak memory of a step in MB, weights, gradients and momentum included: the rank with the most.")
    show(rows, "P", "M", "model", *(f"{side} MB" for side in ENGINES))
    print("\nProcessor time of a step in ms, all threads of all ranks.")
    show(rows, "P", "M", "model", *(f"{side} CPU" for side in ENGINES))
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
        for case, *records in zip(group, *ps.launch(run_cases, ranks, group, options.repeats), strict=True):
            peaks = {name: max(ps.launch(peak_bytes_of_step, ranks, case, name)) for name in ENGINES}
            yield row_of(case, records, peaks)


def row_of(case: EngineCase, records: list[RankMeasurements], peak_bytes: dict[str, int]) -> Row:
    """Return all that is printed of a case."""
    steps = {side: step_times(records, side) for side in ENGINES}
    return {
        "P": case.ranks,
        "M": case.microbatches,
        "model": case.subject.name,
        "ideal": 1e3 * ideal(case) if case.subject.nominal else None,
        **{side: 1e3 * median(steps[side]) for side in ENGINES},
        **{f"{side} / ours": ratio(steps["ours"], steps[side]) for side in ENGINES if side != "ours"},
        **{
            f"{side} CPU": 1e3 * sum(median(lap.process for lap in record.laps[side]) for record in records) for side in ENGINES
        },
        **{f"{side} MB": peak_bytes[side] / 1e6 for side in ENGINES},
    }


if __name__ == "__main__":
    main(tyro.cli(RivalOptions))
