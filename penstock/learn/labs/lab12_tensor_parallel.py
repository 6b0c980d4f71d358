"""Lab 12: tensor parallel, with its backward.

Tensor parallel cuts a layer that is too large for one device. Take two layers with an elementwise function between them. Cut
the first by columns and the second by rows. Each rank then computes some of the hidden features, which no other rank needs,
and their contribution to the output. So the forward ends with one all-reduce of the output, and the backward with one of the
input's gradient. The lab writes each as an autograd Function, and counts its bytes. Then it declares the same in ten lines.

    penstock lab 12
    python -m penstock.learn.labs.lab12_tensor_parallel
    torchrun --nproc-per-node 4 -m penstock.learn.labs.lab12_tensor_parallel

Try: leave `SumGradients` out. Which gradients are still right, and which gradient would a layer before this block get?
"""

import inspect
from textwrap import indent
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import linear, mse_loss

import penstock as ps
from penstock.learn.lab_helpers import check, on_ranks, ranks_here, say

RANKS = 2
ROWS, DIM, HIDDEN = 24, 64, 256  # HIDDEN is a multiple of the ranks
EXACT = 1e-12  # error of float64 sums in another order


def main() -> None:
    """Run the block by hand and declared, and compare both with the uncut block."""
    ranks = ranks_here(RANKS)
    say(f"Lab 12: a block of two layers, Y = relu(X A) B, cut over {ranks} ranks\n")
    draw_block(ranks)
    results = on_ranks(compare_blocks, ranks)
    hand_error, declared_error = show_errors(results)
    check(hand_error < EXACT, "output and gradients are those of the uncut block", f"by hand they are {hand_error:.0e} off")
    num_equal = results[0].num_equal_outputs
    say(f"  {num_equal} of {ROWS * DIM} outputs have equal bits. A sum of {HIDDEN} features is now a sum of {ranks} sums,")
    say(f"  and the order counts: (0.1 + 0.2) + 0.3 is {(0.1 + 0.2) + 0.3}, 0.1 + (0.2 + 0.3) is {0.1 + (0.2 + 0.3)}.")
    compare_bytes_with_data_parallel(results)
    say(f"\nThe same, declared with DTensor:\n\n{indent(inspect.getsource(run_declared_block), '  ')}")
    say(f"The same in JAX, where arrays are sharded (not run here; tried with JAX 0.10):\n\n{JAX}")
    check(declared_error < EXACT, "the declared block has them too", f"declared they are {declared_error:.0e} off")
    say(
        f"\nMeasured: each of {ranks} ranks holds {results[0].num_parameters:,} of {num_block_parameters():,} parameters; one "
        f"all-reduce of {results[0].all_reduce_bytes[0]:,} bytes in the forward, one of {results[0].all_reduce_bytes[-1]:,} in "
        f"the backward; output and gradients are those of the uncut block within {hand_error:.0e} by hand, "
        f"{declared_error:.0e} declared."
    )


def draw_block(ranks: int) -> None:
    """Draw the two cuts, and what happens at the block's ends in forward and backward."""
    shape = f"({ROWS}, {DIM})"
    start, end = f"X {shape} --", f"-- Y {shape}"
    for rank in range(ranks):
        middle = f"+-- A{rank} -> ({ROWS}, {HIDDEN // ranks}) -> relu -> B{rank} -> {shape} --+"
        say(f"  rank {rank}    {start if rank == 0 else ' ' * len(start)}{middle}{end if rank == 0 else ''}")
    gap = len(middle) - 1
    for direction, left_end, right_end in (("forward", "as it is", "all-reduce"), ("backward", "all-reduce", "as it is")):
        say(f"  {direction:10}{' ' * len(start)}{left_end:{gap}}{right_end}")
    say("  A is 0.weight and cut by columns, B is 2.weight and cut by rows; torch keeps them transposed.\n")


