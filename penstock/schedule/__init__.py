"""A schedule is a table of actions: built, proved, lowered, timed and explained. Plain Python, no torch.

A table goes through these steps: family -> table -> verify -> program -> simulate, or the engine.

`table`         actions, what each waits for, and the table of them
`memory`        the memory of activations, and how many are in flight
`program`       a lowered table: what each rank does, and when it posts and waits for which transfers
`verify`        the check that a table has every action once, and the proof that it cannot deadlock
`schedule`      a schedule: a table from rows or a CSV file
`pytorch_csv`   PyTorch's lowered tables, to be proved
`rank_program`  what one rank does of a program, for each kind of batch and call
`transform`     tables made from tables
`microbatch_order`  the order of unequal microbatches that makes a step short
`families/`     the rules by which tables are made
`catalog`       the families by name
`searching/`    the search for tables, for any costs within a limit on memory
`timing/`       when every action runs or ran, and why a rank waits
"""

from penstock.errors import ScheduleError
from penstock.schedule.catalog import build, names
from penstock.schedule.memory import ActivationSize
from penstock.schedule.program import Compute, Program, ProgramLine, Script, Transfer, lower
from penstock.schedule.pytorch_csv import script_from_compute_comms_csv, script_from_compute_comms_rows
from penstock.schedule.schedule import Schedule, from_rows
from penstock.schedule.searching.search import Found, search
from penstock.schedule.table import Action, Kind, Skip, Table
from penstock.schedule.timing.causes import Cause, Idle
from penstock.schedule.timing.events import Event, MessageCost
from penstock.schedule.timing.explain import MeasuredTimeline, explain
from penstock.schedule.timing.explanation import Explanation, Improvement
from penstock.schedule.timing.measurement import Measurement
from penstock.schedule.timing.simulate import Costs, averaging_end_time, simulate
from penstock.schedule.timing.timeline import Timeline
from penstock.schedule.verify import Proof, prove, verify

__all__ = [
    "Action", "ActivationSize", "Cause", "Compute", "Costs", "Event", "Explanation", "Found", "Idle", "Improvement", "Kind",
    "MeasuredTimeline", "Measurement", "MessageCost", "Program", "ProgramLine", "Proof", "Schedule", "ScheduleError",
    "Script", "Skip", "Table", "Timeline", "Transfer", "averaging_end_time", "build", "explain", "from_rows", "lower",
    "names", "prove", "script_from_compute_comms_csv", "script_from_compute_comms_rows", "search", "simulate", "verify",
]  # fmt: skip
