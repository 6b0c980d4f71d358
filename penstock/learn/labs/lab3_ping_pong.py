"""Lab 3: two processes, a message, and how two ranks stop for ever.

The two halves of lab 2 exchanged tensors with `send_tensor` and `recv_tensor`. This lab explains them: a process group, in
which each process has a rank, and messages between ranks. What starts the processes, and why not threads? What does a message
cost? And what if both ranks send first?

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
TIMEOUT_SECONDS = 2.0  # how long a rank waits in the part that deadlocks
MAX_FIT_ERROR = 3.0  # between a message's time and its fitted time, whichever is longer

Times = dict[int, float]  # bytes -> seconds one way


def main() -> None:
    """Show how ranks are started, what a message costs, and how two ranks that both send first deadlock."""
    say("Lab 3: ping-pong\n")
    if is_printing_process():
        show_agent()
    ranks = on_ranks(describe_rank, 2)
    say("\nOn the ranks of this lab:\n  " + "\n  ".join(name for name, _ in ranks))
    check(
        [number for _, number in ranks] == [0, 1],
        "each wrote its rank to the same variable, and each still has its own: no rank sees the memory of another",
        f"the ranks wrote 0 and 1, and read {[number for _, number in ranks]}",
    )
    say("All ranks run the same program. By convention rank 0 prints and writes checkpoints; its machine, MASTER_ADDR, hosts")
    say("the store through which ranks find each other. A backend carries messages: Gloo between CPUs, by sockets; NCCL")
    say(f"between GPUs, by the fastest link it finds. Here: {', '.join(available_backends())}.")

    best_times: Times = {}
    times = best_of(lambda: keep_shorter_times(best_times, on_ranks(ping_pong, 2)[0]), fit_error, good_enough=2.0)
    latency, bandwidth = fit_latency_and_bandwidth(times)
    say("\n  message       one way   latency + size / bandwidth")
    for size, seconds in times.items():
        say(f"  {size_text(size):>9} {1e6 * seconds:8.0f} us  {1e6 * (latency + size / bandwidth):8.0f} us")
    check_time(
        latency > 0 and bandwidth > 0 and fit_error(times) < MAX_FIT_ERROR,
        f"two numbers give the time of any message, within a factor of {fit_error(times):.1f}: {1e6 * latency:.0f} us of "
        f"latency, {bandwidth / 1e9:.2f} GB/s",
        f"latency {1e6 * latency:.0f} us and bandwidth {bandwidth / 1e9:.2f} GB/s are {fit_error(times):.1f} times off a "
        "message's time; a very busy machine? run it again",
    )
    break_even = int(latency * bandwidth)
    say(f"A message of {size_text(break_even)} spends half of its time on latency: send few and large ones.")

    if is_printing_process():  # deadlocked ranks cannot go on, so these are two new ones
        messages = ps.launch(both_send_first, 2)
        say("\nBoth send first, then receive:\n  " + "\n  ".join(messages))
        check(
            # the rank that gives up first closes the connection, which ends the other's wait
            all("waited to send" in message for message in messages) and "no answer within" in " ".join(messages),
            "both waited in vain",
            f"both ranks should wait until they give up, but: {'; '.join(messages)}",
        )
    say("\nWhy: a send ends when its message is received. Both ranks were sending, so neither reached its receive: a cycle.")
    say("The remedy: post the receive and the send, then wait for both. Posting does not wait.")
    swapped = on_ranks(both_post_first, 2)
    check(swapped == [1.0, 0.0], "each rank has the other's tensor", f"the ranks should hold 1.0 and 0.0, got {swapped}")
    say(
        f"\nMeasured: {1e6 * latency:.0f} us for any message and {bandwidth / 1e9:.2f} GB/s for its bytes; two ranks that "
        f"both send first gave up after {TIMEOUT_SECONDS:g} s."
    )


def show_agent() -> None:
    """Do what torchrun's agent does: start three processes, of which one fails, and end the others."""
    say("Why processes? Threads share one interpreter, whose lock lets one thread run Python at a time. Each process has its")
    say("own interpreter, lock and memory, and its own core if there are enough. torchrun's agent starts the processes, tells")
    say("each its rank by environment variables, and watches them. Here is an agent by hand, with three ranks; one fails:")
    exit_codes = run_agent(3, "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(600)")
    for rank, code in enumerate(exit_codes):
        say(f"  rank {rank} ended with {code}{'' if code > 0 else ', a signal from the agent'}")
    check(
        exit_codes[1] == 3 and all(code < 0 for code in (exit_codes[0], exit_codes[2])),
        "rank 1 failed, and the agent ended the others, which would wait for its messages for ever",
        f"rank 1 should end with 3 and the others by a signal; they ended with {exit_codes}",
    )


