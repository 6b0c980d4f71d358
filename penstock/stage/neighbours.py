"""The stages that a stage takes values from and gives values to, and the parameters it shares with each of them."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from penstock.schedule import Kind, Skip
from penstock.schedule.table import receiving_stages

StageParameter = tuple[int, str]  # a stage, and a parameter's name in it


class Neighbours(NamedTuple):
    """The stages at the other ends, in order, and the parameters shared with each.

    A parameter of several stages belongs to the first of them. Each later one borrows it from the one before, as if its value
    had come from there: the gradient goes back with that of what did come from there. So it is summed use by use, microbatch by
    microbatch, from the last use to the first, in the order in which autograd sums it in the uncut model.
    """

    sources: tuple[int, ...]
    takers: tuple[int, ...]
    borrowed: Mapping[int, list[str]] = {}  # source -> own names of the parameters
    lent: Mapping[int, list[str]] = {}  # taker -> own names


def stage_neighbours(stages: int, skips: Collection[Skip], tied: Sequence[Sequence[StageParameter]]) -> list[Neighbours]:
    """The neighbours of every stage: the next ones, those at the other end of `skips`, and who shares a group of `tied`."""
    goes = receiving_stages(stages, skips)
    hops = [hop for group in tied for hop in _hops(group)]
    return [
        Neighbours(
            sources=tuple(goes[Kind.B][stage]),
            takers=tuple(goes[Kind.F][stage]),
            borrowed=_by_stage((start, name) for (start, _), (end, name) in hops if end == stage),
            lent=_by_stage((end, name) for (start, name), (end, _) in hops if start == stage),
        )
        for stage in range(stages)
    ]


def _by_stage(names: Iterable[StageParameter]) -> Mapping[int, list[str]]:
    found = defaultdict[int, list[str]](list)
    for stage, name in names:
        found[stage].append(name)
    return dict(found)


def tied_parameter_skips(tied: Sequence[Sequence[StageParameter]]) -> frozenset[Skip]:
    """The pairs of stages between which gradients of shared parameters go past others."""
    hops = [(start, end) for group in tied for (start, _), (end, _) in _hops(group)]
    return frozenset((start, end) for start, end in hops if end > start + 1)


def _hops(group: Sequence[StageParameter]) -> list[tuple[StageParameter, StageParameter]]:
    """From each stage that has the parameter to the next, by its first name there."""
    first = list({stage: (stage, name) for stage, name in reversed(group)}.values())[::-1]
    return list(pairwise(first))
