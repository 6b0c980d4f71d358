"""What the page asks, as plain data, to what it shows, as plain data. Nothing is kept between two questions.

    answer({"schedule": "1f1b", "ranks": 4, "microbatches": 8})   # a table by name; with "stages_per_rank" where it is open
    answer({"rows": [["0F0", "0B0"]], "placement": [0]})          # a table as it was edited
    answer({"csv": "0F0,0B0\n", "file": "mine.csv"})              # a table that was loaded, PyTorch's compute-only form
    answer({"run": "{..}", "file": "timeline.json"})              # a measured run: its table, and what its actions cost

Each takes besides "costs": {"forward": 1, "backward_input": 1, "backward_weight": 1, "send": 0,
                             "stages": {"2": {"forward": 3}}, "sizes": [[1000, 800]]},
where `sizes`, if there are any, say of every stage what a microbatch takes in bytes, and what W still needs of it;
"max_in_flight" (null: no limit) and "unit" ("ms" where the costs are milliseconds, to be drawn beside a run).
"""

import csv
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from penstock.errors import PenstockError, ScheduleError
from penstock.schedule import Action, Costs, Measurement, Schedule, Timeline, build, from_rows, verify
from penstock.schedule.catalog import FAMILIES
from penstock.schedule.schedule import cells_of
from penstock.schedule.timing.simulate import until_it_stops
from penstock.view.record import Record, read, timeline_data
from penstock.view.studio import question

Data = dict[str, Any]  # what JSON can say

MOST = {"ranks": 16, "stages_per_rank": 4, "microbatches": 64}  # for a table built by name
MOST_MICROBATCHES = 2048  # stages times microbatches: what is answered in a fifth of a second
MOST_ACTIONS = 3 * MOST_MICROBATCHES
STAGE_COSTS = ("forward", "backward_input", "backward_weight")


def answer(request: object) -> Data:
    """The table that is asked for, its proof or what is wrong with it, and when its actions run as far as they can.

    Raises PenstockError, in a sentence for the page, for what cannot be built, read or priced.
    """
    asked = question.mapping(request, "the question")
    if "run" in asked:
        return _of_run(asked)
    schedule = _table(asked)
    _check_size(schedule)
    return _answered(schedule, _costs(asked, schedule.stages), asked)


def choices() -> Data:
    """What the page needs to know before it asks: the schedules there are, and the limits."""
    families = {
        name: {
            "summary": family.summary,
            "stages_per_rank": family.stages_per_rank,
            "least": family.least,
            "open": "stages_per_rank" in family.options,
        }
        for name, family in FAMILIES.items()
    }
    return {"families": families, "most": MOST, "most_microbatches": MOST_MICROBATCHES}


# ---- the table


def _table(asked: Mapping[str, object]) -> Schedule:
    name = question.text(asked.get("name") or asked.get("file") or "table", "name", 200)
    if "csv" in asked:
        text = question.text(asked["csv"], "csv", 2_000_000).removeprefix("\ufeff")
        return _from_rows(name, cells_of(name, text)[:1000], None)
    if "rows" in asked:
        return _from_rows(name, question.items(asked["rows"], "rows"), asked.get("placement"))
    name = question.text(asked.get("schedule"), "schedule", 100)
    ranks, microbatches = (question.whole(asked, what, MOST[what]) for what in ("ranks", "microbatches"))
    given = asked.get("stages_per_rank") is not None
    stages_per_rank = question.whole(asked, "stages_per_rank", MOST["stages_per_rank"]) if given else None
    family = FAMILIES.get(name)
    _check_microbatches(ranks * (stages_per_rank or (family.stages_per_rank if family else 1)), microbatches)
    return build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)


