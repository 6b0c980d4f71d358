"""Read records from files. Refuse impossible values before anything is computed from them."""

import json
import math
from graphlib import CycleError, TopologicalSorter
from itertools import chain, pairwise
from os import PathLike
from pathlib import Path

from penstock.errors import PenstockError
from penstock.schedule import Action, ActivationSize, Event, Improvement, MeasuredTimeline, MessageCost, ScheduleError, Timeline
from penstock.schedule.table import Chains, dependencies
from penstock.view.data.timeline_data import Data
from penstock.view.record import FORMAT, TIMELINE_FILE, Record

MAX_FILE_BYTES = 2**28
SETTINGS_FILE = "run.json"  # in the folder of a run: its options, and at the end its results
MAX_REASON_CHARACTERS = 300


def load(path: str | PathLike[str]) -> Record:
    """Read the record that `save` wrote, from its file or from the folder of its run.

    Raises PenstockError if the file does not exist, or is not a timeline of Penstock.
    """
    file = Path(path) / TIMELINE_FILE if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise PenstockError(f"{path} has no timeline: there is no file {file}{_why_missing(Path(path))}")
    with file.open("rb") as opened:
        data = opened.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise PenstockError(f"{file} has more than {MAX_FILE_BYTES:,} bytes, the most that a timeline may have")
    return read(data, str(file))


def _why_missing(folder: Path) -> str:
    """Return why the folder of a run has no timeline, and how to get one; for another folder, that it has no traces either."""
    try:
        is_finished = "losses" in json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return ", nor are there traces of torch.profiler (.json or .json.gz, one for each rank)" if folder.is_dir() else ""
    if not is_finished:
        return f", which is written after the run's last step: penstock train --resume {folder} goes on to it"
    return (
        ", since no step was measured: the run had one rank, --no-timeline, or was resumed with no step left; "
        f"penstock train --resume {folder} --steps N, with a larger N, measures more"
    )


def read(text: str | bytes, file: str) -> Record:
    """Return the record in `text`. Raises PenstockError, which names `file`, if there is none."""
    try:
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError("it is no JSON object")
        if data.get("format") != FORMAT:
            raise ValueError(_format_error(data))
        name, predicted = str(data["name"]), data["predicted" if "predicted" in data else "planned"]  # in files of 0.2
        steps = tuple(_timeline(name, step["timeline"]) for step in data["steps"])
        if not steps:
            raise ValueError("it has no steps")
        labels = tuple(str(step["label"]) for step in data["steps"])
        layers = tuple(map(float, data.get("layers", ())))
        findings = tuple(
            _finding(finding) for finding in (data.get("verdict") or {}).get("findings", ()) if finding.get("from_trace")
        )
        prediction = None if predicted is None else _timeline(name, predicted)
        return Record(steps, prediction, str(data["unit"]), labels, layers, findings)
    except RecursionError as error:
        raise PenstockError(f"{file} is not a timeline that Penstock wrote: it is nested too deeply") from error
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, ScheduleError) as error:
        why = (str(error) if isinstance(error, ValueError) else repr(error))[:MAX_REASON_CHARACTERS]
        raise PenstockError(f"{file} is not a timeline that Penstock wrote: {why}") from error


def _format_error(data: Data) -> str:
    if "traceEvents" in data:
        return "it is a trace, for ui.perfetto.dev; what Penstock reads is the timeline.json of a run"
    return f"its format is {data.get('format')!r}, not {FORMAT!r}"


# ---- timelines


def _timeline(name: str, data: Data) -> MeasuredTimeline:
    rows = tuple(tuple(_read_event(rank, event) for event in row["events"]) for rank, row in enumerate(data["ranks"]))
    overlaps = frozenset((Action.parse(first), Action.parse(second)) for first, second in data["overlaps"])
    borders = tuple(MessageCost(*map(float, border)) for border in data["borders"])
    skips = {(int(low), int(high)): MessageCost(float(busy), float(latency)) for low, high, busy, latency in data["skips"]}
    sizes = tuple(ActivationSize(*map(float, size)) for size in data["sizes"])
    unit = str(data.get("memory_unit", ""))  # older files have neither this nor the next five
    between, averaging, factors = (
        tuple(map(float, data.get(key, ()))) for key in ("between", "averaging", "microbatch_factors")
    )
    message_bytes = float(data.get("message_bytes", 0))
    timeline = MeasuredTimeline(
        name,
        rows,
        borders,
        sizes,
        overlaps,
        skips,
        unit,
        between,
        averaging,
        factors,
        message_bytes,
        tuple(map(float, data.get("microbatch_sizes", ()))),
        bool(data.get("pairs_send_together")),
        _read_chains(data.get("chains")),
        float(data.get("teacher_output", 0)),
    )
    check_timeline(timeline)
    return timeline


