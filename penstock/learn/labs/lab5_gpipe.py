"""Lab 5: microbatches fill the pipeline.

Cut the batch in M microbatches, and a rank can begin the next while the others work on the last: all forwards, then all
backwards (GPipe). A rank now waits (P-1) T in a step of (M+P-1) T, where it waited (P-1) M T: the bubble is the share
(P-1)/(M+P-1). The batch stays the same here, so T shrinks as M grows, and the step gets shorter and shorter.

    penstock lab 5
    python -m penstock.learn.labs.lab5_gpipe
    torchrun --nproc-per-node 2 -m penstock.learn.labs.lab5_gpipe

Try: 24 microbatches. The simulated step goes on getting shorter; what keeps the measured one from it?
"""

from functools import partial

from penstock import schedule
from penstock.learn.devices import emulated_step
from penstock.learn.lab_helpers import best_of, check_time, drawing, on_ranks, percent, ranks_here, say
from penstock.schedule import Costs, Timeline

RANKS, MICROBATCHES = 4, (1, 2, 4, 8)
FORWARD, BACKWARD = 0.032, 0.064  # seconds of the whole batch on one rank
TOLERANCE = 0.12  # of the step: messages and a busy machine add to the bubble


def main() -> None:
    """The bubble for more and more microbatches, simulated and measured."""
    ranks = ranks_here(RANKS)
    say(f"Lab 5: GPipe over {ranks} ranks\n")
    planned = {count: simulated_step(ranks, count) for count in MICROBATCHES}
    measured = {
        count: best_of(partial(measured_step, ranks, count), partial(off, plan), good_enough=TOLERANCE / 2)
        for count, plan in planned.items()
    }

    say("           step in ms            bubble")
    say("   M  simulated measured   simulated measured")
    for count, plan in planned.items():
        real = measured[count]
        times = f"{1e3 * plan.makespan:9.0f} {1e3 * real.makespan:8.0f}"
        say(f"  {count:2}  {times}   {percent(plan.bubble):>9} {percent(real.bubble):>8}")
    for count, plan in planned.items():
        rule, real = (ranks - 1) / (count + ranks - 1), measured[count]
        check_time(
            abs(plan.bubble - rule) < 1e-6 and off(plan, real) < TOLERANCE,
            f"M = {count}: (P-1)/(M+P-1) = {percent(rule)}, and the measured bubble is near",
            f"with {count} microbatches the bubble should be {percent(rule)}: simulated {percent(plan.bubble)}, measured "
            f"{percent(real.bubble)}; the machine is very busy, or the microbatches are so short that messages count",
        )
    low, high = MICROBATCHES[0], MICROBATCHES[-1]
    check_time(
        measured[high].makespan < measured[low].makespan,
        "the same batch takes less time in more microbatches",
        f"{high} microbatches took {measured[high].makespan:.3f} s, not less than {low}: {measured[low].makespan:.3f} s",
    )

    say(f"\n{high} microbatches, simulated:\n{drawing(planned[high])}")
    say(f"and measured:\n{drawing(measured[high])}")
    speedup = measured[low].makespan / measured[high].makespan
    say(
        f"\nMeasured: from {low} to {high} microbatches the bubble of {ranks} ranks falls from "
        f"{percent(measured[low].bubble)} to {percent(measured[high].bubble)} (simulated: {percent(planned[high].bubble)}), "
        f"and the same batch takes {1e3 * measured[high].makespan:.0f} ms instead of "
        f"{1e3 * measured[low].makespan:.0f} ms, {speedup:.2f} times faster."
    )


def off(plan: Timeline, real: Timeline) -> float:
    """By how much of a step the measured bubble is another than the planned one."""
    return abs(real.bubble - plan.bubble)


def simulated_step(ranks: int, microbatches: int) -> Timeline:
    """What the table says: the costs of a microbatch in, the timeline out."""
    table = schedule.build("gpipe", ranks=ranks, microbatches=microbatches)
    forward, backward = FORWARD / microbatches, BACKWARD / microbatches
    return schedule.simulate(table, Costs(forward=forward, backward_input=backward / 2, backward_weight=backward / 2))


def measured_step(ranks: int, microbatches: int) -> Timeline:
    """What the same table takes on emulated devices."""
    table = schedule.build("gpipe", ranks=ranks, microbatches=microbatches)
    return on_ranks(emulated_step, ranks, table, FORWARD / microbatches, BACKWARD / microbatches)[0]


if __name__ == "__main__":
    main()
