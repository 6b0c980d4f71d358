"""Lab 18: time a message, then hide it.

The time of a message is easily measured wrongly: the first message connects the ranks, a late rank makes the others wait, and a
call that returns at once has sent nothing yet. So warm up, start together, and wait for the end. A call returns at once so that
the message travels while the rank computes. The lab measures messages with and without this overlap, between two stages of a
pipeline and for the gradients of replicas.

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
LATE_SECONDS = 0.03  # by which one rank is late
MESSAGES, MESSAGE_SECONDS = 4, 0.02  # from one stage to the next; the time of one
DIM = 16
EXACT = 1e-12  # error of float64 sums in another order
BUCKETS = (1, 2, 4, 8)


def main() -> None:
    """Time an all-reduce in five ways; overlap messages with microbatches, then an all-reduce with the backward."""
    ranks = ranks_here(RANKS)
    say(f"Lab 18: time and overlap, on {ranks} ranks\n")
    compare_timings(ranks)
    blocking, overlapped = overlap_sends(ranks)
    one_bucket, best, count = overlap_gradients(ranks)
    say(
        f"\nMeasured: {MESSAGES} microbatches and their messages take {1e3 * blocking:.0f} ms with blocking sends, "
        f"{1e3 * overlapped:.0f} with overlap; a backward and its all-reduce {1e3 * best:.0f} ms in {count} buckets, "
        f"{1e3 * one_bucket:.0f} in one."
    )


# ---- timing


class AllReduceTimes(NamedTuple):
    """The times of an all-reduce on this rank, in seconds."""

    first: float  # of a new group
    fastest: float  # of REPEATS, if all ranks start together
    late_peer: float  # if one rank is late
    until_return: float  # if one rank is late, with a handle: until the call returns
    until_wait: float  # and until its `wait()` returns


def compare_timings(ranks: int) -> None:
    """Print the times of an all-reduce on rank 0 with three mistakes, and without."""
    times = best_of(
        lambda: on_ranks(time_all_reduce, ranks)[0],
        lambda times: -min(times.late_peer, times.until_wait),
        good_enough=-0.9 * LATE_SECONDS,
    )
    say("An all-reduce of 4 KB, timed on rank 0 in five ways:")
    late_ms = f"{1e3 * LATE_SECONDS:.0f} ms"
    say(f"  {1e3 * times.first:8.2f} ms   the first one: the ranks connect. So warm up")
    say(f"  {1e3 * times.late_peer:8.2f} ms   another rank was {late_ms} late. So start together, by a barrier")
    say(f"  {1e3 * times.until_return:8.2f} ms   the same, with async_op=True, until the call returns: it is only posted")
    say(f"  {1e3 * times.until_wait:8.2f} ms   until its wait() returns. So wait; for a GPU by torch.cuda.synchronize()")
    say(f"  {1e3 * times.fastest:8.2f} ms   warm, together, with wait(), the fastest of {REPEATS}: its real cost")
    check_time(
        min(times.late_peer, times.until_wait) > LATE_SECONDS / 2,
        "the other ranks wait as long as a rank is late",
        f"with a rank {late_ms} late the all-reduce took {1e3 * times.late_peer:.1f} and {1e3 * times.until_wait:.1f} ms",
    )


def time_all_reduce() -> AllReduceTimes:
    """Time all-reduces in all five ways."""
    topology = ps.comms.init_distributed(backend="gloo")
    group, data = dist.new_group(), torch.ones(1000)  # a new group has no connections yet
    first = seconds_of(lambda: dist.all_reduce(data, group=group))

    def delay_last_rank() -> None:
        dist.barrier()
        if topology.rank == topology.world_size - 1:
            time.sleep(LATE_SECONDS)

    together, late_peer, with_handle = [], [], []
    for _ in range(REPEATS):
        dist.barrier()
        together.append(seconds_of(lambda: dist.all_reduce(data)))
        delay_last_rank()
        late_peer.append(seconds_of(lambda: dist.all_reduce(data)))
        delay_last_rank()
        start = time.perf_counter()
        handle = dist.all_reduce(data, async_op=True)
        until_return = time.perf_counter() - start
        if handle is not None:
            handle.wait()
        with_handle.append((time.perf_counter() - start, until_return))
    until_wait, until_return = max(with_handle)
    return AllReduceTimes(first, min(together), max(late_peer), until_return, until_wait)


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds until `call()` returns."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# ---- overlap with the next microbatch


def overlap_sends(ranks: int) -> tuple[float, float]:
    """Print the time of a stage that computes and sends. Returns its seconds with blocking and with overlapped sends."""
    blocking, overlapped = best_of(
        lambda: on_ranks(time_sends, ranks)[0], lambda seconds: seconds[1] / seconds[0], good_enough=0.8
    )
    duration = f"{1e3 * MESSAGE_SECONDS:.0f} ms"
    say(f"\nA stage computes {MESSAGES} microbatches of {duration} and sends each on. A message takes {duration} too (a sleep:")
    say("between processes of one machine a message is a copy by the same cores; a network card or NVLink needs no core).")
    say(f"  {1e3 * blocking:8.1f} ms   wait for each message: {MESSAGES} x compute, {MESSAGES} x message")
    say(f"  {1e3 * overlapped:8.1f} ms   keep the handles, wait at the end: {MESSAGES} x compute, 1 x message")
    check_time(
        overlapped < blocking,
        f"{percent(1 - overlapped / blocking)} less: only the last message has no compute to overlap with",
        f"with handles it took {1e3 * overlapped:.1f} ms, waiting {1e3 * blocking:.1f}; a very busy machine? run it again",
    )
    say("Penstock keeps the handles, and posts receives ahead: a large message moves only once its receive is posted.")
    return blocking, overlapped


def time_sends() -> tuple[float, float]:
    """Run a stage on rank 0 that sends to rank 1. Returns its seconds with blocking sends, and with handles."""
    rank = ps.comms.init_distributed(backend="gloo").rank
    times: dict[bool, list[float]] = {True: [], False: []}
    for wait in [True, False] * 3:  # in turn, so that a busy machine disturbs both
        dist.barrier()
        rank_functions: list[Callable[[], object]] = [partial(compute_and_send, wait), receive_all]
        times[wait].append(seconds_of(rank_functions[rank]) if rank < 2 else 0.0)
    return min(times[True]), min(times[False])


def compute_and_send(wait: bool) -> None:
    """Compute and send each microbatch; with `wait`, wait for each send. Returns when all messages have arrived."""
    with ThreadPoolExecutor(1) as network:  # one thread: one message after the other
        handles: list[Future[None]] = []
        for number in range(MESSAGES):
            time.sleep(MESSAGE_SECONDS)
            handles.append(network.submit(send_slowly, torch.full((DIM,), float(number))))
            if wait:
                handles[-1].result()
        for handle in handles:
            handle.result()


def send_slowly(message: Tensor) -> None:
    """Send `message` to rank 1 after MESSAGE_SECONDS."""
    time.sleep(MESSAGE_SECONDS)
    dist.send(message, 1)


def receive_all() -> None:
    """Receive all messages, as the next stage."""
    for number in range(MESSAGES):
        message = torch.empty(DIM)
        dist.recv(message, 0)
        assert message[0] == number


# ---- overlap with the backward


def overlap_gradients(ranks: int) -> tuple[float, float, int]:
    """Print the time of a backward and its all-reduces in 1 to 8 buckets.

    Returns the seconds in one bucket, the seconds in the best number of buckets, and that number.
    """
    backward, network = (
        f"{1e3 * seconds:.0f} ms" for seconds in (NUM_LAYERS * BACKWARD_SECONDS, all_reduce_seconds(NUM_LAYERS))
    )
    say(f"\nReplicas (lab 11): the backward of {NUM_LAYERS} layers takes {backward}, an all-reduce of all gradients {network}")
    say("(emulated). It need not wait for the end of the backward: the last layers' gradients are ready first. A bucket holds")
    say("the gradients of some layers; in ms:\n")
    say("  buckets   simulated   measured   posted before the backward ends")
    plans, measured_seconds, total_gradients, num_early = {count: plan_backward(count) for count in BUCKETS}, {}, {}, {}
    for count, plan in plans.items():
        seconds, totals, early_counts = zip(*on_ranks(measure_backward, ranks, count), strict=True)
        measured_seconds[count], total_gradients[count], num_early[count] = max(seconds), totals[0], early_counts[0]
        say(f"  {count:7} {1e3 * plan[-1].end:11.0f} {1e3 * measured_seconds[count]:10.0f} {num_early[count]:10}")
    best = min(plans, key=lambda count: plans[count][-1].end)
    say("".join(f"\n{draw_spans(plans[count])}" for count in (1, best)))
    say("\nFew buckets begin late; many pay the latency each time. DDP's buckets have 25 MB (bucket_cap_mb).")
    check_time(
        all(count == num_early[count] + 1 for count in BUCKETS),
        "all buckets but the last overlap with the backward",
        f"of {BUCKETS} buckets {[*num_early.values()]} were posted before the backward's end",
    )
    check_time(
        all(measured_seconds[count] >= plan[-1].end for count, plan in plans.items()),
        "no number of buckets is faster than simulated",
        f"the backward should take {[round(1e3 * plan[-1].end) for plan in plans.values()]} ms or more, it took "
        f"{[round(1e3 * seconds) for seconds in measured_seconds.values()]}",
    )
    check(
        all((total - total_gradients[1]).abs().max() < EXACT for total in total_gradients.values()),
        "the gradients are the same in any number of buckets",
        "the gradients depend on the number of buckets",
    )
    return measured_seconds[1], measured_seconds[best], best


if __name__ == "__main__":
    main()
