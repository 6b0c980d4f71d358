"""Lab 15: replicas without copies, FSDP by hand.

Replicas (lab 11) each hold all weights, all gradients and all of Adam's averages. Fully sharded, each of P ranks holds a P-th
of all three. Before a layer runs, the ranks gather its weight; after that they let it go; its backward gathers it once more,
and sums the gradients so that each rank gets its own part: a reduce-scatter. By hand, by torch's `fully_shard`, and in a
pipeline. What does it save, and what does it send?

    penstock lab 15
    python -m penstock.learn.labs.lab15_fsdp
    torchrun --nproc-per-node 4 -m penstock.learn.labs.lab15_fsdp

Try: keep the weight from the forward until the backward (ZeRO's second stage). What is sent less, and what is held more?
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
WAYS = "by hand", "by torch", "in a pipeline"
EXACT = 1e-12  # of float64 sums in another order


def main() -> None:
    """The same training by hand, by torch and in a pipeline, beside one process; then what each way holds and sends."""
    say(f"Lab 15: {RANKS} ranks, each with a {RANKS}th of every weight\n")
    shards = on_ranks(train_all, RANKS)
    weights = 8 * LAYERS * DIM**2
    say("Bytes of a rank:                      held always   gathered at once   sent in a step")
    ring = 2 * (RANKS - 1) * weights // RANKS
    say(f"  replicas, all-reduce in a ring {4 * weights:16,} {'-':>18} {ring:16,}")
    say(f"  sharded, by hand               {shards[0].held:16,} {shards[0].gathered:18,} {shards[0].sent:16,}")
    check(
        all(shard.held == 4 * weights // RANKS for shard in shards),
        f"a rank holds a {RANKS}th of weights, gradients and Adam's two averages",
        f"the ranks hold {[shard.held for shard in shards]} bytes, not {4 * weights // RANKS}",
    )
    check(
        all(shard.gathered == 8 * DIM**2 for shard in shards),
        "and never more than one whole weight beside it",
        f"the ranks had {[shard.gathered for shard in shards]} bytes of whole weights at once, not {8 * DIM**2}",
    )
    check(
        all(2 * shard.sent == 3 * ring for shard in shards),
        "it sends half as much again as an all-reduce: gathered twice, reduce-scattered once",
        f"the ranks sent {[shard.sent for shard in shards]} bytes in a step, not {3 * ring // 2}",
    )
    off = {way: max(shard.off[way] for shard in shards) for way in WAYS}
    say(f"\nAfter {STEPS} steps, the weights against those of one process on all {RANKS * ROWS} rows:")
    for way, error in off.items():
        check(error < EXACT, f"{way}: {error:.0e} off", f"{way} the weights are {error:.0e} off those of one process")
    say("By torch: fully_shard(layer, mesh=mesh) for each layer, then fully_shard(model, mesh=mesh). In a pipeline:")
    say('  ps.Pipeline(model, loss, "1f1b", 4, mesh=ps.comms.init_mesh(pp=2, dp=2), data_parallel="fsdp")')
    say("There a stage is gathered once a step, not for each microbatch: M microbatches would send it 2 M times.")
    say("\nWho holds what, of 10 billion parameters in float32 with Adam (160 GB), on each of 8 and of 64 ranks:")
    ways = {"replicas": 0, "ZeRO 1, averages shared out": 2, "ZeRO 2, and gradients": 3, "ZeRO 3 = FSDP, and weights": 4}
    for name, parts in ways.items():
        sizes = [40 * (4 - parts + parts / ranks) for ranks in (8, 64)]
        say(f"  {name:28} {sizes[0]:7.1f} GB {sizes[1]:7.1f} GB")
    say(
        f"\nMeasured: a rank holds {shards[0].held:,} bytes instead of {4 * weights:,} and sends {shards[0].sent:,} in a step "
        f"instead of {ring:,}; by hand the weights are those of one process within {off['by hand']:.0e}."
    )


class Shard(NamedTuple):
    """What one rank has found."""

    held: int  # bytes: its part of weights, gradients and averages
    gathered: int  # bytes of whole weights at once, at most
    sent: int  # bytes in a step
    off: dict[str, float]  # way -> how far its weights are from those of one process


whole_weights: list["weakref.ref[Tensor]"] = []  # all that were gathered, as far as they live
most_at_once = [0]


def gathered(group: RankGroup, shard: Tensor) -> Tensor:
    """(out / ranks, in) of every rank -> (out, in)."""
    weight = collectives.all_gather(group, shard.detach()).flatten(0, 1)
    whole_weights.append(weakref.ref(weight))
    most_at_once[0] = max(most_at_once[0], sum(value.nbytes for ref in whole_weights if (value := ref()) is not None))
    return weight


class ShardedLinear(torch.autograd.Function):
    """y = x Wt, of whose W each rank has its part of the rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, group: RankGroup) -> Tensor:
        """(rows, in), (out / ranks, in) -> (rows, out)."""
        ctx.save_for_backward(x, shard)  # not the whole weight
        ctx.group = group
        return x @ gathered(group, shard).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """The gradients of x, of this rank's rows, and of the shard: the mean over the ranks."""
        x, shard = ctx.saved_tensors
        pieces = (gradient.t() @ x).unflatten(0, (ctx.group.ranks, -1))  # one for each rank
        tensor = collectives.reduce_scatter(ctx.group, pieces) / ctx.group.ranks
        return gradient @ gathered(ctx.group, shard), tensor, None


