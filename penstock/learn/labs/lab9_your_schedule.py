"""Lab 9: a schedule of your own.

A schedule is a table, written as a function that yields the actions of one rank. The lab hands out a schedule with a mistake
and a target to reach. It proves your schedule or refuses it with the reason, draws it, and scores it. Then it runs it on
emulated devices, to measure its time, and on a model that computes, to compare its gradients with one process.

    penstock lab 9
    penstock lab 9 my_schedule.py
    penstock lab 9 --fix
    torchrun --nproc-per-node 2 -m penstock.learn.labs.lab9_your_schedule my_schedule.py

The first command explains the lab. The second judges `my_schedule.py`, and ends with exit code 1 if it misses the target; if
the file does not exist, it writes the schedule with the mistake. Edit the file and run the command again. The third command
shows how to mend the mistake.

Try: the target without a look at how zb-h1 reaches it. Then fewer microbatches in flight, in any time.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import penstock as ps
from penstock.learn.devices import emulated_step
from penstock.learn.equal_stages import simulate_equal_stages
from penstock.learn.lab_helpers import check, drawing, on_ranks, percent, ranks_here, say, split_deadlock, stop
from penstock.learn.labs.lab8_zero_bubble import CLASSES, DIM, batch, gradients_of
from penstock.python_file import table_from_source
from penstock.schedule import Kind, Schedule, Timeline

RANKS, GROUPS = 4, 2  # M = GROUPS x P microbatches
UNIT_SECONDS = 0.010
BROKEN_SCHEDULE_PATH = Path(__file__).with_name("my_schedule.py")
MISTAKE, REPAIR = "    warmup = rank\n", "    warmup = ranks - 1 - rank\n"
FIX_FLAG = "--fix"
REFERENCE_NAMES = ("gpipe", "1f1b", "zb-h1", "zb-v")  # schedules to compare with


@dataclass(frozen=True)
class Score:
    """A table's makespan and its most microbatches in flight on a rank, if F, I and W of a rank take 1 each."""

    time: float
    in_flight: float

    def __str__(self) -> str:
        return f"{self.time:g} units of time, {self.in_flight:g} in flight"


class Trial(NamedTuple):
    """The result of a table on one rank."""

    timeline: Timeline  # on emulated devices
    num_gradients: int  # on this rank
    different_names: tuple[str, ...]  # of gradients that do not have the bits of one process


def main(path: str | None = None) -> None:
    """Explain the lab, show how to mend the broken schedule if `path` is `--fix`, or judge the schedule in the file `path`.

    Raises SystemExit, with the reason, if that schedule is refused or misses the target.
    """
    ranks = ranks_here(RANKS)
    microbatches = GROUPS * ranks
    say(f"Lab 9: a schedule of your own for {ranks} ranks, {microbatches} microbatches; F = I = W = 1, B = I + W = 2")
    say(f"The target: {target(ranks, microbatches)}; a unit is the time of an F\n")
    if path is None or path == FIX_FLAG:
        measured, shortfall = show_broken_schedule(ranks, microbatches, show_repair=path == FIX_FLAG), ""
    else:
        measured, shortfall = judge(read_table(Path(path), ranks, microbatches))
    say(f"\nMeasured: {measured}")
    if shortfall:
        stop(f"{path} misses the target: {shortfall}")


def read_table(path: Path, ranks: int, microbatches: int) -> Schedule:
    """Read the table in the file `path`, and verify it. Writes the broken schedule to the file first if it does not exist."""
    try:
        if not path.exists():
            write_broken_schedule(path)
        table = table_from_source(str(path), path.read_text(encoding="utf-8"), ranks, microbatches)
        ps.schedule.verify(table)
    except OSError as error:
        stop(f"{path} cannot be read or written: {error.strerror or error}")
    except (ps.ScheduleError, UnicodeError) as error:
        stop(split_deadlock(str(error) if str(path) in str(error) else f"{path}: {error}"))
    return table


def write_broken_schedule(path: Path) -> None:
    """Write the broken schedule to `path`."""
    if ranks_here(1) > 1:
        stop(f"{path} does not exist: run the lab without torchrun first, which writes it")
    path.write_text(BROKEN_SCHEDULE_PATH.read_text(encoding="utf-8"), encoding="utf-8")
    say(f"{path} is new: 1F1B with a mistake. Edit it, and run this command again.\n")


def show_broken_schedule(ranks: int, microbatches: int, show_repair: bool) -> str:
    """Show the broken schedule and its error; with `show_repair` mend it. Returns the measurements as text."""
    broken = BROKEN_SCHEDULE_PATH.read_text(encoding="utf-8")
    say("A table, written as a function: 0F3 is stage 0's forward of microbatch 3, 0B3 its backward. It has a mistake:\n")
    say(broken[broken.index("def ") :])
    table = table_from_source("my_schedule.py", broken, ranks, microbatches)
    say(f"{table}\n")
    refusal = verify_error(table)
    say(split_deadlock(refusal))
    check("deadlocks" in refusal, "the broken table is refused, with the cycle", f"verify accepts the broken table {refusal}")
    if show_repair:
        say("\nThe last rank has its first gradient at once, so it needs no forward to warm up; each rank before it needs one")
        say(f"more. The mistake counts from the wrong end:\n\n-{MISTAKE}+{REPAIR}")
        measured, _ = judge(
            table_from_source("the mended my_schedule.py", broken.replace(MISTAKE, REPAIR), ranks, microbatches)
        )
        return measured
    say("\nMended, it is 1f1b. The lab judges 1f1b like this:\n")
    measured, _ = judge(ps.schedule.build("1f1b", ranks=ranks, microbatches=microbatches))
    say("\nNow you: mend it, then reach the target. This command judges the file; if it does not exist, it writes the broken")
    say("schedule to it:\n  penstock lab 9 my_schedule.py\nHow to mend it: penstock lab 9 --fix")
    return measured


