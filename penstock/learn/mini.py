"""Pipeline parallelism in one file, to be read from top to bottom. Penstock does the same, made safe, general and fast.

    torchrun --nproc-per-node 4 -m penstock.learn.mini              # 1F1B, compared with one process
    torchrun --nproc-per-node 4 -m penstock.learn.mini zb-v 12      # any other table, or my.csv, on 12 microbatches

The model is a list of layers. It is cut into stages, and each rank has one or more of them. The batch is cut into
microbatches. A table lists the actions of every rank, in order: `2F3` is the forward of stage 2 for microbatch 3, `2B3` its
backward. A backward may be split in two: `2I3` computes the gradient of the input, which the previous stage waits for, and
`2W3` those of the weights, which no rank waits for, so they can fill a gap. Each rank runs its row of the table. For each
action it receives what the action needs, computes, and sends the result.
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
# `penstock.schedule.build` makes the tables that have a name. A rule is short: in the best known one a rank runs as many
# forwards as there are ranks after it, then alternates one forward and one backward, then runs the remaining backwards.


def one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> Iterator[str]:
    """Yield the row of a rank in 1F1B."""
    warmup = min(ranks - 1 - rank, microbatches)
    yield from (f"{rank}F{microbatch}" for microbatch in range(warmup))
    for microbatch in range(microbatches - warmup):
        yield from (f"{rank}F{warmup + microbatch}", f"{rank}B{microbatch}")
    yield from (f"{rank}B{microbatch}" for microbatch in range(microbatches - warmup, microbatches))


# ---- a tensor from one rank to another
#
# Sends do not wait. In 1F1B two neighbours send to each other at the same time, an output down and a gradient up: if each
# waited until its message is received, neither would get to its receive. So a sender goes on to compute. Until the step's end
# it keeps the handle, and the tensor, which must not change before it is sent. Every message has a number, its tag, so that
# messages may arrive in any order.


class Messages:
    """Sends and receives of a rank in one step. A tensor between two stages of the rank needs no message."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._local: dict[int, Tensor] = {}
        self._pending: list[tuple[Any, Tensor]] = []

    def send(self, tensor: Tensor, to: int, number: int) -> None:
        """Send `tensor` to the rank `to`: first its shape, which the receiver does not know, then its values."""
        if to == self.rank:
            self._local[number] = tensor
            return
        shape = torch.tensor([tensor.dim(), *tensor.shape, *[0] * (7 - tensor.dim())])
        for part, tag in ((shape, 2 * number), (tensor.contiguous(), 2 * number + 1)):
            self._pending.append((dist.isend(part, to, tag=tag), part))

    def receive(self, source: int, number: int) -> Tensor:
        """Wait for message `number` of the rank `source`, and return its tensor."""
        if source == self.rank:
            return self._local.pop(number)
        shape = torch.empty(8, dtype=torch.int64)
        dist.recv(shape, source, tag=2 * number)
        tensor = torch.empty(shape[1 : 1 + int(shape[0])].tolist())
        dist.recv(tensor, source, tag=2 * number + 1)
        return tensor

    def finish(self) -> None:
        """Wait until all sends have finished."""
        for handle, _ in self._pending:
            handle.wait()


# ---- the backward in two halves
#
# The backward of a linear layer, y = x @ W.T + b, has two products: dy @ W is the gradient of x, which the previous stage waits
# for; dy.T @ x is the gradient of W, which no rank waits for. In I autograd runs as usual, but a linear layer defers its
# second product: it appends the operands (W, x, dy) to a list. W computes the products of that list.

Products = list[tuple[nn.Parameter, Tensor, Tensor]]
deferred_products: Products = []  # of the I that runs now, for its W


class SplitLinear(torch.autograd.Function):
    """`F.linear` whose backward computes the gradients of input and bias, and defers that of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor) -> Tensor:
        """Return x @ weight.T + bias: (.., K), (N, K), (N) -> (.., N)."""
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor]:
        """Return the gradients of x, weight (None: deferred) and bias."""
        x, weight = ctx.saved_tensors
        rows, gradients = x.flatten(0, -2), gradient.flatten(0, -2)
        deferred_products.append((weight, rows, gradients))
        input_gradient = (gradients @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        return input_gradient, None, gradients.sum(0)


def split_backward(model: nn.Module) -> None:
    """Make every linear layer of `model` defer the gradient of its weight."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = partial(SplitLinear.apply, weight=layer.weight, bias=layer.bias)  # type: ignore[method-assign]


def add_weight_gradients(products: Products) -> None:
    """Compute deferred products, and add them to the weights' gradients."""
    for weight, rows, gradients in products:
        gradient = gradients.t() @ rows
        weight.grad = gradient if weight.grad is None else weight.grad + gradient


# ---- one rank
#
# Gradients are those of the mean over the batch. A microbatch's weight is its share of the rows. It is applied once, where the
# backward begins. Autograd adds up the gradients of all microbatches in `.grad`, in the order of the table.