def run_agent(ranks: int, program: str) -> list[int]:
    """Run a Python program as `ranks` ranks; if one fails, end the others. Returns their exit codes, negative for a signal."""
    environments = [{**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)]
    processes = [subprocess.Popen([sys.executable, "-c", program], env=environment) for environment in environments]
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):  # one ended with a code other than 0
            for process in processes:
                process.terminate()
        time.sleep(0.01)
    return [process.returncode for process in processes]


process_memory = {"rank": -1}  # every process has its own


def describe_rank() -> tuple[str, int]:
    """Return a line about this rank, and the rank in this process's memory after all ranks wrote theirs."""
    topology = ps.comms.init_distributed(backend="gloo")
    process_memory["rank"] = topology.rank
    dist.barrier()  # both have written
    return (
        f"rank {topology.rank} of {topology.world_size} is process {os.getpid()}; "
        f"next rank: {topology.get_next_rank()}, previous rank: {topology.get_prev_rank()}"
    ), process_memory["rank"]


def available_backends() -> list[str]:
    """Return the names of torch's backends that are available here."""
    availability = {"Gloo": dist.is_gloo_available(), "NCCL": dist.is_nccl_available(), "MPI": dist.is_mpi_available()}
    return [name for name, available in availability.items() if available]


def ping_pong() -> Times:
    """Return the seconds that a message of each size takes one way."""
    topology = ps.comms.init_distributed(backend="gloo")
    one_way_seconds(topology.rank, SIZES[0])  # the first messages are slower, because the ranks connect
    return {4 * size: one_way_seconds(topology.rank, size) for size in SIZES}


def keep_shorter_times(times: Times, other_times: Times) -> Times:
    """Put the shorter of both times of each size into `times`. Returns a copy."""
    times |= {size: min(seconds, times.get(size, seconds)) for size, seconds in other_times.items()}
    return dict(times)


def fit_latency_and_bandwidth(times: Times) -> tuple[float, float]:
    """Fit a line to message times by relative least squares. Returns latency (seconds) and bandwidth (bytes per second)."""
    rows = torch.tensor([[1 / seconds, size / seconds] for size, seconds in times.items()], dtype=torch.float64)
    ones = torch.ones(len(rows), 1, dtype=torch.float64)
    latency, seconds_per_byte = torch.linalg.lstsq(rows, ones).solution.flatten().tolist()
    return latency, 1 / seconds_per_byte


def fit_error(times: Times) -> float:
    """Return the largest ratio between a message's time and its fitted time, or the inverse (at least 1)."""
    latency, bandwidth = fit_latency_and_bandwidth(times)
    ratios = [seconds / max(latency + size / bandwidth, 1e-9) for size, seconds in times.items()]
    return max(max(ratio, 1 / ratio) for ratio in ratios)


def one_way_seconds(rank: int, size: int) -> float:
    """Return half of the shortest round trip of `size` floats; the shortest of several is the least disturbed."""
    tensor, trip_seconds = torch.ones(size), []
    for _ in range(max(4, min(50, 10**7 // size))):
        start = time.perf_counter()
        if rank == 0:
            ps.comms.send_tensor(tensor, dest=1)
            tensor = ps.comms.recv_tensor(tensor.shape, src=1)
        else:
            tensor = ps.comms.recv_tensor(tensor.shape, src=0)
            ps.comms.send_tensor(tensor, dest=0)
        trip_seconds.append(time.perf_counter() - start)
    return min(trip_seconds) / 2


def both_send_first() -> str:
    """Send first on both ranks, the mistake. Returns the timeout's error; without a timeout both would wait for ever."""
    topology = ps.comms.init_distributed(backend="gloo", timeout=TIMEOUT_SECONDS)
    peer = 1 - topology.rank
    try:
        ps.comms.send_tensor(torch.ones(4), dest=peer)
        ps.comms.recv_tensor((4,), src=peer)
    except ps.LostRankError as error:
        time.sleep(TIMEOUT_SECONDS / 2)  # until the peer has timed out too: else its error says that this rank finished
        return str(error)
    return f"rank {topology.rank} did not wait"


def both_post_first() -> float:
    """Swap a float with the peer by torch's `irecv` and `isend`, which return a handle at once. Returns the peer's rank."""
    topology = ps.comms.init_distributed(backend="gloo")
    peer = 1 - topology.rank
    outgoing, incoming = torch.full((4,), float(topology.rank)), torch.empty(4)
    handles = [dist.irecv(incoming, peer), dist.isend(outgoing, peer)]
    for handle in handles:  # keep a handle until it is done: a dropped one loses its message
        if handle is not None:
            handle.wait()
    return incoming[0].item()


def size_text(size: int) -> str:
    """Return a size in bytes as text, in bytes, KB or MB of 2^10 and 2^20."""
    for unit, factor in (("MB", 2**20), ("KB", 2**10)):
        if size >= factor:
            return f"{size // factor} {unit}"
    return f"{size} bytes"


if __name__ == "__main__":
    main()