def _from_rows(name: str, rows: list[Any], placement: object) -> Schedule:
    """Raises ScheduleError before a hostile number makes a table of that size."""
    cells = [[question.text(cell, "a cell", 100) for cell in question.items(row, "a row")] for row in rows]
    if sum(map(len, cells)) > MOST_ACTIONS:
        raise ScheduleError(f"{name} has {sum(map(len, cells))} actions: the studio takes up to {MOST_ACTIONS}")
    if any(int(number) >= MOST_ACTIONS for row in cells for cell in row for number in re.findall(r"\d{4,}", cell)):
        raise ScheduleError(f"{name} has a number of {MOST_ACTIONS} or more: the studio takes smaller tables")
    homes = None if placement is None else [_placed(rank, len(cells)) for rank in question.items(placement, "placement")]
    return from_rows(name, cells, homes)


def _placed(rank: object, ranks: int) -> int:
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < ranks:
        raise ScheduleError(f"placement has {question.shown(rank)}: give the rank of every stage, 0 to {ranks - 1}")
    return rank


def _check_size(schedule: Schedule) -> None:
    if schedule.ranks > 4 * MOST["ranks"]:
        raise ScheduleError(f"{schedule.name} has {schedule.ranks} ranks: the studio takes up to {4 * MOST['ranks']}")
    _check_microbatches(schedule.stages, schedule.microbatches)


def _check_microbatches(stages: int, microbatches: int) -> None:
    if stages * microbatches > MOST_MICROBATCHES:
        raise ScheduleError(
            f"{stages} stages of {microbatches} microbatches are more than the studio draws at once: "
            f"use {max(1, MOST_MICROBATCHES // stages)} microbatches or fewer, or `penstock show` with --html"
        )


# ---- a measured run


def _of_run(asked: Mapping[str, object]) -> Data:
    """The table of a run, its costs in milliseconds, and its last step to lay over whatever is planned."""
    file = question.text(asked.get("file") or "timeline.json", "file", 200)
    record = read(question.text(asked["run"], "run", 32_000_000), file)
    if record.unit != "s":
        raise PenstockError(f"{file} was planned, not measured: load the timeline.json of a run, or a table as CSV")
    timeline = record.steps[-1]
    if len(timeline.events) > MOST_ACTIONS:
        raise PenstockError(f"{file} has {len(timeline.events)} actions a step: the studio takes up to {MOST_ACTIONS}")
    measured = Measurement.of(timeline)
    schedule = replace(measured.schedule, name=record.name)
    _check_size(schedule)
    costs = _in_milliseconds(measured.costs) | ({"sizes": [list(size) for size in measured.sizes]} if measured.sizes else {})
    shown = Record((timeline,), None, "s", (record.label,)).data()
    return _answered(schedule, _checked({"costs": costs}, schedule.stages, "ms"), {**asked, "unit": "ms"}) | {
        "costs": costs,
        "measured": shown,
    }


def _in_milliseconds(costs: Costs) -> Data:
    """Costs as the page asks with them: of every stage, and of the usual message."""
    each: list[list[float]] = [[_rounded(1e3 * seconds) for seconds in getattr(costs, name)] for name in STAGE_COSTS]
    sends = [1e3 * seconds for seconds in costs.send] if isinstance(costs.send, tuple) else []
    usual = {name: _rounded(sum(values) / len(values)) for name, values in zip(STAGE_COSTS, each, strict=True)}
    stages = {str(stage): dict(zip(STAGE_COSTS, values, strict=True)) for stage, values in enumerate(zip(*each, strict=True))}
    return usual | {"send": _rounded(sum(sends) / len(sends)) if sends else 0.0, "stages": stages}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")  # what people read and a field has room for


# ---- the costs


def _costs(asked: Mapping[str, object], stages: int) -> Costs:
    return _checked(asked, stages, asked.get("unit", ""))


