"""What a rank trains: the data, the model cut over the ranks, and its optimizer."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock import checkpoint, comms
from penstock.commands.train import data
from penstock.commands.train.config import HEADS, TrainConfig
from penstock.commands.train.memory import has_room
from penstock.comms.encoding import all_gather_values
from penstock.comms.topology import Topology
from penstock.model import GPT, GPTConfig, mlp
from penstock.pipeline import Pipeline
from penstock.plan import load

WARM_UP = 10  # steps

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Setup:
    """All that one rank trains with."""

    config: TrainConfig
    topology: Topology
    folder: Path | None  # of the run, the same on every rank; None where nothing is kept
    memory: Path | None  # a folder in memory, for a checkpoint after each step; None where nobody starts the ranks again
    begun: bool  # there is a checkpoint in one of them: of an attempt before this one, or of the run that is resumed
    source: data.Text | data.Digits
    pipe: Pipeline
    optimizer: torch.optim.Optimizer
    rate: torch.optim.lr_scheduler.LRScheduler
    parameters: dict[str, int]  # bytes, of every layer of the uncut model

    @property
    def speaks(self) -> bool:
        """Whether this rank tells how it goes, and writes what one rank writes for all."""
        return self.topology.rank == 0

    @property
    def alone(self) -> bool:
        """Whether one process has the whole model."""
        return self.topology.world_size == 1

    def share(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The rows of inputs and target that this rank's replica has."""
        inputs, target = (part.tensor_split(self.pipe.position.replicas)[self.pipe.position.replica] for part in batch)
        return inputs, target

    def save(self, wait: bool = True) -> None:
        """A checkpoint, if there is a folder."""
        if self.folder is not None:
            checkpoint.save(self.folder, self.pipe, self.optimizer, self.rate, keep=self.config.keep, wait=wait)

    def save_in_memory(self) -> None:
        """A checkpoint that outlives the ranks, if they may be started again."""
        if self.memory is not None:
            checkpoint.save(self.memory, self.pipe, self.optimizer, self.rate, keep=1)


def prepared(config: TrainConfig, folder: Path | None, memory: Path | None = None) -> Setup:
    """This rank's part of a new training; all ranks make the same call. `folder` and `memory` count on rank 0."""
    topology = comms.current_topology()
    torch.manual_seed(config.seed)
    source, model, loss_fn = task(config)
    sizes = {name: sum(each.nbytes for each in layer.parameters()) for name, layer in model.named_children()}
    pipe = _cut(config, topology, source, model, loss_fn)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=config.learning_rate)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, config.steps))
    where = _of_rank_0(folder, memory, sum(sizes.values()))
    return Setup(config, topology, *where, source, pipe, optimizer, rate, sizes)


def task(config: TrainConfig) -> tuple[data.Text | data.Digits, nn.Sequential, Loss]:
    """The data, the model and the loss."""
    if config.model == "mlp":
        return data.digits(config.width), mlp(config.width, config.depth, classes=10), nn.functional.cross_entropy
    return data.text(config.data, config.context), gpt(config), token_loss


def gpt(config: TrainConfig) -> GPT:
    """The GPT that a run trains."""
    return GPT(GPTConfig(context=config.context, width=config.width, layers=config.depth, heads=HEADS, dropout=config.dropout))


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy: (batch, time, vocabulary) logits, (batch, time) tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def _cut(config: TrainConfig, topology: Topology, source: Any, model: nn.Sequential, loss_fn: Loss) -> Pipeline:
    """The model over the ranks, as planned, or cut by the times measured on a microbatch; on a single one it is whole."""
    if topology.world_size == 1 and config.plan is None:
        return Pipeline(model, loss_fn, "gpipe", config.microbatches, seed=config.seed)
    plan = None if config.plan is None else load(config.plan)
    rows = -(-config.batch // (config.microbatches * config.dp))
    return Pipeline(
        model,
        loss_fn,
        config.table(),
        config.microbatches,
        seed=config.seed,
        example_args=source.batch(config.seed, 0, rows)[:1] if plan is None else None,
        plan=plan,
        mesh=comms.init_mesh(config.ranks, config.dp, config.tp) if config.dp * config.tp > 1 else None,
        data_parallel=config.data_parallel,
        tensor_parallel=model.tensor_parallel() if isinstance(model, GPT) and config.tp > 1 else None,
    )


def _rate(step: int, steps: int) -> float:
    """Share of the peak learning rate: up in WARM_UP steps, then down along a cosine to a tenth."""
    return min((step + 1) / WARM_UP, 0.55 + 0.45 * math.cos(math.pi * step / steps))


def _of_rank_0(folder: Path | None, memory: Path | None, parameters: int) -> tuple[Path | None, Path | None, bool]:
    """The folders that rank 0 has chosen, since each may have a clock of its own; whether there is a checkpoint in them."""
    topology = comms.current_topology()
    if memory is not None and topology.rank == 0 and not has_room(memory, parameters):
        warnings.warn(f"{memory.parent} has no room for two checkpoints: they are kept on the disk only", stacklevel=3)
        memory = None
    seen = folder, memory, any(each is not None and checkpoint.exists(each) for each in (memory, folder))
    return all_gather_values(seen, topology.transport_device)[0] if topology.world_size > 1 else seen
