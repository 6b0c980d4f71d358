"""Lab 7: several stages on each rank, a smaller bubble, more messages.

A pipeline fills and drains stage by stage, so smaller stages fill it faster. Interleaved 1F1B gives each rank V stages, P
stages apart, each with 1/V of the rank's work. A microbatch passes through all ranks V times, and the bubble is (P-1) T / V
instead of (P-1) T. The lab counts the price in messages and in memory. If messages take time, the gain shrinks: how much time
may a message take?

    penstock lab 7
    python -m penstock.learn.labs.lab7_interleaved
    torchrun --nproc-per-node 2 -m penstock.learn.labs.lab7_interleaved

Try: four times the GROUPS. Does interleaving pay with slower messages when the batch is longer?
"""

from functools import partial

from penstock import schedule
from penstock.learn.devices import emulated_step
from penstock.learn.equal_stages import simulate_equal_stages
from penstock.learn.lab_helpers import best_of, check, check_time, drawing, on_ranks, percent, ranks_here, say
from penstock.schedule import Schedule, Timeline

RANKS, GROUPS = 4, 2  # M = GROUPS x P microbatches
FORWARD, BACKWARD = 0.012, 0.024  # seconds of one microbatch on one rank, all its stages together
T = FORWARD + BACKWARD  # as in the formulas
simulate_table = partial(simulate_equal_stages, forward=FORWARD, backward_input=BACKWARD / 2, backward_weight=BACKWARD / 2)
SEND_COSTS = (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8)  # time of a message, in T
TOLERANCE = 0.12  # a share of the step


def main() -> None:
    """Measure one and two stages on each rank; count messages and memory; simulate slow messages."""
    ranks = ranks_here(RANKS)
    tables = {stages_per_rank: build(ranks, stages_per_rank) for stages_per_rank in (1, 2, 4)}  # V -> table
    say(f"Lab 7: one stage and two on each of {ranks} ranks, {tables[1].microbatches} microbatches, the same work\n")
    single, double = measure(tables[1]), measure(tables[2])
    check_time(
        double.bubble < single.bubble,
        "two stages on each rank do the same work with a smaller bubble",
        f"the bubble of two stages on each rank is {percent(double.bubble)}, not smaller than that of one, "
        f"{percent(single.bubble)}; a very busy machine? run it again",
    )

    say("\nThe price, counted:      messages   in flight on rank 0, in microbatches")
    for stages_per_rank, table in tables.items():
        say(f"  V = {stages_per_rank}  {table.name:16} {schedule.verify(table).transfers:8}   {in_flight_on_rank_0(table):g}")
        check_messages_and_memory(table)
    say(f"With V = 1 the forwards of a microbatch send P-1 = {ranks - 1} messages. Each further stage adds P = {ranks}:")
    say("from the last rank to the first, and down again. The backwards send the same number.")
    say("\nIf a message takes time, a microbatch waits for all of its messages one after another. The step in ms, simulated:")
    say("  message   " + "".join(f"   V = {stages_per_rank}" for stages_per_rank in tables))
    for send in SEND_COSTS:
        times = {
            stages_per_rank: 1e3 * simulate_table(table, send=send * T).makespan for stages_per_rank, table in tables.items()
        }
        cells = "".join(f"{time:7.0f}{'*' if time == min(times.values()) else ' '}" for time in times.values())
        say(f"  {1e3 * send * T:4.1f} ms   {cells}")
    limits = {stages_per_rank: break_even_send_seconds(tables[1], tables[stages_per_rank]) for stages_per_rank in (2, 4)}
    for stages_per_rank, limit in limits.items():
        limit_text = f"{1e3 * limit:.1f} ms a message, {percent(limit / T)} of T = {1e3 * T:.0f} ms"
        say(f"  V = {stages_per_rank} stops paying at {limit_text}")
    check(
        0 < limits[4] < limits[2],
        "the more stages on a rank, the faster messages must be",
        f"V = 4 should stop paying before V = 2, but does at {1e3 * limits[4]:.1f} ms, V = 2 at {1e3 * limits[2]:.1f} ms",
    )
    say(
        f"\nMeasured: two stages on each of {ranks} ranks have a bubble of {percent(double.bubble)}, one has "
        f"{percent(single.bubble)}; a step takes {1e3 * double.makespan:.0f} ms instead of {1e3 * single.makespan:.0f} ms, "
        f"with {schedule.verify(tables[2]).transfers} messages instead of {schedule.verify(tables[1]).transfers}; by the "
        f"simulation it pays while a message takes less than {1e3 * limits[2]:.1f} ms."
    )


