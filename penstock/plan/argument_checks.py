"""Checks of the arguments of `plan`: each function raises PenstockError, in one sentence, for a value that cannot be used."""

import math
from collections.abc import Iterable, Sequence
from typing import SupportsFloat

from penstock.errors import PenstockError, is_whole_number
from penstock.plan.model_profile import ModelProfile
from penstock.plan.partition_search import EvaluatedPartition, PartitionSearch
from penstock.schedule.catalog import FAMILIES, names_with_options
from penstock.schedule.memory import format_bytes, parse_bytes


def parse_ranks_batch_and_seed(
    profile: ModelProfile, ranks: int, batch: int, seed: int, effort: str, efforts: Iterable[str]
) -> tuple[int, int, int]:
    """Return `ranks`, `batch` and `seed` as integers. Raises PenstockError for arguments of which no plan can be made."""
    if not (is_whole_number(ranks, 1) and is_whole_number(batch, 1)):
        raise PenstockError(f"a plan is for 1 rank or more and 1 row or more, whole numbers, not {ranks} and {batch}")
    if not any(layer.seconds for layer in profile.samples[-1].layers):
        raise PenstockError("all layers take 0 seconds, so any plan is as good: measure them, or say what they take")
    if effort not in list(efforts):
        raise PenstockError(f"effort={effort!r}: use {', '.join(efforts)}")
    if not is_whole_number(seed):
        raise PenstockError(f"seed={seed!r}: give a whole number")
    return int(ranks), int(batch), int(seed)


def parse_numbers(**numbers: float) -> dict[str, float]:
    """Return the `numbers` as floats, by name: costs of messages, engine and optimizer. Raises PenstockError out of range."""
    for name, number in numbers.items():
        divides = name in ("bandwidth", "cores")  # may be infinite, but not 0
        if not isinstance(number, SupportsFloat) or not (number > 0 if divides else 0 <= number < math.inf):
            raise PenstockError(f"{name}={number!r} cannot be: give a number {'above 0' if divides else 'of 0 or more'}")
    return {name: float(number) for name, number in numbers.items()}


def parse_integers(name: str, value: int | Sequence[int]) -> list[int]:
    """Return a list of the integer, or of the several integers without repetitions. Raises PenstockError for anything else."""
    values = list(dict.fromkeys(value)) if isinstance(value, Iterable) else [value]
    if not values or not all(map(is_whole_number, values)):
        raise PenstockError(f"{name}={value!r}: give a whole number, or several to choose from")
    return [int(value) for value in values]


def memory_of_ranks(memory: float | str | Sequence[float | str], ranks: int) -> tuple[float, ...]:
    """Return the bytes of every rank. Raises PenstockError unless one size is given, or one for each rank."""
    value = list(memory) if isinstance(memory, Iterable) and not isinstance(memory, str) else [memory] * ranks
    sizes: list[object] = [parse_memory_size(size) if isinstance(size, str) else size for size in value]
    limits = tuple(float(size) for size in sizes if isinstance(size, SupportsFloat) and float(size) > 0)
    if not len(limits) == len(value) == ranks:
        raise PenstockError(f"memory is {memory} for {ranks} ranks: give bytes above 0, once or for each rank of a pipeline")
    return limits


def speeds_of_ranks(speeds: Sequence[float], ranks: int) -> tuple[float, ...]:
    """Return the speed of every rank; empty if none is given. Raises PenstockError for another number of speeds."""
    value: tuple[float, ...] = tuple(speeds) if isinstance(speeds, Iterable) else (speeds,)
    if value and (len(value) != ranks or not all(isinstance(speed, SupportsFloat) and 0 < speed < math.inf for speed in value)):
        raise PenstockError(f"speeds are {speeds} for {ranks} ranks: give a number above 0 for each rank of a pipeline")
    return tuple(map(float, value))


