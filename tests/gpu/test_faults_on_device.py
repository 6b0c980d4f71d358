"""What goes wrong in a stage on a GPU is told on all ranks, and where the GPU can go on the next step works."""

import os
import signal

import pytest
import torch
from device_models import DEVICES, on
from torch import nn

import penstock as ps

M, WIDTH = 4, 8
HUGE = 1 << 50  # bytes
CYCLES = 10**10  # seconds of a device


class FailingLayer(nn.Module):
    """A layer whose sixth forward fails, the second of the second step."""

    def __init__(self, how):
        super().__init__()
        self.how, self.linear, self.count = how, nn.Linear(WIDTH, WIDTH), 0

    def forward(self, hidden):
        self.count += 1
        if self.count == M + 2:
            match self.how:
                case "raise":
                    raise ValueError("planted")
                case "memory":
                    torch.empty(HUGE, dtype=torch.uint8, device=hidden.device)
                case "die":
                    os._exit(9)
                case "killed":  # while its device is busy, and others wait for it
                    torch.cuda._sleep(CYCLES)
                    os.kill(os.getpid(), signal.SIGKILL)
                case "assert":
                    nn.functional.embedding(torch.full((len(hidden),), 10**6, device=hidden.device), self.linear.weight)
        return self.linear(hidden)


def rank_faults(device, how):
    """What three steps come to."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), FailingLayer(how))
    pipe = ps.Pipeline(model, nn.functional.mse_loss, "1f1b", M, topology=on(device), seed=None)
    results = []
    for _ in range(3):
        try:
            pipe.step(torch.ones(2 * M, WIDTH), target=torch.zeros(2 * M, WIDTH))
            results.append("done")
        except ps.PenstockError as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


@pytest.mark.ranks
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["raise", "memory"])
def test_an_error_is_told_on_both_ranks_and_the_next_step_works(device, how):
    first, second = ps.launch(rank_faults, 2, device, how)
    assert first == second
    assert [result.partition(":")[0] for result in first] == ["done", "StageError", "done"]
    assert "rank 1, stage 1, action 1F1, microbatch 1" in first[1]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("device", "how"), [("cpu", "die"), *[pytest.param("cuda", how, marks=pytest.mark.gpu) for how in ("die", "killed")]]
)
def test_a_rank_that_dies_ends_all(device, how):
    with pytest.raises(ps.LostRankError, match="rank 1"):
        ps.launch(rank_faults, 2, device, how)


@pytest.mark.gpu
def test_a_failed_assertion_of_a_kernel_ends_all_with_its_words():
    """CUDA gives the process no way to go on: every later step fails too."""
    try:
        everyone = ps.launch(rank_faults, 2, "cuda", "assert")
    except ps.PenstockError as error:
        everyone = [["done", str(error)]]
    assert all("done" not in result[1:] for result in everyone)
    assert any("assert" in " ".join(result) or "CUDA" in " ".join(result) for result in everyone)
