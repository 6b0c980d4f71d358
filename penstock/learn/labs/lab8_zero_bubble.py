"""Lab 8: backward in two, and where the bubble went.

Backward does two things: the gradient of the input (I), which the rank before is waiting for, and the gradient of the weights
(W), which nobody waits for before the optimizer does. So I goes first, and W fills the time a rank would be idle. What is left
of the bubble depends on the clock: from the first action of any rank to the last (makespan), or of one rank (span)?

    penstock lab 8
    python -m penstock.learn.labs.lab8_zero_bubble
    torchrun --nproc-per-node 2 -m penstock.learn.labs.lab8_zero_bubble

Try: v-half and v-min among the NAMES. What do they pay with, and what do they get for it?
"""

import statistics
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import penstock as ps
from penstock.learn.devices import emulated_step
from penstock.learn.lab_helpers import best_of, check, check_time, drawing, on_ranks, percent, ranks_here, say
from penstock.schedule import Action, Cause, Costs, Kind, Schedule, Timeline

RANKS, GROUPS = 4, 2  # M = GROUPS x P microbatches
NAMES = ("1f1b", "zb-h1", "zb-h2", "zb-v")
FORWARD, INPUTS, WEIGHTS = 1, 1, 1  # of one microbatch on one rank, in units
UNIT = 0.010  # seconds
TOLERANCE = 0.5  # of the step: a busy machine adds to it
DIM, CLASSES, ROWS = 16, 4, 3  # of the model whose gradients are compared; rows of a microbatch


def main() -> None:
    """1F1B and three zero-bubble schedules: drawn, by two clocks, measured, their gradients compared."""
    ranks = ranks_here(RANKS)
    tables = {name: ps.schedule.build(name, ranks=ranks, microbatches=GROUPS * ranks) for name in NAMES}
    say(f"Lab 8: backward in two, {ranks} ranks, {GROUPS * ranks} microbatches; F = I = W = 1, B = I + W = 2\n")
    for name, table in tables.items():
        say(f"{name}: makespan {timed(table).makespan:g}, span {timed(table).span:g}\n{drawing(timed(table))}")
    where_the_bubble_went(tables)
    two_clocks(tables)
    measured = really(tables)
    bubbles = ", ".join(
        f"{name} {percent(real.bubble)} ({percent(real.bubble_by_span)} by span)" for name, real in measured.items()
    )
    old, new = 1e3 * measured["1f1b"].makespan, 1e3 * measured["zb-v"].makespan
    say(
        f"\nMeasured: bubbles of {ranks} ranks: {bubbles}; the same gradients take {old:.0f} ms with 1f1b, {new:.0f} with zb-v."
    )


def where_the_bubble_went(tables: dict[str, Schedule]) -> None:
    """What is left of the idle time, and what the rest was paid with."""
    say("\nA rank's idle time, on average, while the pipeline fills and drains; its microbatches in flight, at most:")
    say("         filling  draining   in flight")
    for name, table in tables.items():
        plan = timed(table)
        fill, drain = (plan.makespan * plan.causes[cause] for cause in (Cause.FILL, Cause.DRAIN))
        in_flight = max(plan.peak_in_flight) * table.ranks / table.num_stages  # a stage's activation is a part of its rank's
        say(f"  {name:6}  {fill:6.2f}   {drain:7.2f}   {in_flight:9g}")
    say("zb-h1: while the pipeline drains, a rank has W to do. zb-h2: while it fills, a rank has more forwards to do, so")
    say("it holds almost twice as many microbatches. zb-v: the stages go down the ranks and back up; each is half as large,")
    say("so the ranks have work after half the time.")


def two_clocks(tables: dict[str, Schedule]) -> None:
    """Makespan and span, and which of them a step takes."""
    say("\nTwo clocks. With a barrier between two steps, such as one norm over all gradients, a step takes its makespan.")
    say("Without it, a rank that is done goes on with the next step: how much later does that one end?")
    say("         makespan   span   a second step later")
    plans, more = {name: timed(table) for name, table in tables.items()}, {}
    for name, plan in plans.items():
        more[name] = timed(back_to_back(tables[name])).makespan - plan.makespan
        say(f"  {name:6} {plan.makespan:8g} {plan.span:6g} {more[name]:21g}")
    work = tables["1f1b"].microbatches * (FORWARD + INPUTS + WEIGHTS)
    h1, h2, v = plans["zb-h1"], plans["zb-h2"], plans["zb-v"]
    check(
        h2.span == more["zb-h2"] == work and h2.makespan == h1.makespan > work,
        f"zb-h2's zero bubble is a span, {work}; with a barrier it takes as long as zb-h1, {h2.makespan:g}",
        f"zb-h2 should have the span {work} and the makespan of zb-h1, {h1.makespan:g}; it has {h2.span:g} and {h2.makespan:g}",
    )
    check(
        v.span == work and v.makespan - work == (h1.makespan - work) / 2,
        f"zb-v has no bubble by span, and even by makespan only {v.makespan - work:g}, half of zb-h1's",
        f"zb-v should have the span {work} and half of the bubble of zb-h1; it has {v.span:g} and the makespan {v.makespan:g}",
    )


