"""The device that lags behind its host (lagging_device.py): the host goes on, and is seen where it waits or reads too early."""

import threading

import lagging_device
import pytest
import torch
from lagging_device import LaggingStream, ahead
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes


@pytest.fixture
def held():
    """A layer whose stream stands still until it is let go, and what lets it."""
    layer, stream, go_on = nn.Linear(3, 3, bias=False), LaggingStream(), threading.Event()
    nn.init.ones_(layer.weight)
    with ahead(stream, [layer]):
        stream.run(go_on.wait)
        lagging_device.waits.clear()
        yield layer, go_on
        go_on.set()


def test_the_host_goes_on_and_what_is_not_made_yet_is_poison(held):
    layer, go_on = held
    layer(torch.ones(2, 3)).sum().backward()
    gradient = layer.weight.grad
    with _disable_current_modes():
        assert gradient.isnan().all()
    assert lagging_device.waits == []
    go_on.set()
    assert gradient.tolist() == [[2.0] * 3] * 3
    assert lagging_device.waits == ["elsewhere"]


def test_what_the_host_asks_for_it_waits_for(held):
    layer, go_on = held
    asked = [lambda made: made.sum().item(), lambda made: made.tolist()[0][0] * 9, lambda made: float(made.cpu().sum())]
    threading.Timer(0.05, go_on.set).start()
    made = layer.weight * 1
    assert [ask(made) for ask in asked] == [9.0] * 3
    assert len(lagging_device.waits) == 3


def test_an_operation_that_fails_has_broken_the_device(held, capfd):
    layer, go_on = held
    nn.functional.embedding(torch.tensor([3]), layer.weight)  # there are rows 0 to 2
    go_on.set()
    for _ in range(2):
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            (layer.weight * 1).sum().item()
    assert "index out of range" in capfd.readouterr().err
