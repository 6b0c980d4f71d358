"""A model of three times the memory that a process may take: from the meta device, imported, trained and exported by four."""

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import penstock as ps
from penstock import checkpoint
from penstock.checkpoint.files.tensor_files import TensorFiles
from penstock.learn.devices import CAN_LIMIT_MEMORY

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(not CAN_LIMIT_MEMORY, reason="Linux tells how much memory a process has")]

LIMIT, LAYERS = 40_000_000, 24
WIDTH = int((3.02 * LIMIT / 4 / LAYERS) ** 0.5)  # so the weights alone are three times the limit
FILE = "model-{:05d}-of-00012.safetensors"  # of two layers


def described(width):
    """On the meta device, with frozen weights and biases to train."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)])
    for layer in model:
        layer.weight.requires_grad_(False)
    return model


def fine_tune(folder, width, microbatches=2):
    """Import, one step, export."""
    pipe = ps.Pipeline(described(width), nn.functional.mse_loss, microbatches=microbatches)
    checkpoint.import_weights(pipe, folder)
    pipe.step(torch.ones(4, width), target=torch.zeros(4, width))
    torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    checkpoint.export(pipe, folder / "out", max_shard_size=LIMIT // 8)


def in_memory():
    """Bytes of this process that are not a file's."""
    return 1024 * int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0])


def rank_peak(small, large):
    """The most memory that it takes, in bytes."""
    ps.comms.init_distributed(backend="gloo")
    fine_tune(small, 4)  # what torch and the ranks set up for themselves is there before memory counts
    begin = peak = in_memory()
    done = threading.Event()

    def watch():
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, in_memory())

    watching = threading.Thread(target=watch)
    watching.start()
    fine_tune(large, WIDTH)
    done.set()
    watching.join()
    return peak - begin


def write(folder, width):
    folder.mkdir()
    homes = {}
    for number in range(LAYERS // 2):
        state = {}
        for layer in (2 * number, 2 * number + 1):
            state[f"{layer}.weight"] = torch.full((width, width), 1 / width, dtype=torch.bfloat16)
            state[f"{layer}.bias"] = torch.full((width,), layer / LAYERS, dtype=torch.bfloat16)
        save_file(state, folder / FILE.format(number + 1))
        homes |= dict.fromkeys(state, FILE.format(number + 1))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))


@pytest.mark.slow
def test_four_processes_import_train_and_export_a_model_of_three_times_what_each_takes(tmp_path):
    small, large = tmp_path / "small", tmp_path / "large"
    write(small, 4)
    write(large, WIDTH)
    (alone,) = ps.launch(rank_peak, 1, small, large)
    assert alone > 3 * LIMIT
    peaks = ps.launch(rank_peak, 4, small, large)
    assert max(peaks) < LIMIT, peaks
    index = json.loads((large / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] > 3 * LIMIT
    files = TensorFiles(large / "out")
    for layer in range(LAYERS):
        assert torch.equal(files[f"{layer}.weight"], torch.full((WIDTH, WIDTH), 1 / WIDTH, dtype=torch.bfloat16).float())
        assert not bool((files[f"{layer}.bias"] == layer / LAYERS).all())
