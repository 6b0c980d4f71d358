"""Traces made by hand, in the form that torch.profiler documents: of a timeline, on a CPU or on GPUs."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.schedule import Action, Event, Timeline, build, simulate
from penstock.timing.costs import Costs

Data = dict[str, Any]
COSTS = Costs(0.010, 0.010, 0.010, send=0.001)  # seconds


def timeline(name: str = "1f1b", ranks: int = 2, microbatches: int = 4) -> Timeline:
    return simulate(build(name, ranks, microbatches), COSTS)


def write(
    folder: Path,
    planned: Timeline,
    steps: Sequence[int] = (3, 4, 5),
    ahead: Sequence[float] = (),  # rank -> seconds its clock is ahead
    hosts: Sequence[str] = (),
    on_gpu: bool = False,
    name: Callable[[Action], str] = lambda action: f"PP:{action}",
    extra: Callable[[int, Event, float], list[Data]] = lambda rank, event, begin: [],  # what else a rank runs in an action
) -> list[Path]:
    """Write a trace for each rank, with these profiler steps, and return the files."""
    folder.mkdir(exist_ok=True)
    files = []
    for rank in range(planned.ranks):
        events, begin = list[Data](), 1000.0 + (ahead[rank] if ahead else 0.0)
        for step in steps:
            events.append(range_event(f"ProfilerStep#{step}", begin - 0.001, begin + planned.makespan + 0.001))
            for event in planned.rows[rank]:
                events += _device_events(event, begin, len(events)) if on_gpu else [_action(event, begin, name(event.action))]
                events += extra(rank, event, begin)
            begin += planned.makespan + 0.010
        header = {"schemaVersion": 1, "distributedInfo": {"backend": "gloo", "rank": rank, "world_size": planned.ranks}}
        header["host_name"] = hosts[rank] if hosts else "one"
        files.append(folder / f"worker{rank}.json")
        files[-1].write_text(json.dumps({**header, "traceEvents": events, "traceName": "made"}, indent=1))
    return files


def range_event(name: str, start: float, end: float, category: str = "user_annotation", **args: Any) -> Data:
    place = {"pid": 1, "tid": 1, "ts": round(1e6 * start, 3), "dur": round(1e6 * (end - start), 3)}
    return {"ph": "X", "cat": category, "name": name, **place, "args": args}


def _action(event: Event, begin: float, name: str) -> Data:
    return range_event(name, begin + event.start, begin + event.end)


def _device_events(event: Event, begin: float, number: int) -> list[Data]:
    """The host is in the range for a tenth of the time and launches two kernels, which fill what the action took."""
    start, end = begin + event.start, begin + event.end
    middle, host = (start + end) / 2, start + (end - start) / 10
    kernels = [(start, middle, 2 * number), (middle, end, 2 * number + 1)]
    return [
        range_event(f"PP:{event.action}", start, host),
        *(range_event("cudaLaunchKernel", host - 1e-6, host, "cuda_runtime", correlation=key) for *_, key in kernels),
        *(range_event("gemm", first, last, "kernel", correlation=key) for first, last, key in kernels),
        range_event("ncclDevKernel_SendRecv", end, end + 1, "kernel", correlation=kernels[0][2]),  # a message is no work
    ]