class Rank:
    """The stages of one rank; runs its row of the table."""

    def __init__(self, layers: Sequence[nn.Module], loss_fn: Any, table: Schedule, rank: int) -> None:
        self.table, self.rank, self.loss_fn = table, rank, loss_fn
        cuts = [stage * len(layers) // table.num_stages for stage in range(table.num_stages + 1)]
        self.stages = {s: nn.Sequential(*layers[cuts[s] : cuts[s + 1]]) for s in table.stages_of(rank)}
        for stage in self.stages.values():
            split_backward(stage)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank's stages, for its optimizer."""
        for stage in self.stages.values():
            yield from stage.parameters()

    def step(self, inputs: Tensor, target: Tensor) -> Tensor:
        """Run forward and backward of one batch, add to `.grad`, return the batch's loss. Every rank makes the same call."""
        count = min(self.table.microbatches, len(inputs))
        self.inputs, self.targets = inputs.tensor_split(count), target.tensor_split(count)
        self.shares = [len(piece) / len(inputs) for piece in self.targets]  # of the batch's rows
        self._activations: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (stage, microbatch) -> its input and output
        self._products: dict[tuple[int, int], Products] = {}  # (stage, microbatch) -> deferred by its I
        self.losses: dict[int, Tensor] = {}
        self.messages = Messages(self.rank)
        run = {Kind.F: self.forward, Kind.B: self.backward, Kind.I: self.backward_input, Kind.W: self.backward_weight}
        for kind, stage, microbatch, _ in self.table.actions[self.rank]:
            if microbatch < count:  # a batch of few rows has fewer microbatches
                run[kind](stage, microbatch)
        self.messages.finish()
        total = sum((self.losses[m] * self.shares[m] for m in sorted(self.losses)), torch.zeros(()))
        dist.broadcast(total, self.table.placement[-1])
        return total

    def forward(self, stage: int, microbatch: int) -> None:
        """Run the stage on the previous one's output, and send its own. The last stage computes the loss."""
        value = self.inputs[microbatch] if stage == 0 else self.receive(Kind.F, stage - 1, microbatch).requires_grad_()
        output = self.stages[stage](value)
        if stage == self.table.num_stages - 1:
            output = self.loss_fn(output, self.targets[microbatch])
            self.losses[microbatch] = output.detach()
        else:
            self.send(output.detach(), Kind.F, stage, microbatch, to=stage + 1)
        self._activations[stage, microbatch] = value, output

    def backward_input(self, stage: int, microbatch: int) -> None:
        """Compute the gradient of the stage's input, and send it. The last stage scales it, where the backward begins."""
        value, output = self._activations.pop((stage, microbatch))
        if stage == self.table.num_stages - 1:
            gradient = torch.full_like(output, self.shares[microbatch])
        else:
            gradient = self.receive(Kind.B, stage + 1, microbatch)
        deferred_products.clear()
        output.backward(gradient)
        self._products[stage, microbatch] = list(deferred_products)
        if stage > 0:
            assert value.grad is not None
            self.send(value.grad, Kind.B, stage, microbatch, to=stage - 1)

    def backward_weight(self, stage: int, microbatch: int) -> None:
        """Compute the gradients of the stage's weights."""
        add_weight_gradients(self._products.pop((stage, microbatch)))

    def backward(self, stage: int, microbatch: int) -> None:
        """Run both halves of the backward."""
        self.backward_input(stage, microbatch)
        self.backward_weight(stage, microbatch)

    def send(self, tensor: Tensor, kind: Kind, stage: int, microbatch: int, to: int) -> None:
        """Send the result of an action to the stage `to`."""
        self.messages.send(tensor, self.table.placement[to], self.number(kind, stage, microbatch))

    def receive(self, kind: Kind, stage: int, microbatch: int) -> Tensor:
        """Receive the result of that action."""
        return self.messages.receive(self.table.placement[stage], self.number(kind, stage, microbatch))

    def number(self, kind: Kind, stage: int, microbatch: int) -> int:
        """Return the number of the message that this action sends."""
        return 2 * (stage * self.table.microbatches + microbatch) + (kind is Kind.B)


# ---- try it: ten training steps, compared with one process that has the whole model


def make_layers(width: int = 64, depth: int = 16) -> list[nn.Module]:
    """Return the layers of a small model, the same on every rank."""
    torch.manual_seed(0)
    return [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]


def main(name: str = "1f1b", microbatches: str = "8") -> None:
    """Train for ten steps. Rank 0 prints the loss, and that of the whole model in one process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks, count = dist.get_rank(), dist.get_world_size(), int(microbatches)
    if name == "mine":  # the rule above, as a table
        actions = tuple(tuple(map(Action.parse, one_forward_one_backward(r, ranks, count))) for r in range(ranks))
        table = Schedule("mine", tuple(range(ranks)), count, actions)
    else:
        table = Schedule.from_csv(name) if name.endswith(".csv") else build(name, ranks=ranks, microbatches=count)
    pipeline, uncut = Rank(make_layers(), nn.functional.mse_loss, table, rank), nn.Sequential(*make_layers())
    optimizers = [torch.optim.Adam(pipeline.parameters(), lr=3e-3), torch.optim.Adam(uncut.parameters(), lr=3e-3)]
    for step in range(10):
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
        target = 0.8 * inputs[:, :1].sign().expand_as(inputs)
        loss = pipeline.step(inputs, target)
        uncut_loss = torch.zeros(())
        for rows, labels in zip(inputs.tensor_split(table.microbatches), target.tensor_split(table.microbatches), strict=True):
            share, microbatch_loss = len(rows) / len(inputs), nn.functional.mse_loss(uncut(rows), labels)
            microbatch_loss.backward(torch.full_like(microbatch_loss, share))
            uncut_loss += microbatch_loss.detach() * share
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        equal = torch.equal(loss, uncut_loss)
        if rank == 0:
            print(f"step {step + 1}: loss {loss:.6f}, one process {uncut_loss:.6f}, the same bits: {equal}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
