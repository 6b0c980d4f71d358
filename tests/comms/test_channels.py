"""What messages travel over: shared memory on one machine, else a process group; the numbers are the same."""

import errno
import mmap
import os
import resource
import sys
import threading
from collections import deque
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from open_files import open_files
from reference import accumulate, assert_same, gradients, merged
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import penstock as ps
from penstock.comms.process_groups import ProcessGroups
from penstock.comms.topology import CPU
from penstock.comms.transport import memory_transport, message_spec, shared_memory
from penstock.comms.transport.channels import ReceiveChannel, SendChannel, open_receiver, open_sender
from penstock.comms.transport.group_transport import GroupReceiver, GroupSender, PendingSends
from penstock.comms.transport.memory_transport import MemoryReceiver, MemorySender
from penstock.comms.transport.message_spec import tensor_spec_of
from penstock.comms.transport.send_thread import SendFailure
from penstock.comms.transport.shared_memory import FREE, SPARE_BYTES, BlockAllocator
from penstock.comms.transport.spec_cache import MessageSpecCache
from penstock.schedule.program import Transfer
from penstock.schedule.table import Action, Kind
from penstock.trees import flatten

WIDTHS = (8, 40_000)  # a small message, and one that is lent


def make(width):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(inplace=True), nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, width))


def data(rows):
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 1, generator=generator)


def loss_fn(output, target):
    return (output.mean(1, keepdim=True) - target).square().mean()


def rank_lines(shared):
    if not shared:
        shared_memory.CAN_SHARE = False
    results, kinds = {}, set()
    for width in WIDTHS:
        pipe = ps.Pipeline(make(width), loss_fn, microbatches=4, cuts=["1", "4"])
        losses = []
        for rows in (8, 8, 6):
            batch, target = data(rows)
            losses.append(pipe.step(batch, target=target))
        results[width] = losses, gradients(pipe.named_parameters())
        channels = pipe._engine.open_channels()
        kinds |= {type(channel.transport) for channel in (*channels.outgoing.values(), *channels.incoming.values())}
        kinds |= set(pipe.lines().values())
    return results, kinds


@pytest.mark.ranks
@pytest.mark.parametrize("shared", [True, False])
def test_numbers_do_not_depend_on_what_messages_travel_over(shared):
    everyone = ps.launch(rank_lines, 3, shared)
    over = {MemorySender, MemoryReceiver, "memory that both processes see"}
    over = over if shared else {GroupSender, GroupReceiver, "a gloo group of their own"}
    assert set.union(*(kinds for _, kinds in everyone)) == over
    for width in WIDTHS:
        model = make(width)
        expected = [accumulate(model, loss_fn, data(rows), 4) for rows in (8, 8, 6)]
        for results, _ in everyone:
            assert all(map(torch.equal, results[width][0], expected))
        assert_same(merged([results[width][1] for results, _ in everyone]), gradients(model.named_parameters()))


@pytest.fixture
def ends():
    memory, file = shared_memory.create_shared_memory(shared_memory.mapping_bytes_to_reserve())
    os.close(file)
    reader, writer = os.pipe()
    sender, receiver = MemorySender(memory, writer, Unfailing()), MemoryReceiver(memory, reader, timedelta(seconds=0.2))
    yield sender, receiver
    sender.close()
    receiver.close()


class Unfailing:
    """Where a sender's thread tells that it has failed: here that is an error."""

    def record_and_publish(self, message, error):
        raise error


@pytest.mark.parametrize("tensor", [torch.arange(6.0).view(2, 3).t(), torch.ones(300, 300), torch.ones(1).expand(200_000)])
def test_a_message_arrives_in_its_layout_and_is_the_receivers_own(ends, tensor):
    sender, receiver = ends
    spec = tensor_spec_of(tensor)
    sender.send(tensor, spec)
    arrived = receiver.wait_receive(None, spec)
    assert torch.equal(arrived, tensor)
    assert arrived.stride() == spec.stride
    arrived.add_(1)
    sender.send(tensor, spec)
    assert torch.equal(receiver.wait_receive(None, spec), tensor)
    assert torch.equal(arrived, tensor + 1)


