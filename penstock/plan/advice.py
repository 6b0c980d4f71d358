"""What is told of memory: bytes to read, and where nothing fits, what would."""

from collections.abc import Iterable

from penstock.plan.candidate import Candidate, Cutting


def nothing_fits(cutting: Cutting, best: Candidate, fitting: Iterable[str]) -> str:
    """Which rank misses most with the candidate that misses least, and what would fit instead."""
    rank = max(range(len(best.choices)), key=lambda rank: best.choices[rank].over)
    choice, stages = best.choices[rank], cutting.stages(best.starts)
    always, buffers = cutting.always(rank, [stages[stage] for stage in cutting.table.homes[rank]])
    held = choice.bytes - always - buffers
    needed = max(each.bytes for each in best.choices)
    schedule, needs = cutting.table.schedule, f"{told_bytes(choice.over)} of {told_bytes(choice.bytes)}"
    told = (
        f"nothing fits: at best ({schedule.name}, {schedule.microbatches} microbatches) rank {rank} misses {needs}: "
        f"{told_bytes(always)} for parameters, gradients and optimizer state, {told_bytes(buffers)} for messages, "
        f"{told_bytes(held)} for activations"
    )
    return f"{told}. What fits: {'; '.join([*fitting, f'{told_bytes(needed)} for each rank'])}"


def told_bytes(number: float) -> str:
    """Bytes to read."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f} bytes"
