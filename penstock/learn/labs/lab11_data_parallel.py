"""Lab 11: data parallel from one all-reduce.

The other way to use several ranks: each has the whole model, and its share of the batch. The gradient of a batch is a sum
over its rows, so the ranks' gradients add up to it: one all-reduce, and every rank takes the same optimizer step. Only the
weights of that sum need care: rows count, not ranks. Then torch's DistributedDataParallel, which is this in two lines.
(It does not wait for the end of the backward either: lab 18.)

    penstock lab 11
    python -m penstock.learn.labs.lab11_data_parallel
    torchrun --nproc-per-node 2 -m penstock.learn.labs.lab11_data_parallel

Try: another seed on each rank before the model is built. What does the all-reduce not mend? What does DDP do about it?
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from penstock.learn.lab_helpers import check, on_ranks, percent, ranks_here, say

RANKS, STEPS = 4, 20
DIM, LAYERS, CLASSES, ROWS = 16, 4, 4, 3  # rank r has (r + 1) x ROWS rows
EXACT = 1e-12  # of float64 sums in another order


def main() -> None:
    """The gradient of a batch from shares of it, by hand and by DDP; then the steps of replicas."""
    ranks = ranks_here(RANKS)
    say(f"Lab 11: {ranks} replicas, each with its share of the batch\n")
    replicas = on_ranks(shares_and_steps, ranks)
    wrong = the_gradient(replicas)
    the_steps(replicas)
    say(
        f"\nMeasured: weighted by rows the gradient of {ranks} shares is the batch's to {replicas[0].weighted:.0e}, a mean of "
        f"means is {percent(wrong)} off; after {STEPS} steps the replicas are equal bit by bit."
    )


class Replica(NamedTuple):
    """What one rank has found: errors of gradients relative to the largest of the whole batch's; parameters in the end."""

    rows: int
    loss: float
    mean_of_means: float
    weighted: float
    ddp: float
    trained: Tensor  # (parameters,)
    alone: Tensor  # the same, trained by one process on the whole batches


def shares_and_steps() -> Replica:
    """One rank's part of all that is compared."""
    topology = ps.comms.init_distributed(backend="gloo")
    rank, ranks = topology.rank, topology.world_size
    inputs, targets = batch(0, ranks)
    rows_of_rank = share(rank)
    rows, total = rows_of_rank.stop - rows_of_rank.start, len(inputs)

    gradient_of_all = gradient(model(), inputs, targets)
    replica = model()
    loss = cross_entropy(replica(inputs[rows_of_rank]), targets[rows_of_rank])  # the mean over this rank's rows
    loss.backward()
    local = flat(replica)
    means = summed(local) / ranks
    weighted = summed(local * (rows / total))

    parallel = DistributedDataParallel(model())  # sums the gradients and divides by the number of ranks
    (cross_entropy(parallel(inputs[rows_of_rank]), targets[rows_of_rank]) * (rows * ranks / total)).backward()
    off = [
        ((value - gradient_of_all).abs().max() / gradient_of_all.abs().max()).item()
        for value in (means, weighted, flat(parallel))
    ]
    return Replica(rows, loss.item(), off[0], off[1], off[2], train(rank, ranks), train_alone(ranks))


def model() -> nn.Module:
    """The same on every rank, in float64."""
    torch.manual_seed(0)
    return ps.model.mlp(DIM, LAYERS, CLASSES).double()


