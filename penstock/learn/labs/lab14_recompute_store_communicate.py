"""Lab 14: recompute, store or communicate.

The backward needs the activations of the forward. Three methods provide them. Store them, which takes memory. Recompute them
from the input of the block, which takes the time of a forward. Communicate them: send them to a rank with free memory and fetch
them back, which moves their bytes twice over the link. The gradients are the same, bit by bit. The lab measures the memory and
time of each method, computes which is best on which machine, and then recomputes in a pipeline.

    penstock lab 14
    python -m penstock.learn.labs.lab14_recompute_store_communicate

Try: fetch a tensor while the backward still works on the one before. When is communicating as fast as storing?
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

SIZES = {64: 1024, 512: 128}  # dim of the blocks -> rows; the product is the same
BLOCKS, EXPANSION = 2, 4  # a block is dim -> EXPANSION x dim -> dim
SAVED_PER_ROW = 1 + 2 * EXPANSION  # x dim numbers that a block saves per row: its input, and the input and output of its GELU
RECOMPUTE_OPERATIONS = 2 * EXPANSION  # x dim^2 operations per row to recompute them: the first layer
REPEATS = 6
MAX_ERROR_FACTOR = 2.0  # between a step's measured and predicted time, whichever is longer

RANKS, MICROBATCHES = 4, 8
FORWARD, BACKWARD = 0.005, 0.010  # seconds of one microbatch on an emulated device

STORE, RECOMPUTE, COMMUNICATE = METHODS = "store", "recompute", "communicate"


def main() -> None:
    """Measure the three methods on two ranks; compute which is best on other machines; then recompute in a pipeline."""
    if not is_printing_process():
        return  # this lab starts its own ranks: of torchrun's ranks only one runs it
    say("Lab 14: recompute, store or communicate\n")
    say(f"{BLOCKS} blocks, dim -> {EXPANSION} dim -> GELU -> dim: the memory that rank 0's backward takes on each rank; the")
    say("time of a step, and how much longer it is than with all stored:\n")
    say("  dim x rows                   rank 0    rank 1      step    longer   by arithmetic")
    trials = {
        dim: best_of(partial(measure_on_two_ranks, dim, rows), worst_error_factor, good_enough=1.5)
        for dim, rows in SIZES.items()
    }
    for dim, trial in trials.items():
        print_trial(dim, trial)
    for dim, trial in trials.items():
        check_trial(dim, trial)
    compare_on_machines(trials)
    storing, recomputing = measure_in_a_pipeline()
    wide = trials[max(trials)]
    stored, inputs = (megabytes(wide.held_bytes[method][0]) for method in (STORE, RECOMPUTE))
    times = ", ".join(
        f"{1e3 * trial.extra_seconds(RECOMPUTE):.0f} and {1e3 * trial.extra_seconds(COMMUNICATE):.0f} ms at dim {dim}"
        for dim, trial in trials.items()
    )
    say(
        f"\nMeasured: recomputing keeps {inputs} of {stored}, communicating none; a step is longer than with storing by {times}"
        f"; a pipeline's step takes {1e3 * recomputing:.0f} ms instead of {1e3 * storing:.0f} if it recomputes."
    )


@dataclass(frozen=True)
class ActivationTrial:
    """All three methods, measured on rank 0."""

    held_bytes: dict[str, tuple[int, int]]  # method -> bytes on rank 0, on rank 1
    seconds: dict[str, float]  # method -> seconds of a forward and backward
    equal: bool  # whether the gradients of all methods have the same bits
    recompute_seconds: float  # to compute once more what the backward needs
    bandwidth: float  # bytes per second

    def extra_seconds(self, method: str) -> float:
        """Return by how many seconds a step is longer than with all activations stored."""
        return self.seconds[method] - self.seconds[STORE]

    def expected_seconds(self, method: str) -> float:
        """Return by how many seconds a step should be longer, by arithmetic."""
        communicate_seconds = 2 * self.held_bytes[COMMUNICATE][1] / self.bandwidth
        return {STORE: 0.0, RECOMPUTE: self.recompute_seconds, COMMUNICATE: communicate_seconds}[method]

    def error_factor(self, method: str) -> float:
        """Return the ratio of a step's time and its prediction, or the inverse (at least 1)."""
        ratio = self.seconds[method] / (self.seconds[STORE] + self.expected_seconds(method))
        return max(ratio, 1 / ratio)