def show_errors(results: list["RankResult"]) -> tuple[float, float]:
    """Print shapes, and the worst rank's error of each tensor. Returns the largest error by hand, and declared."""
    say("Shapes in the uncut block and on a rank, and the error of the worst rank (float64):\n")
    say(f"  {'':16}{'uncut':12}{'a rank':12}{'by hand':>8}{'declared':>10}")
    largest = [0.0, 0.0]
    for name, pair in results[0].compared.items():
        errors = [max(result.compared[name].errors[index] for result in results) for index in (0, 1)]
        largest = [max(error_pair) for error_pair in zip(largest, errors, strict=True)]
        say(f"  {name:16}{pair.uncut!s:12}{pair.part!s:12}{errors[0]:8.0e}{errors[1]:10.0e}")
    return largest[0], largest[1]


def compare_bytes_with_data_parallel(results: list["RankResult"]) -> None:
    """Print the bytes of the two all-reduces, and compare them with data parallel."""
    size, weights = 8 * ROWS * DIM, 8 * num_block_parameters()
    say(f"\nA step sums {2 * size:,} bytes over the ranks, activations of {ROWS} rows, and all ranks wait for them. Data")
    say(f"parallel (lab 11) sums the gradients of all weights, {weights:,} bytes, while the backward goes on; it has less to")
    say(f"sum from {weights // (16 * DIM)} rows on. So tensor parallel is for the fastest links, those within a machine.")
    check(
        all(result.all_reduce_bytes == [size, size] for result in results),
        f"one all-reduce each way, of rows x dim numbers: {size:,} bytes",
        f"every rank should sum {size} bytes each way; it summed {[result.all_reduce_bytes for result in results]}",
    )


JAX = """\
  mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))  # Auto: the compiler inserts communication
  A = jax.device_put(A, NamedSharding(mesh, P(None, "tensor")))  # (dim, hidden): columns
  B = jax.device_put(B, NamedSharding(mesh, P("tensor", None)))  # (hidden, dim): rows
  loss, gradients = jax.jit(jax.value_and_grad(block, argnums=(0, 1, 2)))(A, B, X, targets)  # one program for all devices

In torch the plan names layers, a layer's style says what it sends, and a DTensor knows its placement. In JAX only arrays are
laid out, and the compiler derives the same two all-reduces. Data parallel and FSDP are other layouts of the same program there.
A pipeline is not: each device runs other code at other times, so both libraries write it as a schedule.
"""


class SumGradients(torch.autograd.Function):
    """Passes the input on unchanged. In the backward, sums the ranks' gradients of the input."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        """Return `inputs` (rows, dim) unchanged."""
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the sum of the ranks' gradients (rows, dim)."""
        return all_reduce(gradient)


