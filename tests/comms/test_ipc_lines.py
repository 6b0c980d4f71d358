"""A line whose blocks are memory of a GPU that both processes open, with a model of the GPU: in any order that CUDA allows.

The model's streams do what they were told when the test says so, one thing of some stream after the other. An event stands for
what it was recorded after last, and a stream waits for what it stood for when that was told, as in CUDA. Memory that is let go
is overwritten in the stream that computes.
"""

import mmap
import os
import random
from collections import deque
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import over_lines
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import penstock as ps
from penstock import torch_private
from penstock.comms.groups import Groups
from penstock.comms.messages import ipc_line, lines, wire
from penstock.comms.messages.blocks import Blocks
from penstock.comms.messages.ipc_line import DeviceBlocks, IpcReceiver, IpcSender
from penstock.comms.messages.memory_line import MemoryReceiver, MemorySender
from penstock.comms.messages.opening import DEVICE, HOST, accept, offer
from penstock.comms.messages.wire import describe_tensor
from penstock.comms.topology import CPU

LONG = timedelta(seconds=60)  # that nothing takes


class Gpu:
    """Two processes' streams on one device, and what they have told each other how to open."""

    def __init__(self, seed):
        self.streams, self.random, self.handles, self.idle_events = [], random.Random(seed), [], {CPU: []}

    def run(self, most=10**6):
        """Do so much of what was told, in some order."""
        while most and (ready := [stream for stream in self.streams if stream.told and stream.told[0][0]()]):
            self.random.choice(ready).told.popleft()[1]()
            most -= 1

    def handle(self, thing):
        self.handles.append(thing)
        return bytes([len(self.handles) - 1])

    def opened(self, handle):
        return self.handles[handle[0]]


class Stream:
    def __init__(self, gpu):
        self.told = deque()
        gpu.streams.append(self)

    def tell(self, act, ready=lambda: True):
        self.told.append((ready, act))

    def wait_event(self, event):
        self.tell(lambda: None, event.reached)

    def query(self):
        return not self.told


class Event:
    def __init__(self, gpu):
        self.gpu, self.reached = gpu, lambda: True

    def record(self, stream):
        reached = []
        self.reached = lambda: bool(reached)
        stream.tell(lambda: reached.append(True))

    def query(self):
        return self.reached()

    def ipc_handle(self):
        return self.gpu.handle(self)


class Cuda:
    """In the place of `torch.cuda`, in one of the processes."""

    def __init__(self, gpu):
        self.gpu, self.compute = gpu, Stream(gpu)
        self.Stream = lambda device: Stream(gpu)
        self.Event = lambda **_: Event(gpu)
        self.Event.from_ipc_handle = lambda device, handle: gpu.opened(handle)

    def current_stream(self, device):
        return self.compute

    def stream(self, stream):
        return Telling(stream, self.gpu.host)

    def let_go(self, tensor):
        """What the allocator does with a tensor's memory: the next one gets it, in the stream that computes."""
        self.compute.tell(lambda: tensor.fill_(torch.nan))


class Telling(TorchDispatchMode):
    """Inside, copies to a device's memory are told to a stream."""

    def __init__(self, stream, host):
        super().__init__()
        self.stream, self.host = stream, host

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.copy_.default or args[0].untyped_storage().data_ptr() == self.host:
            return func(*args, **(kwargs or {}))
        self.stream.tell(lambda: func(*args, **(kwargs or {})))
        return args[0]


class Unfailing:
    def tell(self, what, error):
        raise AssertionError(f"{what}: {error}")


@contextmanager
def line_on(gpu, monkeypatch):
    """The module of either end, and both ends."""
    memory, (reader, writer) = mmap.mmap(-1, 2**24), os.pipe()
    modules = [Cuda(gpu), Cuda(gpu)]
    waiting = iter(modules)
    monkeypatch.setattr(torch, "get_device_module", lambda device: next(waiting))
    monkeypatch.setattr(ipc_line, "_idle_events", gpu.idle_events)
    gpu.host = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    monkeypatch.setattr(torch_private, "exported", lambda memory: (gpu.handle(memory),))
    monkeypatch.setattr(torch_private, "opened", lambda exported, device: gpu.opened(*exported))
    sender, receiver = IpcSender(memory, writer, Unfailing(), CPU), IpcReceiver(memory, reader, LONG, CPU)
    yield SimpleNamespace(gpu=gpu, sending=modules[0], receiving=modules[1], sender=sender, receiver=receiver)
    sender.close()
    gpu.run()
    receiver.close()
    assert not ipc_line._closed


