"""Lab 3: two processes, a message, and how two ranks stop for ever.

The two halves of lab 2 talked through `send_tensor` and `recv_tensor`. Here is what these are: a process group, in which
each process has a rank, and messages between ranks. Who starts the processes, and why not threads? What does a message cost?
And what if both ranks send first?

    penstock lab 3
    python -m penstock.learn.labs.lab3_ping_pong
    torchrun --nproc-per-node 2 -m penstock.learn.labs.lab3_ping_pong

Try: let `both_send_first` receive first on rank 1. One line makes the difference.
"""

import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist

import penstock as ps
from penstock.learn.lab_helpers import best_of, check, check_time, is_printing_process, on_ranks, say

SIZES = [4**power for power in range(1, 12, 2)]  # floats: 16 bytes to 16 MB
PATIENCE = 2.0  # seconds a rank waits in the part that stops for ever
APART = 3.0  # times, at most, that a message may take of what the line through all of them says, or the line of it

Times = dict[int, float]  # bytes -> seconds one way


def main() -> None:
    """Who starts whom, who is who, what a message costs, what happens when both send first, and what helps."""
    say("Lab 3: ping-pong\n")
    if is_printing_process():
        watch_an_agent()
    ranks = on_ranks(who_is_who, 2)
    say("\nOn the ranks of this lab:\n  " + "\n  ".join(name for name, _ in ranks))
    check(
        [number for _, number in ranks] == [0, 1],
        "each wrote its rank to the same variable, and each still has its own: no rank sees the memory of another",
        f"the ranks wrote 0 and 1, and read {[number for _, number in ranks]}",
    )
    say("Ranks do the same, and one is the boss: rank 0 prints, writes checkpoints, and its machine has the store at")
    say("MASTER_ADDR, where all meet. Messages are a backend's: Gloo's, through sockets, between CPUs; NCCL's between")
    say(f"GPUs, by the fastest link it finds. Here: {', '.join(backends())}.")

    measured: Times = {}
    times = best_of(lambda: shorter(measured, on_ranks(ping_pong, 2)[0]), apart, good_enough=2.0)
    latency, bandwidth = fitted(times)
    say("\n  message       one way   latency + size / bandwidth")
    for size, seconds in times.items():
        say(f"  {words(size):>9} {1e6 * seconds:8.0f} us  {1e6 * (latency + size / bandwidth):8.0f} us")
    check_time(
        latency > 0 and bandwidth > 0 and apart(times) < APART,
        f"two numbers say what any message costs, within a factor of {apart(times):.1f}: {1e6 * latency:.0f} us of latency, "
        f"{bandwidth / 1e9:.2f} GB/s",
        f"latency {1e6 * latency:.0f} us and bandwidth {bandwidth / 1e9:.2f} GB/s are {apart(times):.1f} times off a message's "
        "time; a very busy machine? run it again",
    )
    say(f"One of {words(int(latency * bandwidth))} pays as much for its way as for its size: send fewer and larger ones.")

    if is_printing_process():  # ranks that have stopped for ever cannot go on, so these are two others
        messages = ps.launch(both_send_first, 2)
        say("\nBoth send first, then receive:\n  " + "\n  ".join(messages))
        check(
            all("gave up" in message for message in messages),
            "both waited in vain",
            f"both ranks sent first, and a rank came through: {'; '.join(messages)}",
        )
    say("\nWhy: a send is over when it has been received. Both ranks were sending, so neither came to its receive: a circle.")
    say("The help: post the receive and the send, then wait for both. Posting does not wait.")
    swapped = on_ranks(both_send_posted, 2)
    check(swapped == [1.0, 0.0], "each rank has the other's tensor", f"the ranks should hold 1.0 and 0.0, got {swapped}")
    say(
        f"\nMeasured: {1e6 * latency:.0f} us for any message and {bandwidth / 1e9:.2f} GB/s for what is in it; two ranks that "
        f"both send first gave up after {PATIENCE:g} s."
    )


