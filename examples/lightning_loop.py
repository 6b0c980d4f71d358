"""Lightning with manual optimisation: its loop, its logging and its callbacks around a pipeline over two ranks.

python examples/lightning_loop.py
torchrun --nproc-per-node 2 examples/lightning_loop.py

Every rank runs a Trainer of its own for one device: the ranks are the pipeline's, so Lightning is told that there is one
process, and neither wraps the model nor shards the data. What needs all weights (checkpoints, norms) is asked of the pipeline.
"""

import os
from typing import Any

import lightning
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import penstock as ps


class OneProcessEnvironment(LightningEnvironment):
    """What Lightning is told: that this process is alone."""

    def world_size(self) -> int:
        """Of one process."""
        return 1

    def global_rank(self) -> int:
        """Of one process."""
        return 0

    def local_rank(self) -> int:
        """Of one process."""
        return 0

    @property
    def creates_processes_externally(self) -> bool:
        """So Lightning starts none."""
        return True


class Piped(lightning.LightningModule):
    """A model cut over the ranks; this rank's stages are what Lightning sees of it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False  # the backward is the pipeline's
        torch.manual_seed(0)
        model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())], nn.Linear(16, 3))
        self.pipe = ps.Pipeline(model, nn.functional.cross_entropy, "1f1b", 4)
        self.mine = nn.ModuleList(self.pipe.stages.values())
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> None:
        """One step, of forward, backward and the optimizer."""
        optimizer: Any = self.optimizers()
        loss: Tensor = self.pipe.step(batch[0], target=batch[1])
        self.pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        self.log("loss", loss)
        self.losses.append(loss.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """For this rank's part."""
        return torch.optim.AdamW(self.pipe.parameters(), lr=1e-2)


def train(epochs: int = 3) -> list[float]:
    """On every rank."""
    rank = ps.comms.init_distributed().rank
    piped = Piped()
    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(inputs, inputs.argmax(1) % 3)
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, plugins=[OneProcessEnvironment()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=rank == 0,
    )  # fmt: skip
    trainer.fit(piped, DataLoader(dataset, batch_size=16, sampler=piped.pipe.sampler(dataset)))
    return piped.losses


if __name__ == "__main__":
    found = train() if "RANK" in os.environ else ps.launch(train, 2)[0]
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(f"step {step}  loss {loss:.5f}" for step, loss in enumerate(found)))
