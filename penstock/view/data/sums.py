"""Summarise a step that is too large for a page: for each rank and time bin, the share of each kind and cause of idle time."""

from penstock.schedule import Timeline
from penstock.view.data.timeline_data import Data

MAX_PAGE_ACTIONS = 250_000  # a page lists that many one by one
NUM_BINS = 256  # a step is cut into time bins of equal length
SHARE_DIGITS = 3  # decimals


def is_huge(timeline: Timeline) -> bool:
    """Return whether a page shows sums instead of actions."""
    return len(timeline.events) > MAX_PAGE_ACTIONS


def sums_data(timeline: Timeline) -> Data:
    """Return the data of `timeline_data`, but with shares of the time bins instead of events."""
    ranks = [_sums(timeline, rank) for rank in range(timeline.ranks)]
    total = timeline.ranks * NUM_BINS
    kinds = {kind: sum(sum(row.get(kind, ())) for row in ranks) / total for kind in "FBIW" if any(kind in row for row in ranks)}
    return {
        "makespan": timeline.makespan,
        "span": timeline.span,
        "idle_share": timeline.idle_share,
        "bubble": timeline.bubble,
        "busy": timeline.busy,
        "causes": {str(cause): share for cause, share in timeline.causes.items()},
        "kinds": kinds,
        "peak_in_flight": timeline.peak_in_flight,
        "peak_memory": timeline.peak_memory,
        "memory_unit": timeline.memory_unit,
        "between": timeline.between_steps,
        "critical_path": [],
        "overlaps": [],
        "borders": [],
        "skips": [],
        "counts": {
            "stages": timeline.num_stages,
            "microbatches": 1 + max(event.action.microbatch for event in timeline.events),
            "actions": len(timeline.events),
        },
        "ranks": [
            {"events": [], "idle": [], "memory": [], "sums": {"end": timeline.makespan, "parts": _rounded(row)}}
            for row in ranks
        ],
    }


def _sums(timeline: Timeline, rank: int) -> dict[str, list[float]]:
    """Return kind or cause -> its share of each time bin of the rank."""
    parts: dict[str, list[float]] = {}
    for cell in timeline.cells(rank):
        for event in cell:
            _add_time(parts, event.action.kind.value, timeline, event.start, event.end, 1 / len(cell))
    for start, end, cause in timeline.idle[rank]:
        _add_time(parts, cause.value, timeline, start, end)
    return parts


def _add_time(
    parts: dict[str, list[float]], part: str, timeline: Timeline, start: float, end: float, weight: float = 1.0
) -> None:
    """Add the interval from `start` to `end` to the bins that it overlaps."""
    shares = parts.setdefault(part, [0.0] * NUM_BINS)
    first, last = ((time - timeline.start) / timeline.makespan * NUM_BINS for time in (start, end))
    for index in range(int(first), min(NUM_BINS, int(last) + 1)):
        shares[index] += weight * max(0.0, min(last, index + 1) - max(first, index))


def _rounded(parts: dict[str, list[float]]) -> dict[str, list[float]]:
    return {part: [round(share, SHARE_DIGITS) for share in shares] for part, shares in parts.items()}
