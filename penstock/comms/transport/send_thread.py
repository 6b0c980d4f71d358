"""A thread beside the compute, and what becomes of its errors."""

import queue
import threading
from collections.abc import Callable
from typing import Any

from penstock.comms.failure_reports import own_error_report, publish_report
from penstock.comms.process_groups import ProcessGroups
from penstock.comms.system import explain_error
from penstock.errors import ResourceError


class SendThread:
    """A thread that does one thing after the other, of which none raises; it ends when nobody has the worker any more."""

    def __init__(self, name: str) -> None:
        self._things: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=_do_each, args=(self._things,), name=name, daemon=True).start()

    def do(self, function: Callable[..., None], *args: Any) -> None:
        """Do `function(*args)` after all that came before."""
        self._things.put((function, *args))

    def __del__(self) -> None:
        self._things.put(None)


def _do_each(things: "queue.SimpleQueue[Any]") -> None:
    while (thing := things.get()) is not None:
        thing[0](*thing[1:])
        thing = None  # let the tensor go before waiting for the next


class SendFailure:
    """The first failure of this rank's own, not of another's, to send something; the other ranks are told at once.

    A thread that sends tells it here and closes its line. That wakes who waits there, who finds this rank's report, and ends
    the step; so ends whatever this rank waits for meanwhile.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self._first: ResourceError | None = None

    def tell(self, what: object, error: Exception) -> None:
        """The `what` could not be sent because of `error`."""
        if self._first is None:
            rank = self._groups.topology.rank
            self._first = ResourceError(f"rank {rank} could not send the {what}: {explain_error(error)}")
            self._first.__cause__ = error
            publish_report(self._groups, own_error_report(rank, self._first))

    def check(self) -> None:
        """Raise ResourceError if there was one."""
        if self._first is not None:
            raise self._first
