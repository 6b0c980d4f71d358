"""What a rank's own system tells it, or refuses it, in words; what is asked of it; and a line for the user."""

import ctypes
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from penstock.errors import PenstockError, ResourceError

DESCRIPTOR_TABLE_FULL = (errno.EMFILE, errno.ENFILE)  # the table of this process' files, or of the machine's
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt (malloc.h)
_KEPT = (1 << 31) - 1  # bytes that may lie free at the top of the heap
_LARGEST = 32 << 20  # bytes; larger blocks are mapped one by one whatever is asked for
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
SPARE = 8  # descriptors that a new group and what is opened with it take beside one for each rank


def check_free_descriptors(ranks: int) -> None:
    """Raise OSError unless a group of so many ranks can be opened: Gloo ends the process where no file descriptor is free."""
    taken = []
    try:
        for _ in range(ranks + SPARE):
            taken.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for number in taken:
            os.close(number)


def count_cores() -> int:
    """How many of this machine's processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_torchrun_integer(name: str, default: str = "") -> int:
    """The number that torchrun has put into the environment as `name`. Raises PenstockError where something else is there."""
    text = os.environ.get(name, default)
    if not text.isdecimal():
        given = "RANK" if "RANK" in os.environ else name
        told = f"{given} is set here, but {name} is {text!r}"
        raise PenstockError(f"{told}: start the command with torchrun, or unset {given}")
    return int(text)


@contextmanager
def batch_thread_policy() -> Iterator[None]:
    """Threads started inside, Gloo's event loops, are batch threads where the system has them (Linux's SCHED_BATCH).

    They compete with the compute for a core, and spin while the main thread holds a lock of theirs. So they do not preempt it
    each time they wake up, which makes small messages faster. A thread inherits the policy of the one that starts it.
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


@contextmanager
def convert_os_errors(what: str) -> Iterator[None]:
    """An OSError inside becomes a ResourceError that begins with `what`."""
    try:
        yield
    except OSError as error:
        raise ResourceError(f"{what}: {explain_error(error)}") from error


def is_out_of_resources(error: BaseException) -> bool:
    """Whether `error` says that this rank's system has refused something; torch says so of memory in a RuntimeError."""
    told = ("allocate memory", "out of memory", "start new thread")
    return isinstance(error, (OSError, MemoryError)) or any(each in str(error) for each in told)


def explain_error(error: BaseException) -> str:
    """Why a call of the system failed, and what to do about it."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE:
        return f"no file descriptor is free{_limit()}: raise `ulimit -n`"
    if number == errno.ENFILE:
        return "no file descriptor is free on this machine: raise `sysctl fs.file-max`"
    return f"{type(error).__name__}: {' '.join(error_text(error).split())}"


def error_text(error: BaseException) -> str:
    """What an error says, as text that can be sent: of a class that cannot say it too, and of a file whose name is no text."""
    try:
        return str(error).encode(errors="backslashreplace").decode()
    except Exception as another:
        return f"it cannot say what it is ({type(another).__name__})"


def print_notice(text: str) -> None:
    """A line for the user, on stderr."""
    with suppress(OSError, ValueError, AttributeError):  # there is nobody to read it
        sys.stderr.write(f"penstock: {text}\n")
        sys.stderr.flush()


def _limit() -> str:
    with suppress(ImportError):  # Windows has none
        import resource

        return f" (limit {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
    return ""


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
