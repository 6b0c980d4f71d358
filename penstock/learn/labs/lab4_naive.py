"""Lab 4: a cut model without a schedule. One rank works, the others wait.

The schedule `naive` runs the model of lab 2 on P ranks, one microbatch at a time through all forwards and back through all
backwards. The model fits, but every rank idles for (P-1) M T, a share of (P-1)/P. T is the time of forward and backward of one
microbatch on one rank. The lab first runs emulated devices (layers that sleep), because P ranks would compete for the cores of
this machine. Then ranks compute, and the lab measures the share of a core that each uses.

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
DIM = 512  # of the model that computes
MAX_CORES = 1.4  # that all ranks together may use: one computes, and all handle messages


def main() -> None:
    """Run the naive schedule on emulated devices; then measure the CPU share of ranks that compute."""
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
    say(f"  with (P-1) M T idle it should be 1/P = {percent(1 / ranks)}, of a step of M P T = {1e3 * planned:.0f} ms")
    check_time(
        0.7 / ranks < mean <= 1 / ranks + 1e-6,
        f"each of {ranks} ranks works about 1/{ranks} of the time, and never two at once",
        f"the ranks work {percent(mean)} of the step, expected about {percent(1 / ranks)}; a very busy machine? run it again",
    )

    say("\nThe same with a model that computes, one thread on each rank; CPU time as the operating system counts it:")
    shares, gpu_utilisations, losses, uncut_losses = best_of(
        lambda: tuple(zip(*on_ranks(measure_real_steps, ranks), strict=True)),
        lambda times: sum(times[0]),
        good_enough=MAX_CORES,
    )
    for rank, share in enumerate(shares):
        gpu_text = "" if gpu_utilisations[rank] is None else f", its GPU {gpu_utilisations[rank]} % (NVML)"
        say(f"  rank {rank}: {percent(share)} of one core{gpu_text}")
    check_time(
        sum(shares) <= MAX_CORES,
        f"{ranks} processes that compute use {sum(shares):.2f} cores together: one works, the others wait",
        f"the ranks use {sum(shares):.2f} cores together: more than one of them works at a time",
    )
    check(
        losses == uncut_losses,
        "every rank has the loss, and it has the bits of one process",
        f"the ranks' losses are {losses}, that of one process is {uncut_losses[0]}",
    )
    say(
        f"\nMeasured: with {ranks} ranks each works {percent(mean)} of a step of {1e3 * timeline.makespan:.0f} ms, and the "
        f"processes that compute use {sum(shares):.2f} cores together: {ranks} devices, the speed of one."
    )


def model() -> nn.Sequential:
    """Build the model that computes, the same in every process."""
    torch.manual_seed(0)
    return ps.model.mlp(DIM)


def batch() -> tuple[Tensor, Tensor]:
    """Return inputs (rows, dim) and targets (rows,), always the same."""
    generator, rows = torch.Generator().manual_seed(1), 256 * MICROBATCHES
    return torch.randn(rows, DIM, generator=generator), torch.randint(2, (rows,), generator=generator)


def measure_real_steps() -> tuple[float, int | None, float, float]:
    """Run steps of a model that computes.

    Returns the share of a core that this process used, its GPU's utilisation in percent (None without a GPU), the loss of the
    first step, and that loss without a pipeline.
    """
    topology = ps.comms.init_distributed()
    torch.set_num_threads(1)
    pipe = ps.Pipeline(model(), nn.CrossEntropyLoss(), schedule="naive", microbatches=MICROBATCHES)
    inputs, target = batch()
    loss = pipe.step(inputs, target=target)  # the first step is slower: in it the ranks agree on the shapes
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(4):
        pipe.step(inputs, target=target)
    share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    return share, gpu_utilisation(topology.device), loss.item(), uncut_loss(topology.device)


def uncut_loss(device: torch.device) -> float:
    """Return the loss of the same batch, in the same microbatches, without a pipeline."""
    uncut = model().to(device)
    microbatches = zip(*(tensor.to(device).chunk(MICROBATCHES) for tensor in batch()), strict=True)
    with torch.no_grad():
        losses = [cross_entropy(uncut(inputs), target) / MICROBATCHES for inputs, target in microbatches]
    return sum(losses, torch.zeros(())).item()


def gpu_utilisation(device: torch.device) -> int | None:
    """Return NVML's utilisation of `device` in percent; None on the CPU, or without the nvidia-ml-py package."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device)
    except (ModuleNotFoundError, RuntimeError):
        return None


if __name__ == "__main__":
    main()
