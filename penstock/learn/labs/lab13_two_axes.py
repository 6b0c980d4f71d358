"""Lab 13: two axes: 2 x 2, pipeline x data.

Four ranks, two ways to use them at once: two pipelines of two stages each, side by side, and each has its share of the
batch. Along one axis activations and gradients pass from stage to stage, for every microbatch (labs 3 to 6); along the other
the replicas of a stage add up their gradients, once a step (lab 11). By hand, then as Penstock does it, both against one
process. And what does a rank hold, wait for and send in a mesh of another shape?

    penstock lab 13
    python -m penstock.learn.labs.lab13_two_axes
    torchrun --nproc-per-node 4 -m penstock.learn.labs.lab13_two_axes

Try: the all-reduce after every microbatch instead of once a step. Which numbers change, and which only the bytes?
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
from penstock.learn.labs.lab11_data_parallel import flat, give

STAGES, REPLICAS = 2, 2
RANKS = STAGES * REPLICAS
DIM, LAYERS, CLASSES = 16, 8, 4
SHARES = (10, 6)  # rows of each replica
MICROBATCHES, STEPS = 4, 10
EXACT = 1e-12  # of float64 sums in another order


def main() -> None:
    """Two pipelines side by side, by hand and by Penstock; then the ways to arrange the same ranks."""
    say(f"Lab 13: {RANKS} ranks as a mesh, pipeline x data\n\n{PICTURE}")
    shares = " and ".join(map(str, SHARES))
    say(f"By hand: {STEPS} steps of {sum(SHARES)} rows, {shares} for the replicas, each in {MICROBATCHES} microbatches.")
    results = on_ranks(both, RANKS)
    for rank, result in enumerate(results):
        stage, replica = divmod(rank, REPLICAS)
        bytes_of_a_step = f"{result.sent:5,} bytes sent, {result.summed:,} bytes of gradients summed"
        say(f"  rank {rank}, stage {stage} of replica {replica}: in a step {bytes_of_a_step}")
    hand = check_weights([result.hand for result in results], results[0].alone)
    say(f"\nBy Penstock:\n\n{indent(inspect.getsource(by_penstock), '  ')}")
    penstock = check_weights([result.penstock for result in results], results[0].alone)
    compare_meshes()
    say(
        f"\nMeasured: after {STEPS} steps of 2 x 2 ranks the weights are those of one process within {hand:.0e}, by Penstock "
        f"within {penstock:.0e}, and replicas are equal bit by bit; rank 0 sends {results[0].sent:,} bytes in a step to the "
        f"next stage, and sums {results[0].summed:,} with its replica."
    )


PICTURE = """\
               replica 0     replica 1
  stage 0       rank 0  =====  rank 1      ===  gradients of the weights, summed once a step
                  |              |          |   activations down and gradients up, each microbatch
  stage 1       rank 2  =====  rank 3
"""

Weights = dict[str, Tensor]  # by their names in the uncut model


def model() -> nn.Sequential:
    """The uncut model, the same on every rank."""
    torch.manual_seed(0)
    return ps.model.mlp(DIM, LAYERS, CLASSES).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step: (rows, dim) inputs, (rows,) targets."""
    generator, rows = torch.Generator().manual_seed(step), sum(SHARES)
    return torch.randn(rows, DIM, generator=generator).double(), torch.randint(CLASSES, (rows,), generator=generator)


def share(step: int, replica: int) -> tuple[Tensor, Tensor]:
    """A replica's rows of it."""
    inputs, targets = batch(step)
    return inputs.split(SHARES)[replica], targets.split(SHARES)[replica]


def by_hand(stage: int, replica: int) -> tuple[Weights, int, int]:
    """Train as one of four ranks. Returns the weights, and the bytes a step sends and sums."""
    mesh = init_device_mesh("cpu", (STAGES, REPLICAS), mesh_dim_names=("pp", "dp"))
    half = ps.partition.split(model(), STAGES)[stage]
    optimizer = torch.optim.SGD(half.parameters(), lr=0.1, momentum=0.9)
    peer = int(mesh.mesh[1 - stage, replica])  # the rank of the other stage of this pipeline
    for step in range(STEPS):
        sent_bytes = one_pipeline(half, stage, peer, *share(step, replica))
        gradients = flat(half)
        dist.all_reduce(gradients, group=mesh.get_group("dp"))  # over the replicas of this stage
        give(half, gradients)
        optimizer.step()
        optimizer.zero_grad()
    return dict(half.named_parameters()), sent_bytes, gradients.nbytes


