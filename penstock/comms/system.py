"""Limits and settings of the operating system, its errors as text, and messages for the user on stderr."""

import ctypes
import errno
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from penstock.errors import PenstockError

DESCRIPTOR_TABLE_FULL = (errno.EMFILE, errno.ENFILE)  # of this process, or of the machine
SPARE_DESCRIPTORS = 8  # that a new group, and files opened with it, need besides one for each rank

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt (malloc.h)
MAX_FREE_HEAP_BYTES = (1 << 31) - 1  # at the top of the heap
MAX_HEAP_BLOCK_BYTES = 32 << 20  # glibc's own upper limit; larger blocks are mapped one by one
MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def check_free_descriptors(ranks: int) -> None:
    """Raise OSError unless there are file descriptors for a group of `ranks`: without them Gloo ends the process."""
    opened = []
    try:
        for _ in range(ranks + SPARE_DESCRIPTORS):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for fd in opened:
            os.close(fd)


def count_cores() -> int:
    """Return the number of this machine's processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_torchrun_integer(name: str, default: str = "") -> int:
    """Return the integer in torchrun's environment variable `name`. Raises PenstockError if it is none."""
    text = os.environ.get(name, default)
    if not text.isdecimal():
        variable = "RANK" if "RANK" in os.environ else name
        raise PenstockError(
            f"{variable} is set here, but {name} is {text!r}: start the command with torchrun, or unset {variable}"
        )
    return int(text)


@contextmanager
def batch_thread_policy() -> Iterator[None]:
    """Start threads of the block (Gloo's event loops) under Linux's policy SCHED_BATCH; do nothing on other systems.

    These threads compete with the main thread for a core, and spin while it holds a lock that they need. Under SCHED_BATCH they
    do not preempt it when they wake up, which makes small messages faster. A thread inherits the policy of its creator.
    """
    policy = os.sched_getscheduler(0) if hasattr(os, "SCHED_BATCH") else None
    try:
        if policy == os.SCHED_OTHER:
            with suppress(OSError):  # some sandboxes know no other policy
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        yield
    finally:
        if policy == os.SCHED_OTHER:
            with suppress(OSError):
                os.sched_setscheduler(0, policy, os.sched_param(0))


def is_out_of_resources(error: BaseException) -> bool:
    """Return whether `error` says that this system refused a resource; for memory torch raises a RuntimeError."""
    texts = ("allocate memory", "out of memory", "start new thread")
    return isinstance(error, (OSError, MemoryError)) or any(text in str(error) for text in texts)


def explain_error(error: BaseException) -> str:
    """Return `error` as one line of text, with advice if no file descriptor is free."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE:
        return f"no file descriptor is free{_descriptor_limit()}: raise `ulimit -n`"
    if number == errno.ENFILE:
        return "no file descriptor is free on this machine: raise `sysctl fs.file-max`"
    return ": ".join(filter(None, [type(error).__name__, " ".join(error_text(error).split())]))


def error_text(error: BaseException) -> str:
    """Return `str(error)` as valid UTF-8, also if it has an invalid file name in it, or raises itself."""
    try:
        return str(error).encode(errors="backslashreplace").decode()
    except Exception as second_error:
        return f"it cannot say what it is ({type(second_error).__name__})"


def report_error_to_torchrun(error: BaseException, began_here: bool) -> None:
    """Write the error that ends this rank for the table that torchrun prints last, unless the script's `@record` has done so.

    torchrun calls the rank with the earliest time, in whole seconds, the root cause. So a rank where the error did not begin
    rounds its time up.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    text, now = explain_error(error), time.time()
    seconds = math.floor(now) if began_here else math.ceil(now)
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(seconds)}}  # torch prints the second
    with suppress(OSError), open(path, "x") as file:
        json.dump({"message": message}, file)


def print_notice(text: str) -> None:
    """Print a line for the user on stderr."""
    with suppress(OSError, ValueError, AttributeError):  # stderr may be closed, or absent
        sys.stderr.write(f"penstock: {text}\n")
        sys.stderr.flush()


def _descriptor_limit() -> str:
    with suppress(ImportError):  # on Windows
        import resource

        return f" (limit {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
    return ""


def keep_freed_memory() -> bool:
    """Make glibc keep memory that this process frees, for its next allocation; return whether that was set.

    Each step frees and allocates the same blocks. By default glibc returns those at the top of its heap to the system, and the
    next use of each 4 KB page is a page fault: for weights of 4 MB that took a fifth of the time of a backward. Does nothing on
    systems without glibc, or if the environment configures the allocator.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in MALLOC_VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(
        mallopt(M_MMAP_THRESHOLD, MAX_HEAP_BLOCK_BYTES) and mallopt(M_TRIM_THRESHOLD, MAX_FREE_HEAP_BYTES)
    )
