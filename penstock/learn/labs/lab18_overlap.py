"""Lab 18: time a message, then hide it.

What a message costs is easily measured wrongly: the first one connects the ranks, a rank that comes late lets the others
wait, and a call that returns at once has done nothing yet. So warm up, start together, and wait for the end. Then the reason
why anybody would let a call return at once: the message travels while the rank computes. Measured with and without, between
two stages of a pipeline and for the gradients of replicas.

    penstock lab 18
    python -m penstock.learn.labs.lab18_overlap
    torchrun --nproc-per-node 2 -m penstock.learn.labs.lab18_overlap

Try: change a tensor after its `isend` and before the `wait()`. What arrives?
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import penstock as ps
from penstock.learn.buckets import BACKWARD_SECONDS, NUM_LAYERS, all_reduce_seconds, draw_spans, measure_backward, plan_backward
from penstock.learn.lab_helpers import best_of, check, check_time, on_ranks, percent, ranks_here, say

RANKS, REPEATS = 4, 5
LATE = 0.03  # seconds that one rank comes late
MESSAGES, TRAVEL = 4, 0.02  # from one stage to the next, and the seconds of each
DIM = 16
EXACT = 1e-12  # of float64 sums in another order
BUCKETS = (1, 2, 4, 8)


def main() -> None:
    """How to time; a message hidden behind the next microbatch; an all-reduce hidden behind the backward."""
    ranks = ranks_here(RANKS)
    say(f"Lab 18: time and overlap, on {ranks} ranks\n")
    how_to_time(ranks)
    alone, hidden = behind_the_next_microbatch(ranks)
    one_bucket, best, count = behind_the_backward(ranks)
    say(
        f"\nMeasured: {MESSAGES} microbatches with their messages take {1e3 * alone:.0f} ms if each is waited for, "
        f"{1e3 * hidden:.0f} if not; a backward and its all-reduce {1e3 * best:.0f} ms in {count} buckets, "
        f"{1e3 * one_bucket:.0f} in one."
    )


# ---- how to time


class AllReduceTimes(NamedTuple):
    """Of one all-reduce on this rank, in seconds."""

    first: float  # the first of its group
    best: float  # of some, all ranks together
    waiting: float  # where one rank is late
    returned: float  # the same, with a handle: until the call returns
    done: float  # and until its `wait()` does


def how_to_time(ranks: int) -> None:
    """Three mistakes, on rank 0, and what each makes of the time."""
    times = best_of(lambda: on_ranks(timed, ranks)[0], lambda times: -min(times.waiting, times.done), good_enough=-0.9 * LATE)
    say("An all-reduce of 4 KB, timed on rank 0 in five ways:")
    say(f"  {1e3 * times.first:8.2f} ms   the first one: the ranks connect. So warm up")
    say(f"  {1e3 * times.waiting:8.2f} ms   another rank came {1e3 * LATE:.0f} ms late. So start together: a barrier")
    say(f"  {1e3 * times.returned:8.2f} ms   the same, with async_op=True, until the call returns: it has only been posted")
    say(f"  {1e3 * times.done:8.2f} ms   until its wait() returns. So wait; for a GPU that is torch.cuda.synchronize()")
    say(f"  {1e3 * times.best:8.2f} ms   warm, together, waited for, the best of {REPEATS}: what it costs")
    check_time(
        min(times.waiting, times.done) > LATE / 2,
        "who is late is paid for by those who wait",
        f"with a rank {1e3 * LATE:.0f} ms late the all-reduce took {1e3 * times.waiting:.1f} and {1e3 * times.done:.1f} ms",
    )


def timed() -> AllReduceTimes:
    """All the ways."""
    topology = ps.comms.init_distributed(backend="gloo")
    group, data = dist.new_group(), torch.ones(1000)  # a new group has no connections yet
    first_call = seconds_of(lambda: dist.all_reduce(data, group=group))

    def with_one_late() -> None:
        dist.barrier()
        if topology.rank == topology.world_size - 1:
            time.sleep(LATE)

    best, late_calls, handled = [], [], []
    for _ in range(REPEATS):
        dist.barrier()
        best.append(seconds_of(lambda: dist.all_reduce(data)))
        with_one_late()
        late_calls.append(seconds_of(lambda: dist.all_reduce(data)))
        with_one_late()
        start = time.perf_counter()
        handle = dist.all_reduce(data, async_op=True)
        returned = time.perf_counter() - start
        if handle is not None:
            handle.wait()
        handled.append((time.perf_counter() - start, returned))
    done_seconds, returned = max(handled)
    return AllReduceTimes(first_call, min(best), max(late_calls), returned, done_seconds)


def seconds_of(call: Callable[[], object]) -> float:
    """The seconds until `call()` returns."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# ---- behind the next microbatch


