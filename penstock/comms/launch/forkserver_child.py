"""What the server that ranks are forked from does when its program has ended: imported there, and nowhere else.

Python's server ends when no rank is left, and leaves it to the program to remove the server's socket. A program that is killed
does not, and a rank that is stopped would be left for ever. So this server looks by itself: it ends with the program, its
ranks end with it (`rank_main`), and it removes the socket.
"""

import atexit
import gc
import os
import signal
import socket
import stat
from contextlib import suppress

SERVER, PROGRAM = os.getpid(), os.getppid()
LOOK = 0.5  # seconds


def _is_orphaned() -> bool:
    return os.getpid() == SERVER and os.getppid() != PROGRAM


def _look(*_: object) -> None:
    if _is_orphaned():
        if path:
            _remove(path)
        os._exit(0)  # it may be exiting already, amid torch's own clean-up, which an exception would come out of as an error


def _listens_at() -> str | None:
    """The path of the socket that this process has been given."""
    for number in os.listdir("/dev/fd"):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(number)).st_mode):
                with socket.socket(fileno=os.dup(int(number))) as each:
                    if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        return str(each.getsockname())
    return None


def _remove(path: str) -> None:
    if _is_orphaned():  # else the program lives, and may start another server there
        with suppress(OSError):  # it is gone already, or the folder holds something of the program's
            os.unlink(path)
            os.rmdir(os.path.dirname(path))


def _imports_are_done() -> None:
    """Before the first fork: what they made is here to stay, and no rank's collector need look at it."""
    if os.getpid() == SERVER:
        gc.freeze()
        gc.enable()


gc.disable()  # so that imports take a quarter less
os.register_at_fork(before=_imports_are_done)
if path := _listens_at():
    atexit.register(_remove, path)
signal.signal(signal.SIGALRM, _look)
signal.setitimer(signal.ITIMER_REAL, LOOK, LOOK)  # no thread, which a process that forks must not have
atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)  # nothing interrupts the exit
