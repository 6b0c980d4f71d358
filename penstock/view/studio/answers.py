"""Answer the page's questions: JSON data in, JSON data out. No state is kept between questions.

    answer({"schedule": "1f1b", "ranks": 4, "microbatches": 8})   # a table by name; "stages_per_rank" if the schedule has it
    answer({"rows": [["0F0", "0B0"]], "placement": [0]})          # an edited table
    answer({"csv": "0F0,0B0\n", "file": "mine.csv"})              # a loaded table, PyTorch's compute-only CSV
    answer({"run": "{..}", "file": "timeline.json"})              # a measured run: its table and its costs
    answer({"run": "{..}", "file": "plan.json"})                  # a plan: its table and its costs

Every question may have "costs" and "unit" (see `costs`; "ms" if the costs are milliseconds, as for a run), and "max_in_flight"
(null: no limit). With "better": true, the answer is a better table, see `search`.
"""

import csv
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from penstock.errors import PenstockError, ScheduleError
from penstock.plan import is_plan_text
from penstock.plan import parse_plan as read_plan
from penstock.schedule import Action, Costs, Measurement, Schedule, Timeline, build, from_rows, verify
from penstock.schedule.catalog import FAMILIES
from penstock.schedule.schedule import parse_csv_cells
from penstock.schedule.table import Table
from penstock.view.data import sums
from penstock.view.data.sums import is_huge, sums_data
from penstock.view.data.timeline_data import Data, timeline_data, verdict_data
from penstock.view.reading import read
from penstock.view.record import Record
from penstock.view.studio import validation
from penstock.view.studio.faster_table import ReportProgress, find_better, found_data
from penstock.view.studio.page_costs import SimulatedTable, measured_costs_data, simulate_at_page_costs

LIMITS = {"ranks": 64, "stages_per_rank": 4, "microbatches": 512}  # of a table built by name
MAX_RANKS = 64  # of a loaded table
MAX_STAGES_TIMES_MICROBATCHES = 131_072  # an answer takes some seconds
MAX_ACTIONS = 3 * MAX_STAGES_TIMES_MICROBATCHES
MAX_DRAWN_STUCK = 100_000  # actions that never run; none is drawn if there are more
SEARCHED_SUFFIX = " (searched)"


def answer(question_data: object, report: ReportProgress = lambda data: None) -> Data:
    """Return the table of a question, its proof or error, and the times of its actions until a deadlock or the end.

    `report` is called with the progress of a search. Raises PenstockError, a sentence for the page, for a table that cannot be
    built, read or simulated.
    """
    request = validation.mapping(question_data, "the question")
    if "run" in request:
        return _answer_for_run(request)
    schedule = _table(request)
    _check_size(schedule)
    return (
        _answer_with_better_table(schedule, request, report) if request.get("better") else _answer_for_table(schedule, request)
    )


def choices() -> Data:
    """Return the schedules and the limits, for the page's controls."""
    families = {
        name: {
            "summary": family.summary,
            "stages_per_rank": family.stages_per_rank,
            "least": family.min_stages_per_rank,
            "open": "stages_per_rank" in family.options,
        }
        for name, family in FAMILIES.items()
    }
    return {"families": families, "most": LIMITS, "most_microbatches": MAX_STAGES_TIMES_MICROBATCHES}


# ---- the table


def _table(request: Mapping[str, object]) -> Schedule:
    name = validation.text(request.get("name") or request.get("file") or "table", "name", 200)
    if "csv" in request:
        text = validation.text(request["csv"], "csv", 8_000_000).removeprefix("\ufeff")
        return _from_rows(name, parse_csv_cells(name, text)[:1000], None)
    if "rows" in request:
        return _from_rows(name, validation.items(request["rows"], "rows"), request.get("placement"))
    name = validation.text(request.get("schedule"), "schedule", 100)
    ranks, microbatches = (
        validation.integer(request, count_name, LIMITS[count_name]) for count_name in ("ranks", "microbatches")
    )
    has_stages = request.get("stages_per_rank") is not None
    stages_per_rank = validation.integer(request, "stages_per_rank", LIMITS["stages_per_rank"]) if has_stages else None
    family = FAMILIES.get(name)
    _check_microbatches(ranks * (stages_per_rank or (family.stages_per_rank if family else 1)), microbatches)
    return build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)


