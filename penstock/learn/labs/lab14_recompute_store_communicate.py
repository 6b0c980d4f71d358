"""Lab 14: recompute, store or communicate.

The backward needs what the forward computed. It can be stored until then, which takes memory; computed again from the input
of the block, which takes the time of a forward; or sent to a rank that has room and fetched back, which takes its bytes twice
over the bandwidth. The gradients are the same, bit by bit. What does each way hold, what does it take, and which is best on
which machine? Then in a pipeline, in which some ranks have room.

    penstock lab 14
    python -m penstock.learn.labs.lab14_recompute_store_communicate

Try: ask for a tensor while the backward still works on the one before. When does communicating cost nothing at all?
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.learn.devices import DIM, EmulatedLayer, fastest_step
from penstock.learn.lab_helpers import best_of, check, check_time, is_printing_process, megabytes, say
from penstock.schedule import Costs

SIZES = {64: 1024, 512: 128}  # dim of the blocks -> rows: as many numbers
BLOCKS, WIDER = 2, 4  # each dim -> WIDER x dim -> dim
KEPT = 1 + 2 * WIDER  # x dim numbers a block keeps of a row: its input, and what goes into its GELU and comes out
OPERATIONS = 2 * WIDER  # x dim^2 to compute them again: the first layer
REPEATS = 6
APART = 2.0  # times, at most, that a step may take of what was predicted

RANKS, MICROBATCHES = 4, 8
FORWARD, BACKWARD = 0.005, 0.010  # seconds of one microbatch on an emulated device

STORE, RECOMPUTE, COMMUNICATE = WAYS = "store", "recompute", "communicate"


def main() -> None:
    """The three ways on one rank beside one that has room; which is best where; and in a pipeline."""
    if not is_printing_process():
        return  # this lab starts its own ranks: one of torchrun's is enough to tell it
    say("Lab 14: recompute, store or communicate\n")
    say(f"{BLOCKS} blocks, dim -> {WIDER} dim -> GELU -> dim: what rank 0 keeps for its backward, and rank 1 for it; the time")
    say("of a step, and how much more that is than if all is stored:\n")
    say("  dim x rows                   rank 0    rank 1      step      more   by arithmetic")
    trials = {dim: best_of(partial(try_both_ranks, dim, rows), worst_off, good_enough=1.5) for dim, rows in SIZES.items()}
    for dim, trial in trials.items():
        show(dim, trial)
    for dim, trial in trials.items():
        check_trial(dim, trial)
    where_which(trials)
    plain, recomputing = in_a_pipeline()
    wide = trials[max(trials)]
    stored, inputs = (megabytes(wide.held[way][0]) for way in (STORE, RECOMPUTE))
    times = ", ".join(
        f"{1e3 * trial.more(RECOMPUTE):.0f} and {1e3 * trial.more(COMMUNICATE):.0f} ms at dim {dim}"
        for dim, trial in trials.items()
    )
    say(
        f"\nMeasured: recomputing keeps {inputs} of {stored}, communicating none; they take {times} more than storing; "
        f"a pipeline's step takes {1e3 * recomputing:.0f} ms instead of {1e3 * plain:.0f} if it recomputes."
    )


@dataclass(frozen=True)
class ActivationTrial:
    """All three ways, measured on rank 0."""

    held: dict[str, tuple[int, int]]  # way -> bytes on rank 0, on rank 1
    seconds: dict[str, float]  # way -> of a forward and backward
    equal: bool  # the gradients, to the bit
    again: float  # seconds to compute what the backward needs once more
    bandwidth: float  # bytes a second

    def more(self, way: str) -> float:
        """The seconds a step takes more than if everything is stored."""
        return self.seconds[way] - self.seconds[STORE]

    def expected(self, way: str) -> float:
        """The same by arithmetic."""
        return {STORE: 0.0, RECOMPUTE: self.again, COMMUNICATE: 2 * self.held[COMMUNICATE][1] / self.bandwidth}[way]

    def off(self, way: str) -> float:
        """How many times longer or shorter a step takes than predicted: what storing takes, and the arithmetic."""
        ratio = self.seconds[way] / (self.seconds[STORE] + self.expected(way))
        return max(ratio, 1 / ratio)


def try_both_ranks(dim: int, rows: int) -> ActivationTrial:
    """All three ways at this size."""
    [trial] = [result for result in ps.launch(try_all, 2, dim, rows) if result]
    return trial


def worst_off(trial: ActivationTrial) -> float:
    """By how many times arithmetic is wrong about a step, at most."""
    return max(map(trial.off, WAYS))


def show(dim: int, trial: ActivationTrial) -> None:
    """The trial's lines of the table."""
    for way in WAYS:
        held_text = "".join(f"{megabytes(size):>10}" for size in trial.held[way])
        more = "" if way == STORE else f"{1e3 * trial.more(way):7.1f} ms {1e3 * trial.expected(way):10.1f} ms"
        size = f"{dim} x {SIZES[dim]}" if way == STORE else ""
        say(f"  {size:14}{way:12}{held_text}{1e3 * trial.seconds[way]:7.1f} ms{more}".rstrip())


