"""A thread that sends while the rank computes, and its first error."""

import queue
import threading
from collections.abc import Callable
from typing import Any

from penstock.comms.process_groups import ProcessGroups
from penstock.comms.status import publish, status_of_error
from penstock.comms.system import explain_error
from penstock.errors import ResourceError


class TaskThread:
    """A thread that runs functions one after the other; they must not raise. It ends when this object is deleted."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=_run_tasks, args=(self._tasks,), name=name, daemon=True).start()

    def enqueue(self, function: Callable[..., None], *args: Any) -> None:
        """Run `function(*args)` in the thread, after all that were enqueued before."""
        self._tasks.put((function, *args))

    def __del__(self) -> None:
        self._tasks.put(None)


def _run_tasks(tasks: "queue.SimpleQueue[Any]") -> None:
    while (task := tasks.get()) is not None:
        task[0](*task[1:])
        task = None  # frees its tensor before the next wait


class SendFailure:
    """The first error of this rank's sends. It is published in the store at once.

    The thread that sends records its error here, and closes its transport. That wakes the rank that waits at the other end. It
    reads the report and ends the step, which also ends any wait of this rank's main thread.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self._first_error: ResourceError | None = None

    def record_and_publish(self, message: object, error: Exception) -> None:
        """Record, and publish to the other ranks, that `message` could not be sent because of `error`."""
        if self._first_error is None:
            topology = self._groups.topology
            self._first_error = ResourceError(f"rank {topology.rank} could not send the {message}: {explain_error(error)}")
            self._first_error.__cause__ = error
            status = status_of_error(topology.rank, self._first_error, topology.timeout, topology.store)
            publish(self._groups.store, status)

    def raise_if_failed(self) -> None:
        """Raise ResourceError if a send has failed."""
        if self._first_error is not None:
            raise self._first_error
