"""Lab 17: the ladder from a core to a network, and what a link is worth.

A device computes on data that is near. Each memory or link farther away holds more and has less bandwidth: registers and
caches, the device's memory, neighbouring devices, other machines. Parallel training has to decide which data crosses which
link, so that it arrives in time. The lab measures the ladder of this machine, and prints that of a GPU by its data sheet. Then
it computes which axis of a mesh may use which link: the time of the bytes, compared with the time of the operations. Last it
places ranks so that most bytes stay near.

    penstock lab 17
    python -m penstock.learn.labs.lab17_hardware
    torchrun --nproc-per-node 2 -m penstock.learn.labs.lab17_hardware

Try: half the DIM with twice the LAYERS. Which axis now needs more bandwidth, and which the same?
"""

import itertools
import time
from collections.abc import Callable

import torch
from torch import Tensor

from penstock.learn.lab_helpers import best_of, check, on_ranks, percent, say
from penstock.learn.labs.lab3_ping_pong import Times, fit_latency_and_bandwidth, keep_shorter_times, ping_pong, size_text

RANKS = 2
SIZES = (2**20, 64 * 2**20)  # bytes to add up: from a cache, and from memory
LINK_GB_PER_SECOND = {  # one way, about, by the data sheet of a GPU of 2023 (H100)
    "shared memory of all SMs": 30_000.0,
    "L2 cache": 5_500.0,
    "HBM, its own memory": 3_350.0,
    "NVLink, to another GPU": 450.0,  # 18 links of 50 GB/s, half of it each way
    "PCIe 5, to the host": 64.0,
    "InfiniBand 400, a machine": 50.0,
    "Ethernet 100": 12.5,
    "Ethernet 1": 0.125,
}
OPERATIONS_PER_SECOND = 400e12  # in bfloat16, as reached in training; the data sheet's peak is 989e12
DIM, TOKENS, LAYERS, MICROBATCHES = 4096, 4096, 8, 8  # of a transformer's stage; TOKENS of a microbatch
WIDTH = 8  # ranks of the tp axis, and of the dp axis
MAX_MESSAGE_SHARE = 0.1  # of the compute's time, for a message that does not overlap with it


def main() -> None:
    """Measure this machine, print a GPU's ladder, compute the bandwidth that each axis needs, and compare placements."""
    say("Lab 17: the ladder from a core to a network\n")
    operations, memory, link = measure_this_machine()
    say("\nA GPU by its data sheet: bandwidth one way, and the operations that it does in the time of a byte, at the")
    say("400 TFLOP/s of bfloat16 that training reaches (the data sheet's peak is 989):")
    for name, bandwidth in LINK_GB_PER_SECOND.items():
        say(f"  {name:27} {bandwidth:9,g} GB/s {OPERATIONS_PER_SECOND / bandwidth / 1e9:12,.0f}")
    say("A byte must be used in about that many operations, or the GPU waits. NCCL reads the topology when a group starts, and")
    say("lays its rings along the fastest links; `nvidia-smi topo -m` prints it. `torch.distributed` calls NCCL for GPUs, and")
    say("Gloo for CPUs.")
    required = required_bandwidths()
    compare_placements()
    say(
        f"\nMeasured: this process does {operations / 1e9:.0f} billion operations a second, reads {memory / 1e9:.1f} GB/s from "
        f"memory and sends {link / 1e9:.1f} GB/s to another process; a stage of the example needs {required['pp'] / 1e9:.1f} "
        f"GB/s to the next stage, and {required['tp'] / 1e9:.0f} for tensor parallel."
    )


