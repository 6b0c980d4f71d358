"""How the two ends of a line between processes of one machine find each other, and which kind of line it becomes.

The sender offers one kind after the other, the best first, until the receiver can open one as well. What is offered is where
the memory and the pipe are, and the secret by which the receiver knows that it has found them; the sender has tried its end.
"""

import mmap
import os
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from penstock.comms.groups import Groups
from penstock.comms.messages.blocks import addresses
from penstock.comms.messages.memory_line import MemoryReceiver, MemorySender
from penstock.comms.shared_memory import SECRET, make, open_of
from penstock.comms.system import reason

OPENING_TAG = 3  # of the messages by which they do
NOTHING, HOST, DEVICE = -1, 0, 1  # where messages lie in the line that is offered
OFFER = 4 + SECRET.size // 8  # numbers: one of these, process, file of the memory, end of the pipe, secret


def offer(groups: Groups, peer: int, kinds: Mapping[int, Callable[[mmap.mmap, int], MemorySender]]) -> MemorySender | None:
    """The sending end of a new line to the rank `peer`, of the first of `kinds` that both can use; None if there is none."""
    instead = ""
    for kind, make_sender in kinds.items():
        sender = _offered(groups, peer, kind, make_sender)
        if not isinstance(sender, str):
            sender.way += instead
            groups.at_close(sender.close)
            return sender
        instead = sender or instead
    groups.everyone.send([torch.full((OFFER,), NOTHING, device="cpu")], peer, OPENING_TAG).wait()
    return None


def _offered(groups: Groups, peer: int, kind: int, make_sender: Callable[[mmap.mmap, int], MemorySender]) -> MemorySender | str:
    """The sending end of a line of this kind, or why there is none."""
    memory, *files = make(addresses())
    if memory is None:
        return ""
    opened = torch.zeros(1, device="cpu")
    try:
        reader, writer = os.pipe()
        files.append(reader)
        sender = make_sender(memory, writer)
        if why := tried(sender):
            return why
        where = torch.tensor([kind, os.getpid(), *files, *SECRET.unpack_from(memory)], device="cpu")
        groups.everyone.send([where], peer, OPENING_TAG).wait()
        groups.everyone.recv([opened], peer, OPENING_TAG).wait()
    finally:
        for file in files:
            os.close(file)
    if opened:
        return sender
    sender.close()
    return _does_not_work(sender, f"rank {peer} cannot open it")


def accept(
    groups: Groups, peer: int, kinds: Mapping[int, Callable[[mmap.mmap, int, timedelta], MemoryReceiver]]
) -> MemoryReceiver | None:
    """The receiving end of a new line from the rank `peer`, likewise."""
    where, instead = torch.zeros(OFFER, dtype=torch.int64, device="cpu"), ""
    while True:
        groups.everyone.recv([where], peer, OPENING_TAG).wait()
        kind, *place = where.tolist()
        if kind == NOTHING:
            return None
        found = _found(*place) if kind in kinds else None
        receiver = kinds[kind](*found, groups.topology.timeout) if found else None
        why = tried(receiver) if receiver else ""
        opened = receiver is not None and not why
        groups.everyone.send([torch.tensor([float(opened)], device="cpu")], peer, OPENING_TAG).wait()
        if receiver is not None and opened:
            receiver.way += instead
            groups.at_close(receiver.close)
            groups.at_wake(receiver.wake)
            return receiver
        instead = why or instead


def _found(process: int, file: int, reader: int, *secret: int) -> tuple[mmap.mmap, int] | None:
    """The memory and the pipe of another process; None if it is none of this machine."""
    memory = open_of(process, file, SECRET.pack(*secret))
    if memory is None:
        return None
    try:
        return memory, os.open(f"/proc/{process}/fd/{reader}", os.O_RDONLY)
    except FileNotFoundError as error:
        raise dist.DistError("the sender is gone") from error


def tried(end: MemorySender | MemoryReceiver) -> str:
    """Why this end does not work here, and is closed; empty if it does."""
    try:
        end.try_out()
    except Exception as error:
        end.close()
        return _does_not_work(end, reason(error))
    return ""


def _does_not_work(end: MemorySender | MemoryReceiver, why: str) -> str:
    return f", since {end.way} does not work here: {why}"
