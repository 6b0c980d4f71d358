"""Pipeline parallelism in one file: read it from top to bottom. The whole of Penstock is this, made safe, general and fast.

    torchrun --nproc-per-node 4 -m penstock.learn.mini              # 1F1B, a loss that falls, the bits of one process
    torchrun --nproc-per-node 4 -m penstock.learn.mini zb-v 12      # any other table, on 12 microbatches

The model is a list of layers. It is cut into stages, and each rank has one or more of them. The batch is cut into
microbatches. A table says, rank by rank, what is done in which order: `2F3` is the forward of stage 2 for microbatch 3, `2B3`
its backward. A backward may come in two halves: `2I3` makes the gradient that the stage before waits for, and `2W3` that of the
weights, which nobody waits for, so that it can fill a gap. That is all. Each rank reads its row of the table; for each action
it receives what the action needs, computes, and sends what it made.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.schedule import Schedule, build
from penstock.schedule.table import Action, Kind

# ---- a table
#
# `penstock.schedule.build` makes those that have a name. A rule is short, though. Here is the best known one: run as many
# forwards as there are ranks behind you, then one forward and one backward in turn, then the backwards that are left.


def one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> Iterator[str]:
    """The row of a rank in 1F1B."""
    ahead = min(ranks - 1 - rank, microbatches)
    yield from (f"{rank}F{microbatch}" for microbatch in range(ahead))
    for microbatch in range(microbatches - ahead):
        yield from (f"{rank}F{ahead + microbatch}", f"{rank}B{microbatch}")
    yield from (f"{rank}B{microbatch}" for microbatch in range(microbatches - ahead, microbatches))


# ---- a tensor from one rank to another
#
# Sends do not wait. In 1F1B two neighbours send to each other at the same time, an output down and a gradient up: if each
# waited until its send has been received, neither would come to its receive. So whoever sends goes on to compute. It keeps
# the handle, and the tensor, which must not change on its way, until the step's end. Every message has a number, its tag, so
# that it does not matter which of two arrives first.


class Messages:
    """What a rank has sent in this step; and what its own stages have for each other, which needs no message."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._local: dict[int, Tensor] = {}
        self._pending: list[tuple[Any, Tensor]] = []

    def send(self, tensor: Tensor, to: int, number: int) -> None:
        """Give `tensor` to the rank `to`: its shape first, which the receiver cannot know, then what is in it."""
        if to == self.rank:
            self._local[number] = tensor
            return
        shape = torch.tensor([tensor.dim(), *tensor.shape, *[0] * (7 - tensor.dim())])
        for part, tag in ((shape, 2 * number), (tensor.contiguous(), 2 * number + 1)):
            self._pending.append((dist.isend(part, to, tag=tag), part))

    def receive(self, source: int, number: int) -> Tensor:
        """Wait for the tensor of this number."""
        if source == self.rank:
            return self._local.pop(number)
        shape = torch.empty(8, dtype=torch.int64)
        dist.recv(shape, source, tag=2 * number)
        tensor = torch.empty(shape[1 : 1 + int(shape[0])].tolist())
        dist.recv(tensor, source, tag=2 * number + 1)
        return tensor

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for handle, _ in self._pending:
            handle.wait()


# ---- the backward in two halves
#
# The backward of a linear layer, y = x @ W.T + b, has two products: dy @ W is the gradient of x, which the stage before waits
# for; dy.T @ x is the gradient of W, which nobody waits for. An I lets autograd run as ever, but a linear layer puts its
# second product off, and leaves what it needs, (W, x, dy), in a list. A W runs the products of that list.

Later = list[tuple[nn.Parameter, Tensor, Tensor]]
put_off: Later = []  # what the I that runs now leaves for its W


