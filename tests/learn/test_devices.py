"""An emulated device sleeps, costs nothing else, and has a gradient."""

from types import SimpleNamespace

import torch

from penstock.learn import devices
from penstock.learn.devices import EmulatedDevice


def test_an_emulated_device_takes_its_time_and_hands_on_the_memory_it_gets(monkeypatch):
    slept = []
    monkeypatch.setattr(devices, "time", SimpleNamespace(sleep=slept.append))
    device = EmulatedDevice(0.02, 0.03, 0.04, parameters=3)
    batch = torch.arange(6.0).view(2, 3)  # requires no gradient: the first stage has a backward all the same
    output = device(batch)
    assert slept == [0.02]
    assert output.data_ptr() == batch.data_ptr()
    output.backward(torch.full((2, 3), 2.0))
    assert sorted(slept[1:]) == [0.03, 0.04]
    assert torch.equal(device.weight.grad, torch.full((3,), 2.0))
    assert batch.grad is None


def test_an_emulated_device_hands_the_gradient_on():
    hidden = torch.zeros(2, 3, requires_grad=True)
    EmulatedDevice(0, 0.001)(hidden).backward(torch.ones(2, 3))
    assert torch.equal(hidden.grad, torch.ones(2, 3))