@pytest.mark.parametrize(("size", "held"), [(100, 1), (100_000, 3)])
def test_a_block_is_used_again_once_its_message_is_let_go(ends, size, held):
    sender, receiver = ends
    message = torch.arange(float(size))
    spec = tensor_spec_of(message)
    kept = []
    for _ in range(3):
        sender.send(message, spec)
        kept.append(receiver.wait_receive(None, spec))
    assert len(sender.allocator.blocks) == held
    kept.clear()
    for _ in range(5):
        sender.send(message, spec)
        assert torch.equal(receiver.wait_receive(None, spec), message)
    assert len(sender.allocator.blocks) == held


def test_a_silent_sender_and_a_closed_one_end_the_wait(ends):
    sender, receiver = ends
    spec = tensor_spec_of(torch.ones(3))
    with pytest.raises(RuntimeError, match="timed out"):
        receiver.wait_receive(None, spec)
    sender.close()
    with pytest.raises(RuntimeError, match="closed the pipe"):
        receiver.wait_receive(None, spec)


def test_a_line_that_is_closed_while_its_thread_writes_leaves_the_pipes_number_to_no_other_file(ends, monkeypatch, tmp_path):
    sender, receiver = ends
    about_to, closed, write = threading.Event(), threading.Event(), os.write

    def late(pipe: int, record: bytes) -> int:
        about_to.set()
        assert closed.wait(60)
        return write(pipe, record)

    monkeypatch.setattr(memory_transport.os, "write", late)
    large = torch.ones(memory_transport.MIN_THREAD_BYTES)
    spec = tensor_spec_of(large)
    sender.send(large, spec)
    assert about_to.wait(60)
    sender.send(large, spec)  # comes to nothing
    sender.close()
    with open(tmp_path / "another", "wb"):
        closed.set()
        assert torch.equal(receiver.wait_receive(None, spec), large)
        with pytest.raises(RuntimeError, match="closed the pipe"):
            receiver.wait_receive(None, spec)
    assert (tmp_path / "another").read_bytes() == b""


def test_messages_of_any_length_share_blocks_whose_sizes_are_powers_of_two(ends):
    sender, receiver = ends
    for length in range(1, 5000, 7):
        message = torch.arange(float(length))
        sender.send(message, tensor_spec_of(message))
        assert torch.equal(receiver.wait_receive(None, tensor_spec_of(message)), message)
    assert len(sender.allocator.blocks) == 4  # of 4, 8, 16 and 32 KB


@pytest.mark.slow
def test_free_blocks_never_keep_more_than_twice_what_is_in_flight_and_a_little(ends):
    sender, receiver = ends
    in_flight = []
    for megabytes in (1, 8, 64, 1, 2, 4, 8, 16, 64, 1):
        message = torch.full((megabytes * 2**18,), float(megabytes))
        for _ in range(3):
            sender._send_now(message, tensor_spec_of(message))
            in_flight.append(receiver.wait_receive(None, tensor_spec_of(message)))
            assert all(torch.equal(count, count[0].expand_as(count)) for count in in_flight)  # nobody's memory was given back
        lying = sum(count.nbytes + 64 for count in in_flight)
        assert sender.allocator.written_bytes <= max(3 * 3 * (64 * 2**20 + 64), lying + 2**24)
        in_flight = in_flight[-1:]
    in_flight.clear()
    small = torch.ones(2**18)
    for _ in range(40):  # what was large once is given back when more small ones are needed than ever
        sender._send_now(small, tensor_spec_of(small))
        in_flight.append(receiver.wait_receive(None, tensor_spec_of(small)))
    assert sender.allocator.written_bytes <= 3 * 40 * (2**20 + 64)


