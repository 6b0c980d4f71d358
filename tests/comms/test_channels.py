"""What messages travel over: shared memory on one machine, else a process group; the numbers are the same."""

import errno
import mmap
import os
import resource
import sys
import threading
from collections import defaultdict, deque
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from open_files import open_files
from reference import OneProcess, assert_as_one_process, stepped
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import penstock as ps
from penstock.comms.encoding import view_as_bytes
from penstock.comms.process_groups import ProcessGroups
from penstock.comms.topology import CPU
from penstock.comms.transport import memory_transport, message_spec, shared_memory
from penstock.comms.transport.channels import ReceiveChannel, SendChannel, open_receiver, open_sender
from penstock.comms.transport.group_transport import REPLACED, GroupReceiver, GroupSender, PendingSends
from penstock.comms.transport.memory_transport import MemoryReceiver, MemorySender
from penstock.comms.transport.message_spec import tensor_spec_of
from penstock.comms.transport.send_thread import SendFailure
from penstock.comms.transport.shared_memory import FREE, SPARE_BYTES, BlockAllocator
from penstock.comms.transport.spec_cache import MAX_SIGNATURES, MessageSpecCache
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


BATCHES = [data(rows) for rows in (8, 8, 6)]


def rank_lines(shared):
    if not shared:
        shared_memory.CAN_SHARE = False
    results, kinds = {}, set()
    for width in WIDTHS:
        pipe = ps.Pipeline(make(width), loss_fn, microbatches=4, cuts=["1", "4"])
        results[width] = stepped(pipe, BATCHES)
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
    expected = {width: stepped(OneProcess(make(width), loss_fn, None, 4), BATCHES) for width in WIDTHS}
    assert_as_one_process([results for results, _ in everyone], expected)


@pytest.fixture
def ends():
    memory, file = shared_memory.create_shared_memory(shared_memory.mapping_bytes_to_reserve())
    os.close(file)
    reader, writer = os.pipe()
    sender, receiver = MemorySender(memory, writer, Unfailing()), MemoryReceiver(memory, reader, timedelta(seconds=0.2))
    yield sender, receiver
    sender.close()
    receiver.close()


def message_of(spec):
    """The description of a message of one tensor."""
    return message_spec.MessageSpec(flatten(torch.empty(0))[1], (spec,))


def send(sender, tensor):
    """Send a message that the receiver expects."""
    spec = message_of(tensor_spec_of(tensor))
    sender.send([tensor], spec, spec)


def receive(receiver, spec):
    """Return the tensor of an expected message."""
    return receiver.receive(receiver.post_receive(message_of(spec)))[1][0]


class Unfailing:
    """Where a sender's thread tells that it has failed: here that is an error."""

    def record_and_publish(self, message, error):
        raise error


@pytest.mark.parametrize("tensor", [torch.arange(6.0).view(2, 3).t(), torch.ones(300, 300), torch.ones(1).expand(200_000)])
def test_a_message_arrives_in_its_layout_and_is_the_receivers_own(ends, tensor):
    sender, receiver = ends
    spec = tensor_spec_of(tensor)
    send(sender, tensor)
    arrived = receive(receiver, spec)
    assert torch.equal(arrived, tensor)
    assert arrived.stride() == spec.stride
    arrived.add_(1)
    send(sender, tensor)
    assert torch.equal(receive(receiver, spec), tensor)
    assert torch.equal(arrived, tensor + 1)


@pytest.mark.parametrize("size", [0, 7, 100_000])
def test_a_message_and_its_description_arrive_in_one_block(ends, size, monkeypatch):
    sender, receiver = ends
    reads, read = [], receiver._read_from_pipe
    monkeypatch.setattr(receiver, "_read_from_pipe", lambda: reads.append(1) or read())
    tensor = torch.arange(float(size)).half()
    spec = message_of(tensor_spec_of(tensor))
    sender.send([tensor], spec, None)
    arrived_spec, (arrived,) = receiver.receive(receiver.post_receive(None))
    assert arrived_spec == spec
    assert torch.equal(arrived.view(torch.half), tensor)
    assert (len(reads), len(sender.allocator.blocks)) == (1, 1)


@pytest.mark.parametrize(("size", "held"), [(100, 1), (100_000, 3)])
def test_a_block_is_used_again_once_its_message_is_let_go(ends, size, held):
    sender, receiver = ends
    message = torch.arange(float(size))
    spec = tensor_spec_of(message)
    kept = []
    for _ in range(3):
        send(sender, message)
        kept.append(receive(receiver, spec))
    assert len(sender.allocator.blocks) == held
    kept.clear()
    for _ in range(5):
        send(sender, message)
        assert torch.equal(receive(receiver, spec), message)
    assert len(sender.allocator.blocks) == held


