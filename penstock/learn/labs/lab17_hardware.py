"""Lab 17: the ladder from a core to a network, and what a link is worth.

A device computes on what is near. Each step away from it holds more and carries less: registers and caches, the device's own
memory, the devices beside it, other machines. All parallel training is an answer to one question: what has to travel over
which step, and is it there in time? First this machine's ladder, measured; then one of GPUs, as sold. Then the sum that says
which axis may use which link: bytes over bandwidth, against operations over speed. And where to put ranks, so that most of
what travels stays near.

    penstock lab 17
    python -m penstock.learn.labs.lab17_hardware
    torchrun --nproc-per-node 2 -m penstock.learn.labs.lab17_hardware

Try: half the DIM with twice the LAYERS. Which axis now asks for more of its link, and which for the same?
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
LINKS = {  # GB/s one way, as sold for one GPU of 2023 (H100), about
    "SM: shared memory": 30_000.0,
    "L2 cache": 5_500.0,
    "HBM, its own memory": 3_350.0,
    "NVLink, to a GPU beside": 450.0,
    "PCIe 5, to the host": 64.0,
    "InfiniBand 400, a machine": 50.0,
    "Ethernet 100": 12.5,
    "Ethernet 1": 0.125,
}
SPEED = 400e12  # operations a second, of bfloat16, as reached in training
DIM, TOKENS, LAYERS, MICROBATCHES = 4096, 4096, 8, 8  # a stage of a transformer; tokens of a microbatch; of a step
WIDTH = 8  # ranks that share products, and replicas
SHARE = 0.1  # of the compute's time that a message may take where nothing hides it


def main() -> None:
    """This machine, a GPU's ladder, the links that each axis needs, and where ranks should stand."""
    say("Lab 17: the ladder from a core to a network\n")
    operations, memory, link = this_machine()
    say("\nA GPU's, as sold, about; in bytes a second one way, and in operations that could be done for each byte:")
    for name, bandwidth in LINKS.items():
        say(f"  {name:27} {bandwidth:9,g} GB/s {SPEED / bandwidth / 1e9:12,.0f}")
    say("Whatever is fetched must be used about so often, or the GPU waits. NCCL looks at this ladder when a group begins, and")
    say("lays its rings along the fastest links; `torch.distributed` hands it what to move, Gloo where there is no GPU.")
    needs = which_link()
    where_to_stand()
    say(
        f"\nMeasured: this process does {operations / 1e9:.0f} billion operations a second, reads {memory / 1e9:.1f} GB of "
        f"memory and sends {link / 1e9:.1f} GB to another; a stage of the example needs {needs['pp'] / 1e9:.1f} GB/s to the "
        f"next, sharing its products {needs['tp'] / 1e9:.0f}."
    )


