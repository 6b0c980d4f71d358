"""A line for tensors on a GPU, with a stub of its streams: what is copied when, what the driver knows, and how it ends."""

import mmap
import os
import threading
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import over_lines
import pytest
import torch

import penstock as ps
from penstock.comms.messages import lines
from penstock.comms.messages.device_line import DeviceReceiver, DeviceSender
from penstock.comms.messages.wire import describe_tensor
from penstock.comms.topology import CPU

LONG = 60  # seconds that nothing takes


class Event:
    def __init__(self, blocking=False):
        self.reached = threading.Event()

    def record(self, stream):
        stream.record(self)

    def synchronize(self):
        assert self.reached.wait(LONG)


class Stream:
    """Does what it is told at once; one that computes reaches an event when the test says so, if it is `held`."""

    def __init__(self, device=None):
        self.held, self.told, self.waited = False, [], []

    def record(self, event):
        self.told.append(event)
        if not self.held:
            event.reached.set()

    def wait_event(self, event):
        event.synchronize()
        self.waited.append(event)

    def go_on(self):
        self.held = False
        for event in self.told:
            event.reached.set()


class Driver:
    """Remembers which memory it knows."""

    def __init__(self, code=0):
        self.code, self.known, self.calls = code, {}, 0

    def cudaHostRegister(self, address, size, flags):
        self.calls += 1
        if self.code == 0:
            assert not any(address < other + length and other < address + size for other, length in self.known.items())
            self.known[address] = size
        return self.code

    def cudaHostUnregister(self, address):
        del self.known[address]


class Module:
    """In the place of `torch.cuda`."""

    Event, Stream = Event, Stream

    def __init__(self, code=0):
        self.compute, self.driver = Stream(), Driver(code)

    def current_stream(self, device):
        return self.compute

    def stream(self, stream):
        return nullcontext()

    device = stream

    def cudart(self):
        return self.driver


class Unfailing:
    def tell(self, what, error):
        raise AssertionError(f"{what}: {error}")


@pytest.fixture
def line(monkeypatch):
    """The module of either end, and both ends."""
    memory, (reader, writer) = mmap.mmap(-1, 2**24), os.pipe()
    modules = [Module(), Module()]
    waiting = iter(modules)
    monkeypatch.setattr(torch, "get_device_module", lambda device: next(waiting))
    sender = DeviceSender(memory, writer, Unfailing(), CPU)
    receiver = DeviceReceiver(memory, reader, timedelta(seconds=LONG), CPU)
    yield *modules, sender, receiver
    sender.close()
    receiver.close()


def test_a_message_leaves_when_the_device_has_made_it(line):
    sending, _, sender, receiver = line
    message = torch.zeros(40_000)
    spec = describe_tensor(message)
    posted = receiver.post(spec)
    sending.compute.held = True
    sender.send(message, spec)
    message.fill_(7)  # what the device makes of it, when it comes to that
    sending.compute.go_on()
    assert torch.equal(receiver.wait(posted, spec), message)


@pytest.mark.parametrize("tensor", [torch.arange(6.0).view(2, 3).t(), torch.ones(3, 4)[:, ::2], torch.zeros(0, 5)])
def test_a_message_arrives_in_its_layout(line, tensor):
    *_, sender, receiver = line
    spec = describe_tensor(tensor)
    posted = receiver.post(spec)
    if spec.bytes:
        sender.send(tensor, spec)
    arrived = receiver.wait(posted, spec)
    assert torch.equal(arrived, tensor)
    assert arrived.stride() == spec.stride


def test_a_buffer_is_written_when_the_device_has_done_with_what_was_there(line):
    _, receiving, sender, receiver = line
    message = torch.full((40_000,), 7.0)
    spec = describe_tensor(message)
    receiving.compute.held = True
    posted = receiver.post(spec)
    posted[0].fill_(3)
    sender.send(message, spec)
    sender.send(message, spec)
    assert posted[0].eq(3).all()
    receiving.compute.go_on()
    assert torch.equal(receiver.wait(posted, spec), message)
    assert len(receiving.compute.waited) == 1  # the device, not the host, waits for the copy
    assert torch.equal(receiver.wait(receiver.post(spec), spec), message)


def test_the_driver_knows_each_block_once_and_forgets_it_in_the_end(line):
    *modules, sender, receiver = line
    for _ in range(3):
        for size in (1, 5_000, 40_000, 5_000):
            message = torch.randn(size)
            spec = describe_tensor(message)
            posted = receiver.post(spec)
            sender.send(message, spec)
            assert torch.equal(receiver.wait(posted, spec), message)
    for module in modules:
        assert module.driver.calls == len(module.driver.known) > 0
    sender.close()
    receiver.close()
    for end in (sender._copying, receiver._taking):
        done = threading.Event()
        end.do(done.set)
        assert done.wait(LONG)
    assert modules[0].driver.known == modules[1].driver.known == {}


def test_where_the_driver_refuses_it_is_asked_once_and_messages_arrive(line):
    *modules, sender, receiver = line
    for module in modules:
        module.driver.code = 1
    for _ in range(2):
        message = torch.randn(3, 5)
        spec = describe_tensor(message)
        sender.send(message, spec)
        assert torch.equal(receiver.wait(receiver.post(spec), spec), message)
    assert [module.driver.calls for module in modules] == [1, 1]


@pytest.mark.parametrize(
    ("happens", "told"),
    [
        (lambda sender, receiver: sender.close(), "the sender has closed the pipe"),
        (lambda sender, receiver: receiver.wake(), "a rank is lost"),
    ],
    ids=["the sender is gone", "the receiver is woken"],
)
def test_who_waits_in_vain_is_told(happens, told, line):
    *_, sender, receiver = line
    spec = describe_tensor(torch.zeros(3))
    posted = [receiver.post(spec) for _ in range(3)]
    happens(sender, receiver)
    for each in posted:
        with pytest.raises(RuntimeError, match=told):
            receiver.wait(each, spec)


def rank_steps():
    module = Module()
    torch.get_device_module = lambda device: module
    lines.MemorySender, lines.MemoryReceiver = partial(DeviceSender, device=CPU), partial(DeviceReceiver, device=CPU)
    return over_lines.steps()


@pytest.mark.ranks
def test_over_such_lines_steps_have_the_bits_of_one_process():
    over_lines.assert_right(ps.launch(rank_steps, 2), "host memory that both processes see")