def measure_on_two_ranks(dim: int, rows: int) -> ActivationTrial:
    """Measure all methods with blocks of `dim` and `rows` rows."""
    [trial] = [result for result in ps.launch(measure_methods, 2, dim, rows) if result]
    return trial


def worst_error_factor(trial: ActivationTrial) -> float:
    """Return the largest error factor of the methods."""
    return max(map(trial.error_factor, METHODS))


def print_trial(dim: int, trial: ActivationTrial) -> None:
    """Print the trial's lines of the table."""
    for method in METHODS:
        held_text = "".join(f"{megabytes(size):>10}" for size in trial.held_bytes[method])
        extra, expected = 1e3 * trial.extra_seconds(method), 1e3 * trial.expected_seconds(method)
        extra_text = "" if method == STORE else f"{extra:7.1f} ms {expected:10.1f} ms"
        size = f"{dim} x {SIZES[dim]}" if method == STORE else ""
        say(f"  {size:14}{method:12}{held_text}{1e3 * trial.seconds[method]:7.1f} ms{extra_text}".rstrip())


def check_trial(dim: int, trial: ActivationTrial) -> None:
    """Check memory and gradients exactly, and the times within MAX_ERROR_FACTOR."""
    block_input = 4 * dim * SIZES[dim]
    expected_sizes = {STORE: (SAVED_PER_ROW, 0), RECOMPUTE: (1, 0), COMMUNICATE: (0, SAVED_PER_ROW)}
    counted_sizes = {method: tuple(size / block_input / BLOCKS for size in sizes) for method, sizes in trial.held_bytes.items()}
    check(
        counted_sizes == expected_sizes,
        f"dim {dim}: a block holds {SAVED_PER_ROW} times its input if it stores, its input if it recomputes, else nothing",
        f"blocks of dim {dim} should hold {expected_sizes} times their input on ranks 0 and 1; they hold {counted_sizes}",
    )
    check(
        trial.equal,
        "the gradients of all three are equal bit by bit",
        f"with dim {dim} the gradients depend on the way activations are provided",
    )
    worst = max(METHODS, key=trial.error_factor)
    worst_expected = trial.seconds[STORE] + trial.expected_seconds(worst)
    check_time(
        worst_error_factor(trial) < MAX_ERROR_FACTOR,
        f"the arithmetic predicts all steps of dim {dim} within a factor of {trial.error_factor(worst):.1f}",
        f"to {worst}, a step of dim {dim} should take {1e3 * worst_expected:.1f} ms, it takes "
        f"{1e3 * trial.seconds[worst]:.1f}; a very busy machine? run it again",
    )


def compare_on_machines(trials: dict[int, ActivationTrial]) -> None:
    """Print for some machines the dim from which on communicating is faster than recomputing."""
    dim = max(trials)
    speed = RECOMPUTE_OPERATIONS * dim**2 * SIZES[dim] * BLOCKS / trials[dim].recompute_seconds
    say(f"\nPer row of a block, recomputing takes {RECOMPUTE_OPERATIONS} dim^2 operations (not those of the second layer),")
    say(f"and communicating sends {SAVED_PER_ROW} dim numbers twice. From which dim on is communicating faster?")
    for name, size, operations, link in (
        ("this machine", 4, speed, trials[dim].bandwidth),
        ("laptops with gigabit Ethernet", 4, 100e9, 0.125e9),
        ("GPUs of one machine, bfloat16", 2, 400e12, 400e9),
        ("GPUs of several machines", 2, 400e12, 50e9),
    ):
        limit = 2 * SAVED_PER_ROW * size * operations / (RECOMPUTE_OPERATIONS * link)
        say(f"  {name:30}{operations / 1e9:9,.0f} GFLOP/s {link / 1e9:7.3g} GB/s  {limit:8,.0f}")
    say("Recomputing needs no other rank and no link; communication can overlap with compute.\n")