def test_a_silent_sender_and_a_closed_one_end_the_wait(ends):
    sender, receiver = ends
    spec = tensor_spec_of(torch.ones(3))
    with pytest.raises(RuntimeError, match="timed out"):
        receive(receiver, spec)
    sender.close()
    with pytest.raises(RuntimeError, match="closed the pipe"):
        receive(receiver, spec)


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
    send(sender, large)
    assert about_to.wait(60)
    send(sender, large)  # comes to nothing
    sender.close()
    with open(tmp_path / "another", "wb"):
        closed.set()
        assert torch.equal(receive(receiver, spec), large)
        with pytest.raises(RuntimeError, match="closed the pipe"):
            receive(receiver, spec)
    assert (tmp_path / "another").read_bytes() == b""


def test_messages_of_any_length_share_blocks_whose_sizes_are_powers_of_two(ends):
    sender, receiver = ends
    for length in range(1, 5000, 7):
        message = torch.arange(float(length))
        send(sender, message)
        assert torch.equal(receive(receiver, tensor_spec_of(message)), message)
    assert len(sender.allocator.blocks) == 4  # of 4, 8, 16 and 32 KB


@pytest.mark.slow
def test_free_blocks_never_keep_more_than_twice_what_is_in_flight_and_a_little(ends):
    sender, receiver = ends
    in_flight = []
    for megabytes in (1, 8, 64, 1, 2, 4, 8, 16, 64, 1):
        message = torch.full((megabytes * 2**18,), float(megabytes))
        for _ in range(3):
            sender._send_now(message, tensor_spec_of(message))
            in_flight.append(receive(receiver, tensor_spec_of(message)))
            assert all(torch.equal(count, count[0].expand_as(count)) for count in in_flight)  # nobody's memory was given back
        lying = sum(count.nbytes + 64 for count in in_flight)
        assert sender.allocator.written_bytes <= max(3 * 3 * (64 * 2**20 + 64), lying + 2**24)
        in_flight = in_flight[-1:]
    in_flight.clear()
    small = torch.ones(2**18)
    for _ in range(40):  # what was large once is given back when more small ones are needed than ever
        sender._send_now(small, tensor_spec_of(small))
        in_flight.append(receive(receiver, tensor_spec_of(small)))
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
        send(outgoing, message)
        arrived = receive(incoming, spec)
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

    def send(self, tensors, spec, expected, what):
        self.messages += tensors

    def post_receive(self, expected):
        return expected

    def receive(self, expected):
        return expected, [self.messages.popleft() for _ in expected.parts]


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


class Failing:
    """A line over which no receive can be posted."""

    def __init__(self, error):
        self.error = error

    def post_receive(self, spec):
        raise self.error


def incoming_over(line, transfer):
    specs = MessageSpecCache()
    specs.add(transfer, message_spec.message_spec_of(*flatten(torch.ones(3))))
    return ReceiveChannel(line, 1, 0, specs)


def test_memory_that_a_rank_lacks_for_a_message_to_come_is_its_own_refusal():
    transfer = Transfer(Action(Kind.F, 0, 3), 0, 1)
    incoming = incoming_over(Failing(RuntimeError("DefaultCPUAllocator: can't allocate memory")), transfer)
    with pytest.raises(ps.ResourceError, match=r"rank 1 could not receive the .*0F3.*: RuntimeError: .*allocate"):
        incoming.post_receive(transfer)


def test_an_error_that_has_nothing_to_do_with_other_ranks_stays_as_it_is_without_a_cause():
    transfer, error = Transfer(Action(Kind.F, 0, 3), 0, 1), RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug") as caught:
        incoming_over(Failing(error), transfer).post_receive(transfer)
    assert caught.value is error
    assert error.__cause__ is None  # not itself: whoever follows the causes would not end


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


def ends_over_a_group(head_apart):
    """Both ends of a transport over a group that is a queue for each tag; `head_apart`: tensors have a group of their own."""
    queues = defaultdict(deque)

    def group(name):
        def send(tensors, peer, tag):
            queues[name, tag].append(tensors[0].clone())
            return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)

        def recv(tensors, peer, tag):
            def wait():
                arrived = posted[name, tag].popleft()
                assert arrived is tensors[0]
                data = queues[name, tag].popleft()
                assert data.nbytes == arrived.nbytes  # NCCL takes no other size
                view_as_bytes(arrived).copy_(data)

            posted[name, tag].append(tensors[0])
            return SimpleNamespace(wait=wait)

        return SimpleNamespace(name=lambda: name, send=send, recv=recv)

    posted = defaultdict(deque)
    gloo = group("gloo")
    tensors = group("nccl") if head_apart else gloo
    specs = [MessageSpecCache(), MessageSpecCache()]
    outgoing = SendChannel(
        GroupSender(gloo, tensors, CPU, PendingSends(Unfailing())), SimpleNamespace(raise_if_failed=lambda: None), specs[0]
    )
    return outgoing, ReceiveChannel(GroupReceiver(gloo, tensors, CPU), 1, 0, specs[1]), specs, queues


