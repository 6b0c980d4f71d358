"""Memory that a step frees is there for the next one."""

import resource
import sys

import pytest
import torch

import penstock as ps
from penstock.comms.system import keep_freed_memory


def rank_faults() -> int:
    """Page faults while 4 MB are freed and taken again a hundred times, once the process has met the block."""
    ps.comms.init_distributed(backend="gloo")
    for _ in range(20):
        torch.ones(1 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        torch.ones(1 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.ranks
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_freed_memory_is_taken_again_without_a_page_fault() -> None:
    [faults] = ps.launch(rank_faults, 1)
    assert faults < 100, "each 4 MB are 1024 pages"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_what_the_environment_says_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()