def watch_an_agent() -> None:
    """What torchrun does, in few lines: three processes, of which one fails."""
    say("Why processes? Threads share one interpreter, whose lock lets one of them run Python at a time. Processes have an")
    say("interpreter, a lock and a memory each, and a core each where there are enough. torchrun's agent starts them, tells")
    say("each by its environment which rank it is, and watches. Here is one by hand, with three ranks, of which one fails:")
    exit_codes = agent(3, "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(600)")
    for rank, code in enumerate(exit_codes):
        say(f"  rank {rank} ended with {code}{'' if code > 0 else ', a signal from the agent'}")
    check(
        exit_codes[1] == 3 and all(code < 0 for code in (exit_codes[0], exit_codes[2])),
        "rank 1 failed, and the agent ended the others: else they would wait for its messages for ever",
        f"rank 1 should end with 3 and the others by a signal; they ended with {exit_codes}",
    )


def agent(ranks: int, program: str) -> list[int]:
    """Run a Python program as `ranks` ranks; if one fails, end the others. Returns how each ended."""
    environments = [{**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)]
    processes = [subprocess.Popen([sys.executable, "-c", program], env=environment) for environment in environments]
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):  # one has ended, and not with 0
            for process in processes:
                process.terminate()
        time.sleep(0.01)
    return [process.returncode for process in processes]


mine = {"rank": -1}


def who_is_who() -> tuple[str, int]:
    """Who this rank is, and what is in its memory where every rank has written its number."""
    topology = ps.comms.init_distributed(backend="gloo")
    mine["rank"] = topology.rank
    dist.barrier()  # both have written
    return (
        f"rank {topology.rank} of {topology.world_size} is process {os.getpid()}; "
        f"next rank: {topology.get_next_rank()}, previous rank: {topology.get_prev_rank()}"
    ), mine["rank"]


def backends() -> list[str]:
    """Those of torch that this machine has."""
    availability = {"Gloo": dist.is_gloo_available(), "NCCL": dist.is_nccl_available(), "MPI": dist.is_mpi_available()}
    return [name for name, available in availability.items() if available]


def ping_pong() -> Times:
    """The seconds one way for each size."""
    topology = ps.comms.init_distributed(backend="gloo")
    one_way(topology.rank, SIZES[0])  # the first messages are slower than all later ones: the ranks connect
    return {4 * size: one_way(topology.rank, size) for size in SIZES}


def shorter(times: Times, other_times: Times) -> Times:
    """Puts the shorter of both into `times`."""
    times |= {size: min(seconds, times.get(size, seconds)) for size, seconds in other_times.items()}
    return dict(times)


def fitted(times: Times) -> tuple[float, float]:
    """Latency in seconds and bandwidth in bytes a second: the line that is nearest to all times, each off by a share of it."""
    rows = torch.tensor([[1 / seconds, size / seconds] for size, seconds in times.items()], dtype=torch.float64)
    latency, each_byte = torch.linalg.lstsq(rows, torch.ones(len(rows), 1, dtype=torch.float64)).solution.flatten().tolist()
    return latency, 1 / each_byte


def apart(times: Times) -> float:
    """By how many times the worst message is off the line."""
    latency, bandwidth = fitted(times)
    ratios = [seconds / max(latency + size / bandwidth, 1e-9) for size, seconds in times.items()]
    return max(max(ratio, 1 / ratio) for ratio in ratios)


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
    peer = 1 - topology.rank
    try:
        ps.comms.send_tensor(torch.ones(4), dest=peer)
        ps.comms.recv_tensor((4,), src=peer)
    except ps.LostRankError as error:
        time.sleep(PATIENCE / 2)  # until the other has given up too: else its error says that this rank has finished
        return str(error)
    return f"rank {topology.rank} came through"


def both_send_posted() -> float:
    """The way out, in torch's own words: `irecv` and `isend` return at once, and promise the rest."""
    topology = ps.comms.init_distributed(backend="gloo")
    peer = 1 - topology.rank
    outgoing, incoming = torch.full((4,), float(topology.rank)), torch.empty(4)
    promises = [dist.irecv(incoming, peer), dist.isend(outgoing, peer)]
    for promise in promises:  # keep each until it is done: a dropped promise loses its message
        if promise is not None:
            promise.wait()
    return incoming[0].item()


def words(size: int) -> str:
    """A size in bytes, KB or MB."""
    for unit, factor in (("MB", 2**20), ("KB", 2**10)):
        if size >= factor:
            return f"{size // factor} {unit}"
    return f"{size} bytes"


if __name__ == "__main__":
    main()
