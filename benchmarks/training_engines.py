"""Engines whose step contains the optimizer's: Penstock, DeepSpeed's pipeline engine, picotron's and torch's `Schedule1F1B`.

DeepSpeed is used if it is installed, picotron if the folder of a clone is given. Nothing but the comparisons needs either.
"""

import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engines import EngineCase, Peer, Penstock, TrainingEngine
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

LEARNING_RATE = 0.01
NO_DEEPSPEED = (
    "Without DeepSpeed, which is not installed: run `DS_BUILD_OPS=0 pip install deepspeed` "
    "in an environment of its own that has Penstock, and start this with its python."
)
NO_PICOTRON = "Without picotron: give the folder of a clone of github.com/huggingface/picotron as --picotron."
Batch = tuple[Tensor, Tensor]
Loss = Callable[[Any, Any], Tensor]


def engine_classes(picotron: Path | None) -> dict[str, Callable[[EngineCase, int], TrainingEngine]]:
    """Return what makes an engine of a case on a rank, by name, of those that are there. `picotron`: the folder of a clone."""
    return {
        "ours": lambda case, rank: WithOptimizer(Penstock(case, rank)),
        **({"deepspeed": DeepSpeed} if find_spec("deepspeed") else {}),
        **({"picotron": partial(_picotron, picotron)} if picotron else {}),
        "torch": lambda case, rank: WithOptimizer(Peer(case, rank)),
    }


def print_missing_engines(picotron: Path | None) -> None:
    """Say which engines are not compared, and how they would be. Raises SystemExit if the folder is no clone of picotron."""
    if not find_spec("deepspeed"):
        print(NO_DEEPSPEED)
    if picotron is None:
        print(NO_PICOTRON)
    else:
        import_picotron(picotron)


class WithOptimizer:
    """An engine whose step contains the optimizer's."""

    def __init__(self, engine: TrainingEngine, learning_rate: float = LEARNING_RATE) -> None:
        self.engine, self.modules = engine, engine.modules
        self.optimizer = optimizer_of(self.modules, learning_rate)

    def step(self) -> Tensor | None:
        """Train on the batch once; the batch's loss where the engine has it."""
        loss = self.engine.step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def optimizer_of(modules: list[nn.Module], learning_rate: float = LEARNING_RATE) -> SGD:
    """Return the optimizer that all engines get."""
    return SGD([parameter for module in modules for parameter in module.parameters()], lr=learning_rate, momentum=0.9)


def microbatches_of(case: EngineCase) -> list[Batch]:
    """Return the batch of a case, cut."""
    inputs, target = case.subject.batch(case.microbatches)
    return list(zip(inputs.chunk(case.microbatches), target.chunk(case.microbatches), strict=True))


class DeepSpeed:
    """DeepSpeed's pipeline engine, as its documentation sets it up; microbatches are cut beforehand."""

    def __init__(self, case: EngineCase, rank: int) -> None:
        stages, batches = case.subject.stages(case.ranks), microbatches_of(case)
        self.modules: list[nn.Module] = [stages[rank]]
        self.engine = make_deepspeed_engine(stages, case.subject.loss, optimizer_of(self.modules), batches)
        self.batches = import_deepspeed().utils.RepeatingLoader(batches)

    def step(self) -> Tensor:
        """Train on the batch once; every rank has the loss."""
        return self.engine.train_batch(data_iter=self.batches)


