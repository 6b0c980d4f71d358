"""Looped BFS: GPipe over several stages on each rank."""

from collections.abc import Iterator

from penstock.schedule.table import Action, Kind


def looped_bfs(rank: int, ranks: int, microbatches: int, *, stages_per_rank: int = 2) -> Iterator[Action]:
    """All forwards stage by stage, then all backwards, breadth first (Lamy-Poirier 2022, arXiv 2211.05953).

    Any P, V and M. Bubble (P-1) T / V for M >= P. M microbatches in flight, as GPipe. The backwards run in ascending order
    of microbatches, so that all schedules sum gradients alike.

        rank 0 | 0F0 0F1 2F0 2F1 .. 2B0 2B1 0B0 0B1
        rank 1 | .. 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1 ..
    """
    stages = range(rank, ranks * stages_per_rank, ranks)
    for stage in stages:
        for microbatch in range(microbatches):
            yield Action(Kind.F, stage, microbatch)
    for stage in reversed(stages):
        for microbatch in range(microbatches):
            yield Action(Kind.B, stage, microbatch)