SIZES = (3, 1000, 5000, 1100)  # floats: the last fits a block that the second has had, whose memory is too small for it


def in_use(compute, spec, device):
    """A buffer whose memory a stream still writes to, for a tensor that was let go."""
    buffer = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
    compute.tell(lambda: buffer.fill_(torch.nan))
    return buffer


def traffic(line, messages, monkeypatch):
    """Send and receive so many messages, the devices now and then behind; what came, and what should have."""
    choose, got, posted = line.gpu.random, [], deque()
    sent = received = 0
    while received < messages:
        act = choose.choice(["send", "post", "receive", "run"])
        size = SIZES[sent % len(SIZES)]
        if act == "send" and sent < min(messages, received + 4):
            message, value = torch.zeros(size), float(sent)
            line.sending.compute.tell(lambda message=message, value=value: message.fill_(value))
            with line.sending.stream(line.sending.compute):
                line.sender.send(message, describe_tensor(message))
            line.sending.let_go(message)
            sent += 1
        elif act == "post" and len(posted) < 2 and received + len(posted) < messages:
            spec = describe_tensor(torch.zeros(SIZES[(received + len(posted)) % len(SIZES)]))
            with monkeypatch.context() as patch:
                patch.setattr(wire, "empty", partial(in_use, line.receiving.compute))
                posted.append((line.receiver.post(spec), spec))
        elif act == "receive" and posted and received < sent:
            tensor = line.receiver.wait(*posted.popleft())
            line.receiving.compute.tell(lambda tensor=tensor: got.append(tensor.unique().tolist()))
            line.receiving.let_go(tensor)
            received += 1
        else:
            line.gpu.run(choose.randrange(6))
    line.gpu.run()
    return got, [[float(number)] for number in range(messages)]


@pytest.mark.parametrize("seed", range(20))
def test_messages_arrive_in_whatever_order_the_devices_come_to_it(seed, monkeypatch):
    with line_on(Gpu(seed), monkeypatch) as line:
        got, expected = traffic(line, 30, monkeypatch)
        assert got == expected
        assert len(line.sender.blocks.places) < 30  # blocks are used again


def without(place, line, monkeypatch):
    """One of the events that the receiver's stream is told to wait for left out."""
    begin = line.receiver._copies.begin

    def begun(to, source, spec, after, copied):
        begin(to, source, spec, [event for number, event in enumerate(after) if number != place], copied)

    monkeypatch.setattr(line.receiver._copies, "begin", begun)


