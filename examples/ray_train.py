"""A pipeline on a Ray cluster, without Slurm or Kubernetes: Ray Train starts the ranks, and starts them again.

    ray start --head                       # on the first machine; on each other one: ray start --address FIRST:6379
    python examples/ray_train.py --ranks 4 --storage /shared/run

`train` is the function that `ps.launch` or torchrun would run. When a rank or a machine is lost, Ray's failure policy starts
all ranks again on what is left of the cluster, and they go on from the newest whole checkpoint; all machines see `--storage`.
"""

import argparse
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import penstock as ps
from penstock import checkpoint


def train(settings: dict[str, Any]) -> None:
    """On every rank; rank 0 tells what it came to in `storage/losses.txt`."""
    folder = Path(settings["storage"])
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())], nn.Linear(16, 3))
    pipe = ps.Pipeline(model, nn.functional.cross_entropy, "1f1b", 4)  # joins the ranks that Ray has joined
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses = checkpoint.resume(folder, pipe, optimizer)["losses"] if checkpoint.exists(folder) else []
    while pipe.step_count < settings["steps"]:
        inputs = torch.randn(16, 16, generator=torch.Generator().manual_seed(pipe.step_count))
        losses.append(pipe.step(inputs, target=inputs.argmax(1) % 3).item())
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.save(folder, pipe, optimizer, extra={"losses": losses})
        if pipe.step_count == settings["die_at"] and pipe.topology.rank == 1 and not (folder / "died").exists():
            (folder / "died").touch()  # once, to see that it goes on
            os.kill(os.getpid(), signal.SIGKILL)
    if pipe.topology.rank == 0:
        (folder / "losses.txt").write_text("\n".join(f"step {step}  loss {loss!r}" for step, loss in enumerate(losses)) + "\n")


def run(train: Callable[[dict[str, Any]], None], description: str | None, steps: int, storage: str) -> None:
    """Read the command line, run `train` on ranks of the cluster, and print what it wrote to `losses.txt`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--storage", default=storage, help="a folder that all machines see")
    parser.add_argument("--die-at", type=int, default=0, help="kill rank 1 after this step, once")
    given = parser.parse_args()
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    folder = Path(given.storage).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    TorchTrainer(
        train,
        train_loop_config={"storage": str(folder), "steps": given.steps, "die_at": given.die_at},
        torch_config=TorchConfig(backend="gloo"),  # on GPUs "nccl"
        scaling_config=ScalingConfig(num_workers=given.ranks, placement_strategy="SPREAD"),
        run_config=RunConfig(storage_path=str(folder), failure_config=FailureConfig(max_failures=3)),
    ).fit()
    print((folder / "losses.txt").read_text(), end="")


if __name__ == "__main__":
    run(train, __doc__, steps=10, storage="ray-run")