def this_machine() -> tuple[float, float, float]:
    """Operations, bytes from memory and bytes to another process, each a second and measured."""
    a, b = torch.randn(2, 512, 512).unbind()
    operations = 2 * 512**3 / best(lambda: a @ b)
    say(f"  {'this machine: products of matrices':36} {operations / 1e9:8.1f} GFLOP/s")
    for size in SIZES:
        memory = size / best(torch.ones(size // 4).sum)
        say(f"  {'  adding up ' + size_text(size):36} {memory / 1e9:8.1f} GB/s")
    measured: Times = {}
    times = best_of(
        lambda: keep_shorter_times(measured, on_ranks(ping_pong, RANKS)[0]),
        lambda times: -fit_latency_and_bandwidth(times)[1],
        good_enough=-1.0,
    )
    _, link = fit_latency_and_bandwidth(times)
    check(link > 0, "larger messages take longer, so there is a bandwidth", f"the bandwidth of {times} is {link}")
    say(f"  {'  to another process':36} {link / 1e9:8.1f} GB/s, {operations / link:.0f} operations for each byte")
    return operations, memory, link


def best(call: Callable[[], Tensor]) -> float:
    """The seconds of the least disturbed of some calls, the first ones left out: they warm up."""
    times = []
    for _ in range(12):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times[2:])


def which_link() -> dict[str, float]:
    """What each axis sends in a step, and how fast its link must be. Returns that, in bytes a second, by axis."""
    weights, activation = 12 * DIM**2 * LAYERS, 2 * TOKENS * DIM  # parameters of the stage; bytes of what it hands on
    forward = (2 * weights * TOKENS + 2 * LAYERS * TOKENS**2 * DIM) / SPEED  # seconds of a microbatch; causal attention
    ring = 2 * (WIDTH - 1) / WIDTH  # x its data that a rank sends in an all-reduce
    say(
        f"\nThe sum, for a stage of {LAYERS} layers of dim {DIM} and microbatches of {TOKENS} tokens in bfloat16, whose forward"
    )
    say(f"takes {1e3 * forward:.0f} ms. What each axis sends, and the time for that as a share of the compute it goes with:\n")
    traffic = {  # axis -> bytes, and the seconds of compute they go with
        "pp": (activation, forward),
        "dp": (ring * 2 * weights, 3 * MICROBATCHES * forward),
        "tp": (ring * 2 * LAYERS * activation, forward / WIDTH),
    }
    explanation = {
        "pp": "to the next stage, the activation of each microbatch: with its forward",
        "dp": f"{WIDTH} replicas sum all gradients, once a step: with its {MICROBATCHES} microbatches",
        "tp": f"{WIDTH} ranks share each product, two sums a layer: with their {WIDTH}th of a forward",
    }
    links = {name.split(",")[0]: 1e9 * bandwidth for name, bandwidth in LINKS.items() if bandwidth < 1000}
    for axis, (size, _) in traffic.items():
        say(f"  {axis}   {size / 1e6:6,.0f} MB   {explanation[axis]}")
    say("\n" + 20 * " " + "".join(f"{axis:>11}" for axis in traffic))
    for name, bandwidth in links.items():
        shares = (percent(size / bandwidth / compute) for size, compute in traffic.values())
        say(f"  {name:18}" + "".join(f"{share:>11}" for share in shares))
    needs = {axis: size / (SHARE * compute) for axis, (size, compute) in traffic.items()}
    say(f"\nTo take {percent(SHARE)} of the compute's time, where nothing hides it (lab 18), they need, in GB/s:")
    say("  " + ", ".join(f"{axis} {need / 1e9:.1f}" for axis, need in needs.items()))
    check(
        needs["pp"] < needs["dp"] < needs["tp"],
        "a pipeline asks least of its links, so it is what crosses machines; tp needs the fastest there are",
        f"the needs are {needs}",
    )
    return needs


def where_to_stand() -> None:
    """The same eight ranks on two machines, in two orders: what crosses between them."""
    say("\nTopology: 2 machines of 4 GPUs, a mesh of pp = dp = tp = 2. Pairs of ranks that talk across machines, by axis,")
    say("as the axes are laid out, the last one over neighbouring GPUs:")
    crossing = {order: crosses(order) for order in (("pp", "dp", "tp"), ("tp", "dp", "pp"))}
    for order, pairs in crossing.items():
        say(f"  {' x '.join(order):14} " + ", ".join(f"{axis} {pairs[axis]} of 4" for axis in ("pp", "dp", "tp")))
    check(
        [crossing[order] for order in crossing] == [{"pp": 4, "dp": 0, "tp": 0}, {"pp": 0, "dp": 0, "tp": 4}],
        "with pp first only activations cross; with tp first every sum of every layer does",
        f"the pairs that cross are {crossing}",
    )
    near, far = (sum(a // 4 != b // 4 for a, b in ring(order)) for order in (range(8), (0, 4, 1, 5, 2, 6, 3, 7)))
    check(
        (near, far) == (2, 8),
        f"a ring of all 8 crosses {near} times in the GPUs' order, {far} times in turn between machines: the slowest link sets"
        " its pace either way, but there it is shared",
        f"the rings cross {near} and {far} times",
    )


def crosses(order: tuple[str, ...]) -> dict[str, int]:
    """For every axis, how many of its pairs stand on two machines; `order` from the slowest to the fastest axis."""
    ranks = {place: number for number, place in enumerate(itertools.product((0, 1), repeat=3))}
    counts = dict.fromkeys(order, 0)
    for place, rank in ranks.items():
        for at, axis in enumerate(order):
            peer = ranks[(*place[:at], 1, *place[at + 1 :])]
            counts[axis] += place[at] == 0 and rank // 4 != peer // 4
    return counts


def ring(order: range | tuple[int, ...]) -> list[tuple[int, int]]:
    """The pairs that send to each other, the last to the first."""
    return [*zip(order, (*order[1:], order[0]), strict=True)]


if __name__ == "__main__":
    main()
