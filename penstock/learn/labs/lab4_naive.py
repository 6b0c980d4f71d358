"""Lab 4: a cut model without a schedule. One rank works, the others wait.

The model of lab 2, over P ranks, one microbatch at a time all the way down and back up: the schedule `naive`. It fits, at
the price of (P-1) M T idle time on every rank, T the forward and backward of one microbatch on one rank: a share of
(P-1)/P. Emulated devices first (a layer that sleeps), since P ranks would compete for the cores of this machine; then
real work, watched from outside.

    penstock lab 4
    python -m penstock.learn.labs.lab4_naive
    torchrun --nproc-per-node 2 -m penstock.learn.labs.lab4_naive

Try: more MICROBATCHES. Does it help?
"""

import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import penstock as ps
from penstock.learn.devices import emulated_step
from penstock.learn.lab_helpers import best_of, check, check_time, drawing, on_ranks, percent, ranks_here, say

RANKS, MICROBATCHES = 4, 3
FORWARD, BACKWARD = 0.010, 0.020  # seconds of one microbatch on one rank
WIDE = 512  # of the model that really computes
MOST_CORES = 1.4  # of all ranks together: one computes, and all handle messages


def main() -> None:
    """The naive schedule on emulated devices, then the CPU shares of ranks that really compute."""
    ranks = ranks_here(RANKS)
    say(f"Lab 4: {ranks} ranks without a schedule\n")
    table = ps.schedule.build("naive", ranks=ranks, microbatches=MICROBATCHES)
    planned = MICROBATCHES * ranks * (FORWARD + BACKWARD)
    timeline = best_of(
        lambda: on_ranks(emulated_step, ranks, table, FORWARD, BACKWARD)[0],
        lambda timeline: timeline.makespan,
        good_enough=1.2 * planned,
    )
    say(drawing(timeline))
    utilisation = [busy / timeline.makespan for busy in timeline.busy]
    for rank, share in enumerate(utilisation):
        say(f"  rank {rank} works {percent(share)} of the step")
    mean = sum(utilisation) / ranks
    say(f"  (P-1) M T says 1/P = {percent(1 / ranks)}, and a step of M P T = {1e3 * planned:.0f} ms")
    check_time(
        0.7 / ranks < mean <= 1 / ranks + 1e-6,
        f"each of {ranks} ranks works about 1/{ranks} of the time, and never two at once",
        f"the ranks work {percent(mean)} of the step, expected about {percent(1 / ranks)}; a very busy machine? run it again",
    )

    say("\nThe same with real work, one thread on each rank, as the system sees it:")
    shares, gpu, losses, alone = best_of(
        lambda: tuple(zip(*on_ranks(real_steps, ranks), strict=True)),
        lambda times: sum(times[0]),
        good_enough=MOST_CORES,
    )
    for rank, share in enumerate(shares):
        watched = "" if gpu[rank] is None else f", its GPU {gpu[rank]} % (NVML)"
        say(f"  rank {rank}: {percent(share)} of one core{watched}")
    check_time(
        sum(shares) <= MOST_CORES,
        f"{ranks} processes that compute use {sum(shares):.2f} cores together: one works, the others wait",
        f"the ranks use {sum(shares):.2f} cores together: more than one of them works at a time",
    )
    check(
        losses == alone,
        "every rank knows the loss, and it has the bits of one process",
        f"the ranks' losses are {losses}, that of one process is {alone[0]}",
    )
    say(
        f"\nMeasured: with {ranks} ranks each works {percent(mean)} of a step of {1e3 * timeline.makespan:.0f} ms, and the "
        f"processes that really compute use {sum(shares):.2f} cores together: {ranks} devices, the speed of one."
    )


def model() -> nn.Sequential:
    """What really computes, the same in every process."""
    torch.manual_seed(0)
    return ps.model.mlp(WIDE)


def batch() -> tuple[Tensor, Tensor]:
    """(rows, wide) inputs and (rows,) targets, always the same."""
    generator, rows = torch.Generator().manual_seed(1), 256 * MICROBATCHES
    return torch.randn(rows, WIDE, generator=generator), torch.randint(2, (rows,), generator=generator)


def real_steps() -> tuple[float, int | None, float, float]:
    """The share of a core this process used in some steps of a real model, its GPU's utilisation if it has one; the loss of
    the first, and the same by one process.
    """
    topology = ps.comms.init_distributed()
    torch.set_num_threads(1)
    pipe = ps.Pipeline(model(), nn.CrossEntropyLoss(), schedule="naive", microbatches=MICROBATCHES)
    inputs, target = batch()
    loss = pipe.step(inputs, target=target)  # the first one is slower: in it the ranks agree on the shapes
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(4):
        pipe.step(inputs, target=target)
    share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    return share, gpu_utilisation(topology.device), loss.item(), one_process(topology.device)


def one_process(device: torch.device) -> float:
    """The loss of the same batch, in the same microbatches, without a pipeline."""
    uncut = model().to(device)
    pieces = zip(*(microbatch.to(device).chunk(MICROBATCHES) for microbatch in batch()), strict=True)
    with torch.no_grad():
        return sum((cross_entropy(uncut(inputs), target) / MICROBATCHES for inputs, target in pieces), torch.zeros(())).item()


def gpu_utilisation(device: torch.device) -> int | None:
    """What NVML says of `device`, in percent; None on the CPU, or without the nvidia-ml-py package."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device)
    except (ModuleNotFoundError, RuntimeError):
        return None


if __name__ == "__main__":
    main()
