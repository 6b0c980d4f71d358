"""Code in the fork server that ends it together with its program. Imported only there.

Python's server ends when no rank is left, and the program removes the server's socket. A program that is killed does not do
that, and a suspended rank would stay forever. So this server checks twice a second whether the program has ended. If so, it
removes the socket and ends, and its ranks end too (`rank_main`).
"""

import atexit
import gc
import os
import signal
import socket
import stat
from contextlib import suppress

from penstock.comms.time_limits import FORKSERVER_CHECK_SECONDS

SERVER_PID, PROGRAM_PID = os.getpid(), os.getppid()


def _is_orphaned() -> bool:
    return os.getpid() == SERVER_PID and os.getppid() != PROGRAM_PID


def _end_if_orphaned(*_: object) -> None:
    """Remove the socket and end this process if its program has ended. Handles the timer's signal."""
    if _is_orphaned():
        if socket_path:
            _remove_socket_if_orphaned(socket_path)
        os._exit(0)  # not an exception: the server may be exiting, inside torch's clean-up, which would print it


def _find_listening_socket() -> str | None:
    """Return the path of the listening socket that this process has inherited; None if it has none."""
    for fd in os.listdir("/dev/fd"):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(fd)).st_mode):
                with socket.socket(fileno=os.dup(int(fd))) as candidate:
                    if candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        return str(candidate.getsockname())
    return None


def _remove_socket_if_orphaned(path: str) -> None:
    if _is_orphaned():  # else the program lives, and may start another server at this path
        with suppress(OSError):  # it is gone already, or the program has put files into its folder
            os.unlink(path)
            os.rmdir(os.path.dirname(path))


def _freeze_imported_objects() -> None:
    """Exclude the objects of imports, which are never deleted, from every rank's garbage collections. Called before a fork."""
    if os.getpid() == SERVER_PID:
        gc.freeze()
        gc.enable()


gc.disable()  # this makes imports a quarter faster
os.register_at_fork(before=_freeze_imported_objects)
if socket_path := _find_listening_socket():
    atexit.register(_remove_socket_if_orphaned, socket_path)
signal.signal(signal.SIGALRM, _end_if_orphaned)
signal.setitimer(signal.ITIMER_REAL, FORKSERVER_CHECK_SECONDS, FORKSERVER_CHECK_SECONDS)  # a process that forks has no threads
atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)  # so that nothing interrupts the exit
