"""benchmarks/stalls.py: what it reads from a profiler's trace."""

import gzip
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from stalls import read


def event(category, name, start, length):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length}


EVENTS = [
    event("kernel", "gemm", 100, 50),
    event("gpu_memcpy", "Memcpy DtoH", 120, 100),  # on another stream, beside it
    event("kernel", "add", 225, 5),
    event("kernel", "late", 300, 10),
    event("cuda_runtime", "cudaLaunchKernel", 90, 3),
    event("cuda_runtime", "cudaMemcpyAsync", 110, 4),
    event("cuda_runtime", "cudaStreamSynchronize", 230, 60),
    event("cuda_runtime", "cudaStreamSynchronize", 310, 5),
    event("cpu_op", "aten::add", 80, 3),
    {"ph": "M", "name": "process_name"},
]


@pytest.mark.parametrize("packed", [False, True])
def test_where_the_device_stands_still_and_what_the_host_waits_in(tmp_path, packed):
    path, text = tmp_path / ("trace.json.gz" if packed else "trace.json"), json.dumps({"traceEvents": EVENTS}).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    found = read(path)
    assert (found.span, found.idle, found.gaps) == (210, 75, [(70, "late")])
    assert found.waits == {"cudaStreamSynchronize": (2, 65.0)}
    assert "idle 0.07 ms of them (35.7%)" in str(found)
    assert "cudaStreamSynchronize x 2, 65 us" in str(found)