def model() -> nn.Sequential:
    """The uncut model, the same on every rank."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(DIM, DIM, bias=False), nn.Tanh())]
    return nn.Sequential(*layers).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """All ranks' rows: inputs and targets, (ranks x rows, dim) each."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(RANKS * ROWS, DIM, generator=generator, dtype=torch.float64)
    return inputs, inputs.cos()


def train_all() -> Shard:
    """The same training in four ways."""
    group = RankGroup.join()
    sharded, held_bytes, sent_bytes = train_by_hand(group)
    trained = sharded, train_by_torch(group), train_in_a_pipeline()
    weights_of_one_process = train_alone()
    off = {
        way: max((weight - weights_of_one_process[name]).abs().max().item() for name, weight in weights.items())
        for way, weights in zip(WAYS, trained, strict=True)
    }
    return Shard(held_bytes, most_at_once[0], sent_bytes, off)


def train_by_hand(group: RankGroup) -> tuple[dict[str, Tensor], int, int]:
    """The weights, gathered in the end; the bytes a rank holds, and sends in a step."""
    named = dict(model().named_parameters())
    shards = {name: nn.Parameter(parameter.detach().chunk(RANKS)[group.rank].clone()) for name, parameter in named.items()}
    optimizer = torch.optim.Adam(shards.values(), lr=0.01)
    for step in range(STEPS):
        group.sent = 0
        inputs, targets = (microbatch.chunk(RANKS)[group.rank] for microbatch in batch(step))
        hidden = inputs.requires_grad_()
        for shard in shards.values():
            hidden = ShardedLinear.apply(hidden, shard, group).tanh()
        mse_loss(hidden, targets).backward()
        sent_size = group.sent
        optimizer.step()
        held_size = sum(shard.nbytes + shard.grad.nbytes for shard in shards.values() if shard.grad is not None)
        held_size += sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.dim())
        optimizer.zero_grad()
    return (
        {name: collectives.all_gather(group, shard.detach()).flatten(0, 1) for name, shard in shards.items()},
        held_size,
        sent_size,
    )


def train_by_torch(group: RankGroup) -> dict[str, Tensor]:
    """The weights after the same steps, by `fully_shard`."""
    replica, mesh = model(), init_device_mesh("cpu", (RANKS,))
    for layer in [*replica][::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(replica, mesh=mesh)
    optimizer = torch.optim.Adam(replica.parameters(), lr=0.01)
    for step in range(STEPS):
        inputs, targets = (microbatch.chunk(RANKS)[group.rank] for microbatch in batch(step))
        mse_loss(replica(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return in_full(dict(replica.named_parameters()))


def train_in_a_pipeline() -> dict[str, Tensor]:
    """This rank's weights after the same steps: two stages, each sharded over two ranks."""
    mesh = ps.comms.init_mesh(pp=2, dp=2)
    pipe = ps.Pipeline(model(), mse_loss, "1f1b", 4, mesh=mesh, data_parallel="fsdp")
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
    for step in range(STEPS):
        inputs, targets = (microbatch.chunk(2)[pipe.position.replica] for microbatch in batch(step))
        pipe.step(inputs, target=targets)
        optimizer.step()
        optimizer.zero_grad()
    return in_full(dict(pipe.named_parameters()))


def in_full(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """The whole of each."""
    return {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        for name, parameter in parameters.items()
    }


def train_alone() -> dict[str, Tensor]:
    """The weights after the same steps of one process on all rows."""
    alone = model()
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.01)
    for step in range(STEPS):
        inputs, targets = batch(step)
        mse_loss(alone(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in alone.named_parameters()}


if __name__ == "__main__":
    main()
