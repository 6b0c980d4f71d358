"""Lab 13: two axes: 2 x 2, pipeline x data.

Four ranks as two pipelines of two stages. Each pipeline has a share of the batch. Along one axis of the mesh, activations and
gradients pass from stage to stage for every microbatch (labs 3 to 6). Along the other, the replicas of a stage sum their
gradients once a step (lab 11). The lab trains by hand and by Penstock, and compares both with one process. How much does a
rank hold, idle and send in a mesh of another shape?

    penstock lab 13
    python -m penstock.learn.labs.lab13_two_axes
    torchrun --nproc-per-node 4 -m penstock.learn.labs.lab13_two_axes

Try: an all-reduce after every microbatch instead of once a step. Does anything but the number of bytes change?
"""

import inspect
from textwrap import indent
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

import penstock as ps
from penstock.learn.lab_helpers import check, on_ranks, percent, say
from penstock.learn.labs.lab11_data_parallel import flat_gradients, set_gradients

STAGES, REPLICAS = 2, 2
RANKS = STAGES * REPLICAS
DIM, LAYERS, CLASSES = 16, 8, 4
REPLICA_ROWS = (10, 6)  # of each replica
MICROBATCHES, STEPS = 4, 10
EXACT = 1e-12  # of float64 sums in another order


def main() -> None:
    """Train two pipelines by hand and by Penstock; then compare meshes of other shapes."""
    say(f"Lab 13: {RANKS} ranks as a mesh, pipeline x data\n\n{MESH_DRAWING}")
    shares = " and ".join(map(str, REPLICA_ROWS))
    say(f"By hand: {STEPS} steps of {sum(REPLICA_ROWS)} rows, {shares} for the replicas, each in {MICROBATCHES} microbatches.")
    results = on_ranks(train_all_ways, RANKS)
    for rank, result in enumerate(results):
        stage, replica = divmod(rank, REPLICAS)
        bytes_of_a_step = f"{result.sent_bytes:5,} bytes sent, {result.gradient_bytes:,} bytes of gradients summed"
        say(f"  rank {rank}, stage {stage} of replica {replica}: in a step {bytes_of_a_step}")
    hand_error = check_weights([result.hand_weights for result in results], results[0].uncut_weights)
    say(f"\nBy Penstock:\n\n{indent(inspect.getsource(train_by_penstock), '  ')}")
    penstock_error = check_weights([result.penstock_weights for result in results], results[0].uncut_weights)
    compare_meshes()
    say(
        f"\nMeasured: after {STEPS} steps of 2 x 2 ranks the weights are those of one process within {hand_error:.0e}, by "
        f"Penstock within {penstock_error:.0e}, and replicas are equal bit by bit; in a step rank 0 sends "
        f"{results[0].sent_bytes:,} bytes to the next stage, and sums {results[0].gradient_bytes:,} with its replica."
    )


MESH_DRAWING = """\
               replica 0     replica 1
  stage 0       rank 0  =====  rank 1      ===  gradients of the weights, summed once a step
                  |              |          |   activations down and gradients up, each microbatch
  stage 1       rank 2  =====  rank 3
"""

Weights = dict[str, Tensor]  # by name in the uncut model


def model() -> nn.Sequential:
    """Build the uncut model, the same on every rank."""
    torch.manual_seed(0)
    return ps.model.mlp(DIM, LAYERS, CLASSES).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the whole batch of a step: inputs (rows, dim), targets (rows,)."""
    generator, rows = torch.Generator().manual_seed(step), sum(REPLICA_ROWS)
    return torch.randn(rows, DIM, generator=generator).double(), torch.randint(CLASSES, (rows,), generator=generator)


def replica_batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    """Return a replica's rows of the batch of a step."""
    inputs, targets = batch(step)
    return inputs.split(REPLICA_ROWS)[replica], targets.split(REPLICA_ROWS)[replica]


def train_by_hand(stage: int, replica: int) -> tuple[Weights, int, int]:
    """Train as one of four ranks. Returns the weights, and the bytes that a step sends and the bytes it sums."""
    mesh = init_device_mesh("cpu", (STAGES, REPLICAS), mesh_dim_names=("pp", "dp"))
    half = ps.partition.split(model(), STAGES)[stage]
    optimizer = torch.optim.SGD(half.parameters(), lr=0.1, momentum=0.9)
    peer = int(mesh.mesh[1 - stage, replica])  # the rank of the other stage of this pipeline
    for step in range(STEPS):
        sent_bytes = run_gpipe_step(half, stage, peer, *replica_batch(step, replica))
        gradients = flat_gradients(half)
        dist.all_reduce(gradients, group=mesh.get_group("dp"))  # over the replicas of this stage
        set_gradients(half, gradients)
        optimizer.step()
        optimizer.zero_grad()
    return dict(half.named_parameters()), sent_bytes, gradients.nbytes