def blocks(dim: int) -> nn.Sequential:
    """Build the blocks: (rows, dim) -> (rows, dim)."""
    torch.manual_seed(0)
    layers = ([nn.Linear(dim, EXPANSION * dim), nn.GELU(), nn.Linear(EXPANSION * dim, dim)] for _ in range(BLOCKS))
    return nn.Sequential(*(nn.Sequential(*layer) for layer in layers))


class RecomputedBlock(nn.Module):
    """A block that saves only its input, and recomputes its activations in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor) -> Tensor:
        """Run the block: (rows, dim) -> (rows, dim)."""
        return checkpoint(self.block, hidden, use_reentrant=False)


class LocalActivations:
    """Keeps the tensors that autograd saves, and counts the bytes of all but the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {parameter.data_ptr() for parameter in model.parameters()}
        self.held_bytes = 0

    def save(self, tensor: Tensor) -> Tensor | torch.Size:
        """Return the value that the graph holds for `tensor`."""
        self.held_bytes += 0 if tensor.data_ptr() in self.weights else tensor.nbytes
        return tensor

    def load(self, packed: Any) -> Tensor:
        """Return the tensor for the value that the graph holds."""
        return packed

    def after_forward(self) -> None:
        """Do nothing: all tensors stay here."""


class RemoteActivations(LocalActivations):
    """Sends the tensors to rank 1, and holds only their shapes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.sending: list[tuple[Any, Tensor]] = []

    def save(self, tensor: Tensor) -> Tensor | torch.Size:
        """Post the send of `tensor`, and return its shape; the forward goes on meanwhile."""
        if tensor.data_ptr() in self.weights:
            return tensor
        self.sending.append((dist.isend(tensor, 1), tensor))
        return tensor.shape

    def load(self, packed: Any) -> Tensor:
        """Receive the tensor; rank 1 sends the last one first, the order in which a backward needs them."""
        if isinstance(packed, Tensor):
            return packed
        tensor = torch.empty(packed)
        dist.recv(tensor, 1)
        return tensor

    def after_forward(self) -> None:
        """Wait until rank 1 has received all tensors, then free them."""
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()


def store_for_rank_0(dim: int, rows: int) -> int:
    """Receive the tensors that rank 0's forward saves, and send them back in reverse. Returns their bytes."""
    widths = [dim, EXPANSION * dim, EXPANSION * dim] * BLOCKS  # per block: its input, the input and output of its GELU
    tensors = [torch.empty(rows, width) for width in widths]
    for work in [dist.irecv(tensor, 0) for tensor in tensors]:
        if work is not None:
            work.wait()
    for tensor in reversed(tensors):
        dist.send(tensor, 0)
    return sum(tensor.nbytes for tensor in tensors)


def measure_methods(dim: int, rows: int) -> ActivationTrial | None:
    """Measure all methods on rank 0, while rank 1 stores its tensors. Returns None on rank 1."""
    rank = ps.comms.init_distributed(backend="gloo").rank
    model, generator = blocks(dim), torch.Generator().manual_seed(1)
    inputs, gradient = torch.randn(2, rows, dim, generator=generator)
    bandwidth = measure_bandwidth(rank, torch.empty(rows, EXPANSION * dim))
    if rank == 1:
        dist.send(torch.tensor([max(store_for_rank_0(dim, rows) for _ in range(REPEATS))]), 0)
        return None
    recomputed = [nn.Sequential(*[*block.children()][:-1]) for block in model]  # torch stops at the last tensor it needs
    recompute_seconds = fastest_seconds(lambda: [layers(inputs) for layers in recomputed])
    bytes_by_method, gradients = {}, {}
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    for method in METHODS * REPEATS:  # in turn, so that a busy machine disturbs all methods
        activations = RemoteActivations(model) if method == COMMUNICATE else LocalActivations(model)
        method_model = nn.Sequential(*map(RecomputedBlock, model)) if method == RECOMPUTE else model
        start = time.perf_counter()
        forward_and_backward(method_model, activations, inputs, gradient)
        times[method].append(time.perf_counter() - start)
        bytes_by_method[method] = activations.held_bytes, 0
        gradients[method] = [parameter.grad for parameter in model.parameters()]
    remote_bytes = torch.zeros(1, dtype=torch.int64)
    dist.recv(remote_bytes, 1)
    bytes_by_method[COMMUNICATE] = bytes_by_method[COMMUNICATE][0], int(remote_bytes)
    equal = all(
        torch.equal(first_gradient, gradient)
        for first_gradient, *other_gradients in zip(*gradients.values(), strict=True)
        for gradient in other_gradients
    )
    seconds = {method: min(method_times) for method, method_times in times.items()}
    return ActivationTrial(bytes_by_method, seconds, equal, recompute_seconds, bandwidth)


