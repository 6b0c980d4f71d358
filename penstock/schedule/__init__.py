"""A schedule is a table of actions: built, proved and lowered. Plain Python: no torch, no times.

A table goes through these steps: family -> table -> verify -> program -> the engine, or `penstock.timing.simulate`.

`table`         actions, what each waits for, and the table of them
`memory`        the memory of activations, and how many are in flight
`program`       a lowered table: what each rank does, and when it posts and waits for which transfers
`verify`        the check that a table has every action once, and the proof that it cannot deadlock
`schedule`      a schedule: a table from rows or a CSV file
`pytorch_csv`   PyTorch's lowered tables, to be proved
`rank_program`  what one rank does of a program, for each kind of batch and call
`transform`     tables made from tables
`families/`     the rules by which tables are made
`catalog`       the families by name

The public names below include those of `penstock.timing`, `penstock.explain` and `penstock.plan.search`. Each is found when
first used, so that a step imports none of these.
"""

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.errors import ScheduleError
    from penstock.explain.explain import MeasuredTimeline, explain
    from penstock.explain.explanation import Explanation, Improvement
    from penstock.plan.search.table_search import Found, search
    from penstock.schedule.catalog import build, names
    from penstock.schedule.memory import ActivationSize
    from penstock.schedule.program import Compute, Program, ProgramLine, Script, Transfer, lower
    from penstock.schedule.proof import Proof, prove, verify
    from penstock.schedule.pytorch_csv import script_from_compute_comms_csv, script_from_compute_comms_rows
    from penstock.schedule.schedule import Schedule, from_rows
    from penstock.schedule.table import Action, Kind, Skip, Table
    from penstock.timing.causes import Cause, Idle
    from penstock.timing.costs import Costs
    from penstock.timing.events import Event, MessageCost
    from penstock.timing.list_schedule import RankProgress, list_schedule
    from penstock.timing.measurement import Measurement
    from penstock.timing.simulate import averaging_end_time, simulate
    from penstock.timing.teacher_tables import with_teacher
    from penstock.timing.timeline import Timeline

__all__ = [
    "Action", "ActivationSize", "Cause", "Compute", "Costs", "Event", "Explanation", "Found", "Idle", "Improvement", "Kind",
    "MeasuredTimeline", "Measurement", "MessageCost", "Program", "ProgramLine", "Proof", "RankProgress", "Schedule",
    "ScheduleError", "Script", "Skip", "Table", "Timeline", "Transfer", "averaging_end_time", "build", "explain", "from_rows",
    "list_schedule", "lower", "names", "prove", "script_from_compute_comms_csv", "script_from_compute_comms_rows", "search",
    "simulate", "verify", "with_teacher",
]  # fmt: skip

_NAMES_OF_MODULE = {
    "catalog": ("build", "names"),
    "memory": ("ActivationSize",),
    "program": ("Compute", "Program", "ProgramLine", "Script", "Transfer", "lower"),
    "pytorch_csv": ("script_from_compute_comms_csv", "script_from_compute_comms_rows"),
    "schedule": ("Schedule", "from_rows"),
    "table": ("Action", "Kind", "Skip", "Table"),
    "proof": ("Proof", "prove", "verify"),
    "penstock.errors": ("ScheduleError",),
    "penstock.explain.explain": ("MeasuredTimeline", "explain"),
    "penstock.explain.explanation": ("Explanation", "Improvement"),
    "penstock.plan.search.table_search": ("Found", "search"),
    "penstock.timing.causes": ("Cause", "Idle"),
    "penstock.timing.costs": ("Costs",),
    "penstock.timing.events": ("Event", "MessageCost"),
    "penstock.timing.list_schedule": ("RankProgress", "list_schedule"),
    "penstock.timing.measurement": ("Measurement",),
    "penstock.timing.simulate": ("averaging_end_time", "simulate"),
    "penstock.timing.teacher_tables": ("with_teacher",),
    "penstock.timing.timeline": ("Timeline",),
}

__getattr__, __dir__ = lazy_exports(__name__, {name: module for module, names in _NAMES_OF_MODULE.items() for name in names})
