"""How ranks meet in the rendezvous store: they agree on the id of a run, and wait for each other.

torchrun's agents keep the store when they restart the ranks, with everything that ranks of the previous run have written. So
each run needs new keys. torchrun's restart count cannot provide them: with several machines, one agent may count a restart that
another has not seen.
"""

import json
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import DistError

from penstock.comms.process import read_text
from penstock.comms.time_limits import MAX_POLL_SECONDS, MIN_POLL_SECONDS
from penstock.errors import LostRankError

if TYPE_CHECKING:
    from torch.distributed import Store

CURRENT_RUN_KEY = "penstock-start"
WAIT_RESULT_KEY, ALL_ARRIVED = "ending", "all here"  # the result of a `wait_for_all`, the same for all of its ranks
ANY_STATUS_KEY = "status"  # set once any rank has a status (status.py) in a store


def poll(seconds: float) -> Iterator[None]:
    """Yield repeatedly for `seconds`, at least once, with short sleeps in between."""
    begin = time.monotonic()
    yield
    while (waited := time.monotonic() - begin) < seconds:
        time.sleep(min(MIN_POLL_SECONDS + waited / 10, MAX_POLL_SECONDS))
        yield


def agree_on_run_id(store: "Store", rank: int, world_size: int, timeout: timedelta) -> str:
    """Return an id for this run of `world_size` ranks, the same on all of them and never used before. All ranks call it.

    1. Rank 0 publishes a new id.
    2. Each rank signs under the id that it reads.
    3. When all have signed, rank 0 publishes the signatures.
    4. A rank that finds its own signature among them returns. One that does not has read the id of an earlier run, and goes
       back to 2 when the id changes.

    Raises LostRankError if not all ranks call it within `timeout`, DistError if one has ended.
    """
    signature, run_id, seconds = uuid.uuid4().hex, "", timeout.total_seconds()
    if rank == 0:
        store.set(CURRENT_RUN_KEY, signature)

    for _ in poll(seconds):
        one_has_ended = store.check([ANY_STATUS_KEY])  # read first: a rank that has returned may leave at once

        current = signature if rank == 0 else read_text(store, CURRENT_RUN_KEY)
        if current != run_id:
            run_id = current
            store.set(f"{run_id}/rank-{rank}", signature)

        keys = [f"{run_id}/rank-{peer}" for peer in range(world_size)]
        if rank == 0 and store.check(keys):
            store.set(f"{run_id}/ready", json.dumps([store.get(key).decode() for key in keys]))

        if signature in json.loads(read_text(store, f"{run_id}/ready") or "[]"):
            return run_id
        if one_has_ended:
            raise DistError("a rank has ended")

    raise LostRankError(f"rank {rank} waited {seconds:g} s for the other ranks to start")


def wait_for_all(store: "Store", num_ranks: int, timeout: timedelta, has_failed: Callable[[], bool] = lambda: False) -> None:
    """Wait until `num_ranks` ranks have called it. Raises DistError on all of them after `timeout`, or if `has_failed()`.

    Call it before Gloo connects, which cannot be interrupted. The first rank that sees a result of the wait sets it for all, so
    that no rank begins to connect to one that has given up.
    """
    is_last = store.add("come", 1) == num_ranks
    for _ in poll(timeout.total_seconds()):
        if has_failed():
            store.compare_set(WAIT_RESULT_KEY, "", "another rank has failed")
        elif is_last:
            store.compare_set(WAIT_RESULT_KEY, "", ALL_ARRIVED)
        if store.check([WAIT_RESULT_KEY]):
            break
    else:
        store.compare_set(WAIT_RESULT_KEY, "", "timed out")

    if (result := store.get(WAIT_RESULT_KEY).decode()) != ALL_ARRIVED:
        raise DistError(result)