def _from_rows(name: str, rows: list[Any], placement: object) -> Schedule:
    """Build the table of these rows. Raises ScheduleError for more actions, or larger numbers, than the studio takes."""
    cells = [[validation.text(cell, "a cell", 100) for cell in validation.items(row, "a row")] for row in rows]
    if sum(map(len, cells)) > MAX_ACTIONS:
        raise ScheduleError(f"{name} has {sum(map(len, cells))} actions: the studio takes up to {MAX_ACTIONS}")
    if any(int(number) >= MAX_ACTIONS for row in cells for cell in row for number in re.findall(r"\d{4,}", cell)):
        raise ScheduleError(f"{name} has a number of {MAX_ACTIONS} or more: the studio takes smaller tables")
    ranks = None if placement is None else [_check_rank(rank, len(cells)) for rank in validation.items(placement, "placement")]
    return from_rows(name, cells, ranks)


def _check_rank(rank: object, ranks: int) -> int:
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < ranks:
        raise ScheduleError(f"placement has {validation.short_repr(rank)}: give the rank of every stage, 0 to {ranks - 1}")
    return rank


def _check_size(schedule: Schedule) -> None:
    if schedule.ranks > MAX_RANKS:
        raise ScheduleError(f"{schedule.name} has {schedule.ranks} ranks: the studio takes up to {MAX_RANKS}")
    _check_microbatches(schedule.num_stages, schedule.microbatches)


def _check_microbatches(stages: int, microbatches: int) -> None:
    if stages * microbatches > MAX_STAGES_TIMES_MICROBATCHES:
        raise ScheduleError(
            f"{stages} stages of {microbatches} microbatches are more than the studio shows: "
            f"use {max(1, MAX_STAGES_TIMES_MICROBATCHES // stages)} microbatches or fewer, or `penstock show` with --html"
        )


# ---- a measured run, or a plan


def _answer_for_run(request: Mapping[str, object]) -> Data:
    """Return the table of a run or plan, its costs in milliseconds, and its usual step for comparison."""
    file = validation.text(request.get("file") or "timeline.json", "file", 200)
    text = validation.text(request["run"], "run", 32_000_000)
    if is_plan_text(text):
        plan = read_plan(text, file)
        if plan.schedule.teacher is not None:
            raise ScheduleError(
                f"{file} is a plan for a model and its teacher, whose layers the studio cannot cut anew: load its table, "
                "`ps.plan.load(FILE).schedule.to_csv(CSV)`, or draw it with `penstock show FILE --html`"
            )
        name, label, timeline, measured = plan.schedule.name, "planned", plan.timeline, plan.measurement
        source, verdict = "plan", None
    else:
        source, record = "run", read(text, file)
        if record.unit != "s":
            raise PenstockError(f"{file} was planned, not measured: load a run's timeline.json, a plan.json or a CSV table")
        name, label, timeline = record.name.removesuffix(", measured"), record.label, record.usual
        if is_huge(timeline):
            raise PenstockError(
                f"{file} has {len(timeline.events)} actions a step: the studio takes up to {sums.MAX_PAGE_ACTIONS}"
            )
        measured = Measurement.from_timelines(*record.steps, layers=record.layers)
        verdict = record.explanation and verdict_data(record.explanation)  # from all steps, as on the run's page
    schedule = replace(measured.schedule, name=name)
    _check_size(schedule)
    costs, data = measured_costs_data(measured), Record((timeline,), None, "s", (label,)).data() | {"verdict": verdict}
    return _answer_for_table(schedule, {**request, "costs": costs, "unit": "ms"}) | {
        "costs": costs,
        "measured": data,
        "source": source,
    }


# ---- the answer


class _Verdict(NamedTuple):
    """The text of `verify`, and the actions in it; for a deadlock, its waits as (awaited action, waiting action)."""

    holds: bool
    text: str
    actions: list[str]
    waits: list[tuple[str, str]]