def measure_this_machine() -> tuple[float, float, float]:
    """Measure this machine. Returns operations, bytes from memory, and bytes to another process, per second."""
    a, b = torch.randn(2, 512, 512).unbind()
    operations = 2 * 512**3 / fastest_seconds(lambda: a @ b)
    say(f"  {'this machine: products, as reached':36} {operations / 1e9:8.1f} GFLOP/s")
    for size in SIZES:
        memory = size / fastest_seconds(torch.ones(size // 4).sum)
        say(f"  {'  adding up ' + size_text(size):36} {memory / 1e9:8.1f} GB/s")
    best_times: Times = {}
    times = best_of(
        lambda: keep_shorter_times(best_times, on_ranks(ping_pong, RANKS)[0]),
        lambda times: -fit_latency_and_bandwidth(times)[1],
        good_enough=-1.0,
    )
    _, link = fit_latency_and_bandwidth(times)
    check(link > 0, "larger messages take longer, so there is a bandwidth", f"the bandwidth of {times} is {link}")
    say(f"  {'  to another process':36} {link / 1e9:8.1f} GB/s, {operations / link:.0f} operations for each byte")
    return operations, memory, link


def fastest_seconds(call: Callable[[], Tensor]) -> float:
    """Return the seconds of the fastest of some calls, the least disturbed; the first two only warm up."""
    times = []
    for _ in range(12):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times[2:])


def required_bandwidths() -> dict[str, float]:
    """Print the bytes that each axis sends, and their time on some links. Returns the bytes per second that each axis needs."""
    weights, activation = 12 * DIM**2 * LAYERS, 2 * TOKENS * DIM  # parameters of the stage; bytes of its output
    operations = 2 * weights * TOKENS + 2 * LAYERS * TOKENS**2 * DIM  # of a microbatch, with causal attention
    forward_seconds = operations / OPERATIONS_PER_SECOND
    ring_factor = 2 * (WIDTH - 1) / WIDTH  # bytes that a rank sends in an all-reduce, per byte of data
    forward_text = f"takes {1e3 * forward_seconds:.0f} ms in bfloat16"
    say(f"\nThe forward of {TOKENS} tokens through a stage of {LAYERS} layers of dim {DIM} {forward_text}.")
    say("The bytes that each axis sends for how much compute, and their time as a share of that compute's time:\n")
    traffic = {  # axis -> bytes, and the seconds of the compute that needs them
        "pp": (activation, forward_seconds),
        "dp": (ring_factor * 2 * weights, 3 * MICROBATCHES * forward_seconds),
        "tp": (ring_factor * 2 * LAYERS * activation, forward_seconds / WIDTH),
    }
    explanation = {
        "pp": "the activation of a microbatch to the next stage, for each forward",
        "dp": f"the gradients summed over {WIDTH} replicas, for each step of {MICROBATCHES} microbatches",
        "tp": f"two sums a layer over the {WIDTH} ranks that share each product, for 1/{WIDTH} of a forward",
    }
    links = {name.split(",")[0]: 1e9 * bandwidth for name, bandwidth in LINK_GB_PER_SECOND.items() if bandwidth < 1000}
    for axis, (size, _) in traffic.items():
        say(f"  {axis}   {size / 1e6:6,.0f} MB   {explanation[axis]}")
    say("\n" + 20 * " " + "".join(f"{axis:>11}" for axis in traffic))
    for name, bandwidth in links.items():
        message_shares = (percent(size / bandwidth / compute_seconds) for size, compute_seconds in traffic.values())
        say(f"  {name:18}" + "".join(f"{share:>11}" for share in message_shares))
    required = {axis: size / (MAX_MESSAGE_SHARE * compute_seconds) for axis, (size, compute_seconds) in traffic.items()}
    say(f"\nTo take {percent(MAX_MESSAGE_SHARE)} of the compute's time without overlap (lab 18), the axes need, in GB/s:")
    say("  " + ", ".join(f"{axis} {bandwidth / 1e9:.1f}" for axis, bandwidth in required.items()))
    check(
        required["pp"] < required["dp"] < required["tp"],
        "pp needs the least bandwidth, so it is the axis to cross machines; tp needs the fastest links",
        f"the axes need {required} bytes a second",
    )
    return required


def compare_placements() -> None:
    """Count the pairs of ranks that communicate between two machines, for two orders of the axes of eight ranks."""
    say("\nTopology: 2 machines of 4 GPUs, a mesh of pp = dp = tp = 2. Pairs of ranks that communicate between machines, by")
    say("axis, for two orders of the axes; the last axis runs over neighbouring GPUs:")
    crossing_pairs = {order: count_crossing_pairs(order) for order in (("pp", "dp", "tp"), ("tp", "dp", "pp"))}
    for order, pairs in crossing_pairs.items():
        say(f"  {' x '.join(order):14} " + ", ".join(f"{axis} {pairs[axis]} of 4" for axis in ("pp", "dp", "tp")))
    check(
        [crossing_pairs[order] for order in crossing_pairs] == [{"pp": 4, "dp": 0, "tp": 0}, {"pp": 0, "dp": 0, "tp": 4}],
        "with pp first only activations cross machines; with tp first every sum of every layer crosses",
        f"the pairs that cross machines are {crossing_pairs}",
    )
    crossings = [
        sum(sender // 4 != receiver // 4 for sender, receiver in ring_pairs(order))
        for order in (range(8), (0, 4, 1, 5, 2, 6, 3, 7))
    ]
    check(
        crossings == [2, 8],
        f"a ring of all 8 crosses machines {crossings[0]} times in the GPUs' order, {crossings[1]} times if it alternates: the "
        "slowest link sets the pace of both, but in the second ring several messages share it",
        f"the rings cross machines {crossings[0]} and {crossings[1]} times",
    )


def count_crossing_pairs(order: tuple[str, ...]) -> dict[str, int]:
    """Return for each axis the number of its pairs on two machines. `order` is from the slowest axis to the fastest."""
    ranks = {coordinates: number for number, coordinates in enumerate(itertools.product((0, 1), repeat=3))}
    counts = dict.fromkeys(order, 0)
    for coordinates, rank in ranks.items():
        for dim, axis in enumerate(order):
            peer = ranks[(*coordinates[:dim], 1, *coordinates[dim + 1 :])]
            counts[axis] += coordinates[dim] == 0 and rank // 4 != peer // 4
    return counts


def ring_pairs(order: range | tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the pairs (sender, receiver) of a ring; the last rank sends to the first."""
    return [*zip(order, (*order[1:], order[0]), strict=True)]


if __name__ == "__main__":
    main()
