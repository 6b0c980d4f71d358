"""Lab 1: one process, the whole model.

All later labs are compared with this one: a model of 16 layers, a plain training loop, one process. How long does a step take,
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
    """Train the monolith on separable classes; print the time of a step and the memory it takes."""
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
    table = memory_by_kind(model, optimizer)
    for kind, size in table.items():
        say(f"  {kind:30} {megabytes(size):>9}")
    states = table["gradients"] + table["Adam's two averages"]
    check(
        states >= 3 * table["weights"],
        "weights, gradients and Adam's averages together are four times the weights",
        f"gradients and Adam's averages take {megabytes(states)}, not three times the weights' {megabytes(table['weights'])}",
    )

    ratio = seconds["backward"] / seconds["forward"]
    say(f"\nThe backward takes {ratio:.1f} forwards. It has two products of matrices for each of the forward's. But in layers")
    say("as small as these, calls, ReLUs and new memory take as long as products. Layers of 1 x 1, nearly without products,")
    say("take 1.5 forwards too; with DIM 1024 and 512 ROWS nearly all of the time is products: 2.0 forwards.")

    total = sum(seconds.values())
    shares = ", ".join(f"{phase} {percent(phase_seconds / total)}" for phase, phase_seconds in seconds.items())
    say(
        f"\nMeasured: a step of {ROWS} rows takes {1e3 * total:.2f} ms ({shares}); the loss fell from {first_loss:.2f} to "
        f"{last_loss:.2f}, and training holds {sum(table.values()) / table['weights']:.1f} times the weights."
    )


def batch(centres: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return points scattered around `centres` (classes, dim), one for each class: inputs (rows, dim), targets (rows,)."""
    targets = torch.randint(len(centres), (rows,))
    return centres[targets] + torch.randn(rows, centres.shape[1]), targets


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[float], dict[str, float]]:
    """Run a plain training loop. Returns the loss of each step, and the median seconds of each phase of a step."""
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
    medians = torch.tensor(times).median(dim=0).values.tolist()  # a median ignores slow first steps and a busy machine
    return losses, dict(zip(("forward", "backward", "optimizer"), medians, strict=True))


def memory_by_kind(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes that each kind of tensor takes in a training step, by the name that is printed."""
    inputs, targets = batch(torch.randn(CLASSES, DIM), ROWS)
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}  # address -> bytes of a tensor that the forward saves for the backward, weights left out

    def record_saved(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with saved_tensors_hooks(record_saved, lambda tensor: tensor):
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
