"""Lab 11: data parallel from one all-reduce.

In data parallel each rank has the whole model and a share of the batch. The gradient of a batch is a sum over its rows, so an
all-reduce of the ranks' gradients gives it, and every rank takes the same optimizer step. The weights of that sum need care:
rows count, not ranks. Then the lab does the same in two lines with torch's DistributedDataParallel, which also overlaps the
all-reduce with the backward (lab 18).

    penstock lab 11
    python -m penstock.learn.labs.lab11_data_parallel
    torchrun --nproc-per-node 2 -m penstock.learn.labs.lab11_data_parallel

Try: another seed on each rank before the model is built. What does the all-reduce not correct? How does DDP avoid it?
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
EXACT = 1e-12  # error of float64 sums in another order


def main() -> None:
    """Compare the batch's gradient by hand, by DDP and in one process; then train the replicas."""
    ranks = ranks_here(RANKS)
    say(f"Lab 11: {ranks} replicas, each with its share of the batch\n")
    replicas = on_ranks(run_replica, ranks)
    mean_of_means_error = check_gradients(replicas)
    check_trained_weights(replicas)
    say(
        f"\nMeasured: weighted by rows, the gradient of {ranks} shares is the batch's within {replicas[0].weighted_error:.0e}; "
        f"a mean of means is {percent(mean_of_means_error)} off; after {STEPS} steps the replicas are equal bit by bit."
    )


class Replica(NamedTuple):
    """The results of one rank. Errors are the largest of a gradient, relative to the largest gradient of the whole batch."""

    rows: int
    loss: float
    mean_of_means_error: float
    weighted_error: float
    ddp_error: float
    weights: Tensor  # (parameters,), after training
    uncut_weights: Tensor  # (parameters,), trained by one process on the whole batches


def run_replica() -> Replica:
    """Compute the batch's gradient in three ways, and train, as one rank."""
    topology = ps.comms.init_distributed(backend="gloo")
    rank, ranks = topology.rank, topology.world_size
    inputs, targets = batch(0, ranks)
    rows, total_rows = rows_of_rank(rank), len(inputs)
    num_rows = rows.stop - rows.start

    batch_gradient = uncut_gradient(model(), inputs, targets)
    replica = model()
    loss = cross_entropy(replica(inputs[rows]), targets[rows])  # the mean over this rank's rows
    loss.backward()
    local_gradient = flat_gradients(replica)
    mean_of_means = all_reduce_sum(local_gradient) / ranks
    weighted_sum = all_reduce_sum(local_gradient * (num_rows / total_rows))

    parallel = DistributedDataParallel(model())  # sums the gradients and divides by the number of ranks
    (cross_entropy(parallel(inputs[rows]), targets[rows]) * (num_rows * ranks / total_rows)).backward()
    mean_of_means_error, weighted_error, ddp_error = (
        ((gradient - batch_gradient).abs().max() / batch_gradient.abs().max()).item()
        for gradient in (mean_of_means, weighted_sum, flat_gradients(parallel))
    )
    weights, uncut_weights = train(rank, ranks), train_uncut(ranks)
    return Replica(num_rows, loss.item(), mean_of_means_error, weighted_error, ddp_error, weights, uncut_weights)


def model() -> nn.Module:
    """Build the model, the same on every rank, in float64."""
    torch.manual_seed(0)
    return ps.model.mlp(DIM, LAYERS, CLASSES).double()


def batch(step: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Return the whole batch of a step: inputs (rows, dim), targets (rows,)."""
    generator, rows = torch.Generator().manual_seed(step), rows_of_rank(ranks - 1).stop
    inputs = torch.randn(rows, DIM, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (rows,), generator=generator)


def rows_of_rank(rank: int) -> slice:
    """Return a rank's rows of the batch: ROWS on rank 0, 2 x ROWS on rank 1, and so on."""
    return slice(ROWS * rank * (rank + 1) // 2, ROWS * (rank + 1) * (rank + 2) // 2)


def flat_gradients(module: nn.Module) -> Tensor:
    """Return all gradients as one vector, so that one all-reduce sums them."""
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None])


