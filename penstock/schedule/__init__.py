"""Schedules: tables of actions, built, proved, timed. Plain Python, no torch."""

from penstock.errors import ScheduleError
from penstock.schedule.catalog import build, names
from penstock.schedule.program import Program, Run, Script, Skip, Step, Transfer, lower
from penstock.schedule.pytorch_csv import from_lowered_csv, from_lowered_rows
from penstock.schedule.table import Action, Kind, Schedule, from_rows
from penstock.schedule.timing.averaging import averaged
from penstock.schedule.timing.causes import Cause, Idle
from penstock.schedule.timing.explain import explain
from penstock.schedule.timing.explanation import Explanation
from penstock.schedule.timing.measured import Measured
from penstock.schedule.timing.simulate import Costs, simulate
from penstock.schedule.timing.timeline import Border, Event, Size, Timeline
from penstock.schedule.verify import Proof, prove, verify

__all__ = [
    "Action",
    "Border",
    "Cause",
    "Costs",
    "Event",
    "Explanation",
    "Idle",
    "Kind",
    "Measured",
    "Program",
    "Proof",
    "Run",
    "Schedule",
    "ScheduleError",
    "Script",
    "Size",
    "Skip",
    "Step",
    "Timeline",
    "Transfer",
    "averaged",
    "build",
    "explain",
    "from_lowered_csv",
    "from_lowered_rows",
    "from_rows",
    "lower",
    "names",
    "prove",
    "simulate",
    "verify",
]
