"""Lab 15: replicas without copies, FSDP by hand.

Each replica (lab 11) holds all weights, all gradients and all of Adam's averages. With full sharding each of P ranks holds a
P-th of all three. Before a layer runs, the ranks gather its weight; after it ran, they free it. The backward gathers the weight
again, and reduce-scatters the gradient, so that each rank gets the sum of its part. The lab trains by hand, by torch's
`fully_shard`, and in a pipeline, and measures the memory that sharding saves and the bytes it sends.

    penstock lab 15
    python -m penstock.learn.labs.lab15_fsdp
    torchrun --nproc-per-node 4 -m penstock.learn.labs.lab15_fsdp

Try: keep the weight from the forward until the backward (ZeRO's second stage). How much less is sent, and how much more held?
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

import penstock as ps
from penstock.learn import collectives
from penstock.learn.collectives import RankGroup
from penstock.learn.lab_helpers import check, on_ranks, say

RANKS = 4
DIM, LAYERS, ROWS, STEPS = 32, 8, 8, 5  # rows of each rank; DIM is a multiple of the ranks
METHODS = "by hand", "by torch", "in a pipeline"
EXACT = 1e-12  # error of float64 sums in another order


def main() -> None:
    """Train sharded by hand, by torch and in a pipeline; compare weights with one process, and memory and bytes sent."""
    say(f"Lab 15: {RANKS} ranks, each with a {RANKS}th of every weight\n")
    shards = on_ranks(train_all, RANKS)
    weights = 8 * LAYERS * DIM**2
    say("Bytes of a rank:                      held always   gathered at once   sent in a step")
    all_reduce_bytes = 2 * (RANKS - 1) * weights // RANKS
    say(f"  replicas, all-reduce in a ring {4 * weights:16,} {'-':>18} {all_reduce_bytes:16,}")
    say(f"  sharded, by hand               {shards[0].held_bytes:16,} {shards[0].peak_gathered:18,} {shards[0].sent:16,}")
    check(
        all(shard.held_bytes == 4 * weights // RANKS for shard in shards),
        f"a rank holds a {RANKS}th of weights, gradients and Adam's two averages",
        f"the ranks hold {[shard.held_bytes for shard in shards]} bytes, not {4 * weights // RANKS}",
    )
    check(
        all(shard.peak_gathered == 8 * DIM**2 for shard in shards),
        "a rank never holds more than one gathered weight",
        f"the ranks had {[shard.peak_gathered for shard in shards]} bytes of whole weights at once, not {8 * DIM**2}",
    )
    check(
        all(2 * shard.sent == 3 * all_reduce_bytes for shard in shards),
        "it sends 1.5 times the bytes of an all-reduce: two all-gathers and a reduce-scatter instead of one of each",
        f"the ranks sent {[shard.sent for shard in shards]} bytes in a step, not {3 * all_reduce_bytes // 2}",
    )
    max_errors = {method: max(shard.max_errors[method] for shard in shards) for method in METHODS}
    say(f"\nAfter {STEPS} steps, the weights compared with those of one process on all {RANKS * ROWS} rows:")
    for method, error in max_errors.items():
        check(error < EXACT, f"{method}: {error:.0e} off", f"{method} the weights are {error:.0e} off those of one process")
    say("By torch: fully_shard(layer, mesh=mesh) for each layer, then fully_shard(model, mesh=mesh). In a pipeline:")
    say('  ps.Pipeline(model, loss, "1f1b", 4, mesh=ps.comms.init_mesh(pp=2, dp=2), data_parallel="fsdp")')
    say("There a stage is gathered once a step; gathering it for each of M microbatches would send it 2 M times.")
    say("\nMemory of a rank for 10 billion parameters in float32 with Adam (160 GB), on 8 and on 64 ranks:")
    sharded_parts = {"replicas": 0, "ZeRO 1, shards averages": 2, "ZeRO 2, and gradients": 3, "ZeRO 3 = FSDP, and weights": 4}
    for name, num_sharded in sharded_parts.items():
        sizes = [40 * (4 - num_sharded + num_sharded / ranks) for ranks in (8, 64)]
        say(f"  {name:28} {sizes[0]:7.1f} GB {sizes[1]:7.1f} GB")
    say(
        f"\nMeasured: a rank holds {shards[0].held_bytes:,} bytes instead of {4 * weights:,} and sends {shards[0].sent:,} in a "
        f"step instead of {all_reduce_bytes:,}; by hand the weights are those of one process within "
        f"{max_errors['by hand']:.0e}."
    )


class ShardResult(NamedTuple):
    """The results of one rank."""

    held_bytes: int  # its shards of weights, gradients and averages
    peak_gathered: int  # bytes of gathered weights at a time
    sent: int  # bytes in a step
    max_errors: dict[str, float]  # method -> largest difference of its weights from one process


gathered_weights: list["weakref.ref[Tensor]"] = []  # of this process; a reference is empty once the weight is freed
peak_gathered_bytes = [0]


def gather_weight(group: RankGroup, shard: Tensor) -> Tensor:
    """Gather the shards (out / ranks, in) of all ranks. Returns the weight (out, in)."""
    weight = collectives.all_gather(group, shard.detach()).flatten(0, 1)
    gathered_weights.append(weakref.ref(weight))
    live_bytes = sum(live.nbytes for reference in gathered_weights if (live := reference()) is not None)
    peak_gathered_bytes[0] = max(peak_gathered_bytes[0], live_bytes)
    return weight


class ShardedLinear(torch.autograd.Function):
    """Computes y = x Wt. Each rank has a shard of the rows of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, group: RankGroup) -> Tensor:
        """Return y (rows, out) of x (rows, in) and this rank's shard (out / ranks, in)."""
        ctx.save_for_backward(x, shard)  # not the whole weight
        ctx.group = group
        return x @ gather_weight(group, shard).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradient of x (rows, in), and the shard's (out / ranks, in), the mean over the ranks."""
        x, shard = ctx.saved_tensors
        pieces = (gradient.t() @ x).unflatten(0, (ctx.group.ranks, -1))  # a piece for each rank
        shard_gradient = collectives.reduce_scatter(ctx.group, pieces) / ctx.group.ranks
        return gradient @ gather_weight(ctx.group, shard), shard_gradient, None


