"""A model that needs three times the memory a process may take: in one process, and as four stages in four.

    python tests/limited_memory.py

Every process may take 400 MB more than it has once torch is imported and the ranks are connected. Trained in full, the
weights and their gradients are three times that; with frozen weights and trained biases, the weights alone are.
"""

import torch
from torch import nn

import penstock as ps
from penstock.learn.devices import CAN_LIMIT_MEMORY, limit_memory, warm_up
from penstock.partition.materialise import materialise

LIMIT = 400_000_000  # bytes; the threads that carry messages take 50 MB of it, for their stacks
LAYERS, ROWS, MICROBATCHES = 16, 8, 4  # a layer is more than 32 MB: smaller blocks leave holes in glibc's heap


def build(frozen: bool) -> nn.Sequential:
    """The model on the meta device: a few kilobytes."""
    weights = 3.02 * LIMIT / 4 / LAYERS / (1 if frozen else 2)  # elements of a layer
    width = int(weights**0.5)
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)])
    for layer in model if frozen else ():
        layer.weight.requires_grad_(False)
    return model


def batch(model: nn.Sequential) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(ROWS, model[0].in_features, generator=generator) for _ in range(2))


def prepare(limit: int | None) -> None:
    ps.comms.init_distributed(backend="gloo")
    warm_up(64, ROWS)
    if limit is not None:
        limit_memory(limit)


def held(parameters) -> int:
    """Bytes of the parameters and their gradients."""
    return sum(p.nbytes + (0 if p.grad is None else p.grad.nbytes) for p in parameters)


def train_whole(frozen: bool) -> str:
    """One SGD step of the whole model in one process: what went wrong."""
    prepare(LIMIT)
    model = build(frozen)
    try:
        materialise(model)
        inputs, targets = batch(model)
        nn.functional.mse_loss(model(inputs), targets).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    except RuntimeError as error:
        return str(error)
    return "it trained"


def train_stage(frozen: bool, limit: int | None = LIMIT) -> tuple[float, int]:
    """One SGD step of this rank's stage: the loss, and the bytes of its parameters and gradients."""
    prepare(limit)
    model = build(frozen)
    pipe = ps.Pipeline(model, nn.functional.mse_loss, "1f1b", microbatches=MICROBATCHES)
    inputs, targets = batch(model)
    loss = pipe.step(inputs, target=targets)
    parameters = list(pipe.parameters())
    nbytes = held(parameters)
    torch.optim.SGD(parameters, lr=0.1).step()
    return loss.item(), nbytes


def main() -> None:
    """Both, both ways."""
    for frozen in (False, True):
        print("frozen weights" if frozen else "trained in full")
        print(f"  one process of {LIMIT / 1e6:.0f} MB: {ps.launch(train_whole, 1, frozen)[0].splitlines()[0]}")
        print(f"  one process without a limit: loss {ps.launch(train_stage, 1, frozen, None)[0][0]:.6f}")
        for rank, (loss, nbytes) in enumerate(ps.launch(train_stage, 4, frozen)):
            print(f"  rank {rank} of 4, as limited: loss {loss:.6f}, parameters and gradients {nbytes / 1e6:.0f} MB")


if __name__ == "__main__":
    if not CAN_LIMIT_MEMORY:
        raise SystemExit("the memory of a process can be limited on Linux only")
    main()
