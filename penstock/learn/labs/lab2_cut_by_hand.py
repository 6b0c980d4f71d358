"""Lab 2: two halves, the gradient carried over by hand, and the memory wall.

A model is cut by three lines: hand over the activation without its history, run the second half's backward, give the
gradient that arrived at the cut to the first half. First in one process, to watch autograd at the cut; then in two,
because that is why one cuts: neither process could hold the whole.

    penstock lab 2
    python -m penstock.learn.labs.lab2_cut_by_hand

Try: leave `detach()` out. Which backward does what now? And without `requires_grad_()`?
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import penstock as ps
from penstock.learn.devices import CAN_LIMIT_MEMORY, limit_memory, warm_up
from penstock.learn.lab_helpers import check, is_printing_process, megabytes, say

LAYERS, CLASSES, ROWS, STEPS = 16, 4, 8, 2
NARROW, WIDE = 64, 1024  # the model to watch, the model that does not fit
DEVICE = 200_000_000  # bytes a process may take for its part of the wide model


def main() -> None:
    """The cut in one process, then the memory wall and two processes that get over it."""
    if not is_printing_process():
        return  # this lab starts its own ranks: one of torchrun's is enough to tell it
    say("Lab 2: two halves, cut by hand\n")
    gradients = watch_the_cut()
    weights = 4 * (LAYERS * (WIDE + 1) * WIDE + (WIDE + 1) * CLASSES)
    say("\nWhy cut at all? The memory wall:")
    say("  10 billion parameters x 4 bytes         =  40 GB  on a device of 24 GB: the weights alone do not fit")
    say("  with the gradients and Adam's averages  = 160 GB  four times as much: 7 devices and a model in 7 pieces")
    say(f"Scaled down: {megabytes(weights)} of weights, {megabytes(4 * weights)} in training; a device has {megabytes(DEVICE)}")
    if not CAN_LIMIT_MEMORY:
        say(f"Measured: all {gradients} gradients are equal bit by bit. (The memory of a process is limited on Linux only.)")
        return
    climb_the_wall()
    say(
        f"\nMeasured: all {gradients} gradients are equal bit by bit; a training of {megabytes(4 * weights)} does not fit into "
        f"{megabytes(DEVICE)}, two halves of {megabytes(2 * weights)} do."
    )


def watch_the_cut() -> int:
    """One step in one process, in two halves. Returns how many gradients were compared with the monolith's."""
    torch.manual_seed(0)
    model = ps.model.mlp(NARROW, LAYERS, CLASSES)
    inputs, targets = torch.randn(ROWS, NARROW), torch.randint(CLASSES, (ROWS,))
    gradients = torch.autograd.grad(cross_entropy(model(inputs), targets), list(model.parameters()))

    first_half, second_half = model[:LAYERS], model[LAYERS:]
    hidden = first_half(inputs)  # (rows, dim)
    describe("what the first half made", hidden)
    handed = hidden.detach().requires_grad_()  # the same memory without its history: all that crosses the cut
    describe("handed over", handed)
    cross_entropy(second_half(handed), targets).backward()  # stops at `handed`, a leaf, and leaves the gradient there
    describe("after the second backward", handed)
    say(f"  gradients in the first half by now: {sum(parameter.grad is not None for parameter in first_half.parameters())}")
    hidden.backward(handed.grad)  # the chain rule goes on where it stopped
    halves = [parameter.grad for parameter in model.parameters()]
    check(
        all(half is not None and torch.equal(half, gradient) for half, gradient in zip(halves, gradients, strict=True)),
        "after the first half's backward every gradient equals the monolith's, bit by bit",
        "the gradients of the two halves differ from the monolith's",
    )
    return len(gradients)


def describe(name: str, tensor: Tensor) -> None:
    """What autograd knows of `tensor`."""
    history = type(tensor.grad_fn).__name__ if tensor.grad_fn else "none"
    grad_shape = str(tuple(tensor.grad.shape)) if tensor.is_leaf and tensor.grad is not None else "none"
    say(f"  {name:26} is_leaf {tensor.is_leaf!s:6} grad_fn {history:14} grad {grad_shape}")


def climb_the_wall() -> None:
    """The wide model in one process without a limit, in one with, in two with the same limit."""
    (free,), (limited,) = ps.launch(train_whole, 1, None), ps.launch(train_whole, 1, DEVICE)
    _, halves = ps.launch(train_half, 2, DEVICE)
    say(f"  one process, no limit       losses {free}")
    say(f"  one process, limited        losses {limited}")
    say(f"  two processes, same limit   losses {halves}")
    check(
        isinstance(limited, str),
        "the whole model does not train within the limit",
        f"the whole model trained within {megabytes(DEVICE)}: this system does not enforce RLIMIT_DATA",
    )
    check(
        halves == free,
        "two halves do, and their losses have the bits of the one process without a limit",
        f"the halves' losses {halves} are not the whole model's {free}",
    )


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """(rows, dim) inputs and (rows,) targets of every step, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randn(ROWS, WIDE, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator)


def train_whole(memory_bytes: int | None) -> list[float] | str:
    """The losses of the whole wide model, or what went wrong."""
    warm_up(WIDE, ROWS)
    if memory_bytes is not None:
        limit_memory(memory_bytes)
    losses = []
    try:
        torch.manual_seed(0)
        model = ps.model.mlp(WIDE, LAYERS, CLASSES)
        optimizer = torch.optim.Adam(model.parameters())
        for inputs, targets in batches():
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    except RuntimeError as error:
        return f"stop in step {len(losses)}: {str(error).rpartition('DefaultCPUAllocator: ')[2]}"
    return losses


def train_half(memory_bytes: int) -> list[float]:
    """The same, half of the layers on each of two ranks; only the second knows the losses."""
    topology = ps.comms.init_distributed(backend="gloo")
    warm_up(WIDE, ROWS)
    limit_memory(memory_bytes)
    torch.manual_seed(0)
    half = ps.ShardedMLP(WIDE, LAYERS, topology.rank, topology.world_size, CLASSES)  # nothing of the other half is built
    optimizer = torch.optim.Adam(half.parameters())
    losses = []
    for inputs, targets in batches():
        if topology.rank == 0:
            hidden = half(inputs)
            ps.comms.send_tensor(hidden, dest=1)  # a message has no history: this is the detach()
            hidden.backward(ps.comms.recv_tensor(hidden.shape, src=1))
        else:
            handed = ps.comms.recv_tensor((ROWS, WIDE), src=0).requires_grad_()
            loss = cross_entropy(half(handed), targets)
            loss.backward()
            assert handed.grad is not None
            ps.comms.send_tensor(handed.grad, dest=0)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    main()