def _read_chains(data: Data | None) -> Chains | None:
    if data is None:
        return None
    teacher = data["teacher"]
    frozen = frozenset(map(int, data["forward_only"]))
    return Chains(int(data["num_stages"]), frozen, None if teacher is None else int(teacher), bool(data["ahead"]))


def _finding(data: Data) -> Improvement:
    gain, rank = float(data["gain"]), data["rank"]
    if not math.isfinite(gain):
        raise ValueError(f"a finding gains {gain}")
    timeline = _timeline(str(data["name"]), data["timeline"])
    return Improvement(str(data["about"]), str(data["text"]), gain, timeline, None if rank is None else int(rank))


def check_timeline(timeline: Timeline) -> None:
    """Raise ValueError for a timeline that is impossible."""
    _check_order(timeline)
    _check_amounts(timeline)


def _check_order(timeline: Timeline) -> None:
    """Check that events and their dependencies have no cycle, so that the critical path ends."""
    ranks: dict[int, int] = {}  # stage -> its rank
    predecessors: dict[Action, set[Action]] = {}
    for event in timeline.events:
        if ranks.setdefault(event.action.stage, event.rank) != event.rank:
            raise ValueError(f"stage {event.action.stage} is on rank {ranks[event.action.stage]} and on rank {event.rank}")
        if event.action in predecessors:
            raise ValueError(f"{event.action} occurs twice")
        predecessors[event.action] = {
            action
            for group in dependencies(event.action, timeline.stage_chains, timeline.skips, timeline.slices)
            for action in group
        }
    neighbours = [pair for row in timeline.rows for pair in pairwise(row)]
    for previous, event in neighbours:
        if event.start < previous.start or event.end < previous.end:
            raise ValueError(f"rank {event.rank} has {event.action} out of order")
        predecessors[event.action].add(previous.action)
    try:
        TopologicalSorter(predecessors).prepare()
    except CycleError as error:
        cycle = " before ".join(map(str, error.args[1]))
        raise ValueError(f"its actions would have to run {cycle}") from error
    for first, second in timeline.overlaps - {(previous.action, event.action) for previous, event in neighbours}:
        raise ValueError(f"{first} and {second} are no pair, they do not follow each other")


def _check_amounts(timeline: Timeline) -> None:
    chains, stages = timeline.stage_chains, timeline.num_stages
    if chains.num_stages != stages or not 0 < (stages if chains.teacher is None else chains.teacher) <= stages:
        raise ValueError(f"its chains have {chains.num_stages} stages, and a teacher from {chains.teacher} on, of {stages}")
    numbers = chain(
        *timeline.message_costs,
        *timeline.activation_sizes,
        *timeline.skips.values(),
        timeline.between_steps,
        timeline.averaging,
        timeline.microbatch_factors,
        timeline.microbatch_sizes,
        [timeline.message_bytes],
    )
    if not all(map(math.isfinite, numbers)):
        raise ValueError("it has a time or a size that is no finite number")
    if timeline.message_costs and len(timeline.message_costs) != stages - 1:
        raise ValueError(f"there are {len(timeline.message_costs)} borders between {stages} stages")
    if timeline.activation_sizes and len(timeline.activation_sizes) != stages:
        raise ValueError(f"there are {len(timeline.activation_sizes)} sizes for {stages} stages")
    if timeline.memory_unit not in ("", "bytes"):
        raise ValueError(f"its memory is in {timeline.memory_unit!r}, not in bytes")
    for name, times in (("between steps", timeline.between_steps), ("of averaging", timeline.averaging)):
        if times and (len(times) != timeline.ranks or not min(times) >= 0):
            raise ValueError(f"the times {name} are {list(times)} on {timeline.ranks} ranks")
    microbatches = 1 + max((event.action.microbatch for event in timeline.events), default=-1)
    if timeline.microbatch_factors and (
        len(timeline.microbatch_factors) < microbatches or min(timeline.microbatch_factors) < 0
    ):
        raise ValueError(f"the factors of {microbatches} microbatches are {list(timeline.microbatch_factors)}")
    if any(not 0 <= lower < upper < stages for lower, upper in timeline.skips):
        raise ValueError(f"a skip is not between two of the {stages} stages")


def _read_event(rank: int, data: Data) -> Event:
    start, end = float(data["start"]), float(data["end"])
    if not 0 <= start <= end < float("inf"):
        raise ValueError(f"{data['action']} runs from {start} to {end}")
    sent = float(data["sent"]) if "sent" in data else None
    if sent is not None and not end <= sent < float("inf"):
        raise ValueError(f"{data['action']} ends at {end} and was sent at {sent}")
    return Event(rank, Action.parse(data["action"]), start, end, sent)