def replica_counts(dp: int | Sequence[int], ranks: int, batch: int) -> list[int]:
    """Return the requested numbers of replicas that divide both `ranks` and `batch`. Raises PenstockError if none does."""
    requested_counts = parse_integers("dp", dp)
    if not (usable_counts := [value for value in requested_counts if value > 0 and ranks % value == 0 and batch % value == 0]):
        max_replicas = math.gcd(ranks, batch)
        raise PenstockError(f"dp={dp}: give replicas that divide {ranks} ranks and {batch} rows, such as {max_replicas}")
    return usable_counts


def family_names(schedules: str | Sequence[str] | None) -> list[str]:
    """Return the names of the families to try: by default all but naive. Raises PenstockError for an unknown name."""
    family_list = list(schedules) if isinstance(schedules, Iterable) and not isinstance(schedules, str) else [schedules or ""]
    if not any(family_list):
        return [name for name in FAMILIES if name != "naive"]
    if unknown := [name for name in family_list if name not in list(FAMILIES)]:
        raise PenstockError(f"there is no schedule {unknown[0]!r}: choose from {', '.join(FAMILIES)}")
    return family_list


def slice_counts(slices: int | Sequence[int], names: Sequence[str]) -> list[int]:
    """Return the numbers of slices to try with the families `names`. Raises PenstockError if no family can be cut so."""
    counts = parse_integers("slices", slices)
    if wrong := [count for count in counts if count < 1]:
        raise PenstockError(f"slices={wrong[0]}: a microbatch is cut into 1 slice or more")
    sliced = names_with_options(["slices"])
    if min(counts) > 1 and not {*sliced} & {*names}:
        families, sliced_families = ", ".join(names), ", ".join(sliced)
        raise PenstockError(f"{families}: without slices, so slices={slices} cannot be planned; {sliced_families} have them")
    return counts


def microbatch_counts(
    microbatches: int | Sequence[int] | None, batch: int, rows: int, ranks: int, max_rows: float
) -> list[int]:
    """Return the numbers of microbatches to try: by default those that divide the rows, or one number if none divides them.

    A microbatch has at most `max_rows` rows, unless no number is left then.
    """
    if microbatches is None:
        max_count = min(rows, 8 * ranks)
        fewest = min(max_count, max(1, min(rows, ranks) // 4, math.ceil(rows / max_rows)))
        divisors = [count for count in range(fewest, max_count + 1) if rows % count == 0]
        return divisors or [min(rows, 4 * ranks)]
    counts = sorted(parse_integers("microbatches", microbatches))
    if wrong := [count for count in counts if not 1 <= count <= batch]:
        raise PenstockError(f"a batch of {batch} rows cannot be split into {wrong[0]} microbatches: use 1 to {batch}")
    return [count for count in counts if count <= rows]


def nothing_fits_message(search: PartitionSearch, best: EvaluatedPartition, alternatives: Iterable[str]) -> str:
    """Return the error if nothing fits: the rank that lacks most memory in the `best` candidate, and what would fit."""
    rank = max(range(len(best.choices)), key=lambda rank: best.choices[rank].excess_bytes)
    choice, stages = best.choices[rank], search.stage_costs(best.starts)
    always, buffers = search.static_bytes(rank, [stages[stage] for stage in search.timer.stages_of_rank[rank]])
    activation_bytes = choice.peak_bytes - always - buffers
    needed = max(choice.peak_bytes for choice in best.choices)
    schedule, needs = search.timer.schedule, f"{format_bytes(choice.excess_bytes)} of {format_bytes(choice.peak_bytes)}"
    problem = (
        f"nothing fits: at best ({schedule.name}, {schedule.microbatches} microbatches) rank {rank} misses {needs}: "
        f"{format_bytes(always)} for parameters, gradients and optimizer state, {format_bytes(buffers)} for messages, "
        f"{format_bytes(activation_bytes)} for activations"
    )
    return f"{problem}. What fits: {'; '.join([*alternatives, f'{format_bytes(needed)} for each rank'])}"


def parse_memory_size(text: str) -> float:
    """Return the bytes in `text`, `2GB`, `2GiB` or `2e9` for instance. Raises PenstockError for anything else."""
    size = parse_bytes(text)
    if size is None or size < 1000:
        raise PenstockError(f"{text!r} is no amount of memory that a rank can have: write it as 2GB, 500MB")
    return size
