"""A step too large for a page to show action by action: for each rank which part of its time went where, slice by slice."""

from penstock.schedule import Timeline
from penstock.view.data.timeline import Data

MOST = 250_000  # actions that a page shows one by one
SLICES = 256  # of the step
DIGITS = 3  # of a share


def is_huge(timeline: Timeline) -> bool:
    """Whether a page shows its sums alone."""
    return len(timeline.events) > MOST


def sums_data(timeline: Timeline) -> Data:
    """What `timeline_data` has, but for every rank sums: the share of each slice that each kind and cause took."""
    ranks = [_sums(timeline, rank) for rank in range(timeline.ranks)]
    total = timeline.ranks * SLICES
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
    parts: dict[str, list[float]] = {}
    for cell in timeline.cells(rank):
        for event in cell:
            _add(parts, event.action.kind.value, timeline, event.start, event.end, 1 / len(cell))
    for start, end, cause in timeline.idle[rank]:
        _add(parts, cause.value, timeline, start, end)
    return parts


def _add(parts: dict[str, list[float]], part: str, timeline: Timeline, start: float, end: float, weight: float = 1.0) -> None:
    """Share out the time from `start` to `end` over the slices it lies in."""
    shares = parts.setdefault(part, [0.0] * SLICES)
    begin, until = ((time - timeline.start) / timeline.makespan * SLICES for time in (start, end))
    for place in range(int(begin), min(SLICES, int(until) + 1)):
        shares[place] += weight * max(0.0, min(until, place + 1) - max(begin, place))


def _rounded(parts: dict[str, list[float]]) -> dict[str, list[float]]:
    return {part: [round(share, DIGITS) for share in shares] for part, shares in parts.items()}