def verify_error(table: Schedule) -> str:
    """Return the error of `verify` for `table`; empty if it is accepted."""
    try:
        ps.schedule.verify(table)
    except ps.ScheduleError as error:
        return str(error)
    return ""


def judge(table: Schedule) -> tuple[str, str]:
    """Prove, draw, score and run `table`. Returns the measurements as text, and by how much it misses the target."""
    plan = simulate_equal_stages(table)
    say(f"{ps.schedule.verify(table)}\n{drawing(plan)}\n")
    shortfall = compare_scores(table)
    trials = on_ranks(run_on_rank, table.ranks, table)
    num_gradients = sum(trial.num_gradients for trial in trials)
    different_names = [name for trial in trials for name in trial.different_names]
    check(
        num_gradients > 0 and not different_names,
        f"all {num_gradients} gradients of a model that computes have the bits of one process",
        f"{len(different_names)} of {num_gradients} gradients differ from one process: {', '.join(different_names[:4])}",
    )
    result = trials[0].timeline
    say(f"\nOn emulated devices, with a unit of {1e3 * UNIT_SECONDS:g} ms:\n{drawing(result)}")
    if {event.action for event in result.events} != {event.action for event in plan.events}:
        say("  (an I directly before its W runs as one B if no other rank waits for the gradient)")
    return (
        f"{table.name} takes {1e3 * result.makespan:.0f} ms (simulated: {1e3 * UNIT_SECONDS * plan.makespan:.0f} ms), its "
        f"bubble is {percent(result.bubble)} ({percent(plan.bubble)}), and all {num_gradients} gradients are equal to one "
        "process, bit by bit.",
        shortfall,
    )


def compare_scores(table: Schedule) -> str:
    """Print the score of `table`, the target, and reference scores. Returns by how much it misses the target, as text."""
    ranks, microbatches = table.ranks, table.microbatches
    own_score, target_score = score(table), target(ranks, microbatches)
    references = {name: score(ps.schedule.build(name, ranks=ranks, microbatches=microbatches)) for name in REFERENCE_NAMES}
    width = max(map(len, ("the target", table.name, *REFERENCE_NAMES)))
    for name, row_score in {"the target": target_score, **references, table.name: own_score}.items():
        say(f"  {name:{width}}  {row_score}")
    check(
        references["zb-h1"] == target_score,
        "the target can be reached",
        f"zb-h1 should reach the target, {target_score}; it takes {references['zb-h1']}",
    )
    excess = {"units of time": own_score.time - target_score.time, "in flight": own_score.in_flight - target_score.in_flight}
    shortfall = " and ".join(f"{amount:g} {quantity} too many" for quantity, amount in excess.items() if amount > 1e-9)
    say(f"  {table.name}: {shortfall or 'the target is reached'}")
    return shortfall


def target(ranks: int, microbatches: int) -> Score:
    """Return the score to reach: a makespan of 3 M + P - 1, with no more microbatches in flight than 1F1B."""
    return Score(3 * microbatches + ranks - 1, ranks)


def score(table: Schedule) -> Score:
    """Return the score of `table`; one microbatch on one of V stages of a rank counts 1/V."""
    plan = simulate_equal_stages(table)
    return Score(plan.makespan, max(plan.peak_in_flight) * table.ranks / table.num_stages)


def run_on_rank(table: Schedule) -> Trial:
    """Run `table`, both on emulated devices and on an MLP with a layer for each stage."""
    timeline = emulated_step(table, UNIT_SECONDS, UNIT_SECONDS, UNIT_SECONDS)
    trained, uncut = gradients_of(table, table.num_stages), uncut_gradients(table)
    return Trial(timeline, len(trained), tuple(name for name, value in trained.items() if not torch.equal(value, uncut[name])))


def uncut_gradients(table: Schedule) -> dict[str, Tensor]:
    """Return the gradients of the same model and batch without a pipeline, by name.

    Bits depend on the order of a sum. So the gradients of the microbatches are added in the order in which `table` computes
    them on their stage.
    """
    torch.manual_seed(0)
    model = ps.model.mlp(DIM, table.num_stages, CLASSES)
    microbatch_gradients = gradients_by_microbatch(model, table.microbatches)
    total: dict[str, Tensor] = {}
    for stage, module in enumerate(ps.partition.split(model, table.num_stages)):
        order = [
            microbatch
            for kind, action_stage, microbatch, _ in table.actions[table.placement[stage]]
            if action_stage == stage and kind in (Kind.B, Kind.W)
        ]
        for name, _ in module.named_parameters():
            first_gradient, *other_gradients = (microbatch_gradients[microbatch][name] for microbatch in order)
            total[name] = sum(other_gradients, first_gradient)
    return total


def gradients_by_microbatch(model: nn.Module, microbatches: int) -> list[dict[str, Tensor]]:
    """Return for each microbatch its share of the batch's gradients, by name."""
    parameters, gradients = dict(model.named_parameters()), []
    for inputs, target in zip(*(tensor.chunk(microbatches) for tensor in batch(microbatches)), strict=True):
        loss = cross_entropy(model(inputs), target)
        share = torch.full_like(loss, 1 / microbatches)
        gradients.append(dict(zip(parameters, torch.autograd.grad(loss, [*parameters.values()], share), strict=True)))
    return gradients


if __name__ == "__main__":
    main(*sys.argv[1:2])
