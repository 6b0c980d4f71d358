"""How far the ranks are: each writes the steps it has done into memory that the launching process reads, in a microsecond."""

import os
import struct
import time
from typing import NamedTuple

ROW = struct.Struct("3d")  # of a rank: steps done when it began, steps done now, when it did one that was new
BEFORE, DONE, NEW = range(3)


class Address(NamedTuple):
    """Where ranks find the memory."""

    process: int
    file: int
    secret: bytes
    furthest: int  # the steps that an earlier attempt has done


class Steps(NamedTuple):
    """How far the ranks of an attempt have come; None where they have told nothing."""

    before: int | None = None  # steps that were done when it began
    done: int | None = None
    new: float | None = None  # time.monotonic() when one was done that no earlier attempt had done


class Page:
    """The memory of one attempt, in the launching process."""

    def __init__(self, ranks: int, furthest: int) -> None:
        from penstock.comms.shared_memory import SECRET, make  # imports torch

        self._begin, self.address = SECRET.size, None
        self._memory, self._file = make(SECRET.size + ranks * ROW.size)
        if self._memory is not None:
            self.address = Address(os.getpid(), self._file, self._memory[: SECRET.size], furthest)

    def read(self) -> Steps:
        """What the ranks have told."""
        told = [row for row in ROW.iter_unpack(self._memory[self._begin :] if self._memory else b"") if row[DONE]]
        if not told:
            return Steps()
        befores, dones, news = zip(*told, strict=True)
        return Steps(int(min(befores)), int(max(dones)), min([new for new in news if new], default=None))

    def close(self) -> None:
        """Let go of it: at the end of the attempt."""
        if self._memory is not None:
            self._memory.close()
            os.close(self._file)


_row: "memoryview[float] | None" = None  # of this rank
_furthest = 0


def tell_into(address: Address, rank: int) -> None:
    """From now on this rank tells there."""
    from penstock.comms.shared_memory import SECRET, open_of

    global _row, _furthest
    if memory := open_of(address.process, address.file, address.secret):
        begin = SECRET.size + rank * ROW.size
        _furthest, _row = address.furthest, memoryview(memory)[begin : begin + ROW.size].cast("d")


def step_done(steps: int) -> None:
    """Tell whoever launched this rank that it has done so many steps."""
    if _row is None:
        return
    if not _row[DONE]:
        _row[BEFORE] = steps - 1
    if not _row[NEW] and steps > _furthest:
        _row[NEW] = time.monotonic()
    _row[DONE] = steps
