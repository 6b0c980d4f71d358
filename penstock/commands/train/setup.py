"""Set up the training of a rank: the data, the model cut over the ranks, the optimizer."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock import checkpoint, comms
from penstock.commands.train import data
from penstock.commands.train.config import HEADS, TrainConfig
from penstock.commands.train.memory_folder import has_room
from penstock.comms.encoding import all_gather_values
from penstock.comms.topology import Topology
from penstock.model import GPT, GPTConfig, mlp
from penstock.pipeline import Pipeline
from penstock.plan import load

WARM_UP_STEPS = 10

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Setup:
    """Everything that a rank trains with."""

    config: TrainConfig
    topology: Topology
    folder: Path | None  # of the run, equal on all ranks; None if nothing is written
    memory: Path | None  # for a checkpoint after each step; None if ranks are not restarted
    has_checkpoint: bool  # of an earlier attempt or the resumed run, in one of the folders
    source: data.TextDataset | data.DigitsDataset
    pipe: Pipeline
    optimizers: list[torch.optim.Optimizer]
    rates: list[torch.optim.lr_scheduler.LRScheduler]  # of each optimizer
    parameters: dict[str, int]  # bytes, of every layer of the uncut model

    @property
    def is_writer(self) -> bool:
        """Return whether this rank prints progress and writes the run's files."""
        return self.topology.rank == 0

    @property
    def is_single_process(self) -> bool:
        """Return whether one process has the whole model."""
        return self.topology.world_size == 1

    def share(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return this replica's rows of the batch's inputs and target."""
        inputs, target = (part.tensor_split(self.pipe.position.replicas)[self.pipe.position.replica] for part in batch)
        return inputs, target

    def update_weights(self) -> None:
        """Take a step of every optimizer, with this rank's gradients."""
        for optimizer in self.optimizers:
            optimizer.step()

    def save(self, wait: bool = True) -> None:
        """Write a checkpoint, if the run has a folder."""
        if self.folder is not None:
            checkpoint.save(self.folder, self.pipe, self.optimizers, self.rates, keep=self.config.keep, wait=wait)

    def save_in_memory(self) -> None:
        """Write a checkpoint to memory that outlives the ranks, if they may be restarted."""
        if self.memory is not None:
            checkpoint.save(self.memory, self.pipe, self.optimizers, self.rates, keep=1)


def set_up(config: TrainConfig, folder: Path | None, memory: Path | None = None) -> Setup:
    """Set up this rank's part of a training. All ranks call this; rank 0's `folder` and `memory` count."""
    topology = comms.current_topology()
    torch.manual_seed(config.seed)
    source, model, loss_fn = task(config)
    sizes = {name: sum(parameter.nbytes for parameter in layer.parameters()) for name, layer in model.named_children()}
    pipe = _cut(config, topology, source, model, loss_fn)
    optimizers = _optimizers(config, pipe, list(sizes))
    rates: list[Any] = [torch.optim.lr_scheduler.LambdaLR(item, lambda step: _rate(step, config.steps)) for item in optimizers]
    folders = _broadcast_folders(folder, memory, sum(sizes.values()))
    return Setup(config, topology, *folders, source, pipe, optimizers, rates, sizes)


def task(config: TrainConfig) -> tuple[data.TextDataset | data.DigitsDataset, nn.Sequential, Loss]:
    """Return the data, the model and the loss function."""
    if config.model == "mlp":
        return data.digits(config.width), mlp(config.width, config.depth, classes=10), nn.functional.cross_entropy
    return data.text(config.data, config.context), gpt(config), token_loss


def gpt(config: TrainConfig) -> GPT:
    """Return the GPT of these options."""
    return GPT(GPTConfig(context=config.context, width=config.width, layers=config.depth, heads=HEADS, dropout=config.dropout))


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (batch, time, vocabulary) and tokens (batch, time)."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def _cut(config: TrainConfig, topology: Topology, source: Any, model: nn.Sequential, loss_fn: Loss) -> Pipeline:
    """Cut the model over the ranks, as planned or by measured times of layers. In one process do not cut it."""
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


def _optimizers(config: TrainConfig, pipe: Pipeline, layers: Sequence[str]) -> list[torch.optim.Optimizer]:
    """Return this rank's optimizers, the same on all ranks: some may have no parameter here. `layers`: of the uncut model."""
    if config.optimizer == "adamw":
        return [torch.optim.AdamW(pipe.parameters(), lr=config.learning_rate)]
    matrices, others = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in pipe.named_parameters():
        is_inner = name.split(".")[0] not in (layers[0], layers[-1])
        (matrices if is_inner and parameter.ndim == 2 else others).append(parameter)
    return [
        torch.optim.Muon([{"params": matrices}], lr=config.learning_rate, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([{"params": others}], lr=config.learning_rate),
    ]


def _rate(step: int, steps: int) -> float:
    """Return the share of the peak learning rate: up in WARM_UP_STEPS steps, then down along a cosine to a tenth."""
    return min((step + 1) / WARM_UP_STEPS, 0.55 + 0.45 * math.cos(math.pi * step / steps))


def _broadcast_folders(folder: Path | None, memory: Path | None, parameters: int) -> tuple[Path | None, Path | None, bool]:
    """Return rank 0's folders on all ranks, and whether one has a checkpoint. `parameters`: bytes."""
    topology = comms.current_topology()
    if memory is not None and topology.rank == 0 and not has_room(memory, parameters):
        warnings.warn(f"{memory.parent} has no room for two checkpoints: they are kept on the disk only", stacklevel=3)
        memory = None
    result = folder, memory, any(path is not None and checkpoint.exists(path) for path in (memory, folder))
    return all_gather_values(result, topology.transport_device)[0] if topology.world_size > 1 else result
