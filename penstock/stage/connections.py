"""The stages that a stage receives values from and sends values to, and the parameters it shares with each of them."""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from penstock.schedule.table import Chains, Kind, Skip, receiving_stages, sending_stages

StageParameter = tuple[int, str]  # a stage, and a parameter's name in it


class StageConnections(NamedTuple):
    """The stages that one stage exchanges messages with, in order, and the parameters shared with each.

    A parameter of several stages belongs to the first of them. Each later one borrows it from the one before, as if its value
    had come from there: the gradient goes back with the gradients of what did come from there. So it is summed use by use,
    microbatch by microbatch, from the last use to the first, in the order in which autograd sums it in the uncut model.
    """

    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    borrowed_parameters: Mapping[int, list[str]] = {}  # source -> their names in this stage
    lent_parameters: Mapping[int, list[str]] = {}  # destination -> their names in this stage
    frozen_sources: frozenset[int] = frozenset()  # sources that get no gradient


def stage_connections(
    stages: int | Chains, skips: Collection[Skip], tied: Sequence[Sequence[StageParameter]]
) -> list[StageConnections]:
    """Return every stage's connections: to the next stages, along `skips`, and to those with a `tied` parameter of it.

    `stages`: their number, or the chains that they form.
    """
    receivers, senders = receiving_stages(stages, skips), sending_stages(stages, skips)
    borrowings = [borrowing for group in tied for borrowing in _lender_borrower_pairs(group)]
    return [
        StageConnections(
            sources=tuple(senders[Kind.F][stage]),
            destinations=tuple(receivers[Kind.F][stage]),
            borrowed_parameters={
                source: [name for (lender, _), (borrower, name) in borrowings if (lender, borrower) == (source, stage)]
                for source in senders[Kind.F][stage]
            },
            lent_parameters={
                receiver: [name for (lender, name), (borrower, _) in borrowings if (lender, borrower) == (stage, receiver)]
                for receiver in receivers[Kind.F][stage]
            },
            frozen_sources=frozenset(senders[Kind.F][stage]) - frozenset(receivers[Kind.B][stage]),
        )
        for stage in range(len(receivers[Kind.F]))
    ]


def tied_parameter_skips(tied: Sequence[Sequence[StageParameter]]) -> frozenset[Skip]:
    """Return the pairs of stages between which gradients of shared parameters go past other stages."""
    pairs = [(lender, borrower) for group in tied for (lender, _), (borrower, _) in _lender_borrower_pairs(group)]
    return frozenset((lender, borrower) for lender, borrower in pairs if borrower > lender + 1)


def _lender_borrower_pairs(group: Sequence[StageParameter]) -> list[tuple[StageParameter, StageParameter]]:
    """Return the pairs of stages, one after the other, that have the parameter, with its first name in each."""
    first_names = list({stage: (stage, name) for stage, name in reversed(group)}.values())[::-1]
    return list(pairwise(first_names))