def make_deepspeed_engine(
    layers: list[Any],
    loss_fn: Loss,
    optimizer: Optimizer,
    batches: list[Batch],
    max_norm: float = 0.0,
    **options: Any,
) -> Any:
    """Return this rank's engine of DeepSpeed.

    `layers`: a module or `LayerSpec` for each stage. `batches`: a step's microbatches. `options`: of its `PipelineModule`.
    """
    deepspeed = import_deepspeed()
    deepspeed.init_distributed(dist_backend="gloo")  # takes the process group that is there
    own = [  # of the other ranks' stages nothing is kept, as with `LayerSpec`
        nn.Identity() if isinstance(layer, nn.Module) and index != dist.get_rank() else layer
        for index, layer in enumerate(layers)
    ]
    with redirect_stdout(io.StringIO()):  # it prints its layers
        module = deepspeed.pipe.PipelineModule(own, len(own), loss_fn=loss_fn, partition_method="uniform", **options)
    config = {
        "train_micro_batch_size_per_gpu": len(batches[0][0]),
        "gradient_accumulation_steps": len(batches),
        "gradient_clipping": max_norm,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine


def import_deepspeed() -> Any:
    """Return the module."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed = import_module("deepspeed")
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # an all-reduce for inference, which would be compiled now
    return deepspeed


def _picotron(folder: Path, case: EngineCase, rank: int) -> TrainingEngine:
    """Its gradients are of the sum of the microbatches' losses, so that its learning rate is divided by their number."""
    return WithOptimizer(PicotronOfCase(folder, case, rank), LEARNING_RATE / case.microbatches)


class PicotronOfCase:
    """picotron's engine on the microbatches of a case."""

    def __init__(self, folder: Path, case: EngineCase, rank: int) -> None:
        stages, self.batches = case.subject.stages(case.ranks), microbatches_of(case)
        self.modules: list[nn.Module] = [stages[rank]]
        with torch.no_grad():
            shape = stages[0](self.batches[0][0]).shape
        self.engine = Picotron(folder, stages[rank], case.subject.loss, shape)

    def step(self) -> Tensor | None:
        """Compute the gradients of a batch; the last stage's rank has the loss."""
        return self.engine.step(self.batches)


class Picotron:
    """picotron's 1F1B as its `train.py` calls it, on a stage of any model.

    A module with the methods of its `PipelineParallel` replaces that class, which is a Llama; a list of microbatches its
    loader; `loss_fn` cross entropy. `torch.cuda.synchronize`, after each transfer, does nothing, as it needs a GPU.
    """

    def __init__(
        self, folder: Path, stage: nn.Module, loss_fn: Loss, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> None:
        self.pipeline, self.ranks = import_picotron(folder)
        if not hasattr(self.ranks, "process_group_manager"):
            self.ranks.setup_process_group_manager(tp_size=1, cp_size=1, pp_size=dist.get_world_size(), dp_size=1)
        self.is_last = self.ranks.process_group_manager.pp_is_last_stage
        self.stage = _PicotronStage(stage, self.is_last, self.pipeline.PipelineParallel.backward)
        self.loss_fn, self.shape, self.dtype = loss_fn, shape, dtype

    def step(self, batches: list[Batch]) -> Tensor | None:
        """Add the gradients of the sum of the microbatches' losses; return the mean of the losses on the last stage's rank."""
        train, loader, per_row = self.pipeline.train_step_pipeline_1f1b, _PicotronLoader(batches), batches[0][1].shape[1:]

        def cross_entropy(output: Tensor, target: Tensor, reduction: str) -> Tensor:
            return self.loss_fn(output, target.unflatten(0, (-1, *per_row)))  # the engine flattens targets

        functions = SimpleNamespace(cross_entropy=cross_entropy)
        with mock.patch.object(self.pipeline, "F", functions), mock.patch.object(torch.cuda, "synchronize", int):
            loss = train(self.stage, loader, self.shape, torch.device("cpu"), self.dtype)
        return torch.tensor(loss, dtype=self.dtype) if self.is_last else None


class _PicotronStage(nn.Module):
    def __init__(self, stage: nn.Module, is_last: bool, backward: Callable[..., Tensor | None]) -> None:
        super().__init__()
        self.stage, self.is_last, self.backward = stage, is_last, partial(backward, self)

    def forward(self, input_ids: Tensor, position_ids: Tensor, hidden_states: Tensor | None) -> Tensor:
        output = self.stage(input_ids if hidden_states is None else hidden_states)
        return output[None] if self.is_last else output  # the engine flattens the first two dimensions


class _PicotronLoader:
    def __init__(self, batches: list[Batch]) -> None:
        self.grad_acc_steps, self._batches = len(batches), iter(batches)

    def __next__(self) -> dict[str, Tensor]:
        inputs, target = next(self._batches)
        return {"input_ids": inputs, "position_ids": inputs, "target_ids": target}


def import_picotron(folder: Path) -> tuple[Any, Any]:
    """Return its modules of pipelines and of process groups. Raises SystemExit if the folder has none."""
    if not (folder / "picotron" / "pipeline_parallel" / "pipeline_parallel.py").exists():
        raise SystemExit(f"{folder} has no picotron/pipeline_parallel: give a clone of github.com/huggingface/picotron")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return import_module("picotron.pipeline_parallel.pipeline_parallel"), import_module("picotron.process_group_manager")
