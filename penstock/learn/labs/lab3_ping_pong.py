"""Lab 3: two processes, a message, and how two ranks stop for ever.

The two halves of lab 2 talked through `send_tensor` and `recv_tensor`. Here is what these are: a process group, in which
each process has a rank, and messages between ranks. What does a message cost? And what if both ranks send first?

    penstock lab 3
    python -m penstock.learn.labs.lab3_ping_pong
    torchrun --nproc-per-node 2 -m penstock.learn.labs.lab3_ping_pong

Try: let `both_send_first` receive first on rank 1. One line makes the difference.
"""

import os
import time

import torch
import torch.distributed as dist

import penstock as ps
from penstock.learn.story import check, is_narrator, on_ranks, say

SIZES = [4**power for power in range(1, 12, 2)]  # floats: 16 bytes to 16 MB
PATIENCE = 2.0  # seconds a rank waits in the part that stops for ever


def main() -> None:
    """Who is who, what a message costs, what happens when both send first, and what helps."""
    say("Lab 3: ping-pong\n")
    names, times = zip(*on_ranks(ping_pong, 2), strict=True)
    for name in names:
        say(f"  {name}")
    say("\n  message        one way    bandwidth")
    for size, seconds in times[0].items():
        say(f"  {words(4 * size):>9}  {1e6 * seconds:8.0f} us  {4 * size / seconds / 1e9:6.2f} GB/s")
    smallest, largest = SIZES[0], SIZES[-1]
    latency, bandwidth = times[0][smallest], 4 * largest / times[0][largest]
    check(
        times[0][largest] > times[0][smallest],
        "small messages cost the latency whatever their size, large ones their size over the bandwidth",
        f"{words(4 * largest)} took {times[0][largest]:.6f} s, not longer than {words(4 * smallest)}: the times make no sense",
    )

    if is_narrator():  # ranks that have stopped for ever cannot go on, so these are two others
        told = ps.launch(both_send_first, 2)
        say("\nBoth send first, then receive:\n  " + "\n  ".join(told))
        check(
            all("gave up" in each for each in told),
            "both waited in vain",
            f"both ranks sent first, and a rank came through: {'; '.join(told)}",
        )
    say("\nWhy: a send is over when it has been received. Both ranks were sending, so neither came to its receive: a circle.")
    say("The help: post the receive and the send, then wait for both. Posting does not wait.")
    swapped = on_ranks(both_send_posted, 2)
    check(swapped == [1.0, 0.0], "each rank has the other's tensor", f"the ranks should hold 1.0 and 0.0, got {swapped}")
    say(
        f"\nMeasured: {1e6 * latency:.0f} us for a message of {words(4 * smallest)} and {bandwidth / 1e9:.2f} GB/s for one of "
        f"{words(4 * largest)}; two ranks that both send first gave up after {PATIENCE:g} s."
    )


def ping_pong() -> tuple[str, dict[int, float]]:
    """Who this rank is, and the seconds one way for each size."""
    topology = ps.comms.init_distributed(backend="gloo")
    name = (
        f"rank {topology.rank} of {topology.world_size} is process {os.getpid()}; "
        f"next rank: {topology.get_next_rank()}, previous rank: {topology.get_prev_rank()}"
    )
    one_way(topology.rank, SIZES[0])  # the first messages are slower than all later ones
    return name, {size: one_way(topology.rank, size) for size in SIZES}


def one_way(rank: int, size: int) -> float:
    """Half of the shortest round trip of `size` floats: the best of several is the least disturbed."""
    ball, trips = torch.ones(size), []
    for _ in range(max(4, min(50, 10**7 // size))):
        start = time.perf_counter()
        if rank == 0:
            ps.comms.send_tensor(ball, dest=1)
            ball = ps.comms.recv_tensor(ball.shape, src=1)
        else:
            ball = ps.comms.recv_tensor(ball.shape, src=0)
            ps.comms.send_tensor(ball, dest=0)
        trips.append(time.perf_counter() - start)
    return min(trips) / 2


def both_send_first() -> str:
    """The mistake. Without the timeout this would be the end; with it, the error is the result."""
    topology = ps.comms.init_distributed(backend="gloo", timeout=PATIENCE)
    other = 1 - topology.rank
    try:
        ps.comms.send_tensor(torch.ones(4), dest=other)
        ps.comms.recv_tensor((4,), src=other)
    except ps.LostRankError as error:
        time.sleep(PATIENCE / 2)  # until the other has given up too: else it is told that this rank has finished
        return str(error)
    return f"rank {topology.rank} came through"


def both_send_posted() -> float:
    """The way out, in torch's own words: `irecv` and `isend` return at once, and promise the rest."""
    topology = ps.comms.init_distributed(backend="gloo")
    other = 1 - topology.rank
    mine, theirs = torch.full((4,), float(topology.rank)), torch.empty(4)
    promises = [dist.irecv(theirs, other), dist.isend(mine, other)]
    for promise in promises:  # keep each until it is done: a dropped promise loses its message
        if promise is not None:
            promise.wait()
    return theirs[0].item()


def words(size: int) -> str:
    """A size in bytes, KB or MB."""
    for unit, factor in (("MB", 2**20), ("KB", 2**10)):
        if size >= factor:
            return f"{size // factor} {unit}"
    return f"{size} bytes"


if __name__ == "__main__":
    main()
