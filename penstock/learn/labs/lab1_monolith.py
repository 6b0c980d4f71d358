"""Lab 1: one process, the whole model.

Everything later is measured against this: a model of 16 layers, a plain training loop, one process. What does a step take,
and where does the time go? What does training keep in memory besides the weights?

    penstock lab 1
    python -m penstock.learn.labs.lab1_monolith

Try: four times the ROWS. Whose share of the step grows, and which line of the memory table? Then twice the DIM.
"""

import time

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

import penstock as ps
from penstock.learn.lab_helpers import check, megabytes, percent, say

DIM, LAYERS, CLASSES = 128, 16, 4
ROWS, STEPS = 64, 60


def main() -> None:
    """Train the monolith on classes that can be learnt; say what it costs in time and memory."""
    say("Lab 1: one process, the whole model\n")
    torch.manual_seed(0)
    model = ps.model.mlp(DIM, LAYERS, CLASSES)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"The model: {LAYERS} layers of {DIM} x {DIM} and a head to {CLASSES} classes, {parameters:,} parameters.\n")

    losses, seconds = train(model, optimizer)
    first_loss, last_loss = losses[0], sum(losses[-10:]) / 10
    for step in range(0, STEPS, STEPS // 6):
        say(f"  step {step:4}   loss {losses[step]:.3f}")
    say(f"  step {STEPS - 1:4}   loss {losses[-1]:.3f}")
    check(
        last_loss < 0.7 * first_loss,
        "the loss falls",
        f"the loss went from {first_loss:.2f} to {last_loss:.2f} in {STEPS} steps, so the model learns nothing",
    )

    say("\nWhat training keeps in memory:")
    table = memory(model, optimizer)
    for memory_part, size in table.items():
        say(f"  {memory_part:30} {megabytes(size):>9}")
    states = table["gradients"] + table["Adam's two averages"]
    check(
        states >= 3 * table["weights"],
        "gradients and Adam make of the weights four times the weights",
        f"gradients and Adam's averages take {megabytes(states)}, not three times the weights' {megabytes(table['weights'])}",
    )

    total = sum(seconds.values())
    shares = ", ".join(f"{memory_part} {percent(part / total)}" for memory_part, part in seconds.items())
    say(
        f"\nMeasured: a step of {ROWS} rows takes {1e3 * total:.2f} ms ({shares}); the loss fell from {first_loss:.2f} to "
        f"{last_loss:.2f}, and training holds {sum(table.values()) / table['weights']:.1f} times the weights."
    )


def batch(centres: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Points scattered around the centre of their class: (rows, dim) inputs, (rows,) targets."""
    targets = torch.randint(len(centres), (rows,))
    return centres[targets] + torch.randn(rows, centres.shape[1]), targets


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[float], dict[str, float]]:
    """The loop everybody knows. Returns the losses, and the median seconds of each part of a step."""
    centres = torch.randn(CLASSES, DIM)
    losses, times = [], []
    for _ in range(STEPS):
        inputs, targets = batch(centres, ROWS)
        start = time.perf_counter()
        loss = cross_entropy(model(inputs), targets)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        times.append([forward - start, backward - forward, time.perf_counter() - backward])
        losses.append(loss.item())
    medians = torch.tensor(times).median(dim=0).values.tolist()  # the first steps, and a busy machine, do not count
    return losses, dict(zip(("forward", "backward", "optimizer"), medians, strict=True))


def memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of everything that training holds at the end of a forward and backward."""
    inputs, targets = batch(torch.randn(CLASSES, DIM), ROWS)
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}  # address -> bytes of what the forward keeps for the backward, the weights left out

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = cross_entropy(model(inputs), targets)
    loss.backward()
    averages = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    return {
        "weights": sum(parameter.nbytes for parameter in model.parameters()),
        "gradients": sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None),
        "Adam's two averages": sum(average.nbytes for average in averages),
        f"activations of {ROWS} rows": sum(saved.values()),
    }


if __name__ == "__main__":
    main()
