"""The ends of a pipe between two processes of one machine. One whose other process has died reads as closed.

A process opens the other's pipe through its /proc entry. What is written at once arrives at once, if it has up to
`select.PIPE_BUF` bytes.
"""

import os
import select
import weakref
from datetime import timedelta

import torch.distributed as dist

from penstock.comms.time_limits import ABORT_CHECK_MILLISECONDS


def open_pipe(pid: int, fd: int, flags: int) -> int:
    """Return a descriptor of the pipe of which process `pid` has the descriptor `fd`. Raises DistError if it has ended."""
    try:
        return os.open(f"/proc/{pid}/fd/{fd}", flags)
    except FileNotFoundError as error:
        raise dist.DistError("the sender is gone") from error


_pipe_ends: "weakref.WeakSet[PipeEnd]" = weakref.WeakSet()


def _close_pipes_in_child() -> None:
    """Close the pipes in a forked child of a rank, for instance a DataLoader's worker: else a dead rank's pipe stays open."""
    for end in list(_pipe_ends):
        end.close_pipe()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_close_pipes_in_child)


class PipeEnd:
    """One process's end of a pipe."""

    def __init__(self, pipe_fd: int) -> None:
        self._pipe_fd = pipe_fd
        self._close_fd = weakref.finalize(self, os.close, pipe_fd)
        self._close_fd.atexit = False  # the system closes it at exit
        _pipe_ends.add(self)

    def close(self) -> None:
        """Close this end, which the other end sees. Messages that have been received stay valid."""
        self.close_pipe()

    def abort_waits(self) -> None:
        """Make a wait of another thread end soon."""

    def close_pipe(self) -> None:
        """Close this process's end of the pipe."""
        self._pipe_fd = -1
        self._close_fd()


class PipeWriter(PipeEnd):
    """The writing end."""

    def write(self, data: bytes) -> None:
        """Write `data` without waiting, unless the pipe is full. If the reader is gone, a later wait will show that."""
        try:  # noqa: SIM105 - this runs for every message
            os.write(self._pipe_fd, data)
        except BrokenPipeError:
            pass


class PipeReader(PipeEnd):
    """The reading end."""

    def __init__(self, pipe_fd: int, timeout: timedelta) -> None:
        super().__init__(pipe_fd)
        self._timeout_milliseconds, self._aborted = timeout / timedelta(milliseconds=1), False
        self._poll = select.poll()
        self._poll.register(pipe_fd, select.POLLIN)

    def read(self, num_bytes: int) -> bytes:
        """Wait for what was written at once, and return it. Raises DistError if the writer is lost or silent."""
        waited = 0.0
        while not self._poll.poll(min(ABORT_CHECK_MILLISECONDS, self._timeout_milliseconds - waited)):
            waited += ABORT_CHECK_MILLISECONDS
            if self._aborted or waited >= self._timeout_milliseconds:
                raise dist.DistError("a rank is lost" if self._aborted else "timed out")

        data = os.read(self._pipe_fd, num_bytes)
        if len(data) < num_bytes:
            raise dist.DistError("the sender has closed the pipe")
        return data

    def read_now(self, num_bytes: int) -> bytes:
        """Return what was written at once; nothing if that has not arrived."""
        return os.read(self._pipe_fd, num_bytes) if self._poll.poll(0) else b""

    def abort_waits(self) -> None:
        """Make a wait of another thread end soon."""
        self._aborted = True