def one_pipeline(half: nn.Module, stage: int, peer: int, inputs: Tensor, targets: Tensor) -> int:
    """GPipe's step of one of two stages; adds to the gradients, returns the bytes sent."""
    microbatches = inputs.tensor_split(MICROBATCHES)
    if stage == 0:
        hidden = [half(microbatch) for microbatch in microbatches]
        for hidden_state in hidden:
            ps.comms.send_tensor(hidden_state, dest=peer)
        for hidden_state in hidden:
            hidden_state.backward(ps.comms.recv_tensor(hidden_state.shape, src=peer, dtype=hidden_state.dtype))
        return sum(hidden_state.nbytes for hidden_state in hidden)
    handed = [
        ps.comms.recv_tensor((len(microbatch), DIM), src=peer, dtype=microbatch.dtype).requires_grad_()
        for microbatch in microbatches
    ]
    for value, target in zip(handed, targets.tensor_split(MICROBATCHES), strict=True):
        loss = cross_entropy(half(value), target, reduction="sum") / sum(SHARES)  # of all rows, those of the other replicas too
        loss.backward()
        assert value.grad is not None
        ps.comms.send_tensor(value.grad, dest=peer)
    return sum(value.nbytes for value in handed)


def by_penstock(replica: int) -> Weights:
    """The same training: a mesh, and this replica's rows."""
    mesh = ps.comms.init_mesh(pp=STAGES, dp=REPLICAS)
    pipe = ps.Pipeline(model(), cross_entropy, "1f1b", MICROBATCHES, mesh=mesh)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        inputs, targets = share(step, replica)
        pipe.step(inputs, target=targets)
        optimizer.step()
        optimizer.zero_grad()
    return dict(pipe.named_parameters())


def alone() -> Weights:
    """The same training in one process, on the whole batches."""
    uncut = model()
    optimizer = torch.optim.SGD(uncut.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        inputs, targets = batch(step)
        cross_entropy(uncut(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(uncut.named_parameters())


class TrainingResult(NamedTuple):
    """One rank: its weights in the end, by hand and by Penstock, those of one process, and the bytes of a step by hand."""

    hand: Weights
    penstock: Weights
    alone: Weights
    sent: int
    summed: int


def both() -> TrainingResult:
    """Train by hand, by Penstock and alone."""
    topology = ps.comms.init_distributed(backend="gloo")
    stage, replica = divmod(topology.rank, REPLICAS)
    hand, sent_bytes, summed = by_hand(stage, replica)
    weights = (hand, by_penstock(replica), alone())
    hand, penstock, alone_weights = ({name: value.detach() for name, value in weight.items()} for weight in weights)
    return TrainingResult(hand, penstock, alone_weights, sent_bytes, summed)


def check_weights(ranks: list[Weights], uncut: Weights) -> float:
    """Those of the replicas against each other, and against one process. Returns how far they are off, at most."""
    replicas = [ranks[stage * REPLICAS : (stage + 1) * REPLICAS] for stage in range(STAGES)]
    apart = [
        name
        for first_replica, *other_replicas in replicas
        for name in first_replica
        if not all(torch.equal(first_replica[name], result[name]) for result in other_replicas)
    ]
    check(not apart, "replicas are equal bit by bit", f"replicas have different {', '.join(apart)}")
    off = max((value - uncut[name]).abs().max().item() for rank in ranks for name, value in rank.items())
    complete = {name for rank in ranks for name in rank} == set(uncut)
    check(complete and off < EXACT, f"all weights are those of one process, within {off:.0e}", f"the weights are {off:.0e} off")
    return off


def compare_meshes() -> None:
    """What a rank holds, idles and sends, by the shape of the mesh."""
    weights, activations = 8 * sum(parameter.numel() for parameter in model().parameters()), 8 * sum(SHARES) * DIM
    say(f"\nOther meshes of {RANKS} ranks, with the same batch in the same microbatches (1f1b, simulated). Bytes of a rank:\n")
    say("  pipeline x data    weights    bubble    activations sent    gradients sent, in a ring")
    bubbles = []
    for stages in (4, 2, 1):
        replicas = RANKS // stages
        table = ps.schedule.build("1f1b", ranks=stages, microbatches=REPLICAS * MICROBATCHES // replicas)
        bubbles.append(ps.schedule.simulate(table).bubble)
        ways = min(2, stages - 1)  # a rank in the middle sends to both sides
        ring = 2 * (replicas - 1) * (weights // stages) // replicas
        cells = f"{weights // stages:10,} {percent(bubbles[-1]):>9} {ways * activations // replicas:19,} {ring:24,}"
        say(f"  {stages} x {replicas}          {cells}")
    say("Activations are sent microbatch by microbatch, and grow with the batch; gradients once a step, and with the model.")
    falling = bubbles == sorted(bubbles, reverse=True) and len(set(bubbles)) == len(bubbles)
    check(falling, "the shorter the pipeline, the smaller the bubble, and the more weights on a rank", f"bubbles of {bubbles}")


if __name__ == "__main__":
    main()
