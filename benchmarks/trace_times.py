"""Times that are read from torch's traces, beside timers around its actions; and predicted steps beside those that ran.

python benchmarks/trace_times.py --ranks 2 4

torch's GPipe, 1F1B, interleaved, zb-v and dualpipe-v run on Gloo under its profiler, on emulated devices, which sleep, and with
`--compute` on an MLP. A row for each: how many actions were found, how many are within 5 % of their timer (start and length, as
shares of the length), the middle and the largest error; of actions under a millisecond, as torch's I of the first stage is, the
largest error in milliseconds. Then steps predicted from the trace of another schedule beside those that ran.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import trace_faults
from torch import nn
from torch.distributed import pipelining

import penstock as ps
from penstock.integrations.torch_trace import read_record
from penstock.learn.devices import EmulatedDevice
from penstock.schedule import Measurement, build
from penstock.view.record import Record

SECONDS = 0.020  # of a rank's forward, of its I and of its W
CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
if torch.__version__.startswith("2.11."):  # whose runtime has a rank send to itself before the first step of these
    del CLASSES["zb-v"], CLASSES["dualpipe-v"]
SINGLE_STAGE, IN_A_V = {"gpipe", "1f1b"}, {"zb-v", "dualpipe-v"}
CLOSE_SHARE = 0.05  # of an action's length
MIN_SECONDS = 0.001  # of an action whose error is a share of its length
Times = dict[str, list[tuple[float, float]]]  # action -> its start and end in each step


def main() -> None:
    """Run all schedules, print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--compute", action="store_true", help="an MLP in place of devices that sleep")
    options = parser.parse_args()
    print(f"torch {torch.__version__}")
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            ps.launch(run_schedules, ranks, Path(folder), options.compute)
            records = {name: read_record(Path(folder) / name)[0] for name in CLASSES}
            for name, record in records.items():
                print(f"| {name} | {ranks} | {compare(record, Path(folder) / name)} |", flush=True)
            if not options.compute:
                print("\n".join(predictions(records, ranks)), flush=True)


def compare(record: Record, folder: Path) -> str:
    """Return the number of actions found, the share within 5 % of their timers, and the largest errors."""
    timers = {}
    for rank, row in enumerate(record.steps[0].rows):
        for action, times in json.loads((folder / f"timers{rank}.txt").read_text()).items():
            timers[action] = times[-len(record.steps) :]
        assert all(str(event.action) in timers for event in row)
    errors, short_errors = list[float](), [0.0]
    for place, step in enumerate(record.steps):
        for event in step.events:
            start, end = timers[str(event.action)][place]
            length = end - start
            error = max(abs(event.start - start), abs(event.end - event.start - length))
            if length < MIN_SECONDS:
                short_errors.append(error)
            else:
                errors.append(error / length)
    found = {str(event.action) for event in record.usual.events}
    close = sum(error <= CLOSE_SHARE for error in errors)
    num_found, short = f"{len(found & set(timers))} of {len(timers)}", f"{1e3 * max(short_errors):.2f} ms"
    return f"{num_found} | {close} of {len(errors)} | {median(errors):.1%} | {max(errors):.1%} | {short}"


def predictions(records: dict[str, Record], ranks: int) -> list[str]:
    """Return rows: steps of the other schedules predicted from the trace of one with as many stages, beside those that ran."""
    lines = []
    for source, others in (("gpipe", ["1f1b"]), ("1f1b", ["gpipe"]), ("interleaved-1f1b", sorted(IN_A_V))):
        measured = Measurement.from_timelines(*records[source].steps)
        for name in [other for other in others if other in records]:
            predicted = measured.predict(build(name, ranks, measured.schedule.microbatches)).makespan
            ran = records[name].usual.makespan
            error = f"{predicted / ran - 1:+.1%}"
            lines.append(f"| {source} | {name} | {ranks} | {1e3 * predicted:.1f} ms | {1e3 * ran:.1f} ms | {error} |")
    return lines


def run_schedules(folder: Path, compute: bool) -> None:
    """Run every schedule on this rank, each into a folder with its trace and its timers."""
    topology = ps.comms.init_distributed(backend="gloo")
    torch.set_num_threads(1)
    for name in CLASSES:
        path = folder / name
        path.mkdir(exist_ok=True)
        times: Times = {}
        step = make_step(name, topology.rank, topology.world_size, compute, times)
        trace_faults.profile_steps(step, path / f"rank{topology.rank}.json")
        (path / f"timers{topology.rank}.txt").write_text(json.dumps(times))


def make_step(name: str, rank: int, ranks: int, compute: bool, times: Times) -> Callable[[], Any]:
    """Return a step of torch's schedule `name`, whose actions write into `times`."""
    stages_per_rank = 1 if name in SINGLE_STAGE else 2
    count, microbatches = stages_per_rank * ranks, 2 * ranks
    own = [rank] if name in SINGLE_STAGE else [rank, count - 1 - rank if name in IN_A_V else rank + ranks]
    width, rows = (1024, 128) if compute else (16, 4)
    seconds = SECONDS / stages_per_rank
    stages = []
    for index in own:
        layers = [nn.Linear(width, width) for _ in range(8 // stages_per_rank)]
        module = nn.Sequential(*layers) if compute else EmulatedDevice(seconds, seconds, seconds)
        stages.append(with_timers(pipelining.PipelineStage(module, index, count, torch.device("cpu")), times))
    schedule = getattr(pipelining, CLASSES[name])(
        stages[0] if name in SINGLE_STAGE else stages, microbatches, loss_fn=trace_faults.first_column, scale_grads=False
    )
    with_loss_in_forward(schedule, times)
    batch, target = torch.zeros(rows * microbatches, width), torch.zeros(rows * microbatches)
    losses: list[torch.Tensor] = []
    arguments = {"target": target, "losses": losses} if count - 1 in own else {}
    return partial(schedule.step, *((batch,) if 0 in own else ()), **arguments, return_outputs=False)


def with_timers(stage: Any, times: Times) -> Any:
    """Return `stage` with a timer around every forward and backward."""

    def timed(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            start = time.time()
            result = function(microbatch, *args, **kwargs)
            letter = kind if kwargs.get("full_backward", True) else "I"
            times.setdefault(f"{stage.stage_index}{letter}{microbatch}", []).append((start, time.time()))
            return result

        return call

    stage.forward_one_chunk = timed(stage.forward_one_chunk, "F")
    stage.backward_one_chunk = timed(stage.backward_one_chunk, "B")
    stage.backward_weight_one_chunk = timed(stage.backward_weight_one_chunk, "W")
    return stage


def with_loss_in_forward(schedule: Any, times: Times) -> None:
    """Let the timers of the last stage's forwards end after the loss."""
    compute_loss = schedule._maybe_compute_loss

    def timed(stage: Any, output: Any, target: Any, microbatch: int, *args: Any, **kwargs: Any) -> Any:
        result = compute_loss(stage, output, target, microbatch, *args, **kwargs)
        if stage.is_last:
            of_action = times[f"{stage.stage_index}F{microbatch}"]
            of_action[-1] = of_action[-1][0], time.time()
        return result

    schedule._maybe_compute_loss = timed


if __name__ == "__main__":
    main()
