"""The memory of activations: held from their forward to the end of their backward."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from penstock.schedule.table import Action, Chains, Kind, Table

MAX_LISTED_RANKS = 16  # with more ranks, the range of the amounts is printed


class ActivationSize(NamedTuple):
    """The memory of one activation of a stage, in any unit."""

    act: float = 1  # all of it, from F on
    keep: float = 1  # the part that W still needs after I

    def memory_change(self, kind: Kind) -> float:
        """Return how an action of `kind` changes its rank's memory: F when it starts, the others when they end."""
        if kind is Kind.F:
            return self.act
        return -self.act if kind is Kind.B else self.keep - self.act if kind is Kind.I else -self.keep


Row = Iterable[Action | tuple[Action, ...]]  # the cells of one rank: an action, or the two of a pair


def memory_after_actions(
    row: Row, sizes: Sequence[ActivationSize] = (), microbatch_factors: Sequence[float] = (), slices: int = 1
) -> Iterator[tuple[Action, float]]:
    """Yield each action of a rank with the memory of the rank's activations after it.

    In a pair the forward counts first, because it begins before the backward ends.

    `sizes`: of an activation of each stage; by default 1. `microbatch_factors`: a multiplier of that for each microbatch; by
    default 1. Each of K `slices` counts 1/K.
    """
    unit, memory, share = ActivationSize(), 0.0, 1.0 / slices
    for cell in row:
        for action in (cell,) if isinstance(cell, Action) else sorted(cell, key=changes_memory_at_end):
            factor = microbatch_factors[action.microbatch] * share if microbatch_factors else share
            memory += (sizes[action.stage] if sizes else unit).memory_change(action.kind) * factor
            yield action, memory


def changes_memory_at_end(action: Action) -> bool:
    """Return whether `action` changes memory when it ends (a backward), not when it starts."""
    return action.kind is not Kind.F


def waiting_outputs(actions: Iterable[Action], chains: Chains) -> list[int]:
    """Return how many of a teacher's outputs wait on a rank for the losses that take them: first, and after each action.

    An output waits from the teacher's last forward until the model's last, which computes the loss and holds the output from
    then on as it needs it. Unless `chains` have a teacher that runs for this batch, all outputs were computed before the step.
    """
    of_loss = chains.num_stages if chains.teacher is None else chains.teacher
    changes = {of_loss - 1: -1}
    if chains.teacher is not None:
        changes[chains.num_stages - 1] = 1
    numbers = [changes.get(action.stage, 0) if action.kind is Kind.F else 0 for action in actions]
    return list(accumulate(numbers, initial=0 if chains.loss_waits else numbers.count(-1)))


class TeacherOutputs(NamedTuple):
    """What the outputs of a teacher take while they wait for their losses."""

    table: Table  # of both models
    sizes: Sequence[float]  # of each microbatch, in any unit


def peaks_in_flight(rows: Iterable[Row], slices: int = 1, forward_only: Collection[int] = frozenset()) -> tuple[float, ...]:
    """Return for every rank the most (stage, microbatch) activations held at once, from F to the end of B or W.

    Each of K `slices` counts 1/K: with K = 4, 7 slices are 1.75 activations.
    `forward_only`: stages that keep nothing for a backward.
    """
    peaks = tuple(max(accumulate(map(_CHANGE_IN_FLIGHT.__getitem__, _kinds(row, forward_only))), default=0) for row in rows)
    return peaks if slices == 1 else tuple(peak / slices for peak in peaks)


_CHANGE_IN_FLIGHT = {kind: int(ActivationSize().memory_change(kind)) for kind in Kind}


def _kinds(row: Row, forward_only: Collection[int]) -> Iterator[Kind]:
    for cell in row:
        if not isinstance(cell, Action):
            kinds = [action.kind for action in cell if action.stage not in forward_only]
            yield from sorted(kinds, key=lambda kind: kind is not Kind.F)
        elif cell.stage not in forward_only:
            yield cell.kind


def format_per_rank(amounts: Sequence[float], format_amount: Callable[[float], str] = "{:g}".format) -> str:
    """Return one amount for each rank as text: `4/3/2/1`, or their range if there are many ranks."""
    if len(amounts) <= MAX_LISTED_RANKS:
        return "/".join(map(format_amount, amounts))
    min_amount, max_amount = min(amounts), max(amounts)
    if min_amount == max_amount:
        return f"{format_amount(max_amount)} on every rank"
    return f"{format_amount(min_amount)} to {format_amount(max_amount)} on {len(amounts)} ranks"


def format_in_flight(peaks: Sequence[float], stages_per_rank: float) -> str:
    """Return the activations in flight on every rank as text: `4/3/2/1`, or `8/8/7/5 (2 for each microbatch)`."""
    unit = f" ({stages_per_rank:g} for each microbatch)" if stages_per_rank > 1 and stages_per_rank % 1 == 0 else ""
    return format_per_rank(peaks) + unit


def format_bytes(size: float) -> str:
    """Return a number of bytes as text: `12.3 MB`."""
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (0, "bytes"))
    factor, name = next((unit for unit in units if size >= unit[0]), units[-1])
    return f"{size / (factor or 1):.4g} {name}"


def parse_bytes(text: str) -> float | None:
    """Return the number of bytes written as `text` (`2GB`, `2GiB`, `2e9`); None if it cannot be read."""
    match = re.fullmatch(r"\s*(\d+\.?\d*(?:E\d+)?)\s*(?:(?:([TGMK])(I?))?B)?\s*", text.upper())
    return float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " ") if match else None