class SplitLinear(torch.autograd.Function):
    """`F.linear`, whose backward computes the gradient of its input and of its bias, and puts that of its weight off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor) -> Tensor:
        """(.., K), (N, K), (N) -> (.., N)."""
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor]:
        """From the output's gradient those of x, weight and bias."""
        x, weight = ctx.saved_tensors
        rows, gradients = x.flatten(0, -2), gradient.flatten(0, -2)
        put_off.append((weight, rows, gradients))
        input_gradient = (gradients @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        return input_gradient, None, gradients.sum(0)


def split_backward(model: nn.Module) -> None:
    """Have every linear layer of `model` put its weight's gradient off."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = partial(SplitLinear.apply, weight=layer.weight, bias=layer.bias)  # type: ignore[method-assign]


def add_weights(later: Later) -> None:
    """What W does: the products that were put off."""
    for weight, rows, gradients in later:
        gradient = gradients.t() @ rows
        weight.grad = gradient if weight.grad is None else weight.grad + gradient


# ---- one rank
#
# Gradients are those of the whole batch's mean. A microbatch weighs as much as it has rows, and the weight is put in once,
# where its backward begins. Autograd adds the gradients of all microbatches up in `.grad`, in the order of the table.


class Rank:
    """What one rank holds, and how it runs its row of the table."""

    def __init__(self, layers: Sequence[nn.Module], loss_fn: Any, table: Schedule, rank: int) -> None:
        self.table, self.rank, self.loss_fn = table, rank, loss_fn
        cuts = [stage * len(layers) // table.num_stages for stage in range(table.num_stages + 1)]
        self.stages = {s: nn.Sequential(*layers[cuts[s] : cuts[s + 1]]) for s in table.stages_of(rank)}
        for stage in self.stages.values():
            split_backward(stage)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of this rank's stages, for its optimizer."""
        for stage in self.stages.values():
            yield from stage.parameters()

    def step(self, inputs: Tensor, target: Tensor) -> Tensor:
        """Forward and backward of one batch, the same call on every rank; gradients are added up, the loss is returned."""
        count = min(self.table.microbatches, len(inputs))
        self.inputs, self.targets = inputs.tensor_split(count), target.tensor_split(count)
        self.shares = [len(piece) / len(inputs) for piece in self.targets]  # of a microbatch in the batch's mean
        self._activations: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (stage, microbatch) -> its input and output
        self.later: dict[tuple[int, int], Later] = {}
        self.losses: dict[int, Tensor] = {}
        self.messages = Messages(self.rank)
        run = {Kind.F: self.forward, Kind.B: self.backward, Kind.I: self.backward_input, Kind.W: self.backward_weight}
        for kind, stage, microbatch, _ in self.table.actions[self.rank]:
            if microbatch < count:  # a small batch has fewer
                run[kind](stage, microbatch)
        self.messages.finish()
        total = sum((self.losses[m] * self.shares[m] for m in sorted(self.losses)), torch.zeros(()))
        dist.broadcast(total, self.table.placement[-1])
        return total

    def forward(self, stage: int, microbatch: int) -> None:
        """Run the stage on what the one before has made; the last one's output becomes the loss."""
        value = self.inputs[microbatch] if stage == 0 else self.receive(Kind.F, stage - 1, microbatch).requires_grad_()
        output = self.stages[stage](value)
        if stage == self.table.num_stages - 1:
            output = self.loss_fn(output, self.targets[microbatch])
            self.losses[microbatch] = output.detach()
        else:
            self.send(output.detach(), Kind.F, stage, microbatch, to=stage + 1)
        self._activations[stage, microbatch] = value, output

    def backward_input(self, stage: int, microbatch: int) -> None:
        """The gradient of what went into the stage; it is scaled once, where it begins."""
        value, output = self._activations.pop((stage, microbatch))
        if stage == self.table.num_stages - 1:
            gradient = torch.full_like(output, self.shares[microbatch])
        else:
            gradient = self.receive(Kind.B, stage + 1, microbatch)
        put_off.clear()
        output.backward(gradient)
        self.later[stage, microbatch] = list(put_off)
        if stage > 0:
            assert value.grad is not None
            self.send(value.grad, Kind.B, stage, microbatch, to=stage - 1)

    def backward_weight(self, stage: int, microbatch: int) -> None:
        """The gradients of the stage's weights."""
        add_weights(self.later.pop((stage, microbatch)))

    def backward(self, stage: int, microbatch: int) -> None:
        """Both at once."""
        self.backward_input(stage, microbatch)
        self.backward_weight(stage, microbatch)

    def send(self, tensor: Tensor, kind: Kind, stage: int, microbatch: int, to: int) -> None:
        """Give what an action has made to the stage `to`."""
        self.messages.send(tensor, self.table.placement[to], self.number(kind, stage, microbatch))

    def receive(self, kind: Kind, stage: int, microbatch: int) -> Tensor:
        """What that action has made."""
        return self.messages.receive(self.table.placement[stage], self.number(kind, stage, microbatch))

    def number(self, kind: Kind, stage: int, microbatch: int) -> int:
        """A number for the message of each action."""
        return 2 * (stage * self.table.microbatches + microbatch) + (kind is Kind.B)


# ---- try it: ten steps beside one process that has the whole model, and the same bits


def layers_of(width: int = 64, depth: int = 16) -> list[nn.Module]:
    """The layers of a small model, the same on every rank."""
    torch.manual_seed(0)
    return [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]


def main(name: str = "1f1b", microbatches: str = "8") -> None:
    """Train for ten steps; rank 0 says the loss, and that of one process that has the whole model."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks, count = dist.get_rank(), dist.get_world_size(), int(microbatches)
    if name == "mine":  # the rule above, as a table
        rows = tuple(tuple(map(Action.parse, one_forward_one_backward(r, ranks, count))) for r in range(ranks))
        table = Schedule("mine", tuple(range(ranks)), count, rows)
    else:
        table = build(name, ranks=ranks, microbatches=count)
    pipeline = Rank(layers_of(), nn.functional.mse_loss, table, rank)
    uncut = nn.Sequential(*layers_of())
    optimizers = [torch.optim.Adam(pipeline.parameters(), lr=1e-2), torch.optim.Adam(uncut.parameters(), lr=1e-2)]
    for step in range(10):
        inputs, target = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(0)).unbind()
        loss = pipeline.step(inputs, target)
        alone = torch.zeros(())
        for rows_in, rows_out in zip(inputs.tensor_split(count), target.tensor_split(count), strict=True):
            share, piece = len(rows_in) / len(inputs), nn.functional.mse_loss(uncut(rows_in), rows_out)
            piece.backward(torch.full_like(piece, share))
            alone += piece.detach() * share
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}: loss {loss:.6f}, one process {alone:.6f}, the same bits: {torch.equal(loss, alone)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
