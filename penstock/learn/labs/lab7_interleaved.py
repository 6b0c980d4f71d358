"""Lab 7: several stages on each rank, a smaller bubble, more messages.

A pipeline fills and drains stage by stage, so smaller stages fill it faster. Interleaved 1F1B gives each rank V stages of
1/V of its work, P stages apart: a microbatch passes through all ranks V times, and the bubble is (P-1) T / V where it was
(P-1) T. The price is counted here, in messages and in memory. A message that takes time can eat up the gain: how much time?

    penstock lab 7
    python -m penstock.learn.labs.lab7_interleaved
    torchrun --nproc-per-node 2 -m penstock.learn.labs.lab7_interleaved

Try: four times the GROUPS. Does a longer batch bear slower messages?
"""

from penstock import schedule
from penstock.learn.devices import emulated_step
from penstock.learn.lab_helpers import best_of, check, check_time, drawing, on_ranks, percent, ranks_here, say
from penstock.schedule import Costs, Schedule, Timeline

RANKS, GROUPS = 4, 2  # M = GROUPS x P microbatches
FORWARD, BACKWARD = 0.012, 0.024  # seconds of one microbatch on one rank, all its stages together
T = FORWARD + BACKWARD
SENDS = (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8)  # what a message takes, in T
TOLERANCE = 0.12  # of the step


def main() -> None:
    """One stage on each rank against two, measured; what it costs; and when it no longer pays, simulated."""
    ranks = ranks_here(RANKS)
    tables = {count: build(ranks, count) for count in (1, 2, 4)}  # V -> table
    say(f"Lab 7: one stage and two on each of {ranks} ranks, {tables[1].microbatches} microbatches, the same work\n")
    single, double = measured(tables[1]), measured(tables[2])
    check_time(
        double.bubble < single.bubble,
        "two stages on each rank do the same work with a smaller bubble",
        f"the bubble of two stages on each rank is {percent(double.bubble)}, not smaller than that of one, "
        f"{percent(single.bubble)}; a very busy machine? run it again",
    )

    say("\nThe price, counted:      messages   in flight on rank 0, in microbatches")
    for count, table in tables.items():
        say(f"  V = {count}  {table.name:16} {schedule.verify(table).transfers:8}   {in_flight(table):g}")
        check_price(table)
    say(
        f"On its way down a microbatch goes from rank to rank P-1 = {ranks - 1} times. Each stage more on the ranks sends it\n"
        f"round once more, from the last rank back to the first and down: P = {ranks} messages more; and as many on its way up."
    )

    say("\nIf a message takes time, a microbatch waits for all of its messages in turn. The step in ms, simulated:")
    say("  message   " + "".join(f"   V = {count}" for count in tables))
    for send in SENDS:
        times = {count: 1e3 * timed(table, send * T).makespan for count, table in tables.items()}
        cells = "".join(f"{time:7.0f}{'*' if time == min(times.values()) else ' '}" for time in times.values())
        say(f"  {1e3 * send * T:4.1f} ms   {cells}")
    limits = {count: break_even(tables[1], tables[count]) for count in (2, 4)}
    for count, limit in limits.items():
        say(f"  V = {count} stops paying at {1e3 * limit:.1f} ms a message, {percent(limit / T)} of T = {1e3 * T:.0f} ms")
    check(
        0 < limits[4] < limits[2],
        "the more stages on a rank, the faster its messages must be",
        f"V = 2 stops paying at {1e3 * limits[2]:.1f} ms and V = 4 at {1e3 * limits[4]:.1f} ms: that is not the order expected",
    )
    say(
        f"\nMeasured: two stages on each of {ranks} ranks have a bubble of {percent(double.bubble)}, one has "
        f"{percent(single.bubble)}; a step takes {1e3 * double.makespan:.0f} ms instead of {1e3 * single.makespan:.0f} ms, "
        f"with {schedule.verify(tables[2]).transfers} messages instead of {schedule.verify(tables[1]).transfers}; by the "
        f"simulation it pays while a message takes less than {1e3 * limits[2]:.1f} ms."
    )


def build(ranks: int, count: int) -> Schedule:
    """1F1B with `count` stages on each rank."""
    if count == 1:
        return schedule.build("1f1b", ranks=ranks, microbatches=GROUPS * ranks)
    return schedule.build("interleaved-1f1b", ranks=ranks, microbatches=GROUPS * ranks, stages_per_rank=count)


def timed(table: Schedule, send: float = 0.0) -> Timeline:
    """`table` simulated: every stage has its part of its rank's work, a message takes `send` seconds."""
    part = table.ranks / table.num_stages
    return schedule.simulate(table, Costs(part * FORWARD, part * BACKWARD / 2, part * BACKWARD / 2, send))


def measured(table: Schedule) -> Timeline:
    """`table` on emulated devices, drawn, its bubble checked."""
    plan = timed(table).bubble
    timeline = best_of(
        lambda: on_ranks(emulated_step, table.ranks, table, FORWARD, BACKWARD)[0],
        lambda timeline: abs(timeline.bubble - plan),
        good_enough=TOLERANCE / 2,
    )
    say(f"{table.name}, measured: {1e3 * timeline.makespan:.0f} ms, bubble {percent(timeline.bubble)}\n{drawing(timeline)}")
    check_bubble(table, timeline)
    return timeline


def in_flight(table: Schedule) -> float:
    """The most that rank 0 has in flight; a stage's activation is a part of its rank's."""
    return timed(table).peak_in_flight[0] * table.ranks / table.num_stages


def check_bubble(table: Schedule, timeline: Timeline) -> None:
    """The bubble is (P-1) T / V: simulated exactly, measured about."""
    ranks, count = table.ranks, table.num_stages // table.ranks
    idle = (ranks - 1) * T / count
    step = table.microbatches * T + idle
    plan, rule, real = timed(table).bubble, idle / step, timeline.bubble
    check_time(
        abs(plan - rule) < 1e-6 and abs(real - plan) < TOLERANCE,
        f"(P-1) T / {count} = {1e3 * idle:.0f} ms of {1e3 * step:.0f}: {percent(rule)}, and the measured bubble is near",
        f"the bubble of {table.name} should be {percent(rule)}: simulated {percent(plan)}, measured {percent(real)}; "
        "a very busy machine? run it again",
    )


def check_price(table: Schedule) -> None:
    """What the rules say of messages and memory."""
    ranks, microbatches, count = table.ranks, table.microbatches, table.num_stages // table.ranks
    messages, num_messages = schedule.verify(table).transfers, 2 * microbatches * (ranks - 1 + (count - 1) * ranks)
    num_in_flight = min(microbatches, ranks if count == 1 else ((count - 1) * ranks + 2 * (ranks - 1) + 1) / count)
    check(
        messages == num_messages and in_flight(table) == num_in_flight,
        f"2 M ((P-1) + (V-1) P) = {num_messages} messages, {num_in_flight:g} in flight",
        f"{table.name} should send {num_messages} messages and hold {num_in_flight:g} microbatches; it sends {messages}, "
        f"holds {in_flight(table):g}",
    )


def break_even(plain: Schedule, interleaved: Schedule) -> float:
    """The seconds a message may take until `interleaved` is no faster than `plain`, found by halving."""
    low, high = 0.0, 10 * T
    for _ in range(30):
        middle = (low + high) / 2
        pays = timed(interleaved, middle).makespan < timed(plain, middle).makespan
        low, high = (middle, high) if pays else (low, middle)
    return low


if __name__ == "__main__":
    main()