def batch(step: int, ranks: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step: (rows, dim) inputs, (rows,) targets."""
    generator, rows = torch.Generator().manual_seed(step), share(ranks - 1).stop
    inputs = torch.randn(rows, DIM, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (rows,), generator=generator)


def share(rank: int) -> slice:
    """The rows of a rank: ROWS, 2 x ROWS, and so on."""
    return slice(ROWS * rank * (rank + 1) // 2, ROWS * (rank + 1) * (rank + 2) // 2)


def flat(module: nn.Module) -> Tensor:
    """All gradients in one piece, so that one all-reduce takes them all."""
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None])


def gradient(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Of the mean loss over all rows, in one process."""
    cross_entropy(module(inputs), targets).backward()
    return flat(module)


def summed(tensor: Tensor) -> Tensor:
    """The sum of all ranks' tensors."""
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def train(rank: int, ranks: int) -> Tensor:
    """The parameters after some steps as one of the replicas."""
    replica = model()
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        inputs, targets = batch(step, ranks)
        rows = share(rank)
        loss = cross_entropy(replica(inputs[rows]), targets[rows], reduction="sum") / len(inputs)  # so the shares add up
        loss.backward()
        give(replica, summed(flat(replica)))
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(replica.parameters()).detach()


def give(module: nn.Module, gradients: Tensor) -> None:
    """The other way of `flat`."""
    pieces = gradients.split([parameter.numel() for parameter in module.parameters()])
    for parameter, piece in zip(module.parameters(), pieces, strict=True):
        parameter.grad = piece.view_as(parameter)


def train_alone(ranks: int) -> Tensor:
    """The parameters after the same steps of one process on the whole batches."""
    uncut = model()
    optimizer = torch.optim.SGD(uncut.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        gradient(uncut, *batch(step, ranks))
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(uncut.parameters()).detach()


def the_gradient(replicas: list[Replica]) -> float:
    """Three ways to the whole batch's gradient. Returns how far off a mean of means is."""
    total = sum(replica.rows for replica in replicas)
    for rank, replica in enumerate(replicas):
        say(
            f"  rank {rank}: {replica.rows:2} of {total} rows, their mean loss {replica.loss:.4f}, "
            f"weight {replica.rows}/{total}"
        )
    rank_0 = replicas[0]
    say("\nThe gradients after one all-reduce, against one process with the whole batch:")
    say(f"  a mean of the ranks' means           {percent(rank_0.mean_of_means):>7} off")
    say(f"  each weighted by its rows            {rank_0.weighted:7.0e} off")
    say(f"  DDP, the loss weighted by its rows   {rank_0.ddp:7.0e} off")
    check(
        max(replica.weighted for replica in replicas) < EXACT,
        "weighted by rows, the sum of the ranks' gradients is the gradient of the batch",
        f"the weighted sum of the gradients is {rank_0.weighted:.0e} off",
    )
    check(
        rank_0.mean_of_means > 0.01,
        "a mean of means is another gradient: it counts a row of rank 0 more than a row of the others",
        f"a mean of means is only {rank_0.mean_of_means:.0e} off: do the ranks have equal shares?",
    )
    check(
        max(replica.ddp for replica in replicas) < EXACT,
        "DDP takes the mean of the ranks: right for equal shares, for others weight the loss by rows x ranks / all rows",
        f"DDP's gradient is {rank_0.ddp:.0e} off",
    )
    say("DDP, in two lines:")
    say("  replica = DistributedDataParallel(model)  # sends rank 0's weights to all, and sums in every backward")
    say("  (loss(replica(inputs), targets) * rows * ranks / all_rows).backward()")
    return rank_0.mean_of_means


def the_steps(replicas: list[Replica]) -> None:
    """What training leaves on the ranks."""
    say(f"\n{STEPS} steps, each rank its own optimizer, one all-reduce of {replicas[0].trained.numel()} numbers a step:")
    off = (replicas[0].trained - replicas[0].alone).abs().max().item()
    num_equal = sum(torch.equal(replica.trained, replicas[0].trained) for replica in replicas)
    say(f"  rank 0's weights are {off:.0e} off those of one process")
    check(
        num_equal == len(replicas),
        "all replicas' weights are equal bit by bit: the same start, the same sum, the same step",
        f"only {num_equal} of {len(replicas)} replicas have the weights of rank 0",
    )
    check(off < EXACT, "and those of one process, to rounding", f"the weights are {off:.0e} off those of one process")


if __name__ == "__main__":
    main()