BROKEN = {
    "the sender uses a block that is not marked": lambda line, patch: patch.setattr(Blocks, "is_free", lambda *_: True),
    "the sender uses a block that is not copied": lambda line, patch: patch.setattr(DeviceBlocks, "is_free", Blocks.is_free),
    "the receiver copies before the sender has": partial(without, 1),
    "the receiver overwrites what is still used": partial(without, 0),
    "the receiver computes on what is not there": lambda line, patch: patch.setattr(line.receiver._copies, "wait", id),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_the_model_finds_each_rule_that_is_broken(rule, monkeypatch):
    for seed in range(40):
        with line_on(Gpu(seed), monkeypatch) as line:
            BROKEN[rule](line, monkeypatch)
            try:
                got, expected = traffic(line, 30, monkeypatch)
            except RuntimeError:  # the two do not even agree what lies where
                return
            if got != expected:
                return
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("tensor", [torch.arange(6.0).view(2, 3).t(), torch.ones(3, 4)[:, ::2], torch.zeros(0, 5)])
def test_a_message_arrives_in_its_layout(tensor, monkeypatch):
    with line_on(Gpu(0), monkeypatch) as line:
        spec = describe_tensor(tensor)
        if spec.bytes:
            line.sender.send(tensor, spec)  # at once
        with torch.inference_mode():
            arrived = line.receiver.wait(line.receiver.post(spec), spec)
        line.gpu.run()
        assert torch.equal(arrived, tensor)
        assert arrived.stride() == spec.stride
        assert not arrived.is_inference()


def test_events_that_the_receiver_knows_do_not_end_with_the_line_and_are_used_again(monkeypatch):
    gpu = Gpu(0)
    for _ in range(2):
        with line_on(gpu, monkeypatch) as line:
            traffic(line, 4, monkeypatch)
            events = {id(place.event) for place in line.sender.blocks.places.values()}
            idle = {id(event) for event in gpu.idle_events[CPU]}
            assert not events & idle
        assert events <= {id(event) for event in gpu.idle_events[CPU]}
        assert idle <= {id(event) for event in gpu.idle_events[CPU]}


def test_what_a_lost_sender_never_writes_ends_the_wait_and_is_let_go_when_the_device_is_idle(monkeypatch):
    with line_on(Gpu(0), monkeypatch) as line:
        message = torch.zeros(3)
        spec = describe_tensor(message)
        line.sender.send(message, spec)
        line.receiver.wait(line.receiver.post(spec), spec)
        line.sender.close()
        with pytest.raises(RuntimeError, match="the sender is gone"):
            line.receiver.settle()
        line.receiver.close()
        assert len(ipc_line._closed) == 1
        line.gpu.run()
        ipc_line._let_go()


# ---- two processes: memory that is shared stands for a device's, and everything is done at once


class AtOnce:
    """In the place of `torch.cuda`."""

    def __init__(self):
        self.compute = SimpleNamespace(query=lambda: True, wait_event=lambda event: None)
        event = SimpleNamespace(record=lambda stream: None, query=lambda: True, ipc_handle=lambda: b"event")
        self.Stream = lambda device: self.compute
        self.Event = lambda **_: event
        self.Event.from_ipc_handle = lambda device, handle: event

    def current_stream(self, device):
        return self.compute

    def stream(self, stream):
        return nullcontext()


def exported(memory):
    memory.share_memory_()
    return os.getpid(), *memory.untyped_storage()._share_fd_cpu_()


def opened(exported, device):
    process, file, size = exported
    own = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
    storage = torch.UntypedStorage._new_shared_fd_cpu(own, size)
    os.close(own)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def rank_at_once():
    module = AtOnce()
    torch.get_device_module = lambda device: module
    torch_private.exported, torch_private.opened = exported, opened
    lines.MemorySender, lines.MemoryReceiver = partial(IpcSender, device=CPU), partial(IpcReceiver, device=CPU)
    return over_lines.steps(), ways()


def ways():
    """How a line is carried where CUDA IPC does not work on one of the ends, and where it does."""
    topology = ps.comms.init_distributed()
    groups, told = Groups(topology, "ways"), []
    for breaks in ("exported", "opened", "content", ""):
        with pytest.MonkeyPatch.context() as patch:
            if breaks in ("exported", "opened"):
                patch.setattr(torch_private, breaks, refuses)
            elif breaks:
                patch.setattr(torch_private, "opened", lambda exported, device: torch.zeros(2**12, dtype=torch.uint8))
            if topology.rank == 0:
                on_device = partial(IpcSender, device=CPU, failure=Unfailing())
                line = offer(groups, 1, {DEVICE: on_device, HOST: partial(MemorySender, failure=Unfailing())})
            else:
                line = accept(groups, 0, {DEVICE: partial(IpcReceiver, device=CPU), HOST: MemoryReceiver})
            told.append((type(line).__name__, line.way))
    groups.close()
    return told


def refuses(*_):
    raise RuntimeError("pidfd_getfd: Operation not permitted")


@pytest.mark.ranks
def test_over_such_lines_steps_have_the_bits_of_one_process_and_where_there_can_be_none_host_memory_carries():
    everyone = ps.launch(rank_at_once, 2)
    over_lines.assert_right([steps for steps, _ in everyone], ipc_line.WAY)
    host, why = "memory that both processes see", f"since {ipc_line.WAY} does not work here: RuntimeError:"
    refused = f"{host}, {why} pidfd_getfd: Operation not permitted"
    sending, receiving = (told for _, told in everyone)
    assert sending == [
        ("MemorySender", refused),
        *[("MemorySender", f"{host}, since {ipc_line.WAY} does not work here: rank 1 cannot open it")] * 2,
        ("IpcSender", ipc_line.WAY),
    ]
    assert receiving == [
        ("MemoryReceiver", host),
        ("MemoryReceiver", refused),
        ("MemoryReceiver", f"{host}, {why} the other process' memory does not have what was written there"),
        ("IpcReceiver", ipc_line.WAY),
    ]
