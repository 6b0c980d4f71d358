"""How far the ranks are: each writes the steps it has done into memory that the launching process reads, in a microsecond."""

import os
import struct
import time
from mmap import mmap
from typing import NamedTuple

ROW = struct.Struct("qqd")  # of a rank: steps done when it began, steps done now, when it did one that was new


class Address(NamedTuple):
    """Where ranks find the memory."""

    process: int
    file: int
    secret: bytes
    furthest: int  # the steps that an earlier attempt has done


class Steps(NamedTuple):
    """How far the ranks of an attempt have come."""

    before: int  # steps that were done when it began
    done: int
    new: float | None  # time.monotonic() when one was done that no earlier attempt had done


class Page:
    """The memory of one attempt, in the launching process."""

    def __init__(self, ranks: int, furthest: int) -> None:
        from penstock.comms.shared_memory import SECRET, make  # imports torch

        self._ranks, self._begin = ranks, SECRET.size
        self._memory, self._file = make(SECRET.size + ranks * ROW.size)
        secret = b"" if self._memory is None else self._memory[: SECRET.size]
        self.address = None if self._memory is None else Address(os.getpid(), self._file, secret, furthest)

    def read(self) -> Steps | None:
        """What the ranks have told; None where they told nothing."""
        memory = self._memory or bytes(self._begin + self._ranks * ROW.size)
        rows = [ROW.unpack_from(memory, self._begin + rank * ROW.size) for rank in range(self._ranks)]
        told = [(before, done, new) for before, done, new in rows if done]
        if not told:
            return None
        befores, dones, news = zip(*told, strict=True)
        return Steps(min(befores), max(dones), min([new for new in news if new], default=None))

    def close(self) -> None:
        """Let go of it: at the end of the attempt."""
        if self._memory is not None:
            self._memory.close()
            os.close(self._file)


class _Teller:
    """This rank's row of the memory."""

    def __init__(self, memory: mmap, offset: int, furthest: int) -> None:
        self.memory, self.offset, self.furthest = memory, offset, furthest
        self.before, self.new = -1, 0.0

    def tell(self, done: int) -> None:
        if self.before < 0:
            self.before = done - 1
        if not self.new and done > self.furthest:
            self.new = time.monotonic()
        ROW.pack_into(self.memory, self.offset, self.before, done, self.new)


_teller: _Teller | None = None


def tell_into(address: Address, rank: int) -> None:
    """From now on this rank tells there."""
    from penstock.comms.shared_memory import SECRET, open_of

    global _teller
    memory = open_of(address.process, address.file, address.secret)
    _teller = None if memory is None else _Teller(memory, SECRET.size + rank * ROW.size, address.furthest)


def step_done(steps: int) -> None:
    """Tell whoever launched this rank that it has done so many steps."""
    if _teller is not None:
        _teller.tell(steps)
