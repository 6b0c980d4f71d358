"""What is known for sure of the other ranks: each tells which process it is, and those on its machine can see how that is."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from penstock.comms.health.process import ALIVE, ENDED, STOPPED, UNKNOWN, Process, this_process
from penstock.comms.starting.meeting import depart, departed, said

GONE, STANDS, SILENT = "is gone", "is stopped (SIGSTOP)", "has given no heartbeat for"


def tell_life(store: Any, rank: int) -> None:
    """Say which process `rank`, this one, is."""
    store.set(_key(rank), json.dumps(this_process()))


def have_told(store: Any, ranks: Collection[int]) -> bool:
    """Whether all of these have."""
    return bool(store.check([_key(rank) for rank in ranks]))


def life(store: Any, rank: int) -> Process:
    """The process of `rank`; one that nobody can see, if it has not told."""
    told = said(store, _key(rank))
    return Process(*json.loads(told)) if told else UNKNOWN


def gone(store: Any, ranks: Collection[int]) -> dict[int, str]:
    """What became of those of `ranks` that have left. One whose process has ended without a word is told to all."""
    if store is None:
        return {}
    for rank in set(ranks) - departed(store, ranks).keys():
        if life(store, rank).state() == ENDED:
            depart(store, rank, GONE)
    return departed(store, ranks)


def lost(gone: Mapping[int, str]) -> dict[int, str]:
    """Those of the `gone` that did not leave by themselves."""
    return {rank: how for rank, how in gone.items() if how.startswith((GONE, STANDS, SILENT))}


def alive(store: Any, ranks: Collection[int]) -> set[int]:
    """Those of `ranks` that certainly live: their processes run on this machine."""
    return {rank for rank in ranks if life(store, rank).state() == ALIVE}


def stopped(store: Any, ranks: Collection[int]) -> dict[int, str]:
    """Those of `ranks` whose processes are stopped, in words."""
    lives = {rank: life(store, rank) for rank in ranks}
    return {rank: f"{STANDS} {each.doing()}".strip() for rank, each in lives.items() if each.state() == STOPPED}


def _key(rank: int) -> str:
    return f"life-{rank}"
