"""Read the steps of other programs from their torch.profiler traces, one for each rank: `penstock show traces/`.

timeline = read("traces/")
print(timeline.explain())
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from graphlib import CycleError
from os import PathLike
from pathlib import Path

from penstock.errors import PenstockError
from penstock.integrations.chrome_trace import PROFILE, is_trace
from penstock.integrations.clocks import clock_offsets
from penstock.integrations.rank_trace import RankTrace, TimedAction, read_rank_trace
from penstock.integrations.trace_delays import describe_delays, find_delays
from penstock.schedule import Action, Event, Kind, MeasuredTimeline, Schedule, ScheduleError, build, from_rows, names
from penstock.view.reading import check_timeline
from penstock.view.record import TIMELINE_FILE, Record

ENDINGS = (".json", ".json.gz")

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]
_GIVE_ONE_RUN = "give the traces of one run, from a folder of its own"

StepKey = tuple[int, int]  # number of the profiler step, number of the pipeline step in it
RankStep = list[TimedAction]  # the actions of one rank in one step, in order


def read(paths: Paths, ranks: Sequence[int] | None = None, placement: Sequence[int] | None = None) -> MeasuredTimeline:
    """Return the step of median length in these traces, in seconds.

    `paths`: a folder, or a file for each rank; `.json` or `.json.gz`, as `export_chrome_trace` writes them.
    `ranks`: the job's ranks of one pipeline, in its order; by default those that the traces name, else all.
    `placement`: the rank of each stage, as an index into `ranks`; by default as the traces say, else one stage for each rank.

    Raises PenstockError for a file that is no trace or is damaged, and for traces that do not form steps of one pipeline.
    """
    usual = read_record(paths, ranks, placement)[0].usual
    assert isinstance(usual, MeasuredTimeline)
    return usual


def read_record(
    paths: Paths,
    ranks: Sequence[int] | None = None,
    placement: Sequence[int] | None = None,
    on_bytes: Callable[[int], object] = lambda count: None,
    stages_per_rank: int = 1,
) -> tuple[Record, list[str]]:
    """Return all steps in the traces, and notes on how they were read. Arguments and errors: as `read`.

    `on_bytes` is called with the number of bytes read, chunk by chunk. `stages_per_rank`: for a program whose ranges name no
    stages, if no `placement` is given.
    """
    files = trace_files(paths)
    traces = _select_pipeline([read_rank_trace(file, position, on_bytes) for position, file in enumerate(files)], ranks)
    _check_same_job(traces)
    _count_microbatches_by_step(traces)
    _set_stages(traces, placement, stages_per_rank)
    steps = _common_steps(traces)
    tables, num_dropped = _complete_tables(steps, placement)
    _check_last_stage(next(iter(tables.values())), traces)
    steps = {key: steps[key] for key in tables}
    table = next(iter(tables.values()))

    intervals = [[{timed.action: (timed.start, timed.end) for timed in row} for row in rows] for rows in steps.values()]
    offsets, error = clock_offsets(intervals, [trace.host for trace in traces])
    name = f"{_catalog_name(table)}, measured"
    timelines, message_bytes = [], max(trace.events.max_message_bytes for trace in traces)
    for key, rows in steps.items():
        events = tuple(_events(rank, row, offsets[rank]) for rank, row in enumerate(rows))
        between_steps = tuple(_seconds_before_step(trace, row) for trace, row in zip(traces, rows, strict=True))
        timeline = MeasuredTimeline(
            name,
            events,
            between_steps=between_steps,
            message_bytes=message_bytes,
            pairs_send_together=traces[0].events.is_of_torch_runtime,
        )
        timelines.append(_check_timeline(timeline, key, traces))
    record = Record(tuple(timelines), unit="s", labels=tuple(map(_step_name, steps)))
    usual = list(steps.values())[record.steps.index(record.usual)]
    findings = tuple(find_delays(record, traces, usual))
    notes = [*_notes(record, traces, num_dropped, error), *describe_delays(record, traces, usual)]
    return replace(record, findings=findings), notes


def is_traces(path: Path) -> bool:
    """Return whether `path` is a trace, or a folder of traces that is not the folder of a run."""
    if path.is_dir():
        return not (path / TIMELINE_FILE).exists() and any(
            is_trace(file) for file in path.iterdir() if file.name.endswith(ENDINGS)
        )
    return path.is_file() and (path.name.endswith(".json.gz") or (path.name.endswith(".json") and is_trace(path)))


def trace_files(paths: Paths) -> list[Path]:
    """Return the trace files that `paths` lists or that its folders hold. Raises PenstockError if there is none."""
    given_paths = [Path(path) for path in ([paths] if isinstance(paths, str | PathLike) else paths)]
    files = []
    for path in given_paths:
        inside = [file for file in path.iterdir() if file.name.endswith(ENDINGS)] if path.is_dir() else [path]
        traces = sorted(file for file in inside if file == path or is_trace(file))
        if not traces:
            raise PenstockError(f"{path} has no traces of torch.profiler (.json or .json.gz, one for each rank): {PROFILE}")
        files += traces
    if not files:
        raise PenstockError("there are no traces to read: give a folder, or a file for each rank")
    return files


# ---- ranks and stages


def _select_pipeline(traces: Sequence[RankTrace], ranks: Sequence[int] | None) -> list[RankTrace]:
    """Return the traces of one pipeline, in its order. Raises PenstockError if one is missing or given twice."""
    by_rank: dict[int, RankTrace] = {}
    for trace in traces:
        if (earlier := by_rank.setdefault(trace.rank, trace)) is not trace:
            raise PenstockError(f"{earlier.path} and {trace.path} are both of rank {trace.rank}: give one trace for each rank")
    first_rank = min(by_rank)
    ranks = ranks or [rank for rank in by_rank[first_rank].pipeline if rank in by_rank] or sorted(by_rank)
    if missing_ranks := [rank for rank in ranks if rank not in by_rank]:
        raise PenstockError(
            f"there is no trace of rank {missing_ranks[0]}, but of {_comma_list(sorted(by_rank))}: add it, or give ranks="
        )
    return [by_rank[rank] for rank in ranks]


def _check_same_job(traces: Sequence[RankTrace]) -> None:
    """Raise PenstockError if the traces are of two runs: of worlds of two sizes, or on one machine at two times."""
    first = traces[0]
    for trace in traces[1:]:
        if first.world_size and trace.world_size and first.world_size != trace.world_size:
            sizes = f"{first.path} of a run of {first.world_size} ranks, {trace.path} of one of {trace.world_size}"
            raise PenstockError(f"the traces are of two runs, {sizes}: {_GIVE_ONE_RUN}")
    for trace in traces[1:]:
        earlier, later = sorted((first, trace), key=lambda trace: trace.actions[0].host_start)
        pause = later.actions[0].host_start - earlier.actions[-1].end
        if pause > 0 and first.host and first.host == trace.host:
            problem = f"{later.path} begins {pause:.3g} s after the last action of {earlier.path}"
            raise PenstockError(f"the traces are of two runs, {problem}: {_GIVE_ONE_RUN}")


def _count_microbatches_by_step(traces: Sequence[RankTrace]) -> None:
    """Count the microbatches of actions whose ranges name none from 0 in each step, if the profiler marked no steps.

    A step ends where no rank has a microbatch between its forward and its backward. On the last rank of 1F1B that is so after
    each backward, on the first rank only at the end of a step.
    """
    if not all((trace.is_inferred or trace.is_counted) and not trace.steps for trace in traces):
        return
    ends = sorted(set.intersection(*map(_counts_at_rest, traces)))
    for trace in traces:
        trace.actions = [
            timed._replace(
                action=action._replace(microbatch=action.microbatch - ends[bisect_right(ends, action.microbatch) - 1])
            )
            for timed in trace.actions
            for action in [timed.action]
        ]


def _counts_at_rest(trace: RankTrace) -> set[int]:
    """Return the numbers of backwards after which the rank has run the backward of every forward; 0 is one of them."""
    counts, numbers = Counter[Kind](), {0}
    for timed in trace.actions:
        counts[timed.action.kind] += 1
        if counts[Kind.F] == counts[Kind.B]:
            numbers.add(counts[Kind.B])
    return numbers


def _set_stages(traces: Sequence[RankTrace], placement: Sequence[int] | None, stages_per_rank: int) -> None:
    """Set the stages of actions if the traces name none. Raises PenstockError if they do not fit `placement`."""
    if any(trace.names_stages for trace in traces):
        if nameless := [trace for trace in traces if not trace.names_stages]:
            raise PenstockError(f"{nameless[0].path} names no stages, the other traces do: give traces of one job")
        return
    count = len(traces)
    rank_of = list(range(count)) * stages_per_rank if placement is None else list(placement)
    if sorted(rank_of[:count]) != list(range(count)) or rank_of != rank_of[:count] * (len(rank_of) // count):
        raise PenstockError(
            f"placement {rank_of} does not cycle over {count} ranks: give every rank once, or V times in the same order"
        )
    if len(rank_of) > count and not all(trace.is_counted for trace in traces):
        raise PenstockError(f"{traces[0].path} has one stage, as its ranges say: leave out placement and stages_per_rank")
    for rank, trace in enumerate(traces):
        action_of = partial(
            _interleaved_action,
            first_stage=rank_of.index(rank),
            ranks=count,
            stages=len(rank_of),
            forwards=_count_forwards(trace),
        )
        trace.actions = [timed._replace(action=action_of(timed.action)) for timed in trace.actions]


def _count_forwards(trace: RankTrace) -> int:
    """Return how many forwards the rank runs in a step, over all its stages."""
    return 1 + max(timed.action.microbatch for timed in trace.actions)


def _interleaved_action(action: Action, first_stage: int, ranks: int, stages: int, forwards: int) -> Action:
    """Return stage and microbatch of the n-th forward or backward of a rank, where n is `action.microbatch`.

    The rank runs P microbatches in each of its stages in turn, and backwards from its last stage, as in Megatron's interleaved
    schedule. `forwards`: how many a rank runs in a step.
    """
    kind, _, index, _ = action
    stages_per_rank = stages // ranks
    group, within_group = divmod(index, ranks * stages_per_rank)
    size = max(1, min(ranks, forwards // stages_per_rank - group * ranks))
    chunk, microbatch = divmod(within_group, size)
    chunk = chunk if kind is Kind.F else stages_per_rank - 1 - chunk
    return Action(kind, first_stage + max(chunk, 0) * ranks, group * ranks + microbatch)


# ---- steps


def _common_steps(traces: Sequence[RankTrace]) -> dict[StepKey, list[RankStep]]:
    """Return the steps that all ranks have, with the actions of every rank. Raises PenstockError if there is none."""
    steps_per_rank = [_steps_of(trace) for trace in traces]
    common = sorted(set.intersection(*(set(steps) for steps in steps_per_rank)))
    if not common:
        rows = zip(traces, steps_per_rank, strict=True)
        step_texts = "; ".join(f"{trace.path.name}: {_comma_list(_step_numbers(steps))}" for trace, steps in rows)
        raise PenstockError(f"the traces have no step in common ({step_texts}): profile the same steps on every rank")
    return {key: [steps[key] for steps in steps_per_rank] for key in common}


def _step_numbers(steps: Mapping[StepKey, RankStep]) -> list[int]:
    return sorted({number for number, _ in steps})


def _steps_of(trace: RankTrace) -> dict[StepKey, RankStep]:
    """Return the actions of each step. An action that repeats in a profiler step begins another pipeline step."""
    steps = defaultdict[StepKey, RankStep](list)
    ranges = sorted((span.start, span.end, number) for number, span in trace.steps.items())
    part, step, actions_in_part = 0, -1, set[Action]()
    for timed in trace.actions:
        index = bisect_right(ranges, timed.host_start, key=lambda timed_range: timed_range[0]) - 1
        number = ranges[index][2] if index >= 0 and timed.host_start < ranges[index][1] else 0
        if ranges and (index < 0 or timed.host_start >= ranges[index][1]):
            continue  # before the first mark, or after the last
        if number != step:
            part, step, actions_in_part = 0, number, set()
        elif timed.action in actions_in_part:
            part, actions_in_part = part + 1, set()
        actions_in_part.add(timed.action)
        steps[number, part].append(timed)
    return steps


def _complete_tables(
    steps: Mapping[StepKey, Sequence[RankStep]], placement: Sequence[int] | None
) -> tuple[dict[StepKey, Schedule], int]:
    """Return the tables of the steps that ran the most common table, and the number of other steps.

    Raises PenstockError if no step is complete.
    """
    tables, errors = dict[StepKey, Schedule](), list[PenstockError]()
    for key, rows in steps.items():
        try:
            tables[key] = _table(key, rows, placement)
        except PenstockError as error:
            errors.append(error)
    if not tables:
        raise errors[0]
    most_common = Counter(table.actions for table in tables.values()).most_common(1)[0][0]
    kept_tables = {key: table for key, table in tables.items() if table.actions == most_common}
    return kept_tables, len(steps) - len(kept_tables)


def _table(key: StepKey, rows: Sequence[RankStep], placement: Sequence[int] | None) -> Schedule:
    """Return the table that ran in a step. Raises PenstockError if actions are missing, or a stage ran on two ranks."""
    stages = {timed.action.stage for row in rows for timed in row}
    if len(stages) <= max(stages):
        missing_stage = next(stage for stage in range(len(stages) + 1) if stage not in stages)
        raise PenstockError(f"no trace has stage {missing_stage}: give the traces of all ranks of the pipeline")
    table = from_rows("traces", [[timed.action for timed in row] for row in rows])
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(table.actions):
        for action in row:
            if rank_of.setdefault(action.stage, rank) != rank:
                problem = f"stage {action.stage} ran on two of these ranks, {rank_of[action.stage]} and {rank}"
                raise PenstockError(f"{problem}: they are replicas, so give the traces of one pipeline")
    if placement is not None and tuple(placement) != table.placement:
        raise PenstockError(f"placement is {list(placement)}, but in the traces the stages ran on {list(table.placement)}")
    actions = {action for row in table.actions for action in row}
    for stage in range(table.stages):
        for microbatch in range(table.microbatches):
            has_kind = {kind: Action(kind, stage, microbatch) in actions for kind in Kind}
            for name, is_there in (("forward", has_kind[Kind.F]), ("backward", has_kind[Kind.B] or has_kind[Kind.I])):
                if not is_there:
                    problem = f"{_step_name(key)} has no {name} of microbatch {microbatch} on stage {stage}"
                    raise PenstockError(f"{problem}: profile whole steps of training, on all ranks")
    return table


def _check_last_stage(table: Schedule, traces: Sequence[RankTrace]) -> None:
    """Raise PenstockError if every backward of the last stage received a message: then it is not the last stage."""
    stage = table.stages - 1
    receiving = {timed.action for trace in traces for timed in trace.actions if timed.receives}
    backwards = {action for row in table.actions for action in row if action.stage == stage and action.kind in (Kind.B, Kind.I)}
    if backwards <= receiving:
        problem = f"backwards of stage {stage} wait for messages from stage {stage + 1}, which is in no trace"
        raise PenstockError(f"{problem}: give the traces of all ranks of the pipeline")


def _step_name(key: StepKey) -> str:
    number, part = key
    return f"step {number}" + (f", part {part + 1}" if part else "")


def _catalog_name(table: Schedule) -> str:
    """Return the name of the catalog's schedule with these actions, or "traces" if there is none."""
    for name in names():
        try:
            schedule = build(name, table.ranks, table.microbatches, table.stages // table.ranks)
        except ScheduleError:
            continue
        if schedule.actions == table.actions:
            return name
    return table.name


def _events(rank: int, row: RankStep, offset: float) -> tuple[Event, ...]:
    """Return the events of `row` by rank 0's clock, moved if needed so that no two overlap."""
    events, previous_end = list[Event](), -float("inf")
    for action, start, end, sent, *_ in row:
        start, end = max(start + offset, previous_end), max(end + offset, previous_end)
        events.append(Event(rank, action, start, end, None if sent is None else max(end, sent + offset)))
        previous_end = end
    return tuple(events)


def _seconds_before_step(trace: RankTrace, row: RankStep) -> float:
    """Return the seconds from the previous step's end to this step's first action or message; 0 for the first step."""
    step_start = row[0].host_start
    earlier_ends = [timed.sent or timed.end for timed in trace.actions if timed.host_start < step_start]
    starts = [start for start in trace.work_starts if earlier_ends and earlier_ends[-1] <= start <= step_start]
    return max(0.0, min(starts, default=step_start) - earlier_ends[-1]) if earlier_ends else 0.0


def _check_timeline(timeline: MeasuredTimeline, key: StepKey, traces: Sequence[RankTrace]) -> MeasuredTimeline:
    """Return `timeline`. Raises PenstockError if its events contradict each other, as those of two runs do."""
    try:
        check_timeline(timeline)
    except ValueError as error:
        cycle = error.__cause__.args[1] if isinstance(error.__cause__, CycleError) else ()
        ranks = sorted({event.rank for event in timeline.events if event.action in cycle})
        of_two = f", as {traces[ranks[0]].path} and {traces[ranks[1]].path} are of two runs" if len(ranks) > 1 else ""
        raise PenstockError(f"{_step_name(key)} contradicts itself{of_two}, {error}: {_GIVE_ONE_RUN}") from error
    return timeline


# ---- sentences


def _notes(record: Record, traces: Sequence[RankTrace], num_dropped: int, error: float) -> list[str]:
    """Return sentences on how the timeline was found."""
    lengths = [1e3 * step.makespan for step in record.steps]
    steps = f"{len(lengths)} steps of {min(lengths):.1f} to {max(lengths):.1f} ms, the median one is shown"
    notes = [steps if len(lengths) > 1 else "1 step"]
    if num_dropped:
        notes.append(f"left out: {num_dropped} with other actions, or incomplete")
    if len({trace.host for trace in traces}) > 1:
        notes.append(f"clocks aligned by messages, to within {1e6 * error:.0f} us")
    elif error:
        notes.append(f"clocks of one machine contradicted by its messages, by {1e6 * error:.0f} us")
    if any(trace.is_inferred for trace in traces):
        notes.append("actions inferred from autograd's operations and messages, because no range names them")
    if any(trace.is_counted for trace in traces):
        notes.append("microbatches counted in the order of their ranges, which do not name them")
    return notes


def _comma_list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