def check_trial(dim: int, trial: ActivationTrial) -> None:
    """What can be counted exactly."""
    block_input = 4 * dim * SIZES[dim]
    expected_sizes = {STORE: (KEPT, 0), RECOMPUTE: (1, 0), COMMUNICATE: (0, KEPT)}
    counted_sizes = {way: tuple(size / block_input / BLOCKS for size in sizes) for way, sizes in trial.held.items()}
    check(
        counted_sizes == expected_sizes,
        f"dim {dim}: to store, a block holds {KEPT} times its input; to recompute, its input; to communicate, nothing",
        f"blocks of dim {dim} should hold {expected_sizes} times their input on ranks 0 and 1; they hold {counted_sizes}",
    )
    check(
        trial.equal,
        "the gradients of all three are equal bit by bit",
        f"with dim {dim} the gradients depend on the way their activations are kept",
    )
    worst = max(WAYS, key=trial.off)
    check_time(
        worst_off(trial) < APART,
        f"the arithmetic predicts all steps of dim {dim} within a factor of {trial.off(worst):.1f}",
        f"to {worst}, a step of dim {dim} should take {1e3 * (trial.seconds[STORE] + trial.expected(worst)):.1f} ms, it takes "
        f"{1e3 * trial.seconds[worst]:.1f}; a very busy machine? run it again",
    )


def where_which(trials: dict[int, ActivationTrial]) -> None:
    """From which dim on communicating is the better of the two, by the speeds of compute and link."""
    dim = max(trials)
    speed = OPERATIONS * dim**2 * SIZES[dim] * BLOCKS / trials[dim].again
    say(
        f"\nFor a row of a block recomputing takes {OPERATIONS} dim^2 operations (the second layer's are not needed again), and"
    )
    say(f"communicating twice {KEPT} dim numbers over the link. So it is the faster one from which dim on?")
    for name, size, operations, link in (
        ("this machine", 4, speed, trials[dim].bandwidth),
        ("laptops with gigabit Ethernet", 4, 100e9, 0.125e9),
        ("GPUs of one machine, bfloat16", 2, 400e12, 400e9),
        ("GPUs of several", 2, 400e12, 50e9),
    ):
        limit = 2 * KEPT * size * operations / (OPERATIONS * link)
        say(f"  {name:30}{operations / 1e9:9,.0f} GFLOP/s {link / 1e9:7.3g} GB/s  {limit:8,.0f}")
    say("Recomputing needs no other rank and no link; what is communicated may travel while other things are computed.\n")


def blocks(dim: int) -> nn.Sequential:
    """(rows, dim) -> the same."""
    torch.manual_seed(0)
    layers = ([nn.Linear(dim, WIDER * dim), nn.GELU(), nn.Linear(WIDER * dim, dim)] for _ in range(BLOCKS))
    return nn.Sequential(*(nn.Sequential(*layer) for layer in layers))


class Recomputed(nn.Module):
    """A block of which only the input is kept."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor) -> Tensor:
        """(rows, dim) -> the same."""
        return checkpoint(self.block, hidden, use_reentrant=False)


class LocalActivations:
    """Keeps what autograd saves on this rank, and counts its bytes, without the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {parameter.data_ptr() for parameter in model.parameters()}
        self.held = 0

    def keep(self, tensor: Tensor) -> Tensor | torch.Size:
        """What the graph holds in place of `tensor`."""
        self.held += 0 if tensor.data_ptr() in self.weights else tensor.nbytes
        return tensor

    def fetch(self, packed: Any) -> Tensor:
        """It again, when the backward needs it."""
        return packed

    def forward_done(self) -> None:
        """Nothing more will be kept."""


class RemoteActivations(LocalActivations):
    """Sends it to rank 1, and holds only its shape."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.sending: list[tuple[Any, Tensor]] = []

    def keep(self, tensor: Tensor) -> Tensor | torch.Size:
        """Post it; the forward goes on meanwhile."""
        if tensor.data_ptr() in self.weights:
            return tensor
        self.sending.append((dist.isend(tensor, 1), tensor))
        return tensor.shape

    def fetch(self, packed: Any) -> Tensor:
        """Rank 1 gives back what came last first, as a backward wants it."""
        if isinstance(packed, Tensor):
            return packed
        tensor = torch.empty(packed)
        dist.recv(tensor, 1)
        return tensor

    def forward_done(self) -> None:
        """What has arrived there is not needed here."""
        for promise, _ in self.sending:
            promise.wait()
        self.sending.clear()


def keep_for_rank_0(dim: int, rows: int) -> int:
    """Rank 1's part: take in what a forward saves, give it back in reverse. Returns the bytes."""
    widths = [dim, WIDER * dim, WIDER * dim] * BLOCKS  # of each block: its input, what GELU gets, what it makes
    tensors = [torch.empty(rows, width) for width in widths]
    for promise in [dist.irecv(tensor, 0) for tensor in tensors]:
        if promise is not None:
            promise.wait()
    for tensor in reversed(tensors):
        dist.send(tensor, 0)
    return sum(tensor.nbytes for tensor in tensors)


