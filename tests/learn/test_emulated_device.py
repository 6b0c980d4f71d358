"""An emulated device sleeps, costs nothing else, and has a gradient."""

from time import perf_counter

import torch

from penstock.learn.emulated_device import EmulatedDevice


def test_an_emulated_device_takes_its_time_and_hands_on_the_memory_it_gets():
    device = EmulatedDevice(0.02, 0.03, 0.04, parameters=3)
    batch = torch.arange(6.0).view(2, 3)  # requires no gradient: the first stage has a backward all the same
    begin = perf_counter()
    output = device(batch)
    middle = perf_counter()
    assert output.data_ptr() == batch.data_ptr()
    output.backward(torch.full((2, 3), 2.0))
    assert middle - begin >= 0.02
    assert perf_counter() - middle >= 0.07
    assert torch.equal(device.weight.grad, torch.full((3,), 2.0))
    assert batch.grad is None


def test_an_emulated_device_hands_the_gradient_on():
    hidden = torch.zeros(2, 3, requires_grad=True)
    EmulatedDevice(0, 0.001)(hidden).backward(torch.ones(2, 3))
    assert torch.equal(hidden.grad, torch.ones(2, 3))