class SumOutputs(torch.autograd.Function):
    """Sums the ranks' outputs. The gradient of a sum is that of each summand, so the backward passes it on unchanged.

    In lab 10 the backward of an all-reduce is an all-reduce: there the losses of all ranks count. Here all ranks compute the
    same loss, which counts once.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        """Return the sum of the ranks' outputs (rows, dim)."""
        return all_reduce(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return `gradient` (rows, dim) unchanged."""
        return gradient


all_reduce_bytes: list[int] = []  # bytes of each all-reduce of this process


def all_reduce(part: Tensor) -> Tensor:
    """Return the sum of all ranks' tensors, and record its bytes."""
    total = part.clone()
    dist.all_reduce(total)
    all_reduce_bytes.append(total.nbytes)
    return total


class CutBlock(nn.Module):
    """A rank's part of a block: some of the hidden features, and their contribution to the output."""

    def __init__(self, uncut: nn.Module, rank: int, ranks: int) -> None:
        super().__init__()
        weights = {name: parameter.detach() for name, parameter in uncut.named_parameters()}
        self.first_weight = nn.Parameter(weights["0.weight"].chunk(ranks, dim=0)[rank])  # (hidden / ranks, dim)
        self.first_bias = nn.Parameter(weights["0.bias"].chunk(ranks)[rank])  # (hidden / ranks,)
        self.second_weight = nn.Parameter(weights["2.weight"].chunk(ranks, dim=1)[rank])  # (dim, hidden / ranks)
        self.second_bias = nn.Parameter(weights["2.bias"])  # (dim,), on every rank

    def forward(self, inputs: Tensor) -> Tensor:
        """Run the block: (rows, dim) -> (rows, dim), equal on every rank."""
        hidden = linear(SumGradients.apply(inputs), self.first_weight, self.first_bias).relu()  # (rows, hidden / ranks)
        return SumOutputs.apply(linear(hidden, self.second_weight)) + self.second_bias  # the bias once, not for every rank


def block() -> nn.Sequential:
    """Build the uncut block, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, DIM)).double()


def num_block_parameters() -> int:
    """Return the number of parameters of the uncut block."""
    return 2 * DIM * HIDDEN + HIDDEN + DIM


def batch() -> tuple[Tensor, Tensor]:
    """Return inputs and targets (rows, dim), the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(2, ROWS, DIM, generator=generator, dtype=torch.float64)
    return inputs.requires_grad_(), targets


def output_and_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Run forward and backward. Returns the output as "Y", and the gradients by name."""
    inputs, targets = batch()
    output = module(inputs)
    mse_loss(output, targets).backward()
    gradients = {f"{name}.grad": parameter.grad for name, parameter in [("X", inputs), *module.named_parameters()]}
    return {"Y": output.detach(), **{name: gradient for name, gradient in gradients.items() if gradient is not None}}


def run_declared_block() -> dict[str, Tensor]:
    """Cut the block by a plan: how to cut which layer, over which ranks. The all-reduces follow from the plan."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}  # the layers' names
    cut = parallelize_module(block(), mesh, plan)  # the parameters are DTensors now: one tensor, a part on each rank
    tensors = output_and_gradients(cut)
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in tensors.items()}


class ComparedPart(NamedTuple):
    """The comparison of a tensor: its shapes, and the errors by hand and declared, relative to its largest element."""

    uncut: tuple[int, ...]  # shape in the uncut block
    part: tuple[int, ...]  # shape on a rank
    errors: tuple[float, float]


class RankResult(NamedTuple):
    """The results of one rank."""

    compared: dict[str, ComparedPart]
    num_equal_outputs: int  # elements with the bits of the uncut block's output
    all_reduce_bytes: list[int]
    num_parameters: int


def compare_blocks() -> RankResult:
    """Run the block uncut, by hand and declared, and compare this rank's tensors."""
    topology = ps.comms.init_distributed(backend="gloo")
    rank, ranks = topology.rank, topology.world_size
    all_reduce_bytes.clear()
    cut_block = CutBlock(block(), rank, ranks)
    tensors, hand_tensors = output_and_gradients(block()), output_and_gradients(cut_block)
    declared_tensors = run_declared_block()
    compared = {}
    for (name, uncut), part, declared in zip(tensors.items(), hand_tensors.values(), declared_tensors.values(), strict=True):
        cut_dims = [dim for dim in range(uncut.dim()) if uncut.shape[dim] != part.shape[dim]]
        uncut_part = uncut.chunk(ranks, dim=cut_dims[0])[rank] if cut_dims else uncut
        hand_error, declared_error = (
            ((tensor - expected).abs().max() / expected.abs().max()).item()
            for tensor, expected in ((part, uncut_part), (declared, uncut))
        )
        compared[name] = ComparedPart(tuple(uncut.shape), tuple(part.shape), (hand_error, declared_error))
    num_equal = int((hand_tensors["Y"] == tensors["Y"]).sum().item())
    num_parameters = sum(parameter.numel() for parameter in cut_block.parameters())
    return RankResult(compared, num_equal, list(all_reduce_bytes), num_parameters)


if __name__ == "__main__":
    main()