def build(ranks: int, stages_per_rank: int) -> Schedule:
    """Build 1F1B, interleaved if `stages_per_rank` is more than 1."""
    if stages_per_rank == 1:
        return schedule.build("1f1b", ranks=ranks, microbatches=GROUPS * ranks)
    return schedule.build("interleaved-1f1b", ranks=ranks, microbatches=GROUPS * ranks, stages_per_rank=stages_per_rank)


def measure(table: Schedule) -> Timeline:
    """Run `table` on emulated devices, print its timeline and check its bubble. Returns the timeline."""
    planned_bubble = simulate_table(table).bubble
    timeline = best_of(
        lambda: on_ranks(emulated_step, table.ranks, table, FORWARD, BACKWARD)[0],
        lambda timeline: abs(timeline.bubble - planned_bubble),
        good_enough=TOLERANCE / 2,
    )
    say(f"{table.name}, measured: {1e3 * timeline.makespan:.0f} ms, bubble {percent(timeline.bubble)}\n{drawing(timeline)}")
    check_bubble(table, timeline)
    return timeline


def in_flight_on_rank_0(table: Schedule) -> float:
    """Return the most microbatches in flight on rank 0; one microbatch on one of V stages counts 1/V."""
    return simulate_table(table).peak_in_flight[0] * table.ranks / table.num_stages


def check_bubble(table: Schedule, timeline: Timeline) -> None:
    """Check that the bubble is (P-1) T / V: exactly if simulated, about if measured."""
    ranks, stages_per_rank = table.ranks, table.num_stages // table.ranks
    idle = (ranks - 1) * T / stages_per_rank
    step = table.microbatches * T + idle
    planned_bubble, expected_bubble = simulate_table(table).bubble, idle / step
    check_time(
        abs(planned_bubble - expected_bubble) < 1e-6 and abs(timeline.bubble - planned_bubble) < TOLERANCE,
        f"(P-1) T / {stages_per_rank} = {1e3 * idle:.0f} ms of {1e3 * step:.0f}: {percent(expected_bubble)}, and the measured "
        "bubble is near",
        f"the bubble of {table.name} should be {percent(expected_bubble)}: simulated {percent(planned_bubble)}, measured "
        f"{percent(timeline.bubble)}; a very busy machine? run it again",
    )


def check_messages_and_memory(table: Schedule) -> None:
    """Check the number of messages and the microbatches in flight against the formulas."""
    ranks, microbatches, stages_per_rank = table.ranks, table.microbatches, table.num_stages // table.ranks
    messages, in_flight = schedule.verify(table).transfers, in_flight_on_rank_0(table)
    expected_messages = 2 * microbatches * (ranks - 1 + (stages_per_rank - 1) * ranks)
    interleaved_in_flight = ((stages_per_rank - 1) * ranks + 2 * (ranks - 1) + 1) / stages_per_rank
    expected_in_flight = min(microbatches, ranks if stages_per_rank == 1 else interleaved_in_flight)
    check(
        messages == expected_messages and in_flight == expected_in_flight,
        f"2 M ((P-1) + (V-1) P) = {expected_messages} messages, {expected_in_flight:g} in flight",
        f"{table.name} should send {expected_messages} messages and hold {expected_in_flight:g} microbatches; it sends "
        f"{messages}, holds {in_flight:g}",
    )


def break_even_send_seconds(one_stage: Schedule, interleaved: Schedule) -> float:
    """Return the seconds of a message at which `interleaved` is no faster than `one_stage`, found by bisection."""
    low, high = 0.0, 10 * T
    for _ in range(30):
        middle = (low + high) / 2
        pays = simulate_table(interleaved, send=middle).makespan < simulate_table(one_stage, send=middle).makespan
        low, high = (middle, high) if pays else (low, middle)
    return low


if __name__ == "__main__":
    main()
