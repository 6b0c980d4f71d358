"""The store that launched ranks meet at: the launching process keeps it, and each rank reaches it over a pipe of its own.

The pipe is inherited and has no name. So there is no port that another user of the machine could come to, as there is with
torch's TCPStore, which asks nobody who he is; and nothing is left of it when the processes have ended, however they do.
"""

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from penstock.comms.encoding import decode, encode
from penstock.comms.rendezvous import poll

# What a rank may ask for. Nothing of it waits (a value is asked for once it is there), so several threads can share a pipe.
ANSWERS = {
    name: getattr(dist.HashStore, name) for name in ("get", "set", "add", "check", "compare_set", "delete_key", "num_keys")
}


def serve_store(store: dist.HashStore, end: Connection) -> None:
    """Answer what a rank asks of `store` over this end of its pipe, in a thread, until the rank is gone."""
    threading.Thread(target=_serve, args=(store, end), name="penstock-store", daemon=True).start()


def _serve(store: dist.HashStore, end: Connection) -> None:
    with end:
        try:
            while True:
                what, *given = decode(end.recv_bytes())
                end.send_bytes(encode(ANSWERS[what](store, *given)))
        except Exception:  # the rank is gone, or asks for what no rank of ours does: for it this is the store's end
            return


def _asked_for(what: str) -> Any:
    """A method of the store that asks for this, and gives what comes back."""
    return lambda self, *given: self._ask(what, *given)


class PipeStore(dist.Store):
    """The store as a rank has it, from Python and from torch's C++, from any thread.

    Raises DistNetworkError, which is a RuntimeError, once the launching process is gone, as TCPStore does.
    """

    timeout: timedelta  # torch's, as `set_timeout` has it

    def __init__(self, end: Connection) -> None:
        super().__init__()
        self._end, self._lock = end, threading.Lock()
        os.register_at_fork(after_in_child=end.close)  # it is this rank's alone

    def _ask(self, *request: Any) -> Any:
        with self._lock:
            try:
                self._end.send_bytes(encode(request))
                return decode(self._end.recv_bytes())
            except (OSError, EOFError) as error:
                raise dist.DistNetworkError("the store is gone, with the process that launched the ranks") from error
            except BaseException:  # of a signal's handler: the answer to come is nobody's
                self._end.close()
                raise

    def get(self, key: str) -> bytes:
        """The value, once there is one."""
        self.wait([key])
        return bytes(self._ask("get", key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all of them have a value."""
        for _ in poll((timeout or self.timeout).total_seconds()):
            if self.check(keys):
                return
        raise dist.DistStoreError(f"timed out: nobody has set {', '.join(keys)}")

    # These do what torch's do, under the names that its C++ calls them by; the others that a store has it makes of them.
    set, add, compare_set, check = _asked_for("set"), _asked_for("add"), _asked_for("compare_set"), _asked_for("check")
    deleteKey, getNumKeys = _asked_for("delete_key"), _asked_for("num_keys")

    def clone(self) -> "PipeStore":
        """This one: nothing in it waits for the launching process to do more than answer."""
        return self
