"""What is read from a disk may be anything: only regular files are opened, and what is wrong is told in a sentence."""

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import MismatchError

_KINDS = {
    **{stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe"},
    **{stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"},
}


class Damaged(MismatchError):
    """A file of a checkpoint is not what was written."""


@contextmanager
def reading(path: Path, damaged: str) -> Iterator[None]:
    """While `path` is read: what goes wrong is raised as Damaged, which says that it cannot be read, or is `damaged`."""
    try:
        yield
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise Damaged(f"{path} {damaged}") from error


@contextmanager
def opened(path: Path, follow: bool = False) -> Iterator[io.BufferedReader]:
    """The regular file `path`, to be read.

    Raises OSError for anything else, which is not opened, or not waited for: a link too, unless `follow`.
    """
    _check_regular(os.stat(path, follow_symlinks=follow), path)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    with os.fdopen(os.open(path, flags), "rb") as file:
        _check_regular(os.fstat(file.fileno()), path)  # it may have been exchanged
        yield file


def _check_regular(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))