def run_gpipe_step(half: nn.Module, stage: int, peer: int, inputs: Tensor, targets: Tensor) -> int:
    """Run a step of GPipe on one of two stages, which adds to the gradients. Returns the bytes sent."""
    microbatches = inputs.tensor_split(MICROBATCHES)
    if stage == 0:
        outputs = [half(microbatch) for microbatch in microbatches]
        for output in outputs:
            ps.comms.send_tensor(output, dest=peer)
        for output in outputs:
            output.backward(ps.comms.recv_tensor(output.shape, src=peer, dtype=output.dtype))
        return sum(output.nbytes for output in outputs)
    cut_inputs = [
        ps.comms.recv_tensor((len(microbatch), DIM), src=peer, dtype=microbatch.dtype).requires_grad_()
        for microbatch in microbatches
    ]
    for cut_input, target in zip(cut_inputs, targets.tensor_split(MICROBATCHES), strict=True):
        loss = cross_entropy(half(cut_input), target, reduction="sum") / sum(REPLICA_ROWS)  # the rows of all replicas
        loss.backward()
        assert cut_input.grad is not None
        ps.comms.send_tensor(cut_input.grad, dest=peer)
    return sum(cut_input.nbytes for cut_input in cut_inputs)


def train_by_penstock(replica: int) -> Weights:
    """Train on a mesh, with this replica's rows. Returns the weights of this rank."""
    mesh = ps.comms.init_mesh(pp=STAGES, dp=REPLICAS)
    pipe = ps.Pipeline(model(), cross_entropy, "1f1b", MICROBATCHES, mesh=mesh)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        inputs, targets = replica_batch(step, replica)
        pipe.step(inputs, target=targets)
        optimizer.step()
        optimizer.zero_grad()
    return dict(pipe.named_parameters())


def train_uncut() -> Weights:
    """Train in one process, on the whole batches. Returns the weights."""
    uncut = model()
    optimizer = torch.optim.SGD(uncut.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        inputs, targets = batch(step)
        cross_entropy(uncut(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(uncut.named_parameters())


class TrainingResult(NamedTuple):
    """The weights of one rank after training, and the bytes of a step by hand."""

    hand_weights: Weights
    penstock_weights: Weights
    uncut_weights: Weights
    sent_bytes: int
    gradient_bytes: int  # that an all-reduce sums


def train_all_ways() -> TrainingResult:
    """Train by hand, by Penstock and in one process."""
    topology = ps.comms.init_distributed(backend="gloo")
    stage, replica = divmod(topology.rank, REPLICAS)
    hand_weights, sent_bytes, gradient_bytes = train_by_hand(stage, replica)
    all_weights = (hand_weights, train_by_penstock(replica), train_uncut())
    hand_weights, penstock_weights, uncut_weights = (
        {name: weight.detach() for name, weight in weights.items()} for weights in all_weights
    )
    return TrainingResult(hand_weights, penstock_weights, uncut_weights, sent_bytes, gradient_bytes)


def check_weights(rank_weights: list[Weights], uncut: Weights) -> float:
    """Check that replicas are equal, and equal to one process to rounding. Returns the largest error."""
    replicas = [rank_weights[stage * REPLICAS : (stage + 1) * REPLICAS] for stage in range(STAGES)]
    different_names = [
        name
        for first_replica, *other_replicas in replicas
        for name in first_replica
        if not all(torch.equal(first_replica[name], replica[name]) for replica in other_replicas)
    ]
    check(not different_names, "replicas are equal bit by bit", f"replicas have different {', '.join(different_names)}")
    max_error = max((weight - uncut[name]).abs().max().item() for weights in rank_weights for name, weight in weights.items())
    complete = {name for weights in rank_weights for name in weights} == set(uncut)
    check(
        complete and max_error < EXACT,
        f"all weights are those of one process, within {max_error:.0e}",
        f"the weights are {max_error:.0e} off",
    )
    return max_error


def compare_meshes() -> None:
    """Print what a rank holds, idles and sends in meshes of other shapes."""
    weights, activations = 8 * sum(parameter.numel() for parameter in model().parameters()), 8 * sum(REPLICA_ROWS) * DIM
    say(f"\nOther meshes of {RANKS} ranks, with the same batch in the same microbatches (1f1b, simulated). Bytes of a rank:\n")
    say("  pipeline x data    weights    bubble    activations sent    gradients sent, in a ring")
    bubbles = []
    for stages in (4, 2, 1):
        replicas = RANKS // stages
        table = ps.schedule.build("1f1b", ranks=stages, microbatches=REPLICAS * MICROBATCHES // replicas)
        bubbles.append(ps.schedule.simulate(table).bubble)
        num_neighbours = min(2, stages - 1)  # to which a rank in the middle sends
        ring_bytes = 2 * (replicas - 1) * (weights // stages) // replicas
        sent_bytes = num_neighbours * activations // replicas
        cells = f"{weights // stages:10,} {percent(bubbles[-1]):>9} {sent_bytes:19,} {ring_bytes:24,}"
        say(f"  {stages} x {replicas}          {cells}")
    say("Activations are sent for each microbatch and grow with the batch; gradients once a step, and grow with the model.")
    falling = bubbles == sorted(bubbles, reverse=True) and len(set(bubbles)) == len(bubbles)
    check(falling, "the shorter the pipeline, the smaller the bubble, and the more weights on a rank", f"bubbles of {bubbles}")


if __name__ == "__main__":
    main()