def behind_the_next_microbatch(ranks: int) -> tuple[float, float]:
    """A stage that hands microbatch after microbatch on. Returns the seconds with each send waited for, and without."""
    waited, hidden = best_of(lambda: on_ranks(hand_on, ranks)[0], lambda seconds: seconds[1] / seconds[0], good_enough=0.8)
    took = f"{1e3 * TRAVEL:.0f} ms"
    say(f"\nA stage computes {MESSAGES} microbatches of {took} and hands each on. A message takes {took} as well (emulated:")
    say("between processes of one machine it is a copy, by the same cores; a network card or NVLink needs none):")
    say(f"  {1e3 * waited:8.1f} ms   each message waited for: {MESSAGES} x compute, {MESSAGES} x message")
    say(f"  {1e3 * hidden:8.1f} ms   handles kept, waited for at the end: {MESSAGES} x compute, 1 x message")
    check_time(
        hidden < waited,
        f"{percent(1 - hidden / waited)} less: only the last message has nothing to hide behind",
        f"with handles it took {1e3 * hidden:.1f} ms, waiting {1e3 * waited:.1f}; a very busy machine? run it again",
    )
    say("Penstock keeps the handles, and posts receives ahead: a large message moves only once its receive is posted.")
    return waited, hidden


def hand_on() -> tuple[float, float]:
    """The seconds of rank 0 that sends to rank 1: waiting for each message, and with handles."""
    rank = ps.comms.init_distributed(backend="gloo").rank
    times: dict[bool, list[float]] = {True: [], False: []}
    for wait in [True, False] * 3:  # in turn, so that a busy machine disturbs both
        dist.barrier()
        parts: list[Callable[[], object]] = [partial(stage, wait), receive_all]
        times[wait].append(seconds_of(parts[rank]) if rank < 2 else 0.0)
    return min(times[True]), min(times[False])


def stage(wait: bool) -> None:
    """Compute and send, for each microbatch; return when all has arrived."""
    with ThreadPoolExecutor(1) as wire:  # it carries one message after the other
        handles: list[Future[None]] = []
        for number in range(MESSAGES):
            time.sleep(TRAVEL)
            handles.append(wire.submit(carry, torch.full((DIM,), float(number))))
            if wait:
                handles[-1].result()
        for handle in handles:
            handle.result()


def carry(message: Tensor) -> None:
    """A message to rank 1 that takes its time."""
    time.sleep(TRAVEL)
    dist.send(message, 1)


def receive_all() -> None:
    """The next stage."""
    for number in range(MESSAGES):
        message = torch.empty(DIM)
        dist.recv(message, 0)
        assert message[0] == number


# ---- behind the backward


def behind_the_backward(ranks: int) -> tuple[float, float, int]:
    """The backward with its all-reduces in one bucket and in more. Returns the seconds of one, the fewest, in how many."""
    backward, network = (
        f"{1e3 * seconds:.0f} ms" for seconds in (NUM_LAYERS * BACKWARD_SECONDS, all_reduce_seconds(NUM_LAYERS))
    )
    say(f"\nReplicas (lab 11): the backward of {NUM_LAYERS} layers takes {backward}, an all-reduce of all gradients {network}")
    say("(emulated). It need not wait for the end: the last layers' gradients are there first. They go in buckets, so many")
    say("layers' gradients together; in ms:\n")
    say("  buckets   simulated   measured   under way before the backward ends")
    plans, real, sums, early = {count: plan_backward(count) for count in BUCKETS}, {}, {}, {}
    for count, plan in plans.items():
        seconds, totals, early_counts = zip(*on_ranks(measure_backward, ranks, count), strict=True)
        real[count], sums[count], early[count] = max(seconds), totals[0], early_counts[0]
        say(f"  {count:7} {1e3 * plan[-1].end:11.0f} {1e3 * real[count]:10.0f} {early[count]:10}")
    best = min(plans, key=lambda count: plans[count][-1].end)
    say("".join(f"\n{draw_spans(plans[count])}" for count in (1, best)))
    say("\nFew buckets begin late, many pay the latency each time. DDP's are of 25 MB (bucket_cap_mb).")
    check_time(
        all(count == early[count] + 1 for count in BUCKETS),
        "all buckets but the last one go behind the backward",
        f"of {BUCKETS} buckets {[*early.values()]} were under way before the backward's end",
    )
    check_time(
        all(real[count] >= plan[-1].end for count, plan in plans.items()),
        "no number of buckets beats the arithmetic",
        f"the backward should take {[round(1e3 * plan[-1].end) for plan in plans.values()]} ms or more, it took "
        f"{[round(1e3 * result) for result in real.values()]}",
    )
    check(
        all((total - sums[1]).abs().max() < EXACT for total in sums.values()),
        "the gradients are the same in any number of buckets",
        "the gradients depend on the number of buckets",
    )
    return real[1], real[best], best


if __name__ == "__main__":
    main()