def forward_and_backward(model: nn.Module, activations: LocalActivations, inputs: Tensor, gradient: Tensor) -> None:
    """Run a forward and backward, and keep the tensors that autograd saves in `activations`."""
    model.zero_grad()
    with saved_tensors_hooks(activations.save, activations.load):
        output = model(inputs)
    activations.after_forward()
    output.backward(gradient)


def fastest_seconds(function: Callable[[], object]) -> float:
    """Return the seconds of the fastest of some calls, the least disturbed."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_bandwidth(rank: int, tensor: Tensor) -> float:
    """Return the bytes per second from one rank to the other, by the fastest round trip."""
    calls = [dist.send, dist.recv] if rank == 0 else [dist.recv, dist.send]

    def trip() -> None:
        for call in calls:
            call(tensor, 1 - rank)

    return 2 * tensor.nbytes / fastest_seconds(trip)


def measure_in_a_pipeline() -> tuple[float, float]:
    """Run a step of emulated devices that store, and one that recomputes. Returns the seconds of both."""
    table = ps.schedule.build("1f1b", ranks=RANKS, microbatches=MICROBATCHES)
    in_flight = "/".join(map(str, ps.schedule.simulate(table).peak_in_flight))
    say(f"In a pipeline recomputing adds a forward to each backward (1f1b, {RANKS} ranks, {MICROBATCHES} microbatches):\n")
    say("               simulated   measured   ranks hold")
    seconds = []
    for recompute, backward, tensors in ((None, BACKWARD, "activations"), ("stage", BACKWARD + FORWARD, "inputs")):
        planned_seconds = ps.schedule.simulate(table, Costs(FORWARD, backward / 2, backward / 2)).makespan
        step_seconds = best_of(partial(launch_pipeline_step, recompute), float, good_enough=1.3 * planned_seconds)
        seconds.append(step_seconds)
        method = RECOMPUTE if recompute else STORE
        times = f"{1e3 * planned_seconds:9.0f} ms{1e3 * step_seconds:8.0f} ms"
        say(f"  {method:10}{times}   the {tensors} of {in_flight} microbatches")
        check_time(
            planned_seconds <= step_seconds < 2 * planned_seconds,
            f"{method}: the step takes the planned time, and little more",
            f"{method}: the step should take {1e3 * planned_seconds:.0f} ms, it took {1e3 * step_seconds:.0f}; a very busy "
            "machine? run it again",
        )
    say(f"Or communicate: rank r has P - r microbatches in flight, so it and rank P-1-r have P + 1 = {RANKS + 1} together. If")
    say(f"the first ranks send some to the last, no rank holds more than {RANKS // 2 + 1} (BPipe, Kim and others, 2023).")
    return seconds[0], seconds[1]


def pipeline_step(recompute: Any) -> float:
    """Run a step of emulated devices. Returns its seconds."""
    ranks = ps.comms.init_distributed(backend="gloo").world_size
    # The second layer takes no time, but needs the output of the first, so that torch recomputes the first.
    stages = [nn.Sequential(EmulatedLayer(DIM, FORWARD, BACKWARD), EmulatedLayer(DIM, 0, 0)) for _ in range(ranks)]
    return fastest_step(ps.Pipeline(stages, mse_loss, "1f1b", MICROBATCHES, recompute=recompute)).makespan


def launch_pipeline_step(recompute: Any) -> float:
    """Run that step on RANKS ranks. Returns its seconds."""
    return ps.launch(pipeline_step, RANKS, recompute)[0]


if __name__ == "__main__":
    main()
