"""Accelerate around a pipeline over two ranks: its launcher, trackers and printing; model and data are the pipeline's.

python examples/accelerate_loop.py
accelerate launch --multi_gpu --num_processes 2 examples/accelerate_loop.py

By `--multi_gpu` the launcher starts several processes, on a machine without GPUs too; by `--cpu` it starts one.

`accelerator.prepare(model)` would wrap each rank's model in DistributedDataParallel, and `prepare(loader)` would give each rank
other rows: both are right for replicas and wrong for the ranks of one pipeline. So neither is called.
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock as ps


def train(folder: str = "") -> list[float]:
    """On every rank; with a `folder` the losses are written there for TensorBoard, by rank 0."""
    accelerator = Accelerator(cpu=True, log_with="tensorboard" if folder else None, project_dir=folder or None)
    if folder:
        accelerator.init_trackers("losses")
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())], nn.Linear(16, 3))
    pipe = ps.Pipeline(model, nn.functional.cross_entropy, "1f1b", 4)  # joins the ranks that Accelerate has joined
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    inputs = torch.randn(64, 16)
    dataset = TensorDataset(inputs, inputs.argmax(1) % 3)
    losses = []
    accelerator.print(f"processes {accelerator.num_processes}")
    for epoch in range(3):
        for batch, target in DataLoader(dataset, batch_size=16, sampler=pipe.sampler(dataset)):
            loss = pipe.step(batch, target=target)
            accelerator.clip_grad_norm_(pipe.parameters(), 1.0)  # over all ranks, as pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            accelerator.log({"loss": losses[-1], **pipe.metrics()}, step=pipe.step_count)
        accelerator.print(f"epoch {epoch}  loss {losses[-1]:.5f}")
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    train(*sys.argv[1:])
