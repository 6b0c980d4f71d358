"""While torch.profiler runs, its trace has every action and message of ours under its cell; without it nothing is added."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock as ps

pytestmark = pytest.mark.ranks

SCHEDULE, RANKS, MICROBATCHES = "zb-h1", 2, 3


def rank_profiled(folder: Path) -> None:
    from penstock.engine import profiling

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    pipe = ps.Pipeline(model, nn.functional.mse_loss, SCHEDULE, MICROBATCHES)
    batch, ranges = torch.randn(6, 4), profiling.partial
    profiling.partial = None  # it would fail if it was called without a profiler
    pipe.step(batch, target=batch)
    profiling.partial = ranges
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        pipe.step(batch, target=batch)
    names = [event.name for event in sorted(profiler.events(), key=lambda event: event.time_range.start)]
    row = [str(event.action) for event in pipe.timeline().rows[pipe.topology.rank]]
    (folder / f"{pipe.topology.rank}").write_text("\n".join(names))
    (folder / f"{pipe.topology.rank} ran").write_text("\n".join(row))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("names")
    ps.launch(rank_profiled, RANKS, folder)
    return folder


def test_every_action_is_a_range_with_its_cell_in_the_order_it_ran(folder: Path) -> None:
    for rank in range(RANKS):
        names = (folder / f"{rank}").read_text().split("\n")
        row = (folder / f"{rank} ran").read_text().split("\n")
        assert [name for name in names if re.fullmatch(r"\d[FBIW]\d", name)] == row


def test_no_transfer_that_may_outlive_the_profiler_is_recorded(folder: Path) -> None:
    """Its end would be written into freed memory: torch crashes."""
    assert [line for rank in range(RANKS) for line in (folder / f"{rank}").read_text().split("\n") if "gloo:" in line] == []


def test_every_message_is_a_range_on_both_its_ranks(folder: Path) -> None:
    names = [(folder / f"{rank}").read_text().split("\n") for rank in range(RANKS)]
    for microbatch in range(MICROBATCHES):
        assert f"0SEND_F{microbatch}" in names[0]
        assert f"1RECV_F{microbatch}" in names[1]
        assert f"1SEND_B{microbatch}" in names[1]
        assert f"0RECV_B{microbatch}" in names[0]