MESSAGES = {
    "a number": torch.tensor(1.5),
    "a matrix": torch.arange(6.0).view(2, 3),
    "its transpose": torch.arange(6.0).view(3, 2).t(),
    "with a gradient": torch.arange(6.0).view(2, 3).requires_grad_(),
    "another shape": torch.arange(20.0).view(4, 5),
    "several": (torch.ones(3), None, torch.zeros(0, 2), 7, torch.arange(9)),
    "one is None": (None, None, torch.zeros(0, 2), 7, torch.arange(9)),
    "another number": (torch.ones(3), None, torch.zeros(0, 2), 8, torch.arange(9)),
    "all is None": (None, None, None, 7, None),
    "nothing": (),
    "no elements": torch.zeros(0, 3),
    "begins as one that is replaced": torch.tensor(list(REPLACED) * 2, dtype=torch.uint8),
    "is what a replaced one begins with": torch.tensor(list(REPLACED), dtype=torch.uint8),
}


@pytest.mark.parametrize("head_apart", [False, True])
def test_any_message_may_come_instead_of_any_other_with_receives_posted_behind_it(head_apart):
    outgoing, incoming, specs, queues = ends_over_a_group(head_apart)
    names = [name for pair in permutations(MESSAGES, 2) for name in pair] + list(MESSAGES) * 2
    for step in range(0, len(names), 3):
        messages = names[step : step + 3]
        transfers = [Transfer(Action(Kind.F, 0, number), 0, 1) for number in range(3)]
        for cache in specs:
            cache.begin_step(["a signature"] * 3)
        for transfer in transfers:
            incoming.post_receive(transfer)
        for transfer, name in zip(transfers, messages, strict=False):
            outgoing.send(transfer, MESSAGES[name])
            sent, arrived = flatten(MESSAGES[name]), flatten(incoming.receive(transfer, CPU))
            assert message_spec.message_spec_of(*sent).fits_layout_of(message_spec.message_spec_of(*arrived))
            for leaf, arrived_leaf in zip(sent[0], arrived[0], strict=True):
                assert torch.equal(leaf, arrived_leaf) if isinstance(leaf, torch.Tensor) else leaf == arrived_leaf
        for transfer in transfers[len(messages) :]:
            outgoing.send(transfer, MESSAGES["a number"])
            incoming.receive(transfer, CPU)
        for cache in specs:
            cache.end_step()
        assert not any(queues.values())
        assert specs[0].step_specs == specs[1].step_specs


@pytest.mark.parametrize("head_apart", [False, True])
def test_a_message_as_before_is_sent_without_a_description(head_apart):
    outgoing, incoming, specs, queues = ends_over_a_group(head_apart)
    counts = []
    for _ in range(3):
        transfer = Transfer(Action(Kind.F, 0, 0), 0, 1)
        for cache in specs:
            cache.begin_step(["a signature"])
        incoming.post_receive(transfer)
        outgoing.send(transfer, MESSAGES["a matrix"])
        counts.append(sum(map(len, queues.values())))
        incoming.receive(transfer, CPU)
        for cache in specs:
            cache.end_step()
    assert counts == [3, 1 + head_apart, 1 + head_apart]  # size and description only in the first


def test_specs_of_a_signature_that_is_none_are_forgotten_after_the_step():
    cache, spec = MessageSpecCache(), message_spec.message_spec_of(*flatten(torch.ones(3)))
    transfer = Transfer(Action(Kind.F, 0, 1), 0, 1)
    for _ in range(2):
        cache.begin_step(["kept", None])
        assert cache.step_specs[transfer] is None
        cache.add(transfer, spec)
        cache.end_step()
    assert [*cache._by_signature] == ["kept"]


def test_specs_of_the_signatures_used_last_are_remembered():
    cache, spec = MessageSpecCache(), message_spec.message_spec_of(*flatten(torch.ones(3)))
    transfer = Transfer(Action(Kind.F, 0, 0), 0, 1)
    for signature in range(MAX_SIGNATURES + 10):
        cache.begin_step([signature, 0])  # signature 0 is in every step
        if signature < 2:
            cache.add(transfer, spec)
        cache.end_step()
    assert len(cache._by_signature) == MAX_SIGNATURES
    known = []
    for signature in (0, 1):
        cache.begin_step([signature])
        known.append(cache.step_specs[transfer])
    assert known == [spec, None]
