"""What activations take: held from their forward to the end of their backward."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from penstock.schedule.table import Action, Kind


class Size(NamedTuple):
    """What one activation of a stage takes, in any unit: all of it, and the part that W still needs after I."""

    act: float = 1
    keep: float = 1

    def change(self, kind: Kind) -> float:
        """What an action of `kind` adds to the memory of its rank: F when it starts, the others when they end."""
        if kind is Kind.F:
            return self.act
        return -self.act if kind is Kind.B else self.keep - self.act if kind is Kind.I else -self.keep


FEW = 16  # ranks, of which each one's amount is told
Row = Iterable[Action | tuple[Action, ...]]  # of one rank; a place is an action, or the two of a pair


def held_after(row: Row, sizes: Sequence[Size] = ()) -> Iterator[tuple[Action, float]]:
    """The actions of a rank, and what its activations take once each has ended.

    Of a pair the forward counts first: it begins before the backward ends. Without `sizes`, of the stages, each takes 1.
    """
    one, held = Size(), 0.0
    for cell in row:
        for action in (cell,) if isinstance(cell, Action) else cell if len(cell) == 1 else sorted(cell, key=frees):
            held += (sizes[action.stage] if sizes else one).change(action.kind)
            yield action, held


def frees(action: Action) -> bool:
    """Whether `action` changes what is held when it ends, not when it starts."""
    return action.kind is not Kind.F


def peaks_in_flight(rows: Iterable[Row]) -> tuple[int, ...]:
    """For every rank, the most (stage, microbatch) activations held at once: F takes one up, B or W lets it go."""
    return tuple(int(max((held for _, held in held_after(row)), default=0)) for row in rows)


def of_ranks(amounts: Sequence[float], told: Callable[[float], str] = "{:g}".format) -> str:
    """One amount for each rank, as people read them: `4/3/2/1`; of many ranks what all have, or from where to where it goes."""
    if len(amounts) <= FEW:
        return "/".join(map(told, amounts))
    least, most = min(amounts), max(amounts)
    return f"{told(most)} on every rank" if least == most else f"{told(least)} to {told(most)} on {len(amounts)} ranks"
