"""The C library's allocator, told that a training step will want again what the last one freed."""

import ctypes
import os
import sys

# glibc's mallopt (malloc.h)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT = (1 << 31) - 1  # bytes that may lie free at the top of the heap
_LARGEST = 32 << 20  # bytes; larger blocks are mapped one by one whatever is asked for

_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let freed memory stay with this process instead of going back to the system; whether the allocator could be told.

    A step frees and takes the same blocks again and again. By default glibc returns those at the top of its heap, and the next
    touch of each 4 KB page is a fault of the kernel's: on weights of 4 MB that was measured as a fifth of the time of a
    backward. Only on Linux with glibc; what the environment says about it is respected.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, _KEPT))
