"""What is told of memory: bytes to read, and where nothing fits, what would."""

from collections.abc import Iterable

from penstock.errors import PenstockError
from penstock.plan.candidate import Candidate, Cutting
from penstock.schedule.timing.explanation import bytes_meant, bytes_told


def nothing_fits(cutting: Cutting, best: Candidate, fitting: Iterable[str]) -> str:
    """Which rank misses most with the candidate that misses least, and what would fit instead."""
    rank = max(range(len(best.choices)), key=lambda rank: best.choices[rank].over)
    choice, stages = best.choices[rank], cutting.stages(best.starts)
    always, buffers = cutting.always(rank, [stages[stage] for stage in cutting.table.homes[rank]])
    held = choice.bytes - always - buffers
    needed = max(each.bytes for each in best.choices)
    schedule, needs = cutting.table.schedule, f"{bytes_told(choice.over)} of {bytes_told(choice.bytes)}"
    told = (
        f"nothing fits: at best ({schedule.name}, {schedule.microbatches} microbatches) rank {rank} misses {needs}: "
        f"{bytes_told(always)} for parameters, gradients and optimizer state, {bytes_told(buffers)} for messages, "
        f"{bytes_told(held)} for activations"
    )
    return f"{told}. What fits: {'; '.join([*fitting, f'{bytes_told(needed)} for each rank'])}"


def bytes_of(text: str) -> float:
    """The bytes that `text` says, `2GB`, `2GiB` or `2e9` for instance. Raises PenstockError for anything else."""
    size = bytes_meant(text)
    if size is None or size < 1000:
        raise PenstockError(f"{text!r} is no amount of memory that a rank can have: write it as 2GB, 500MB")
    return size
