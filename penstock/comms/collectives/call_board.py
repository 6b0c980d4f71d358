"""Memory in which the ranks of a group on one machine write what each was called with, and read what the others were."""

import mmap
import threading
import time

from penstock.comms.collectives.call import DIGEST_BITS
from penstock.comms.shared_memory import SECRET

NAP, LONGEST_NAP = 10e-6, 1e-3  # seconds between looks at the board: longer from look to look
ROWS = 2  # nobody begins a call before all have come to the one before, so no rank is more than one call ahead
COUNT_BITS = 64 - DIGEST_BITS  # of a word, above the call's digest
CLOSED = 0  # the word that says which call, if any, a rank does not come to


class CallBoard:
    """What each rank of a group was called with in this call and the one before, as one number."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        self._words = memoryview(memory)[SECRET.size :].cast("Q")
        self._rank, self._size = rank, size
        self._fence = threading.Lock()
        self.count = 0  # of calls
        self.differ = False  # this rank has seen that another was called with something else

    @staticmethod
    def bytes(size: int) -> int:
        """What a board for `size` ranks takes."""
        return SECRET.size + 8 * (1 + ROWS * size)

    def close(self, call: int) -> int:
        """Tell the others that this rank does not come to `call`, nor to any later one; the first such of all ranks'."""
        self._words[CLOSED] = min(self._words[CLOSED] or call, call)
        return self._words[CLOSED]

    def arrive(self, digest: int, timeout: float) -> bool:
        """Write the digest of this rank's call; whether those of the ranks that came before are the same.

        First it makes sure that all ranks came to the call before, in which this one may have been done early. Raises
        RuntimeError if one does not within `timeout` seconds.
        """
        self.count += 1
        if self.count > 1 and not self._all_came(timeout):
            return False
        self._tag = self.count % 2**COUNT_BITS
        self._mine = self._tag << DIGEST_BITS | digest
        self._row = 1 + self.count % ROWS * self._size
        self._words[self._row + self._rank] = self._mine  # eight bytes at once
        with self._fence:  # the write is finished before the reading begins
            return self._agree(self._read())

    def _all_came(self, timeout: float) -> bool:
        """Wait until all ranks have come to the call before; whether all of them have the same number."""
        looks, deadline = 0, 0.0
        while (words := self._read()).count(self._mine) < self._size:
            looks += 1
            deadline = deadline or time.monotonic() + timeout
            agree, late = self._agree(words), time.monotonic() > deadline
            if self.differ or late:
                self.close(self.count - 1)  # it is that call which comes to nothing, and not the one that begins
            if not agree:
                return False
            if late:
                raise RuntimeError("timed out")
            time.sleep(min(looks * NAP, LONGEST_NAP))
        return True

    def _read(self) -> list[int]:
        return self._words[self._row : self._row + self._size].tolist()

    def _agree(self, words: list[int]) -> bool:
        """Whether nobody stays away, and all that have come to this call have the same number."""
        if words.count(self._mine) < self._size:  # else no need to look closer
            self.differ = any(word != self._mine and word >> DIGEST_BITS == self._tag for word in words)
        return not self.differ and not 0 < self._words[CLOSED] <= self.count
