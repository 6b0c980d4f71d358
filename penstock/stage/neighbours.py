"""What a stage takes from other stages, gives to them, and shares with them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from penstock.schedule import Skip
from penstock.schedule.table import edges

Name = tuple[int, str]  # a stage, and a parameter's name in it


@dataclass
class Neighbours:
    """The stages at the other ends, in order, and the parameters shared with each.

    A parameter of several stages belongs to the first of them. Each later one borrows it from the one before, as if its value
    had come from there: the gradient goes back with that of what did come from there. So it is summed use by use, microbatch by
    microbatch, from the last use to the first, in the order in which autograd sums it in the uncut model.
    """

    sources: tuple[int, ...]
    takers: tuple[int, ...]
    borrowed: dict[int, list[str]] = field(default_factory=dict)  # source -> own names of the parameters
    lent: dict[int, list[str]] = field(default_factory=dict)  # taker -> own names

    @classmethod
    def of_chain(cls, index: int) -> "Neighbours":
        """Of a stage that has a neighbour on each side and nothing else."""
        return cls((index - 1,), (index + 1,))


def neighbours_of(stages: int, skips: Collection[Skip], tied: Sequence[Sequence[Name]]) -> list[Neighbours]:
    """The neighbours of every stage."""
    ways = edges(stages, skips)
    found = [
        Neighbours(tuple(start for start, end in ways if end == stage), tuple(end for start, end in ways if start == stage))
        for stage in range(stages)
    ]
    for group in tied:
        for (start, name), (end, further) in _hops(group):
            found[start].lent.setdefault(end, []).append(name)
            found[end].borrowed.setdefault(start, []).append(further)
    return found


def skips_of_tied(tied: Sequence[Sequence[Name]]) -> frozenset[Skip]:
    """The pairs of stages between which gradients of shared parameters go past others."""
    hops = [(start, end) for group in tied for (start, _), (end, _) in _hops(group)]
    return frozenset((start, end) for start, end in hops if end > start + 1)


def _hops(group: Sequence[Name]) -> list[tuple[Name, Name]]:
    """From each stage that has the parameter to the next, by its first name there."""
    first = list({stage: (stage, name) for stage, name in reversed(group)}.values())[::-1]
    return list(pairwise(first))
