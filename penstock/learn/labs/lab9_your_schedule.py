"""Lab 9: a schedule of your own.

A schedule is a table, and a table is easily written: a function that says, rank by rank, what comes after what. The lab hands
out one with a mistake, and a target to reach. Yours is proved, or refused with the reason; drawn; scored; and run: on
emulated devices for its time, on a model that computes for its gradients, which are compared with those of one process.

    penstock lab 9
    penstock lab 9 my_schedule.py
    penstock lab 9 --fix
    torchrun --nproc-per-node 2 -m penstock.learn.labs.lab9_your_schedule my_schedule.py

The first tells the story. The second judges `my_schedule.py`, and ends with exit code 1 if the target is missed; if there is
no such file it hands one out. Edit it, and run it again. The third says what mends the one that is handed out.

Try: the target without a look at how zb-h1 reaches it. Then fewer microbatches in flight, whatever the steps.
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
from penstock.learn.lab_helpers import check, drawing, on_ranks, percent, ranks_here, say, split_deadlock, stop
from penstock.learn.labs.lab8_zero_bubble import CLASSES, DIM, batch, gradients_of
from penstock.learn.python_schedule import table_from_source
from penstock.schedule import Costs, Kind, Schedule, Timeline

RANKS, GROUPS = 4, 2  # M = GROUPS x P microbatches
UNIT = 0.010  # seconds
HANDED_OUT = Path(__file__).with_name("my_schedule.py")
MISTAKE, REPAIR = "    warmup = rank\n", "    warmup = ranks - 1 - rank\n"
FIX = "--fix"
KNOWN = ("gpipe", "1f1b", "zb-h1", "zb-v")  # to compare with


@dataclass(frozen=True)
class Score:
    """What a table achieves at F = I = W = 1 of a rank: its makespan, and the most microbatches a rank has in flight."""

    steps: float
    in_flight: float

    def __str__(self) -> str:
        return f"{self.steps:g} steps, {self.in_flight:g} in flight"


class Trial(NamedTuple):
    """What a table came to when it ran."""

    timeline: Timeline  # on emulated devices
    gradients: int  # that this rank has
    different: tuple[str, ...]  # of these, those that do not have the bits of one process


def main(path: str | None = None) -> None:
    """The story, with what mends the broken schedule for `--fix`; or the judgement of the schedule in the file `path`.

    Raises SystemExit, with the reason, if that is refused or misses the target.
    """
    ranks = ranks_here(RANKS)
    microbatches = GROUPS * ranks
    say(f"Lab 9: a schedule of your own for {ranks} ranks, {microbatches} microbatches; F = I = W = 1, B = I + W = 2")
    say(f"The target: {target(ranks, microbatches)}\n")
    if path is None or path == FIX:
        measured, shortfall = tell(ranks, microbatches, mended=path == FIX), ""
    else:
        measured, shortfall = judge(learners(Path(path), ranks, microbatches))
    say(f"\nMeasured: {measured}")
    if shortfall:
        stop(f"{path} misses the target: {shortfall}")


def learners(path: Path, ranks: int, microbatches: int) -> Schedule:
    """The table in the file `path`, proved; the broken one, handed out, where there is no file."""
    try:
        if not path.exists():
            hand_out(path)
        table = table_from_source(str(path), path.read_text(encoding="utf-8"), ranks, microbatches)
        ps.schedule.verify(table)
    except OSError as error:
        stop(f"{path} cannot be read or written: {error.strerror or error}")
    except (ps.ScheduleError, UnicodeError) as error:
        stop(split_deadlock(str(error) if str(path) in str(error) else f"{path}: {error}"))
    return table


def hand_out(path: Path) -> None:
    """Write the broken schedule to `path`."""
    if ranks_here(1) > 1:
        stop(f"{path} does not exist: run the lab without torchrun first, then it is written")
    path.write_text(HANDED_OUT.read_text(encoding="utf-8"), encoding="utf-8")
    say(f"{path} is new: 1F1B with a mistake. Edit it, and run this again.\n")


def tell(ranks: int, microbatches: int, mended: bool) -> str:
    """A broken schedule, what is wrong with it, and how to go on; or what mends it. Returns what was measured."""
    broken = HANDED_OUT.read_text(encoding="utf-8")
    say("A table, written as a function: 0F3 is stage 0's forward of microbatch 3, 0B3 its backward. It has a mistake:\n")
    say(broken[broken.index("def ") :])
    table = table_from_source("my_schedule.py", broken, ranks, microbatches)
    say(f"{table}\n")
    refusal = why_refused(table)
    say(split_deadlock(refusal))
    check("deadlocks" in refusal, "the broken table is refused, with the circle", f"nothing stops the broken table {refusal}")
    if mended:
        say("\nThe last rank has its first gradient at once, so it warms up with no forward at all, and every rank before it")
        say(f"with one more. The mistake counts from the wrong end:\n\n-{MISTAKE}+{REPAIR}")
        measured, _ = judge(
            table_from_source("the mended my_schedule.py", broken.replace(MISTAKE, REPAIR), ranks, microbatches)
        )
        return measured
    say("\nMended it is 1f1b, which is judged like this:\n")
    measured, _ = judge(ps.schedule.build("1f1b", ranks=ranks, microbatches=microbatches))
    say("\nNow you: mend it, then reach the target. This hands the broken one out, unless the file is there, and judges it:")
    say("  penstock lab 9 my_schedule.py")
    say("How to mend it: penstock lab 9 --fix")
    return measured


def why_refused(table: Schedule) -> str:
    """What `verify` has against `table`; empty if nothing."""
    try:
        ps.schedule.verify(table)
    except ps.ScheduleError as error:
        return str(error)
    return ""


def judge(table: Schedule) -> tuple[str, str]:
    """Prove, draw, score and run `table`. Returns what was measured, and by what it misses the target."""
    plan = timed(table)
    say(f"{ps.schedule.verify(table)}\n{drawing(plan)}\n")
    shortfall = compare(table)
    trials = on_ranks(run, table.ranks, table)
    gradients, different = sum(trial.gradients for trial in trials), [name for trial in trials for name in trial.different]
    check(
        gradients > 0 and not different,
        f"all {gradients} gradients of a model that computes have the bits of one process",
        f"{len(different)} of {gradients} gradients differ from one process: {', '.join(different[:4])}",
    )
    real = trials[0].timeline
    say(f"\nOn emulated devices, a unit {1e3 * UNIT:g} ms:\n{drawing(real)}")
    if {event.action for event in real.events} != {event.action for event in plan.events}:
        say("  (an I with its W right behind it runs as one B where no other rank waits for the gradient)")
    return (
        f"{table.name} takes {1e3 * real.makespan:.0f} ms (simulated: {1e3 * UNIT * plan.makespan:.0f} ms), its bubble is "
        f"{percent(real.bubble)} ({percent(plan.bubble)}), and all {gradients} gradients are equal to one process, bit by bit.",
        shortfall,
    )


def compare(table: Schedule) -> str:
    """The score of `table` beside the target and the schedules there are. Returns by what it misses the target."""
    ranks, microbatches = table.ranks, table.microbatches
    own_score, aim = score(table), target(ranks, microbatches)
    known = {name: score(ps.schedule.build(name, ranks=ranks, microbatches=microbatches)) for name in KNOWN}
    width = max(map(len, ("the target", table.name, *KNOWN)))
    for name, row_score in {"the target": aim, **known, table.name: own_score}.items():
        say(f"  {name:{width}}  {row_score}")
    check(
        known["zb-h1"] == aim, "the target can be reached", f"zb-h1 should reach the target, {aim}; it takes {known['zb-h1']}"
    )
    over = {"steps": own_score.steps - aim.steps, "in flight": own_score.in_flight - aim.in_flight}
    shortfall = " and ".join(f"{amount:g} {quantity} too many" for quantity, amount in over.items() if amount > 1e-9)
    say(f"  {table.name}: {shortfall or 'the target is reached'}")
    return shortfall


def target(ranks: int, microbatches: int) -> Score:
    """What a schedule should achieve: M T and a bubble of P - 1, with no more in flight than 1F1B."""
    return Score(3 * microbatches + ranks - 1, ranks)


def timed(table: Schedule) -> Timeline:
    """`table` simulated, in units; every stage has an equal part of the work."""
    part = table.ranks / table.num_stages
    return ps.schedule.simulate(table, Costs(part, part, part))


def score(table: Schedule) -> Score:
    """What `table` achieves; a stage's activation is a part of its rank's."""
    plan = timed(table)
    return Score(plan.makespan, max(plan.peak_in_flight) * table.ranks / table.num_stages)


def run(table: Schedule) -> Trial:
    """Run `table`, both on emulated devices and on an MLP with a layer for each stage."""
    timeline = emulated_step(table, UNIT, UNIT, UNIT)
    trained, alone = gradients_of(table, table.num_stages), one_process(table)
    return Trial(timeline, len(trained), tuple(name for name, value in trained.items() if not torch.equal(value, alone[name])))


def one_process(table: Schedule) -> dict[str, Tensor]:
    """The gradients of the same model and batch without a pipeline, by name.

    Where bits are to be equal, so must be the order of a sum: the gradients of the microbatches are added in the order in
    which `table` makes them on their stage.
    """
    torch.manual_seed(0)
    model = ps.model.mlp(DIM, table.num_stages, CLASSES)
    microbatch_gradients = of_each_microbatch(model, table.microbatches)
    total: dict[str, Tensor] = {}
    for stage, module in enumerate(ps.partition.split(model, table.num_stages)):
        order = [
            microbatch
            for kind, where, microbatch, _ in table.actions[table.placement[stage]]
            if where == stage and kind in (Kind.B, Kind.W)
        ]
        for name, _ in module.named_parameters():
            first_gradient, *other_gradients = (microbatch_gradients[microbatch][name] for microbatch in order)
            total[name] = sum(other_gradients, first_gradient)
    return total


def of_each_microbatch(model: nn.Module, microbatches: int) -> list[dict[str, Tensor]]:
    """For every microbatch, what it adds to the gradients of the batch, by name."""
    parameters, gradients = dict(model.named_parameters()), []
    for inputs, target in zip(*(tensor.chunk(microbatches) for tensor in batch(microbatches)), strict=True):
        loss = cross_entropy(model(inputs), target)
        share = torch.full_like(loss, 1 / microbatches)
        gradients.append(dict(zip(parameters, torch.autograd.grad(loss, [*parameters.values()], share), strict=True)))
    return gradients


if __name__ == "__main__":
    main(*sys.argv[1:2])