def really(tables: dict[str, Schedule]) -> dict[str, Timeline]:
    """All of them measured, name -> timeline, and their gradients compared."""
    say(f"\nRun on emulated devices, a unit {1e3 * UNIT:g} ms, and on a model that really computes, for its gradients:")
    say("           makespan in ms        bubble         by span")
    say("         planned measured   planned measured   measured")
    measured, gradients = {}, {}
    for name, table in tables.items():
        plan = timed(table)
        real, gradients[name] = best_of(
            partial(run_on_ranks, table), lambda result: result[0].makespan, good_enough=1.15 * UNIT * plan.makespan
        )
        measured[name] = real
        times = f"{1e3 * UNIT * plan.makespan:7.0f} {1e3 * real.makespan:8.0f}"
        say(f"  {name:6} {times}   {percent(plan.bubble):>7} {percent(real.bubble):>8}   {percent(real.bubble_by_span):>8}")
    for name, table in tables.items():
        check_measured(name, timed(table), measured[name])
        check_gradients(name, gradients[name], gradients["1f1b"])
    check_halves(measured["zb-h1"])
    slowest = max(measured, key=lambda name: measured[name].makespan)
    check_time(
        slowest == "1f1b",
        "with its backward in two, each of the others is faster than 1f1b",
        f"the slowest is {slowest}, not 1f1b; a very busy machine? run it again",
    )
    return measured


def run_on_ranks(table: Schedule) -> tuple[Timeline, dict[str, Tensor]]:
    """A step of `table`, measured, and all ranks' gradients of the model that computes."""
    timelines, parts = zip(*on_ranks(run, table.ranks, table, 4 * table.ranks), strict=True)
    return timelines[0], {name: gradient for part in parts for name, gradient in part.items()}


def is_near(plan: Timeline, real: Timeline) -> bool:
    """Whether a step took what the plan says, and little more: devices that sleep are never early."""
    return 0.999 * UNIT * plan.makespan <= real.makespan < (1 + TOLERANCE) * UNIT * plan.makespan


def timed(table: Schedule) -> Timeline:
    """`table` simulated, in units; every stage has its part of its rank's work."""
    part = table.ranks / table.num_stages
    return ps.schedule.simulate(table, Costs(part * FORWARD, part * INPUTS, part * WEIGHTS))


def back_to_back(table: Schedule) -> Schedule:
    """Two steps of `table`, every rank beginning the second when it is done with the first."""
    rows = [
        [*row, *(Action(kind, stage, table.microbatches + microbatch) for kind, stage, microbatch, _ in row)]
        for row in table.actions
    ]
    return ps.schedule.from_rows(table.name, rows, table.placement)


def check_measured(name: str, plan: Timeline, real: Timeline) -> None:
    """The step takes the time that was planned."""
    planned, took = 1e3 * UNIT * plan.makespan, 1e3 * real.makespan
    check_time(
        is_near(plan, real),
        f"{name}: the step takes {took:.0f} ms, planned were {planned:.0f}",
        f"{name} should take {planned:.0f} ms and little more, it took {took:.0f}; a very busy machine? run it again",
    )


def check_gradients(name: str, gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    """Check that all gradients have the bits of 1f1b's, the `reference`."""
    equal_names = [key for key, value in reference.items() if key in gradients and torch.equal(gradients[key], value)]
    check(
        len(equal_names) == len(reference) == len(gradients) > 0,
        f"{name}: all {len(gradients)} gradients have the bits of 1f1b's",
        f"{name} has {len(gradients)} gradients, of which {len(equal_names)} are those of 1f1b, which has {len(reference)}",
    )


def check_halves(real: Timeline) -> None:
    """I and W take their own time each."""
    took = {
        kind: statistics.median(event.end - event.start for event in real.events if event.action.kind is kind)
        for kind in (Kind.I, Kind.W)
    }
    inputs, weights = 1e3 * took[Kind.I], 1e3 * took[Kind.W]
    check_time(
        0.9 * INPUTS < took[Kind.I] / UNIT < INPUTS + WEIGHTS / 2
        and 0.9 * WEIGHTS < took[Kind.W] / UNIT < WEIGHTS + INPUTS / 2,
        f"zb-h1: an I takes {inputs:.1f} ms, a W {weights:.1f} ms: the backward really is in two",
        f"an I takes {inputs:.1f} ms and a W {weights:.1f} ms, not {1e3 * UNIT * INPUTS:g} and {1e3 * UNIT * WEIGHTS:g}",
    )


def run(table: Schedule, layers: int) -> tuple[Timeline, dict[str, Tensor]]:
    """A step of `table` on emulated devices, and this rank's gradients of a step of a model that computes."""
    return emulated_step(table, FORWARD * UNIT, INPUTS * UNIT, WEIGHTS * UNIT), gradients_of(table, layers)


def gradients_of(table: Schedule, layers: int) -> dict[str, Tensor]:
    """This rank's gradients after one step of an MLP, by their names in the whole model."""
    ps.comms.init_distributed(backend="gloo")
    torch.manual_seed(0)
    pipe = ps.Pipeline(ps.model.mlp(DIM, layers, CLASSES), cross_entropy, schedule=table)
    inputs, target = batch(table.microbatches)
    pipe.step(inputs, target=target)
    return {name: parameter.grad for name, parameter in pipe.named_parameters() if parameter.grad is not None}


def batch(microbatches: int) -> tuple[Tensor, Tensor]:
    """(rows, dim) inputs and (rows,) targets, always the same."""
    generator = torch.Generator().manual_seed(1)
    rows = ROWS * microbatches
    return torch.randn(rows, DIM, generator=generator), torch.randint(CLASSES, (rows,), generator=generator)


if __name__ == "__main__":
    main()
