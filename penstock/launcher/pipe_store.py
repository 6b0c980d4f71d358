"""The rendezvous store of launched ranks: it is in the launching process, and each rank has a pipe to it.

The pipe is inherited and has no name. So there is no port that another user of the machine could connect to, as with torch's
TCPStore, which does not authenticate. And nothing is left over, however the processes end.
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

# The methods that a rank may call. None of them waits ("get" is called once the value is there), so threads can share a pipe.
SERVED_METHODS = {
    name: getattr(dist.HashStore, name) for name in ("get", "set", "add", "check", "compare_set", "delete_key", "num_keys")
}


def serve_store(store: dist.HashStore, pipe: Connection) -> None:
    """Answer a rank's calls of `store` through `pipe`, in a thread, until the rank is gone."""
    threading.Thread(target=_answer_calls, args=(store, pipe), name="penstock-store", daemon=True).start()


def _answer_calls(store: dist.HashStore, pipe: Connection) -> None:
    with pipe:
        try:
            while True:
                method, *args = decode(pipe.recv_bytes())
                pipe.send_bytes(encode(SERVED_METHODS[method](store, *args)))
        except Exception:  # the rank is gone, or has sent an invalid call: end its connection
            return


def _remote_method(method: str) -> Any:
    """Return a method for PipeStore that calls `method` of the launching process's store."""
    return lambda self, *args: self._call(method, *args)


class PipeStore(dist.Store):
    """A rank's end of the store, usable from Python, from torch's C++, and from any thread.

    Raises DistNetworkError, which is a RuntimeError, once the launching process is gone, as TCPStore does.
    """

    timeout: timedelta  # torch's, as `set_timeout` sets it

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self._pipe, self._lock = pipe, threading.Lock()
        os.register_at_fork(after_in_child=pipe.close)  # a process that the rank forks must not use it

    def _call(self, *request: Any) -> Any:
        with self._lock:
            try:
                self._pipe.send_bytes(encode(request))
                return decode(self._pipe.recv_bytes())
            except (OSError, EOFError) as error:
                raise dist.DistNetworkError("the store is gone, with the process that launched the ranks") from error
            except BaseException:  # from a signal handler: the next call must not read the answer to this one
                self._pipe.close()
                raise

    def get(self, key: str) -> bytes:
        """Wait until `key` has a value, and return it."""
        self.wait([key])
        return bytes(self._call("get", key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all `keys` have a value. Raises DistStoreError after `timeout`."""
        for _ in poll((timeout or self.timeout).total_seconds()):
            if self.check(keys):
                return
        raise dist.DistStoreError(f"timed out: nobody has set {', '.join(keys)}")

    # Methods with the names that torch's C++ calls. torch derives the store's other methods from them.
    set, add, compare_set, check = (
        _remote_method("set"),
        _remote_method("add"),
        _remote_method("compare_set"),
        _remote_method("check"),
    )
    deleteKey, getNumKeys = _remote_method("delete_key"), _remote_method("num_keys")

    def clone(self) -> "PipeStore":
        """Return this store: no call waits for another, so no thread needs a connection of its own."""
        return self
