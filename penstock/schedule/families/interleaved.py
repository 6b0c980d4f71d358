"""Interleaved 1F1B: each rank has several stages, so the bubble is that of smaller stages."""

from collections.abc import Iterator

from penstock.schedule.table import Action, Kind

Place = tuple[int, int]  # stage, microbatch


def interleaved_1f1b(
    rank: int, ranks: int, microbatches: int, *, stages_per_rank: int = 2, group_size: int | None = None
) -> Iterator[Action]:
    """1F1B over V stages on each rank (Narayanan et al. 2021, arXiv 2104.04473).

    Microbatches pass in groups of g: a group goes through all of a rank's stages before the next one enters. Warm up with
    w = min(MV, 2(P-1-r) + (V-1)g) forwards; then, for each backward: the next forward if there is one, the next backward.
    Any P, V and M; g = P where P divides M, else the batch is cut into M // P groups (see `group_size_for`).
    Bubble (P-1) T / V, 1F1B's over V, for V times the messages. In flight on rank r, in microbatches:
    ((V-1)P + 2(P-1-r) + 1)/V.

        rank 0 | 0F0 0F1 2F0 2F1 .. 2B0 .. 2B1 .. 0B0 .. 0B1
        rank 1 | .. 1F0 1F1 3F0 3B0 3F1 3B1 1B0 .. 1B1
    """
    forwards, backwards = interleaved(rank, ranks, microbatches, stages_per_rank, group_size)
    group = group_size or group_size_for(microbatches, ranks)
    warmup = min(len(forwards), 2 * (ranks - 1 - rank) + (stages_per_rank - 1) * group)
    for place in forwards[:warmup]:
        yield Action(Kind.F, *place)
    for index, place in enumerate(backwards):
        if warmup + index < len(forwards):
            yield Action(Kind.F, *forwards[warmup + index])
        yield Action(Kind.B, *place)


def interleaved(
    rank: int, ranks: int, microbatches: int, stages_per_rank: int, group_size: int | None
) -> tuple[list[Place], list[Place]]:
    """The forwards of `rank` and its backwards: a group of microbatches through all its stages, then the next group."""
    group = group_size or group_size_for(microbatches, ranks)
    groups = [range(first, min(first + group, microbatches)) for first in range(0, microbatches, group)]
    down, up = (range(rank, ranks * stages_per_rank, ranks)[::step] for step in (1, -1))
    forwards, backwards = ([(stage, m) for each in groups for stage in stages for m in each] for stages in (down, up))
    return forwards, backwards


def group_size_for(microbatches: int, ranks: int) -> int:
    """The group size g unless told: M microbatches in M // P groups (one, if M < P), as equal as they can be."""
    return -(-microbatches // max(1, microbatches // ranks))