def model() -> nn.Sequential:
    """Build the uncut model, the same on every rank."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(DIM, DIM, bias=False), nn.Tanh())]
    return nn.Sequential(*layers).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the rows of all ranks: inputs and targets (ranks x rows, dim)."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(RANKS * ROWS, DIM, generator=generator, dtype=torch.float64)
    return inputs, inputs.cos()


def train_all() -> ShardResult:
    """Train by all methods and in one process. Returns this rank's result."""
    group = RankGroup.join()
    sharded, held_bytes, sent_bytes = train_by_hand(group)
    trained_weights = sharded, train_by_torch(group), train_in_a_pipeline()
    uncut_weights = train_uncut()
    max_errors = {
        method: max((weight - uncut_weights[name]).abs().max().item() for name, weight in weights.items())
        for method, weights in zip(METHODS, trained_weights, strict=True)
    }
    return ShardResult(held_bytes, peak_gathered_bytes[0], sent_bytes, max_errors)


def train_by_hand(group: RankGroup) -> tuple[dict[str, Tensor], int, int]:
    """Train with shards by hand. Returns the whole weights, the bytes that a rank holds, and those it sends in a step."""
    shards = {
        name: nn.Parameter(parameter.detach().chunk(RANKS)[group.rank].clone())
        for name, parameter in model().named_parameters()
    }
    optimizer = torch.optim.Adam(shards.values(), lr=0.01)
    for step in range(STEPS):
        group.sent = 0
        inputs, targets = (tensor.chunk(RANKS)[group.rank] for tensor in batch(step))
        hidden = inputs.requires_grad_()
        for shard in shards.values():
            hidden = ShardedLinear.apply(hidden, shard, group).tanh()
        mse_loss(hidden, targets).backward()
        sent_bytes = group.sent
        optimizer.step()
        held_bytes = sum(shard.nbytes + shard.grad.nbytes for shard in shards.values() if shard.grad is not None)
        held_bytes += sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.dim())
        optimizer.zero_grad()
    weights = {name: collectives.all_gather(group, shard.detach()).flatten(0, 1) for name, shard in shards.items()}
    return weights, held_bytes, sent_bytes


def train_by_torch(group: RankGroup) -> dict[str, Tensor]:
    """Train by `fully_shard`. Returns the whole weights."""
    replica, mesh = model(), init_device_mesh("cpu", (RANKS,))
    for layer in [*replica][::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(replica, mesh=mesh)
    optimizer = torch.optim.Adam(replica.parameters(), lr=0.01)
    for step in range(STEPS):
        inputs, targets = (tensor.chunk(RANKS)[group.rank] for tensor in batch(step))
        mse_loss(replica(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_tensors(dict(replica.named_parameters()))


def train_in_a_pipeline() -> dict[str, Tensor]:
    """Train with two stages, each sharded over two ranks. Returns the whole weights of this rank's stage."""
    mesh = ps.comms.init_mesh(pp=2, dp=2)
    pipe = ps.Pipeline(model(), mse_loss, "1f1b", 4, mesh=mesh, data_parallel="fsdp")
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
    for step in range(STEPS):
        inputs, targets = (tensor.chunk(2)[pipe.position.replica] for tensor in batch(step))
        pipe.step(inputs, target=targets)
        optimizer.step()
        optimizer.zero_grad()
    return full_tensors(dict(pipe.named_parameters()))


def full_tensors(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the whole tensor of each parameter, sharded or not."""
    return {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        for name, parameter in parameters.items()
    }


def train_uncut() -> dict[str, Tensor]:
    """Train in one process on all rows. Returns the weights."""
    uncut = model()
    optimizer = torch.optim.Adam(uncut.parameters(), lr=0.01)
    for step in range(STEPS):
        inputs, targets = batch(step)
        mse_loss(uncut(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in uncut.named_parameters()}


if __name__ == "__main__":
    main()
