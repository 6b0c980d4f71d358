"""Lab 12: tensor parallel, with its backward.

A layer too large for one device can be cut itself. Of two layers with something elementwise between them, cut the first by
columns and the second by rows: each rank computes some of the hidden features, which no other rank needs, and what they add
to the output. So the forward takes one all-reduce, at its end; and the backward one, at its end, of the input's gradient.
Each is an autograd Function, written out below; what they send is counted. Then the same in ten lines, declared.

    penstock lab 12
    python -m penstock.learn.labs.lab12_tensor_parallel
    torchrun --nproc-per-node 4 -m penstock.learn.labs.lab12_tensor_parallel

Try: leave `SumGradients` out. Which gradients are still right, and what would a layer before this block learn?
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
EXACT = 1e-12  # of float64 sums in another order


def main() -> None:
    """The block by hand, then declared, both against the uncut one."""
    ranks = ranks_here(RANKS)
    say(f"Lab 12: a block of two layers, Y = relu(X A) B, cut over {ranks} ranks\n")
    draw(ranks)
    parts = on_ranks(compare, ranks)
    hand, torchs = show_errors(parts)
    check(hand < EXACT, "the output and every gradient are those of the uncut block", f"by hand they are {hand:.0e} off")
    bits = f"{parts[0].equal_bits} of {ROWS * DIM} outputs"
    say(f"  Not to the bit ({bits}): a sum of {HIDDEN} features is now a sum of {ranks} sums, and the")
    say(f"  order counts: (0.1 + 0.2) + 0.3 is {(0.1 + 0.2) + 0.3}, 0.1 + (0.2 + 0.3) is {0.1 + (0.2 + 0.3)}.")
    count_bytes(parts)
    say(f"\nThe same declared, with DTensor:\n\n{indent(inspect.getsource(declared), '  ')}")
    say(f"The same in JAX, where arrays are sharded (not run here; tried with JAX 0.10):\n\n{JAX}")
    check(torchs < EXACT, "declared, they are those of the uncut block as well", f"declared they are {torchs:.0e} off")
    say(
        f"\nMeasured: each of {ranks} ranks holds {parts[0].held:,} of {parameters():,} parameters; one all-reduce of "
        f"{parts[0].sent[0]:,} bytes in the forward, one of {parts[0].sent[-1]:,} in the backward; output and gradients are "
        f"those of the uncut block within {hand:.0e} by hand, {torchs:.0e} declared."
    )


def draw(ranks: int) -> None:
    """The two cuts, and what is to be done at the block's ends."""
    around = f"({ROWS}, {DIM})"
    start, end = f"X {around} --", f"-- Y {around}"
    for rank in range(ranks):
        middle = f"+-- A{rank} -> ({ROWS}, {HIDDEN // ranks}) -> relu -> B{rank} -> {around} --+"
        say(f"  rank {rank}    {start if rank == 0 else ' ' * len(start)}{middle}{end if rank == 0 else ''}")
    gap = len(middle) - 1
    for way, left_end, right_end in (("forward", "as it is", "all-reduce"), ("backward", "all-reduce", "as it is")):
        say(f"  {way:10}{' ' * len(start)}{left_end:{gap}}{right_end}")
    say("  A is 0.weight and cut by columns, B is 2.weight and cut by rows; torch keeps them transposed.\n")


def show_errors(parts: list["Part"]) -> tuple[float, float]:
    """Everything compared, the worst rank's errors; returns the largest of those by hand, and declared."""
    say("What the uncut block has, what a rank has, and how far off the worst rank is (float64):\n")
    say(f"  {'':16}{'uncut':12}{'a rank':12}{'by hand':>8}{'declared':>10}")
    largest = [0.0, 0.0]
    for name, pair in parts[0].compared.items():
        errors = [max(part.compared[name].off[way] for part in parts) for way in (0, 1)]
        largest = [max(two) for two in zip(largest, errors, strict=True)]
        say(f"  {name:16}{pair.uncut!s:12}{pair.part!s:12}{errors[0]:8.0e}{errors[1]:10.0e}")
    return largest[0], largest[1]


def count_bytes(parts: list["Part"]) -> None:
    """What the two all-reduces sum, beside what data parallel would."""
    size, weights = 8 * ROWS * DIM, 8 * parameters()
    say(f"\nA step sums {2 * size:,} bytes over the ranks, activations of {ROWS} rows, and everybody waits for them. Data")
    say(f"parallel (lab 11) sums the gradients of all weights, {weights:,} bytes, and nobody need wait; it has less to sum")
    say(f"from {weights // (16 * DIM)} rows on. So tensor parallel is for the fastest links, those within a machine.")
    check(
        all(part.sent == [size, size] for part in parts),
        f"one all-reduce each way, of rows x dim numbers: {size:,} bytes",
        f"every rank should sum {size} bytes each way; they summed {[part.sent for part in parts]}",
    )