def _checked(asked: Mapping[str, object], stages: int, unit: object) -> Costs:
    """What the page says of costs, in the unit of the timeline."""
    if unit not in ("", "ms"):
        raise PenstockError(f"unit is {question.shown(unit)}: use '' or 'ms'")
    scale = 1e-3 if unit == "ms" else 1.0
    said = question.mapping(asked.get("costs", {}), "costs")
    own = question.mapping(said.get("stages", {}), "the costs of single stages")

    def of(name: str, stage: int) -> float:
        here = question.mapping(own.get(str(stage), {}), f"the cost of stage {stage}")
        return scale * question.number(here.get(name, said.get(name, 1)), f"{name} of stage {stage}")

    forward, inputs, weights = ([of(name, stage) for stage in range(stages)] for name in STAGE_COSTS)
    send, sizes = scale * question.number(said.get("send", 0), "send"), _sizes(said, stages)
    act, keep = zip(*sizes, strict=True) if sizes else (1, None)
    return Costs(forward, inputs, weights, send=send, act=act, keep=keep)


def _sizes(said: Mapping[str, object], stages: int) -> list[list[float]]:
    """Of every stage; none if they are of another number of stages."""
    sizes = [
        [question.number(size, "a size", 1e18) for size in question.items(pair, "a size")]
        for pair in question.items(said.get("sizes", []), "sizes")
    ]
    if any(len(pair) != 2 for pair in sizes):
        raise PenstockError("sizes has other than two numbers for each stage: give what it takes, and what W still needs")
    return sizes if len(sizes) == stages else []


# ---- the answer


class _Verdict(NamedTuple):
    """What `verify` said, and the actions it named: in a circle, each wait as (what is waited for, what waits)."""

    holds: bool
    text: str
    actions: list[str]
    waits: list[tuple[str, str]]


_ACTION = re.compile(r"\b\d+[FBIW]\d+\b")
_WAIT = re.compile(r"waits for .*?(\d+[FBIW]\d+).*before \{?(\d+[FBIW]\d+)|has (\d+[FBIW]\d+) before (\d+[FBIW]\d+)")


def _proved(schedule: Schedule, max_in_flight: int | None) -> _Verdict:
    try:
        return _Verdict(True, str(verify(schedule, max_in_flight)), [], [])
    except ScheduleError as error:
        text = str(error)
    found = [match.groups() for clause in text.split(";") if (match := _WAIT.search(clause))]
    waits = [(awaited, waiting) if awaited else (needed, early) for awaited, waiting, early, needed in found]
    return _Verdict(False, text, list(dict.fromkeys(_ACTION.findall(text))), waits)


def _answered(schedule: Schedule, costs: Costs, asked: Mapping[str, object]) -> Data:
    limit = asked.get("max_in_flight")
    verdict = _proved(schedule, None if limit is None else question.whole(asked, "max_in_flight", 10**9))
    timeline = None
    try:
        timeline = until_it_stops(schedule, costs)
        timeline = replace(timeline, memory_unit="" if costs.keep is None else "bytes")
    except ScheduleError:
        if verdict.holds:
            raise
    buffer = io.StringIO()
    csv.writer(buffer).writerows(schedule.texts())
    return {
        "name": schedule.name,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "placement": list(schedule.placement),
        "rows": schedule.texts(),
        "csv": buffer.getvalue(),
        "unit": "s" if asked.get("unit") == "ms" else "",
        "proof": verdict._asdict(),
        "stopped": timeline is not None and len(timeline.events) < sum(map(len, schedule.actions)),
        "stuck": [] if timeline is None else list(_stuck(schedule, timeline, costs)),
        "timeline": None if timeline is None else timeline_data(timeline),
    }


def _stuck(schedule: Schedule, timeline: Timeline, costs: Costs) -> Iterator[Data]:
    """What never runs, where its rank would come to it if it had not to wait."""
    table = costs.table(schedule.stages)
    for rank, row in enumerate(timeline.rows):
        free, ran = (row[-1].end if row else timeline.start) - timeline.start, {event.action for event in row}
        for cell in schedule.cells(rank):
            actions = (cell,) if isinstance(cell, Action) else cell
            if actions[0] not in ran:
                end = free + sum(table[action.kind][action.stage] for action in actions)
                for half, action in enumerate(actions):
                    halves = {"half": half} if len(actions) > 1 else {}
                    yield {"rank": rank, "action": str(action), "start": free, "end": end, **halves}
                free = end
