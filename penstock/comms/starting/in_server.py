"""What the server that ranks are forked from does at its end: imported there, and nowhere else.

Python leaves it to the program that started the server to remove the server's socket, and one that is killed does not. The
server ends after it, and so can always do it.
"""

import atexit
import os
import socket
from contextlib import suppress

SERVER = os.getpid()


def _listens_at() -> str | None:
    """The path of the socket that this process has been given."""
    for number in os.listdir("/dev/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(number))) as each:
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return str(each.getsockname())
    return None


def _remove(path: str) -> None:
    if os.getpid() == SERVER:
        with suppress(OSError):  # it is gone already, or the folder holds something of the program's
            os.unlink(path)
            os.rmdir(os.path.dirname(path))


if path := _listens_at():
    atexit.register(_remove, path)