def test_messages_that_take_more_addresses_than_there_are_say_so(ends, monkeypatch):
    sender, _ = ends
    message = torch.ones(2**20)
    monkeypatch.setattr(sender.allocator, "_end", len(sender.allocator._memory) - 2**22)
    with pytest.raises(OSError, match=r"no room in this transport's [\d,]+ bytes of addresses"):
        sender._send_now(message, tensor_spec_of(message))


def rank_of_random_shapes(shapes):
    """Both ways over lines of their own, `shapes` messages of lengths never seen before: descriptors and memory on the way."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    topology = ps.comms.init_distributed()
    groups = ProcessGroups(topology, "shapes")
    pending = PendingSends(SendFailure(groups))
    if topology.rank == 0:
        outgoing, incoming = open_sender(groups, "there", 1, pending), open_receiver(groups, "back", 1)
    else:
        incoming, outgoing = open_receiver(groups, "there", 0), open_sender(groups, "back", 0, pending)
    lengths = torch.randint(1, 2**17, (shapes,), generator=torch.Generator().manual_seed(1)).tolist()
    ball, found = torch.ones(2**17), []
    for turn, length in enumerate(lengths):
        message = ball[:length]
        spec = tensor_spec_of(message)
        outgoing.send(message, spec)
        arrived = incoming.wait_receive(incoming.post_receive(spec), spec)
        assert arrived[-1] == 1
        if turn % (shapes // 50) == 0:
            found.append((len(open_files()), _resident()))
    dist.barrier()
    groups.close()
    return found


def _resident():
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what a process holds")
def test_ten_thousand_shapes_take_no_descriptors_and_no_memory():
    for found in ps.launch(rank_of_random_shapes, 2, 10_000):
        descriptors, memory = zip(*found, strict=True)
        assert len(set(descriptors)) == 1
        settled = memory[len(memory) // 5 :]
        middle = (len(settled) - 1) / 2
        slope = sum((x - middle) * y for x, y in enumerate(settled)) / sum((x - middle) ** 2 for x in range(len(settled)))
        print(f"{descriptors[0]} descriptors, {settled[-1] / 2**20:.1f} MiB, {slope * 50 / 2**10:+.1f} KiB per 10,000 shapes")
        assert abs(slope) * 50 < 2**22


class Shelf:
    """A line through host memory to oneself, of tensors that have no values."""

    transport_device = CPU

    def __init__(self):
        self.messages = deque()

    def send(self, tensor, spec, what):
        self.messages.append(tensor)

    def post_receive(self, spec):
        return None

    def wait_receive(self, posted, spec):
        return self.messages.popleft()


def test_tensors_on_gpus_go_through_host_memory_in_their_layout():
    transfer, shelf = Transfer(Action(Kind.F, 0, 3), 0, 1), Shelf()
    specs = MessageSpecCache()
    outgoing, incoming = (
        SendChannel(shelf, SimpleNamespace(raise_if_failed=lambda: None), specs),
        ReceiveChannel(shelf, 1, 0, specs),
    )
    with FakeTensorMode():
        hidden = torch.ones(4, 6, 2, device="cuda:0").transpose(0, 2)
        rows = torch.zeros(3, 5, dtype=torch.int16, device="cuda:0")
        message = {"hidden": hidden, "rows": rows, "column": rows.select(1, 0)}
        spec = message_spec.message_spec_of(*flatten(message))
        specs.add(transfer, spec)
        outgoing.send(transfer, message)
        assert [message.device for message in shelf.messages] == [CPU] * 3
        incoming.post_receive(transfer)
        arrived = incoming.receive(transfer, torch.device("cuda:1"))
    assert message_spec.message_spec_of(*flatten(arrived)) == spec
    assert {str(message.device) for message in arrived.values()} == {"cuda:1"}


def test_memory_that_a_rank_lacks_for_a_message_to_come_is_its_own_refusal():
    class Full:
        """A line over which receives are posted, on a rank without memory."""

        def post_receive(self, spec):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    transfer, specs = Transfer(Action(Kind.F, 0, 3), 0, 1), MessageSpecCache()
    specs.add(transfer, message_spec.message_spec_of(*flatten(torch.ones(3))))
    incoming = ReceiveChannel(Full(), 1, 0, specs)
    with pytest.raises(ps.ResourceError, match=r"rank 1 could not receive the .*0F3.*: RuntimeError: .*allocate"):
        incoming.post_receive(transfer)


@pytest.mark.parametrize("size", [-1, 2**40])
def test_a_description_that_none_can_be_as_long_as_is_refused_and_no_rank_is_called_lost(size):
    gloo = SimpleNamespace(name=lambda: "gloo", recv=lambda tensors, *_: SimpleNamespace(wait=lambda: tensors[0].fill_(size)))
    incoming = ReceiveChannel(GroupReceiver(gloo, gloo, CPU), 1, 0, specs := MessageSpecCache())
    specs.begin_step(["a signature"] * 4)
    incoming.post_receive(transfer := Transfer(Action(Kind.F, 0, 3), 0, 1))
    with pytest.raises(ps.MismatchError, match=r"another rank sends a value of .* bytes: 268,435,456 are the most"):
        incoming.receive(transfer, CPU)


def rank_forks():
    """How many ends of its lines a rank has, how many are open in a process that it forks, and that it can go on."""
    pipe = ps.Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.functional.mse_loss, "1f1b", 2)
    pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))
    ends = [
        end.transport
        for end in (*pipe._engine.open_channels().outgoing.values(), *pipe._engine.open_channels().incoming.values())
    ]
    child = os.fork()
    if child == 0:
        os._exit(sum(end._pipe_fd >= 0 for end in ends))
    _, status = os.waitpid(child, 0)
    loss = pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))
    return len(ends), os.waitstatus_to_exitcode(status), torch.isfinite(loss).item()


@pytest.mark.ranks
def test_a_process_that_a_rank_forks_holds_no_end_of_its_lines():
    assert ps.launch(rank_forks, 2) == [(2, 0, True)] * 2


def rank_inference():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = ps.Pipeline(model, nn.functional.mse_loss, "1f1b", 2)
    batch = torch.linspace(0, 1, 16).view(4, 4)
    with torch.inference_mode():
        _, before = pipe.eval(batch, target=batch)
    return before.item(), pipe.step(batch, target=batch).item()


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evaluation_in_inference_mode_leaves_nothing_that_the_next_step_stumbles_over(ranks):
    for evaluated, trained in ps.launch(rank_inference, ranks):
        assert evaluated == trained


def test_where_the_system_takes_no_memory_back_blocks_keep_it():
    memory = mmap.mmap(-1, 2**28)

    class Refuses:
        """Memory of a sandbox that knows no such advice."""

        def __getattr__(self, name):
            return getattr(memory, name)

        def __len__(self):
            return len(memory)

        def __getitem__(self, place):
            return memory[place]

        def __setitem__(self, place, value):
            memory[place] = value

        def madvise(self, *advice):
            raise OSError(errno.ENOSYS, "no such advice")

    allocator = BlockAllocator(Refuses())
    for power in range(12, 26):
        memory[allocator.allocate(2**power)] = FREE
    assert allocator.written_bytes > SPARE_BYTES


def test_a_line_with_no_addresses_left_uses_larger_blocks_that_are_free():
    memory = mmap.mmap(-1, 2**20)
    allocator = BlockAllocator(memory)
    memory[allocator.allocate(2**18)] = FREE  # half of it
    taken = [allocator.allocate(2**17) for _ in range(2)]
    assert len(set(taken)) == 2
    with pytest.raises(OSError, match="no room in this transport's 1,048,576 bytes of addresses: raise `ulimit -v`"):
        allocator.allocate(2**18)