JAX = """\
  mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))  # Auto: the compiler finds what must be sent
  A = jax.device_put(A, NamedSharding(mesh, P(None, "tensor")))  # (dim, hidden): columns
  B = jax.device_put(B, NamedSharding(mesh, P("tensor", None)))  # (hidden, dim): rows
  loss, gradients = jax.jit(jax.value_and_grad(block, argnums=(0, 1, 2)))(A, B, X, targets)  # one program for all devices

torch: the plan names layers, a layer's style says what it sends, and a DTensor knows how it lies. JAX: arrays are laid out,
nothing is said of layers, and the compiler derives the same two all-reduces. Data parallel and FSDP are other layouts of the
same program there. A pipeline is not: each device runs other code at other times, so both write it out, as a schedule.
"""


class SumGradients(torch.autograd.Function):
    """The input, as it is. Every rank's part of the block has a gradient for it; they add up."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        """(rows, dim) -> the same."""
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """(rows, dim), by a part -> (rows, dim), by all."""
        return all_reduce(gradient)


class SumOutputs(torch.autograd.Function):
    """The sum of all ranks' parts. The gradient of a sum is that of each part, so it passes as it is.

    (Lab 10 has all-reduce as its own backward: that is for a loss on every rank, all of which count. Here all ranks compute
    the same loss, which counts once.)
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        """(rows, dim), a part -> (rows, dim), the sum."""
        return all_reduce(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """(rows, dim) -> the same."""
        return gradient


sent: list[int] = []  # bytes of each all-reduce of this process


def all_reduce(part: Tensor) -> Tensor:
    """The sum over all ranks, counted."""
    total = part.clone()
    dist.all_reduce(total)
    sent.append(total.nbytes)
    return total


class CutBlock(nn.Module):
    """A rank's part of a block: some hidden features, and what they add to the output."""

    def __init__(self, uncut: nn.Module, rank: int, ranks: int) -> None:
        super().__init__()
        weights = {name: parameter.detach() for name, parameter in uncut.named_parameters()}
        self.up = nn.Parameter(weights["0.weight"].chunk(ranks, dim=0)[rank])  # (hidden / ranks, dim)
        self.first_bias = nn.Parameter(weights["0.bias"].chunk(ranks)[rank])  # (hidden / ranks,)
        self.second = nn.Parameter(weights["2.weight"].chunk(ranks, dim=1)[rank])  # (dim, hidden / ranks)
        self.second_bias = nn.Parameter(weights["2.bias"])  # (dim,), on every rank

    def forward(self, inputs: Tensor) -> Tensor:
        """(rows, dim) -> the same, on every rank."""
        hidden = linear(SumGradients.apply(inputs), self.up, self.first_bias).relu()  # (rows, hidden / ranks)
        return SumOutputs.apply(linear(hidden, self.second)) + self.second_bias  # the bias once, not once a rank


def block() -> nn.Sequential:
    """The uncut block, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, DIM)).double()


def parameters() -> int:
    """Of the uncut block."""
    return 2 * DIM * HIDDEN + HIDDEN + DIM


def batch() -> tuple[Tensor, Tensor]:
    """Inputs and targets, (rows, dim) each, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(2, ROWS, DIM, generator=generator, dtype=torch.float64)
    return inputs.requires_grad_(), targets


def outcome(module: nn.Module) -> dict[str, Tensor]:
    """Output and gradients of a forward and backward."""
    inputs, targets = batch()
    output = module(inputs)
    mse_loss(output, targets).backward()
    gradients = {f"{name}.grad": parameter.grad for name, parameter in [("X", inputs), *module.named_parameters()]}
    return {"Y": output.detach(), **{name: gradient for name, gradient in gradients.items() if gradient is not None}}


def declared() -> dict[str, Tensor]:
    """The block cut by torch: which layer how, over which ranks. The all-reduces follow from that."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}  # the layers' names
    cut = parallelize_module(block(), mesh, plan)  # the parameters are DTensors now: one tensor, a part on each rank
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in outcome(cut).items()}


class ComparedPart(NamedTuple):
    """Something of the uncut block and of a rank: shapes; by how much of its largest it is off, by hand and declared."""

    uncut: tuple[int, ...]
    part: tuple[int, ...]
    off: tuple[float, float]


class Part(NamedTuple):
    """What one rank has found."""

    compared: dict[str, ComparedPart]
    equal_bits: int  # outputs
    sent: list[int]
    held: int  # parameters


def compare() -> Part:
    """The block uncut, by hand and declared, on this rank."""
    topology = ps.comms.init_distributed(backend="gloo")
    rank, ranks = topology.rank, topology.world_size
    sent.clear()
    cut_block = CutBlock(block(), rank, ranks)
    uncut, hand, torchs = outcome(block()), outcome(cut_block), declared()
    compared = {}
    for (name, full_value), part, full in zip(uncut.items(), hand.values(), torchs.values(), strict=True):
        shared = [dim for dim, (all_of, some) in enumerate(zip(full_value.shape, part.shape, strict=True)) if all_of != some]
        full_part = full_value.chunk(ranks, dim=shared[0])[rank] if shared else full_value
        off = [
            ((value - right).abs().max() / right.abs().max()).item() for value, right in ((part, full_part), (full, full_value))
        ]
        compared[name] = ComparedPart(tuple(full_value.shape), tuple(part.shape), (off[0], off[1]))
    equal = (hand["Y"] == uncut["Y"]).sum().item()
    return Part(compared, int(equal), list(sent), sum(parameter.numel() for parameter in cut_block.parameters()))


if __name__ == "__main__":
    main()