def try_all(dim: int, rows: int) -> ActivationTrial | None:
    """All three on rank 0, while rank 1 is there for it; None on rank 1."""
    rank = ps.comms.init_distributed(backend="gloo").rank
    model, numbers = blocks(dim), torch.Generator().manual_seed(1)
    inputs, gradient = torch.randn(2, rows, dim, generator=numbers)
    link = bandwidth(rank, torch.empty(rows, WIDER * dim))
    if rank == 1:
        dist.send(torch.tensor([max(keep_for_rank_0(dim, rows) for _ in range(REPEATS))]), 0)
        return None
    needed = [nn.Sequential(*[*block.children()][:-1]) for block in model]  # torch recomputes up to the last tensor it needs
    recompute_seconds = fastest(lambda: [part(inputs) for part in needed])
    held_bytes, gradients = {}, {}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for way in WAYS * REPEATS:  # in turn, so that a busy machine disturbs all of them
        activations = RemoteActivations(model) if way == COMMUNICATE else LocalActivations(model)
        run = nn.Sequential(*map(Recomputed, model)) if way == RECOMPUTE else model
        start = time.perf_counter()
        forward_and_backward(run, activations, inputs, gradient)
        times[way].append(time.perf_counter() - start)
        held_bytes[way] = activations.held, 0
        gradients[way] = [parameter.grad for parameter in model.parameters()]
    elsewhere = torch.zeros(1, dtype=torch.int64)
    dist.recv(elsewhere, 1)
    held_bytes[COMMUNICATE] = held_bytes[COMMUNICATE][0], int(elsewhere)
    equal = all(
        torch.equal(stored, result) for stored, *recomputed in zip(*gradients.values(), strict=True) for result in recomputed
    )
    return ActivationTrial(held_bytes, {way: min(duration) for way, duration in times.items()}, equal, recompute_seconds, link)


def forward_and_backward(model: nn.Module, activations: LocalActivations, inputs: Tensor, gradient: Tensor) -> None:
    """One step, what it saves left with `here`."""
    model.zero_grad()
    with saved_tensors_hooks(activations.keep, activations.fetch):
        output = model(inputs)
    activations.forward_done()
    output.backward(gradient)


def fastest(function: Callable[[], object]) -> float:
    """The seconds of the least disturbed of some calls."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def bandwidth(rank: int, tensor: Tensor) -> float:
    """Bytes a second from one rank to the other, by the fastest round trip."""
    calls = [dist.send, dist.recv] if rank == 0 else [dist.recv, dist.send]

    def trip() -> None:
        for call in calls:
            call(tensor, 1 - rank)

    return 2 * tensor.nbytes / fastest(trip)


def in_a_pipeline() -> tuple[float, float]:
    """Run a step of emulated devices that store, and of some that recompute. Return the seconds of both."""
    table = ps.schedule.build("1f1b", ranks=RANKS, microbatches=MICROBATCHES)
    in_flight = "/".join(map(str, ps.schedule.simulate(table).peak_in_flight))
    say(f"In a pipeline recomputing adds a forward to each backward (1f1b, {RANKS} ranks, {MICROBATCHES} microbatches):\n")
    say("               simulated   measured   a rank holds")
    seconds = []
    for recompute, backward, content in ((None, BACKWARD, "activations"), ("stage", BACKWARD + FORWARD, "inputs")):
        plan = ps.schedule.simulate(table, Costs(FORWARD, backward / 2, backward / 2)).makespan
        real = best_of(partial(launched, recompute), float, good_enough=1.3 * plan)
        seconds.append(real)
        way = RECOMPUTE if recompute else STORE
        say(f"  {way:10}{1e3 * plan:9.0f} ms{1e3 * real:8.0f} ms   the {content} of {in_flight} microbatches")
        check_time(
            plan <= real < 2 * plan,
            f"{way}: the step takes what the table says, and little more",
            f"{way}: the step should take {1e3 * plan:.0f} ms, it took {1e3 * real:.0f}; a very busy machine? run it again",
        )
    say(f"Or communicate: rank r has P - r microbatches in flight, so it and rank P-1-r have P + 1 = {RANKS + 1} together. No")
    say(f"rank need hold more than {RANKS // 2 + 1} if the first leave some with the last (BPipe, Kim and others, 2023).")
    return seconds[0], seconds[1]


def pipeline_step(recompute: Any) -> float:
    """The seconds of a step of emulated devices."""
    ranks = ps.comms.init_distributed(backend="gloo").world_size
    # The second layer takes no time, but needs the output of the first, so that all of it is recomputed.
    stages = [nn.Sequential(EmulatedLayer(DIM, FORWARD, BACKWARD), EmulatedLayer(DIM, 0, 0)) for _ in range(ranks)]
    return fastest_step(ps.Pipeline(stages, mse_loss, "1f1b", MICROBATCHES, recompute=recompute)).makespan


def launched(recompute: Any) -> float:
    """Return the seconds of that step on all ranks."""
    return ps.launch(pipeline_step, RANKS, recompute)[0]


if __name__ == "__main__":
    main()
