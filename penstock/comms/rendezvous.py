"""What ranks write for each other in the store that they meet at: the name of one start of all of them, and who has left.

torchrun's agents keep the store when they start the ranks again, and with it what the ranks of the start before have
written there. Each start must find names of its own. No number that torchrun gives will do: with several machines one agent
may count a restart that another has not.
"""

import json
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError

from penstock.errors import LostRankError

NAP, LONGEST_NAP = 2e-4, 5e-3  # seconds between looks at the store: the longer, the longer it takes
CURRENT = "penstock-start"
ENDING, ALL_HERE = "ending", "all here"  # of a wait for all
DEPARTED = "departed"  # somebody has; after "-" and a rank: what became of that one
FINISHED = "has finished"


def looks(seconds: float) -> Iterator[None]:
    """Moments to look at the store, for so many seconds, at least one."""
    begin = time.monotonic()
    yield
    while (waited := time.monotonic() - begin) < seconds:
        time.sleep(min(NAP + waited / 10, LONGEST_NAP))
        yield


def said(store: Any, key: str) -> str:
    """What is written under `key`; empty if nothing is yet."""
    return store.get(key).decode() if store.check([key]) else ""


def name_of_start(store: Any, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name for this start of `world_size` ranks, the same on all of them and never given before. All ranks call it.

    Rank 0 chooses a name and waits until every rank has signed there; then it says who. A rank whose signature is not among
    them has met the name of an earlier start, and waits for a newer one. Raises LostRankError if not all have come within
    `timeout`, or one has left.
    """
    mine, name, seconds = uuid.uuid4().hex, "", timeout.total_seconds()
    if rank == 0:
        store.set(CURRENT, mine)
    for _ in looks(seconds):
        gone = departed(store, range(world_size))  # first: who is ready may have done all it had to before the next look
        current = mine if rank == 0 else said(store, CURRENT)
        if current != name:
            name = current
            store.set(f"{name}/rank-{rank}", mine)
        signatures = [f"{name}/rank-{other}" for other in range(world_size)]
        if rank == 0 and store.check(signatures):
            store.set(f"{name}/ready", json.dumps([store.get(each).decode() for each in signatures]))
        if mine in json.loads(said(store, f"{name}/ready") or "[]"):
            return name
        if gone:
            raise left(gone, f"rank {rank} waited for the other ranks to start")
    raise LostRankError(f"rank {rank} waited {seconds:g} s for the other ranks to start")


def all_come(store: Any, ranks: int, timeout: timedelta, is_over: Callable[[], bool] = lambda: False) -> None:
    """Wait until so many `ranks` have come here. Raises DistError if they do not, or it `is_over`: Gloo knows no such end.

    Who sees first how it ends decides it for all: nobody goes on to connect to a rank that has given up.
    """
    last = store.add("come", 1) == ranks
    for _ in looks(timeout.total_seconds()):
        if is_over():
            store.compare_set(ENDING, "", "another rank has failed")
        elif last:
            store.compare_set(ENDING, "", ALL_HERE)
        if store.check([ENDING]):
            break
    else:
        store.compare_set(ENDING, "", "timed out")
    if (ending := store.get(ENDING).decode()) != ALL_HERE:
        raise DistError(ending)


def depart(store: Any, rank: int, how: str) -> None:
    """Tell the others what became of `rank`; what is told first holds."""
    with suppress(RuntimeError):  # the store may be gone, with the rank that had it
        store.compare_set(f"{DEPARTED}-{rank}", "", how)
        store.set(DEPARTED, "")


def departed(store: Any, ranks: Collection[int]) -> dict[int, str]:
    """What became of those of `ranks` that have left."""
    if store is None or not store.check([DEPARTED]):
        return {}
    return {rank: how for rank in ranks if (how := said(store, f"{DEPARTED}-{rank}"))}


def left(gone: dict[int, str], waited: str) -> LostRankError:
    """The error where somebody `waited` for ranks of which some are gone."""
    what_to_do = ": every rank must make the same calls" if FINISHED in gone.values() else ""
    return LostRankError(f"{waited}, but {', '.join(f'rank {rank} {how}' for rank, how in gone.items())}{what_to_do}", gone)
