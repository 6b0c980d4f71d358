"""Rows that every rank sends to all others, a message for each: through pipes on one machine, through Gloo between machines.

A pipe wakes the rank that waits. Gloo wakes a thread, which wakes the rank, and takes twice as long.

    both ranks   offer the writing end of a pipe, and memory with a secret
    both         open the other's end if the memory has that secret: a process on another machine may have the same pid
    both         say whether they could; if one could not, both use Gloo

Gloo's rows have one length, since their receives are posted before they are sent, one exchange ahead:

    this exchange:   send the row; wait for the receive posted in the last exchange
    the next one:    its receive is posted now, before its row can be sent
"""

import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from penstock.comms.encoding import tensor_bytes, tensor_of_bytes
from penstock.comms.pipe import PipeReader, PipeWriter, open_pipe
from penstock.comms.process_groups import ProcessGroups, call_unprofiled
from penstock.comms.shared_memory import SECRET, create_shared_memory, open_shared_memory
from penstock.comms.wait_errors import convert_errors

ROW_TAG = 1
NO_PID = -1  # instead of the pid if this process has no memory to share
OFFER_NUMBERS = 3 + SECRET.size // 8  # pid, descriptors of the memory and of the pipe, the secret


class RowExchange:
    """The exchange of rows of `num_bytes` with all other ranks of `groups`. They open it at the same time.

    Raises OSError if this rank has no file descriptors left, RuntimeError if another does not open it.
    """

    def __init__(self, groups: ProcessGroups, num_bytes: int) -> None:
        own_rank = groups.topology.rank
        pipes = _open_pipes(groups, [rank for rank in groups.ranks if rank != own_rank])
        self._links: dict[int, _PipeLink | _GlooLink] = {}  # peer -> link
        for peer, ends in pipes.items():
            self._links[peer] = _PipeLink(*ends, num_bytes) if ends else _GlooLink(groups.world_group, peer, num_bytes)
        self._uses_gloo = not all(pipes.values())

    def send(self, row: bytes, purpose: str) -> None:
        """Send `row` to all other ranks, without waiting. Raises WaitError: `purpose` as in `ControlGroup.all_gather_row`."""
        if self._uses_gloo:
            call_unprofiled(self._send, row, purpose)
        else:
            self._send(row, purpose)

    def _send(self, row: bytes, purpose: str) -> None:
        for peer, link in self._links.items():
            try:
                link.send(row)
            except RuntimeError:
                with convert_errors(f"for rank {peer} {purpose}", peer):
                    raise

    def receive(self, peer: int) -> bytes:
        """Wait for the row of `peer`, and return it. Raises RuntimeError if that rank is lost or silent."""
        return self._links[peer].receive()

    def receive_now(self, peer: int) -> bytes:
        """Return the row of `peer` if it has arrived; else nothing, or zeros."""
        return self._links[peer].receive_now()


class _PipeLink:
    """The two pipes between this rank and another one of this machine."""

    def __init__(self, reader: PipeReader, writer: PipeWriter, num_bytes: int) -> None:
        self._reader, self._writer, self._num_bytes = reader, writer, num_bytes

    def send(self, row: bytes) -> None:
        """Send `row`."""
        self._writer.write(row)

    def receive(self) -> bytes:
        """Wait for the other rank's row."""
        return self._reader.read(self._num_bytes)

    def receive_now(self) -> bytes:
        """Return the row, nothing if it has not arrived."""
        return self._reader.read_now(self._num_bytes)


class _GlooLink:
    """The messages between this rank and `peer`."""

    def __init__(self, group: Any, peer: int, num_bytes: int) -> None:
        self._group, self._peer, self._num_bytes = group, peer, num_bytes
        self._sent: tuple[dist.Work, torch.Tensor] | None = None  # the last row
        self._arriving = self._posted = self._post_receive()  # of this exchange, and of the next one

    def send(self, row: bytes) -> None:
        """Send `row`, and post the receive of the next exchange."""
        last_sent, tensor = self._sent, tensor_of_bytes(row)
        self._sent = self._group.send([tensor], self._peer, ROW_TAG), tensor
        if last_sent is not None:
            last_sent[0].wait()  # returns at once: the peer had posted its receive one exchange before
        self._arriving, self._posted = self._posted, self._post_receive()

    def receive(self) -> bytes:
        """Wait for the other rank's row."""
        row, work = self._arriving
        if isinstance(work, RuntimeError):
            raise work
        work.wait()
        return tensor_bytes(row)

    def receive_now(self) -> bytes:
        """Return the row, zeros if it has not arrived."""
        return tensor_bytes(self._arriving[0])

    def _post_receive(self) -> tuple[torch.Tensor, dist.Work | RuntimeError]:
        """Post a receive. An error is raised only by its exchange: the peer may have finished."""
        row = torch.zeros(self._num_bytes, dtype=torch.uint8, device="cpu")
        try:
            return row, self._group.recv([row], self._peer, ROW_TAG)
        except RuntimeError as error:
            return row, error


def _open_pipes(groups: ProcessGroups, peers: Sequence[int]) -> dict[int, tuple[PipeReader, PipeWriter] | None]:
    """Open a pipe in each direction to each of `peers`; None where the two share no memory."""
    pipes: dict[int, tuple[PipeReader, PipeWriter] | None] = dict.fromkeys(peers)
    with ExitStack() as stack:

        def close_at_end(fd: int) -> int:
            stack.callback(os.close, fd)
            return fd

        offers = {peer: [NO_PID] * OFFER_NUMBERS for peer in peers}
        memory, memory_fd = create_shared_memory(mmap.PAGESIZE)
        readers: dict[int, PipeReader] = {}
        if memory is not None:
            close_at_end(memory_fd)
            for peer in peers:
                reader_fd, writer_fd = os.pipe()
                readers[peer] = PipeReader(reader_fd, groups.topology.timeout)
                offers[peer] = [os.getpid(), memory_fd, close_at_end(writer_fd), *SECRET.unpack_from(memory)]

        received = _exchange_numbers(groups.world_group, offers, OFFER_NUMBERS)
        writers = {peer: _open_offer(offer) if memory is not None else None for peer, offer in received.items()}
        answers = _exchange_numbers(groups.world_group, {peer: [int(writers[peer] is not None)] for peer in peers}, 1)
        for peer in peers:
            if (writer := writers[peer]) is not None and answers[peer][0]:
                pipes[peer] = ends = readers[peer], writer
                groups.transports.update(ends)
    return pipes


def _open_offer(offer: Sequence[int]) -> PipeWriter | None:
    """Open the pipe that a rank has offered; None if it is on another machine."""
    pid, memory_fd, writer_fd, *secret = offer
    memory = None if pid == NO_PID else open_shared_memory(pid, memory_fd, SECRET.pack(*secret))
    if memory is None:
        return None
    memory.close()
    return PipeWriter(open_pipe(pid, writer_fd, os.O_WRONLY))


def _exchange_numbers(group: Any, numbers: dict[int, list[int]], count: int) -> dict[int, list[int]]:
    """Send each peer its `count` integers, and return those that it has sent."""
    received = {peer: torch.zeros(count, dtype=torch.int64, device="cpu") for peer in numbers}
    works = [group.recv([tensor], peer, ROW_TAG) for peer, tensor in received.items()]
    sent = [torch.tensor(values, device="cpu") for values in numbers.values()]
    works += [group.send([tensor], peer, ROW_TAG) for peer, tensor in zip(numbers, sent, strict=True)]
    for work in works:
        work.wait()
    return {peer: tensor.tolist() for peer, tensor in received.items()}
