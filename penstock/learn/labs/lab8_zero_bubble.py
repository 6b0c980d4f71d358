"""Lab 8: backward in two, and where the bubble went.

A backward computes two things: the gradient of the input (I), for which the previous rank waits, and the gradient of the
weights (W), which only the optimizer needs. So I runs first, and W fills time in which a rank would idle. The bubble that
remains depends on the clock: makespan, from the first action of any rank to the last, or span, the same for one rank?

    penstock lab 8
    python -m penstock.learn.labs.lab8_zero_bubble
    torchrun --nproc-per-node 2 -m penstock.learn.labs.lab8_zero_bubble

Try: v-half and v-min among the NAMES. What do they save, and what does it cost?
"""

import statistics
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import penstock as ps
from penstock.learn.devices import emulated_step
from penstock.learn.equal_stages import simulate_equal_stages
from penstock.learn.lab_helpers import best_of, check, check_time, drawing, on_ranks, percent, ranks_here, say
from penstock.schedule import Action, Cause, Kind, Schedule, Timeline

RANKS, GROUPS = 4, 2  # M = GROUPS x P microbatches
NAMES = ("1f1b", "zb-h1", "zb-h2", "zb-v")
UNIT_SECONDS = 0.010  # of F, of I and of W of one microbatch on one rank
TOLERANCE = 0.5  # a share of the step: a busy machine adds to it
DIM, CLASSES, ROWS = 16, 4, 3  # of the model whose gradients are compared; rows of a microbatch


def main() -> None:
    """Draw, simulate and measure 1F1B and three zero-bubble schedules, and compare their gradients."""
    ranks = ranks_here(RANKS)
    tables = {name: ps.schedule.build(name, ranks=ranks, microbatches=GROUPS * ranks) for name in NAMES}
    say(f"Lab 8: backward in two, {ranks} ranks, {GROUPS * ranks} microbatches; F = I = W = 1, B = I + W = 2\n")
    for name, table in tables.items():
        plan = simulate_equal_stages(table)
        say(f"{name}: makespan {plan.makespan:g}, span {plan.span:g}\n{drawing(plan)}")
    show_idle_causes(tables)
    show_makespan_and_span(tables)
    results = measure_all(tables)
    bubbles = ", ".join(
        f"{name} {percent(result.bubble)} ({percent(result.bubble_by_span)} by span)" for name, result in results.items()
    )
    step_ms = {name: f"{1e3 * result.makespan:.0f}" for name, result in results.items()}
    say(
        f"\nMeasured: bubbles of {ranks} ranks: {bubbles}; the same gradients take {step_ms['1f1b']} ms with 1f1b, "
        f"{step_ms['zb-v']} with zb-v."
    )


def show_idle_causes(tables: dict[str, Schedule]) -> None:
    """Print each schedule's idle time while the pipeline fills and drains, and its microbatches in flight."""
    say("\nA rank's idle time, on average, while the pipeline fills and drains; its microbatches in flight, at most:")
    say("         filling  draining   in flight")
    for name, table in tables.items():
        plan = simulate_equal_stages(table)
        fill, drain = (plan.makespan * plan.causes[cause] for cause in (Cause.FILL, Cause.DRAIN))
        in_flight = max(plan.peak_in_flight) * table.ranks / table.num_stages  # with two stages on a rank each counts 1/2
        say(f"  {name:6}  {fill:6.2f}   {drain:7.2f}   {in_flight:9g}")
    say("zb-h1: while the pipeline drains, a rank runs W. zb-h2: while it fills, a rank also runs more forwards, so it holds")
    say("almost twice as many microbatches. zb-v: the stages go down the ranks and back up; each is half as large, so the")
    say("ranks have work after half the time.")


def show_makespan_and_span(tables: dict[str, Schedule]) -> None:
    """Print makespan and span, and which of them a step takes."""
    say("\nTwo clocks. With a barrier between steps, for example a norm over all gradients, a step takes its makespan.")
    say("Without a barrier a rank that is done begins the next step: how much later does that step end?")
    say("         makespan   span   a second step later")
    plans, extra = {name: simulate_equal_stages(table) for name, table in tables.items()}, {}
    for name, plan in plans.items():
        extra[name] = simulate_equal_stages(two_steps(tables[name])).makespan - plan.makespan
        say(f"  {name:6} {plan.makespan:8g} {plan.span:6g} {extra[name]:21g}")
    work = 3 * tables["1f1b"].microbatches
    h1, h2, v = plans["zb-h1"], plans["zb-h2"], plans["zb-v"]
    check(
        h2.span == extra["zb-h2"] == work and h2.makespan == h1.makespan > work,
        f"zb-h2 has no bubble by span, {work}; with a barrier it takes as long as zb-h1, {h2.makespan:g}",
        f"zb-h2 should have the span {work} and the makespan of zb-h1, {h1.makespan:g}; it has {h2.span:g} and {h2.makespan:g}",
    )
    check(
        v.span == work and v.makespan - work == (h1.makespan - work) / 2,
        f"zb-v has no bubble by span, and even by makespan only {v.makespan - work:g}, half of zb-h1's",
        f"zb-v should have the span {work} and half of the bubble of zb-h1; it has {v.span:g} and the makespan {v.makespan:g}",
    )