_ACTION = re.compile(r"\b\d+[FBIW]\d+(?:\.\d+)?\b")
_WAIT = re.compile(
    r"waits for .*?(\d+[FBIW][\d.]+).*before \{?(\d+[FBIW][\d.]*\d)|has (\d+[FBIW][\d.]+) before (\d+[FBIW][\d.]*\d)"
)


def _verify(schedule: Schedule, max_in_flight: int | None) -> _Verdict:
    try:
        return _Verdict(True, str(verify(schedule, max_in_flight)), [], [])
    except ScheduleError as error:
        text = str(error)
    matches = [match.groups() for clause in text.split(";") if (match := _WAIT.search(clause))]
    waits = [(awaited, waiter) if awaited else (needed, too_early) for awaited, waiter, too_early, needed in matches]
    return _Verdict(False, text, list(dict.fromkeys(_ACTION.findall(text))), waits)


def _answer_for_table(schedule: Schedule, request: Mapping[str, object]) -> Data:
    simulated = None
    verdict = _verify(schedule, _limit(request))
    try:
        simulated = _simulate(schedule, request)
    except ScheduleError:
        if verdict.holds:
            raise
    buffer, rows = io.StringIO(), schedule.csv_rows()
    csv.writer(buffer).writerows(rows)
    return {
        "name": schedule.name,
        "ranks": schedule.ranks,
        "stages": schedule.num_stages,
        "microbatches": schedule.microbatches,
        "placement": list(schedule.placement),
        "rows": rows,
        "csv": buffer.getvalue(),
        "unit": "s" if request.get("unit") == "ms" else "",
        "proof": verdict._asdict(),
        **_timeline_parts(simulated),
    }


def _timeline_parts(simulated: SimulatedTable | None) -> Data:
    """Return the timeline, or its sums if it is huge, and the actions that never run."""
    if simulated is None:
        return {"stopped": False, "stuck": [], "timeline": None}
    num_unfinished = sum(map(len, simulated.table.actions)) - len(simulated.timeline.events)
    to_data = sums_data if is_huge(simulated.timeline) else timeline_data
    return {
        "stopped": num_unfinished > 0,
        "stuck": list(_stuck_actions(*simulated)) if num_unfinished < MAX_DRAWN_STUCK else [],
        "timeline": to_data(simulated.timeline),
    }


def _answer_with_better_table(schedule: Schedule, request: Mapping[str, object], report: ReportProgress) -> Data:
    """Return the answer for a better table, with the result of the search as "found"."""
    limit, simulated = _limit(request), _simulate(schedule, request)
    result = find_better(schedule, simulated.costs, limit, report)
    name = f"{schedule.name.removesuffix(SEARCHED_SUFFIX)}{SEARCHED_SUFFIX}"
    return _answer_for_table(replace(result.schedule, name=name), request) | {"found": found_data(result)}


def _limit(request: Mapping[str, object]) -> int | None:
    return None if request.get("max_in_flight") is None else validation.integer(request, "max_in_flight", 10**9)


def _simulate(schedule: Schedule, request: Mapping[str, object]) -> SimulatedTable:
    return simulate_at_page_costs(schedule, validation.mapping(request.get("costs", {}), "costs"), request.get("unit", ""))


def _stuck_actions(schedule: Table, costs: Costs, timeline: Timeline) -> Iterator[Data]:
    """Yield the actions that never run, with the times at which their rank would run them if it never waited."""
    action_costs = costs.action_costs_by_microbatch(schedule.num_stages, schedule.microbatches)
    for rank, row in enumerate(timeline.rows):
        free, actions_run = (row[-1].end if row else timeline.start) - timeline.start, {event.action for event in row}
        for cell in schedule.cells(rank):
            actions = (cell,) if isinstance(cell, Action) else cell
            if actions[0] not in actions_run:
                end = free + sum(action_costs[action.kind][action.stage][action.microbatch] for action in actions)
                for half, action in enumerate(actions):
                    halves = {"half": half} if len(actions) > 1 else {}
                    yield {"rank": rank, "action": str(action), "start": free, "end": end, **halves}
                free = end