def uncut_gradient(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the gradient of the mean loss over all rows, as one vector."""
    cross_entropy(module(inputs), targets).backward()
    return flat_gradients(module)


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Return the sum of all ranks' tensors."""
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def train(rank: int, ranks: int) -> Tensor:
    """Train as one of the replicas. Returns the parameters as one vector."""
    replica = model()
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        inputs, targets = batch(step, ranks)
        rows = rows_of_rank(rank)
        loss = cross_entropy(replica(inputs[rows]), targets[rows], reduction="sum") / len(inputs)  # so the shares add up
        loss.backward()
        set_gradients(replica, all_reduce_sum(flat_gradients(replica)))
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(replica.parameters()).detach()


def set_gradients(module: nn.Module, gradients: Tensor) -> None:
    """Set the gradients of `module` from one vector, the inverse of `flat_gradients`."""
    pieces = gradients.split([parameter.numel() for parameter in module.parameters()])
    for parameter, piece in zip(module.parameters(), pieces, strict=True):
        parameter.grad = piece.view_as(parameter)


def train_uncut(ranks: int) -> Tensor:
    """Train in one process on the whole batches. Returns the parameters as one vector."""
    uncut = model()
    optimizer = torch.optim.SGD(uncut.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        uncut_gradient(uncut, *batch(step, ranks))
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(uncut.parameters()).detach()


def check_gradients(replicas: list[Replica]) -> float:
    """Print and check the errors of three ways to the batch's gradient. Returns the error of a mean of means."""
    total_rows = sum(replica.rows for replica in replicas)
    for rank, replica in enumerate(replicas):
        say(
            f"  rank {rank}: {replica.rows:2} of {total_rows} rows, their mean loss {replica.loss:.4f}, "
            f"weight {replica.rows}/{total_rows}"
        )
    rank_0 = replicas[0]
    say("\nThe gradients after one all-reduce, compared with one process and the whole batch:")
    say(f"  a mean of the ranks' means           {percent(rank_0.mean_of_means_error):>7} off")
    say(f"  a sum weighted by rows               {rank_0.weighted_error:7.0e} off")
    say(f"  DDP, the loss weighted by rows       {rank_0.ddp_error:7.0e} off")
    check(
        max(replica.weighted_error for replica in replicas) < EXACT,
        "weighted by rows, the sum of the ranks' gradients is the gradient of the batch",
        f"the weighted sum of the gradients is {rank_0.weighted_error:.0e} off",
    )
    check(
        rank_0.mean_of_means_error > 0.01,
        "a mean of means is another gradient: a row of rank 0 counts more than a row of another rank",
        f"a mean of means is only {rank_0.mean_of_means_error:.0e} off: do the ranks have equal shares?",
    )
    check(
        max(replica.ddp_error for replica in replicas) < EXACT,
        "DDP takes the mean over ranks: right for equal shares; for others weight the loss by rows x ranks / all rows",
        f"DDP's gradient is {rank_0.ddp_error:.0e} off",
    )
    say("DDP, in two lines:")
    say("  replica = DistributedDataParallel(model)  # sends rank 0's weights to all, and averages in every backward")
    say("  (loss(replica(inputs), targets) * rows * ranks / all_rows).backward()")
    return rank_0.mean_of_means_error


def check_trained_weights(replicas: list[Replica]) -> None:
    """Check that the replicas' weights after training are equal, and those of one process."""
    say(f"\n{STEPS} steps, an optimizer on each rank, one all-reduce of {replicas[0].weights.numel()} numbers a step:")
    max_error = (replicas[0].weights - replicas[0].uncut_weights).abs().max().item()
    num_equal = sum(torch.equal(replica.weights, replicas[0].weights) for replica in replicas)
    say(f"  rank 0's weights differ from those of one process by {max_error:.0e}")
    check(
        num_equal == len(replicas),
        "all replicas' weights are equal bit by bit: the same start, the same sum, the same step",
        f"only {num_equal} of {len(replicas)} replicas have the weights of rank 0",
    )
    check(max_error < EXACT, "they are those of one process, to rounding", f"the weights are {max_error:.0e} off")


if __name__ == "__main__":
    main()