def measure_all(tables: dict[str, Schedule]) -> dict[str, Timeline]:
    """Measure all tables and compare their gradients. Returns the timelines by name."""
    say(f"\nOn emulated devices, with a unit of {1e3 * UNIT_SECONDS:g} ms; a model that computes then compares gradients:")
    say("           makespan in ms        bubble         by span")
    say("         planned measured   planned measured   measured")
    results, gradients = {}, {}
    for name, table in tables.items():
        plan = simulate_equal_stages(table)
        result, gradients[name] = best_of(
            partial(run_on_ranks, table), lambda result: result[0].makespan, good_enough=1.15 * UNIT_SECONDS * plan.makespan
        )
        results[name] = result
        times = f"{1e3 * UNIT_SECONDS * plan.makespan:7.0f} {1e3 * result.makespan:8.0f}"
        say(f"  {name:6} {times}   {percent(plan.bubble):>7} {percent(result.bubble):>8}   {percent(result.bubble_by_span):>8}")
    for name, table in tables.items():
        check_step_time(name, simulate_equal_stages(table), results[name])
        check_gradients(name, gradients[name], gradients["1f1b"])
    check_split_backward(results["zb-h1"])
    slowest = max(results, key=lambda name: results[name].makespan)
    check_time(
        slowest == "1f1b",
        "with the backward in two, each schedule is faster than 1f1b",
        f"the slowest is {slowest}, not 1f1b; a very busy machine? run it again",
    )
    return results


def run_on_ranks(table: Schedule) -> tuple[Timeline, dict[str, Tensor]]:
    """Run a step of `table`. Returns its timeline, and the gradients of all ranks of the model that computes."""
    timelines, rank_gradients = zip(*on_ranks(run_on_rank, table.ranks, table, 4 * table.ranks), strict=True)
    return timelines[0], {name: gradient for gradients in rank_gradients for name, gradient in gradients.items()}


def is_near(plan: Timeline, result: Timeline) -> bool:
    """Return whether a step took the planned time or little more; devices that sleep are never early."""
    return 0.999 * UNIT_SECONDS * plan.makespan <= result.makespan < (1 + TOLERANCE) * UNIT_SECONDS * plan.makespan


def two_steps(table: Schedule) -> Schedule:
    """Return a table of two steps of `table`, without a barrier between them."""
    rows = [
        [*row, *(Action(kind, stage, table.microbatches + microbatch) for kind, stage, microbatch, _ in row)]
        for row in table.actions
    ]
    return ps.schedule.from_rows(table.name, rows, table.placement)


def check_step_time(name: str, plan: Timeline, result: Timeline) -> None:
    """Check that the step takes about the planned time."""
    planned_ms, measured_ms = 1e3 * UNIT_SECONDS * plan.makespan, 1e3 * result.makespan
    check_time(
        is_near(plan, result),
        f"{name}: the step takes {measured_ms:.0f} ms, the plan says {planned_ms:.0f}",
        f"{name} should take {planned_ms:.0f} ms and little more, it took {measured_ms:.0f}; a very busy machine? run it again",
    )


def check_gradients(name: str, gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    """Check that all gradients have the bits of 1f1b's, the `reference`."""
    equal_names = [key for key, value in reference.items() if key in gradients and torch.equal(gradients[key], value)]
    check(
        len(equal_names) == len(reference) == len(gradients) > 0,
        f"{name}: all {len(gradients)} gradients have the bits of 1f1b's",
        f"{name} has {len(gradients)} gradients, of which {len(equal_names)} are those of 1f1b, which has {len(reference)}",
    )


def check_split_backward(result: Timeline) -> None:
    """Check that an I and a W each take the time of their half of the backward."""
    input_ms, weight_ms = (
        1e3 * statistics.median(event.end - event.start for event in result.events if event.action.kind is kind)
        for kind in (Kind.I, Kind.W)
    )
    planned_ms = 1e3 * UNIT_SECONDS
    check_time(
        0.9 * planned_ms < input_ms < 1.5 * planned_ms and 0.9 * planned_ms < weight_ms < 1.5 * planned_ms,
        f"zb-h1: an I takes {input_ms:.1f} ms, a W {weight_ms:.1f} ms: the backward is in two",
        f"an I takes {input_ms:.1f} ms and a W {weight_ms:.1f} ms, not {planned_ms:g} and {planned_ms:g}",
    )


def run_on_rank(table: Schedule, layers: int) -> tuple[Timeline, dict[str, Tensor]]:
    """Run a step of `table` on emulated devices, then one of a model that computes. Returns that timeline, these gradients."""
    return emulated_step(table, UNIT_SECONDS, UNIT_SECONDS, UNIT_SECONDS), gradients_of(table, layers)


def gradients_of(table: Schedule, layers: int) -> dict[str, Tensor]:
    """Run one step of an MLP. Returns this rank's gradients, by their names in the whole model."""
    ps.comms.init_distributed(backend="gloo")
    torch.manual_seed(0)
    pipe = ps.Pipeline(ps.model.mlp(DIM, layers, CLASSES), cross_entropy, schedule=table)
    inputs, target = batch(table.microbatches)
    pipe.step(inputs, target=target)
    return {name: parameter.grad for name, parameter in pipe.named_parameters() if parameter.grad is not None}


def batch(microbatches: int) -> tuple[Tensor, Tensor]:
    """Return inputs (rows, dim) and targets (rows,), always the same."""
    generator = torch.Generator().manual_seed(1)
    rows = ROWS * microbatches
    return torch.randn(rows, DIM, generator=generator), torch.randint(CLASSES, (rows,), generator=generator)


if __name__ == "__main__":
    main()
