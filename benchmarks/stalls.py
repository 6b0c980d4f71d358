"""Where a GPU stands still in a step, and what the host calls that waits: read from a trace of torch's profiler.

    python benchmarks/stalls.py trace.json.gz

The trace is what `torch.profiler.profile().export_chrome_trace(path)` writes. Gaps are between one piece of work of the device
and the next, on whatever stream.
"""

import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

GAP = 20.0  # microseconds; what the device takes from one kernel to the next anyway is a few
DEVICE = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))  # categories of what it does
WAITS = ("Synchronize", "cudaMalloc", "cudaFree", "cudaHostRegister", "cudaMemcpy")  # how calls that may wait are called
NEVER = ("Async", "cudaMallocAsync", "cudaFreeAsync")


class Stalls(NamedTuple):
    """What a trace tells; times in microseconds."""

    span: float  # from the first work of the device to the last
    idle: float  # of it, without any work
    gaps: list[tuple[float, str]]  # the longest of those over GAP: how long, and the work that it ended with
    waits: Mapping[str, tuple[int, float]]  # what the host called that may wait: how often, and for how long

    def __str__(self) -> str:
        share = self.idle / self.span if self.span else 0.0
        lines = [f"the device: {self.span / 1e3:.2f} ms, idle {self.idle / 1e3:.2f} ms of them ({share:.1%})"]
        lines += [f"  idle {gap:9.0f} us before {name[:80]}" for gap, name in self.gaps]
        return "\n".join([*lines, *(f"  host: {name} x {n}, {time:.0f} us" for name, (n, time) in self.waits.items())])


def read(path: Path) -> Stalls:
    """What the trace at `path` tells."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return stalls(json.loads(text)["traceEvents"])


def stalls(events: Iterable[Mapping[str, Any]], most: int = 10) -> Stalls:
    """The same of a trace's events; of gaps the `most` longest."""
    whole = [event for event in events if event.get("ph") == "X"]
    work = sorted((event["ts"], event["ts"] + event["dur"], event["name"]) for event in whole if event.get("cat") in DEVICE)
    gaps, busy_until = list[tuple[float, str]](), work[0][0] if work else 0.0
    for start, end, name in work:
        gaps += [(start - busy_until, name)] if start > busy_until else []
        busy_until = max(busy_until, end)
    count, seconds = Counter[str](), Counter[str]()
    for event in whole:
        name = event["name"]
        if (
            event.get("cat") == "cuda_runtime"
            and any(wait in name for wait in WAITS)
            and not any(value in name for value in NEVER)
        ):
            count[name] += 1
            seconds[name] += event["dur"]
    waits = {name: (count[name], float(seconds[name])) for name in sorted(count, key=lambda value: -seconds[value])}
    longest = sorted((gap for gap in gaps if gap[0] > GAP), reverse=True)[:most]
    return Stalls(busy_until - work[0][0] if work else 0.0, sum(gap for gap, _ in gaps), longest, waits)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(f"{argument}\n{read(Path(argument))}")
