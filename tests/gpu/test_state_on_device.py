"""What a training on a GPU keeps and leaves: memory by step, checkpoints that move between devices, and the command."""

import json
import sys

import pytest
import torch
from device_models import DEVICES, batch, made, on
from torch import nn

import penstock as ps
from penstock import checkpoint
from penstock.engine import report, step

M = 4


def trained(topology, device):
    model, loss_fn = made("gpt", device, layers=4)
    pipe = ps.Pipeline(model, loss_fn, "1f1b", M, topology=topology)
    return pipe, torch.optim.AdamW(pipe.parameters(), lr=1e-3)


def rank_moves(device, folder):
    """Two steps, a checkpoint, and it again in a pipeline on the CPU and one here; what both come to after a step more."""
    topology = on(device)
    pipe, optimizer = trained(topology, device)
    inputs, target = batch("gpt", device, M)
    for _ in range(2):
        pipe.step(inputs, target=target)
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(folder, pipe, optimizer, extra={"from": device})
    states = [{name: tensor.cpu() for name, tensor in pipe.state_dict().items()}]
    for where in (ps.comms.Topology(device=torch.device("cpu")), topology):
        other, again = trained(where, device)
        assert checkpoint.resume(folder, other, again) == {"from": device}
        states.append({name: tensor.cpu() for name, tensor in other.state_dict().items()})
        moments = next(iter(again.state.values()))
        assert moments["exp_avg"].device.type == where.device.type
    other.step(inputs, target=target)
    pipe.step(inputs, target=target)
    gradients = [[parameter.grad.cpu() for parameter in one.parameters()] for one in (pipe, other)]
    return states, gradients


@pytest.mark.ranks
@pytest.mark.parametrize("device", DEVICES)
def test_a_checkpoint_moves_between_devices_and_goes_on_to_the_bit(device, tmp_path):
    [(states, gradients)] = ps.launch(rank_moves, 1, device, tmp_path)
    for other in states[1:]:
        assert all(torch.equal(state, other[name]) for name, state in states[0].items())
    assert all(map(torch.equal, *gradients))


def rank_memory(names):
    topology, peaks = on("cuda"), {}
    for name in names:
        model, loss_fn = made("gpt", "cuda")
        pipe = ps.Pipeline(model, loss_fn, name, 8, topology=topology)
        inputs, target = batch("gpt", "cuda", 8)
        pipe.step(inputs, target=target)
        held = torch.cuda.memory_allocated()
        big = torch.empty(2**34, dtype=torch.uint8, device="cuda")  # between the steps: no part of the next one's peak
        del big
        pipe.step(inputs, target=target)
        peaks[name] = [value - held for value in pipe.report.peak_memory]
        del pipe
    return peaks


@pytest.mark.gpu
def test_the_peak_is_of_the_step_and_1f1b_keeps_less_than_gpipe():
    peaks = ps.launch(rank_memory, 2, ["gpipe", "1f1b"])[0]
    print(peaks)
    assert all(0 < count < 2**34 for peak in peaks.values() for count in peak)
    assert peaks["1f1b"][1] < peaks["gpipe"][1]


def test_the_allocators_peak_is_forgotten_before_each_step_and_told_after_it(monkeypatch):
    results, gpu = [], torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: results.append("forgotten"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: results.append("asked") or 2**20)
    monkeypatch.setattr(step, "reset_peak_memory", lambda device: report.reset_peak_memory(gpu))
    monkeypatch.setattr(step, "peak_process_memory", lambda device: report.peak_process_memory(gpu))
    pipe = ps.Pipeline(nn.Linear(3, 3), lambda output, target: results.append("acted") or output.sum(), "1f1b", 1)
    for _ in range(2):
        results.clear()
        pipe.step(torch.ones(2, 3), target=torch.ones(2))
        assert results == ["forgotten", "acted", "asked"]
        assert pipe.report.peak_memory == (2**20,)


@pytest.mark.gpu
def test_penstock_train_trains_on_the_gpu(tmp_path):
    pytest.importorskip("tyro", reason="the command line needs tyro: pip install tyro")
    from penstock.commands.cli import main

    sys.argv = ["penstock", "train", "--device", "cuda", "--ranks", "2", "--steps", "6", "--out", str(tmp_path)]
    main()
    [lines] = [path.read_text().splitlines() for path in tmp_path.glob("*/metrics.jsonl")]
    assert len(lines) >= 6
    assert all(isinstance(json.loads(line), dict) for line in lines)


@pytest.mark.parametrize("device", DEVICES)
def test_units_of_a_model_on_the_cpu_are_measured_where_the_stages_will_be(device):
    where = torch.device(device, 0 if device == "cuda" else None)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    whole = ps.partition.CuttableModel(model, None, (torch.ones(8, 64),))
    assert len(whole.choose_cuts(2, where)) == 1
    assert {each.device.type for each in model.parameters()} == {"cpu"}
