"""Lab 2: two halves, the gradient carried over by hand, and the memory wall.

Three lines cut a model: detach the activation at the cut, run the second half's backward, and pass the gradient that arrives
at the cut to the first half's backward. The lab does it in one process first, to show what autograd does at the cut. Then in
two processes, of which neither could hold the whole model: that is why one cuts.

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

LAYERS, CLASSES, ROWS, STEPS = 16, 4, 8, 4
NARROW, WIDE = 64, 1024  # the model to watch, the model that does not fit
DEVICE_BYTES = 200_000_000  # that a process may take for its part of the wide model


def main() -> None:
    """Cut the model in one process; then train a model too large for one process in two."""
    if not is_printing_process():
        return  # this lab starts its own ranks: of torchrun's ranks only one runs it
    say("Lab 2: two halves, cut by hand\n")
    gradients = compare_halves_with_monolith()
    weights = 4 * (LAYERS * (WIDE + 1) * WIDE + (WIDE + 1) * CLASSES)
    say("\nWhy cut at all? The memory wall:")
    say("  10 billion parameters x 4 bytes         =  40 GB  on a device of 24 GB: the weights alone do not fit")
    say("  with the gradients and Adam's averages  = 160 GB  four times as much: 7 devices and a model in 7 pieces")
    device = megabytes(DEVICE_BYTES)
    say(f"Scaled down: {megabytes(weights)} of weights, {megabytes(4 * weights)} in training; a device has {device}")
    if not CAN_LIMIT_MEMORY:
        say(f"Measured: all {gradients} gradients are equal bit by bit. (The memory of a process is limited on Linux only.)")
        return
    train_within_memory_limit()
    say(
        f"\nMeasured: all {gradients} gradients are equal bit by bit; a training of {megabytes(4 * weights)} does not fit into "
        f"{device}, two halves of {megabytes(2 * weights)} do."
    )


def compare_halves_with_monolith() -> int:
    """Run one step as two halves and compare its gradients with the monolith's. Returns the number of gradients."""
    torch.manual_seed(0)
    model = ps.model.mlp(NARROW, LAYERS, CLASSES)
    inputs, targets = torch.randn(ROWS, NARROW), torch.randint(CLASSES, (ROWS,))
    gradients = torch.autograd.grad(cross_entropy(model(inputs), targets), list(model.parameters()))

    first_half, second_half = model[:LAYERS], model[LAYERS:]
    hidden = first_half(inputs)  # (rows, dim)
    print_autograd_state("output of the first half", hidden)
    cut_input = hidden.detach().requires_grad_()  # the same memory without its graph: all that crosses the cut
    print_autograd_state("input of the second half", cut_input)
    cross_entropy(second_half(cut_input), targets).backward()  # stops at `cut_input`, a leaf, and leaves the gradient there
    print_autograd_state("after the second backward", cut_input)
    say(f"  gradients in the first half so far: {sum(parameter.grad is not None for parameter in first_half.parameters())}")
    hidden.backward(cut_input.grad)  # continues the chain rule where it stopped
    halves = [parameter.grad for parameter in model.parameters()]
    check(
        all(half is not None and torch.equal(half, gradient) for half, gradient in zip(halves, gradients, strict=True)),
        "after the first half's backward every gradient equals the monolith's, bit by bit",
        "the gradients of the two halves differ from the monolith's",
    )
    return len(gradients)


def print_autograd_state(name: str, tensor: Tensor) -> None:
    """Print whether `tensor` is a leaf, its grad_fn, and the shape of its gradient."""
    history = type(tensor.grad_fn).__name__ if tensor.grad_fn else "none"
    grad_shape = str(tuple(tensor.grad.shape)) if tensor.is_leaf and tensor.grad is not None else "none"
    say(f"  {name:26} is_leaf {tensor.is_leaf!s:6} grad_fn {history:14} grad {grad_shape}")


def train_within_memory_limit() -> None:
    """Train the wide model in one process without a memory limit, in one with a limit, and in two with the same limit."""
    (unlimited,), (limited,) = ps.launch(train_whole, 1, None), ps.launch(train_whole, 1, DEVICE_BYTES)
    _, halves = ps.launch(train_half, 2, DEVICE_BYTES)
    say(f"  one process, no limit       losses {rounded(unlimited)}")
    say(f"  one process, limited        losses {rounded(limited)}")
    say(f"  two processes, same limit   losses {rounded(halves)}")
    check(
        isinstance(limited, str),
        "the whole model does not train within the limit",
        f"the whole model trained within {megabytes(DEVICE_BYTES)}: this system does not enforce RLIMIT_DATA",
    )
    check(
        halves == unlimited,
        "two halves do, and their losses have the bits of the one process without a limit",
        f"the halves' losses {halves} are not the whole model's {unlimited}",
    )
    check(halves[-1] < halves[0] / 2, "the loss falls", f"the losses {halves} do not fall")


def rounded(losses: list[float] | str) -> str:
    """Return losses with three decimals; a text unchanged."""
    return losses if isinstance(losses, str) else ", ".join(f"{loss:.3f}" for loss in losses)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs (rows, dim) and targets (rows,) for every step: the same rows, so that the loss falls."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(ROWS, WIDE, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator)
    yield from [(inputs, targets)] * STEPS


def train_whole(memory_bytes: int | None) -> list[float] | str:
    """Train the whole wide model. Returns its losses, or the text of torch's error if memory runs out."""
    warm_up(WIDE, ROWS)
    if memory_bytes is not None:
        limit_memory(memory_bytes)
    losses = []
    try:
        torch.manual_seed(0)
        model = ps.model.mlp(WIDE, LAYERS, CLASSES)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
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
    """Train half of the wide model on each of two ranks. Returns the losses on rank 1, an empty list on rank 0."""
    topology = ps.comms.init_distributed(backend="gloo")
    warm_up(WIDE, ROWS)
    limit_memory(memory_bytes)
    torch.manual_seed(0)
    half = ps.ShardedMLP(WIDE, LAYERS, topology.rank, topology.world_size, CLASSES)  # builds this half only
    optimizer = torch.optim.Adam(half.parameters(), lr=1e-4)
    losses = []
    for inputs, targets in batches():
        if topology.rank == 0:
            hidden = half(inputs)
            ps.comms.send_tensor(hidden, dest=1)  # a message carries no graph: this replaces detach()
            hidden.backward(ps.comms.recv_tensor(hidden.shape, src=1))
        else:
            cut_input = ps.comms.recv_tensor((ROWS, WIDE), src=0).requires_grad_()
            loss = cross_entropy(half(cut_input), targets)
            loss.backward()
            assert cut_input.grad is not None
            ps.comms.send_tensor(cut_input.grad, dest=0)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    main()
