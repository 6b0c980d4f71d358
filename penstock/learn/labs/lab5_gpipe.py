"""Lab 5: microbatches fill the pipeline.

GPipe runs all forwards, then all backwards. With M microbatches a rank begins the next while other ranks work on the last. It
now idles for (P-1) T of a step of (M+P-1) T, instead of (P-1) M T in lab 4: the bubble is (P-1)/(M+P-1). Here the batch stays
the same, so T shrinks as M grows, and the step gets shorter.

    penstock lab 5
    python -m penstock.learn.labs.lab5_gpipe
    torchrun --nproc-per-node 2 -m penstock.learn.labs.lab5_gpipe

Try: 24 microbatches. The simulated step is shorter still; why is the measured one not?
"""

from functools import partial

from penstock import schedule
from penstock.learn.devices import emulated_step
from penstock.learn.lab_helpers import best_of, check_time, drawing, on_ranks, percent, ranks_here, say
from penstock.schedule import Costs, Timeline

RANKS, MICROBATCHES = 4, (1, 2, 4, 8)
FORWARD, BACKWARD = 0.032, 0.064  # seconds of the whole batch on one rank
TOLERANCE = 0.12  # a share of the step: messages and a busy machine add to the bubble


def main() -> None:
    """Compare the simulated and the measured bubble for 1 to 8 microbatches."""
    ranks = ranks_here(RANKS)
    say(f"Lab 5: GPipe over {ranks} ranks\n")
    plans = {count: simulated_step(ranks, count) for count in MICROBATCHES}
    results = {
        count: best_of(partial(measured_step, ranks, count), partial(bubble_error, plan), good_enough=TOLERANCE / 2)
        for count, plan in plans.items()
    }

    say("           step in ms            bubble")
    say("   M  simulated measured   simulated measured")
    for count, plan in plans.items():
        result = results[count]
        times = f"{1e3 * plan.makespan:9.0f} {1e3 * result.makespan:8.0f}"
        say(f"  {count:2}  {times}   {percent(plan.bubble):>9} {percent(result.bubble):>8}")
    for count, plan in plans.items():
        expected, result = (ranks - 1) / (count + ranks - 1), results[count]
        check_time(
            abs(plan.bubble - expected) < 1e-6 and bubble_error(plan, result) < TOLERANCE,
            f"M = {count}: (P-1)/(M+P-1) = {percent(expected)}, and the measured bubble is near",
            f"with {count} microbatches the bubble should be {percent(expected)}: simulated {percent(plan.bubble)}, measured "
            f"{percent(result.bubble)}; the machine is very busy, or the microbatches are so short that messages count",
        )
    low, high = MICROBATCHES[0], MICROBATCHES[-1]
    check_time(
        results[high].makespan < results[low].makespan,
        "the same batch takes less time in more microbatches",
        f"{high} microbatches took {results[high].makespan:.3f} s, not less than {low}: {results[low].makespan:.3f} s",
    )

    say(f"\n{high} microbatches, simulated:\n{drawing(plans[high])}")
    say(f"and measured:\n{drawing(results[high])}")
    speedup = results[low].makespan / results[high].makespan
    say(
        f"\nMeasured: from {low} to {high} microbatches the bubble of {ranks} ranks falls from "
        f"{percent(results[low].bubble)} to {percent(results[high].bubble)} (simulated: {percent(plans[high].bubble)}), "
        f"and the same batch takes {1e3 * results[high].makespan:.0f} ms instead of "
        f"{1e3 * results[low].makespan:.0f} ms, {speedup:.2f} times faster."
    )


def bubble_error(plan: Timeline, result: Timeline) -> float:
    """Return the difference between the measured and the simulated bubble, as a share of a step."""
    return abs(result.bubble - plan.bubble)


def simulated_step(ranks: int, microbatches: int) -> Timeline:
    """Simulate a step of GPipe with the costs of one microbatch."""
    table = schedule.build("gpipe", ranks=ranks, microbatches=microbatches)
    forward, backward = FORWARD / microbatches, BACKWARD / microbatches
    return schedule.simulate(table, Costs(forward=forward, backward_input=backward / 2, backward_weight=backward / 2))


def measured_step(ranks: int, microbatches: int) -> Timeline:
    """Run a step of GPipe on emulated devices. Returns its timeline."""
    table = schedule.build("gpipe", ranks=ranks, microbatches=microbatches)
    return on_ranks(emulated_step, ranks, table, FORWARD / microbatches, BACKWARD / microbatches)[0]


if __name__ == "__main__":
    main()
