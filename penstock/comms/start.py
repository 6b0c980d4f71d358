"""The name of one start of all ranks, which they agree on through the store that they meet at.

torchrun's agents keep the store when they start the ranks again, and with it what the ranks of the start before have
written there. Each start must find names of its own. No number that torchrun gives will do: with several machines one agent
may count a restart that another has not.
"""

import json
import time
import uuid
from datetime import timedelta
from typing import Any

from penstock.errors import LostRankError

POLL = 0.005  # seconds
CURRENT = "penstock-start"


def name_of_start(store: Any, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name for this start of `world_size` ranks, the same on all of them and never given before. All ranks call it.

    Rank 0 chooses a name and waits until every rank has signed there; then it says who. A rank whose signature is not among
    them has met the name of an earlier start, and waits for a newer one. Raises LostRankError, or what `store`
    raises, if not all have come within `timeout`.
    """
    mine, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        _sign(store, mine, rank, mine)
        store.set(CURRENT, mine)
        signatures = [_signature(mine, other) for other in range(world_size)]
        store.wait(signatures, timeout)
        store.set(f"{mine}/ready", json.dumps([store.get(each).decode() for each in signatures]))
        return mine
    seen = ""
    while time.monotonic() < deadline:
        name = store.get(CURRENT).decode()
        if name != seen:
            _sign(store, name, rank, mine)
            seen = name
        if store.check([f"{name}/ready"]) and mine in json.loads(store.get(f"{name}/ready")):
            return name
        time.sleep(POLL)
    raise LostRankError(f"rank {rank} waited {timeout.total_seconds():g} s for the other ranks to start")


def _signature(name: str, rank: int) -> str:
    return f"{name}/rank-{rank}"


def _sign(store: Any, name: str, rank: int, mine: str) -> None:
    store.set(_signature(name, rank), mine)
