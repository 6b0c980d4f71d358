"""Trainer whose model is cut over ranks: what plain Trainer calls a batch is a step of the pipeline."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

import penstock as ps
from penstock.comms.control_group import shared_control_group
from penstock.engine.checks.outdated_weights import allow_outdated_use
from penstock.integrations.transformers.arguments import TrainingArguments, check_arguments
from penstock.integrations.transformers.grouping_collator import GroupingCollator, RowBatch
from penstock.integrations.transformers.model_view import (
    ModelView,
    TrainerLoss,
    arguments_of_call,
    outputs_once,
    refuse_call,
    settle,
)
from penstock.integrations.transformers.optimizer import RankOptimizer
from penstock.integrations.transformers.progress import replace_progress

if TYPE_CHECKING:
    from transformers import Trainer as Mixin
else:
    Mixin = object


class PipelineTrainerMixin(Mixin):
    """What makes any subclass of transformers' Trainer train over ranks; before it among the bases.

    Every rank makes the same calls, those that save and evaluate too. The model is cut when the first batch is there.
    `compute_loss` may be overridden: it calls the model once, by name, and looks at what it returns and at the batch.
    """

    def __init__(self, model: Any = None, args: Any = None, *more: Any, **options: Any) -> None:
        args = TrainingArguments("tmp_trainer") if args is None else args
        check_arguments(args)
        super().__init__(model, args, *more, **options)
        if args.group is not None:
            self._check_divides_by_tokens()
        self._pipelines: dict[frozenset[str], ps.Pipeline] = {}  # by the names of the arguments that the model is called with
        self._loss = TrainerLoss(self)
        self._accumulated: list[dict[str, Any]] = []  # the batches of one optimizer step
        self._losses: list[Tensor] = []  # of those that `training_step` is still to be called with
        self._rank_optimizer: RankOptimizer | None = None
        self._flos_per_element: int | None = None  # floating-point operations, of an element of the model's main input
        replace_progress(self.callback_handler.callbacks, lambda: None if self.pipeline is None else self.pipeline.report)
        ranks, replicas = ps.comms.current_topology().world_size, args.replicas
        self._mesh = ps.comms.init_mesh(pp=ranks // replicas, dp=replicas) if replicas > 1 else None

    @property
    def pipeline(self) -> ps.Pipeline | None:
        """What trains and evaluates; None before the first batch."""
        return next(iter(self._pipelines.values()), None)

    def _pipeline_for(self, call: dict[str, Any]) -> ps.Pipeline:
        """The pipeline of a model that is called so. One that gets no labels, to predict, has another graph of the same cut."""
        names = frozenset(name for name, value in call.items() if value is not None)
        if names not in self._pipelines:
            settle(self.model)
            previous, options = self.pipeline, self.args.pipeline_options()
            if previous is not None and "plan" not in options:
                options["cuts"] = previous.cuts
            options |= {"mesh": self._mesh, "seed": self.args.seed, "reduction": "sum", "example_kwargs": call}
            options["scaler"] = self.accelerator.scaler
            self._pipelines[names] = ps.Pipeline(self.model, self._loss, **options)
            self._take_out_parameters()
        return self._pipelines[names]

    def create_accelerator_and_postprocess(self) -> None:
        """With a scaler that overflows on all ranks if it does on one, where `fp16` has one."""
        super().create_accelerator_and_postprocess()
        if self.accelerator.scaler is not None and ps.comms.current_topology().world_size > 1:
            self.accelerator.scaler = share_scaler(self.accelerator.scaler, self.args.device.type)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A new model, which a new pipeline trains."""
        self._pipelines, self._rank_optimizer, self._flos_per_element = {}, None, None
        return super().call_model_init(trial)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> ModelView:
        return ModelView(self.model, refuse_call)

    # -- training ----------------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The batches of one optimizer step, which flow through the pipeline together."""
        if self.args.group is not None:
            epoch_iterator = self._grouped_batches(list(islice(epoch_iterator, num_batches)))
        self._accumulated, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._losses = []
        return self._accumulated, num_items

    def get_train_dataloader(self) -> Any:
        """With `group="planned"`, of rows as they are: `get_batch_samples` groups and collates them."""
        if self.args.group is None:
            return super().get_train_dataloader()
        collate: Any = self.data_collator
        self.data_collator: Any = RowBatch
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = collate

    def _check_divides_by_tokens(self) -> None:
        """Raise MismatchError where batches of unequal rows would count alike: a loss that is each batch's own mean."""
        is_causal = getattr(self.model, "loss_type", None) == "ForCausalLM" and not self.args.label_smoothing_factor
        if not is_causal and self.compute_loss_func is None:
            raise ps.MismatchError(
                "group='planned' makes batches of unequal rows, so it needs a loss divided by the tokens of the whole step: "
                "that of a ..ForCausalLM model without label smoothing, or a compute_loss_func that uses num_items_in_batch"
            )

    def _grouped_batches(self, batches: Sequence[RowBatch]) -> Iterator[Any]:
        """As many batches of the same rows, of like lengths."""
        rows = [row for batch in batches for row in batch.rows]
        return iter(GroupingCollator(self.data_collator, len(batches))(rows) if rows else ())

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """The loss of one of these batches; with the first of them, forward and backward of all."""
        if not self._losses:
            self._losses = self._step(self._accumulated or [inputs], num_items_in_batch)
            self._accumulated = []
        return self._losses.pop(0)

    def _step(self, batches: Sequence[dict[str, Any]], num_items: Tensor | None) -> list[Tensor]:
        """Forward and backward of all `batches`; the loss of each, as `training_step` has it."""
        batches = [self._prepare_inputs(batch) for batch in batches]
        calls = [self._arguments_of_model(batch, num_items) for batch in batches]
        pipe = self._pipeline_for(calls[0])
        if self.args.replicas > 1 and num_items is not None:
            firsts = [ranks[0] for ranks in pipe.position.replica_pipelines]
            counts = pipe.gather(num_items.item)
            num_items = torch.full_like(num_items, sum(counts[rank] for rank in firsts))
            calls = [{**call, "num_items_in_batch": num_items} if "num_items_in_batch" in call else call for call in calls]
        self._loss.num_items = num_items

        pipe.train()
        self.model.train()  # which `compute_loss` may look at
        pipe.step_count = self.state.global_step
        losses: list[Tensor] = []
        with self.accelerator.autocast():
            total = pipe.step_microbatches(calls, batches, losses=losses, scale=1 / self.args.replicas)

        if self.args.replicas > 1:  # the mean over them is what plain Trainer logs
            zeros = [torch.zeros_like(total) for _ in batches[1:]]
            return [total.to(self.args.device) / self.args.replicas, *zeros]
        return [loss.to(self.args.device) for loss in losses]

    def _arguments_of_model(self, inputs: dict[str, Any], num_items: Tensor | None) -> dict[str, Any]:
        """What `compute_loss` calls the model with."""
        return arguments_of_call(self.model, lambda model: self.compute_loss(model, dict(inputs), num_items_in_batch=num_items))

    def _clip_grad_norm(self, model: Any, max_norm: float | None = None) -> Tensor:
        assert self.pipeline is not None
        self.accelerator.unscale_gradients()
        return self.pipeline.clip_grad_norm_(self.args.max_grad_norm if max_norm is None else max_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Tensor | None = None) -> Tensor:
        return self._clip_grad_norm(model, float("inf")) if grad_norm is None else grad_norm

    def create_optimizer(self, model: Any = None) -> Any:
        """Of all parameters, in groups by their names; this rank's are left once it is known which they are."""
        super().create_optimizer(self.model)
        self._take_out_parameters()
        return self.optimizer

    def _take_out_parameters(self) -> None:
        """Those of other ranks, from the optimizer, once."""
        pipe, optimizer = self.pipeline, getattr(self.optimizer, "optimizer", self.optimizer)
        if pipe is None or optimizer is None or (self._rank_optimizer and self._rank_optimizer.optimizer is optimizer):
            return
        own_ids = {id(parameter) for _, parameter in pipe.named_parameters()}
        self._rank_optimizer = RankOptimizer(optimizer, own_ids, set(map(id, self.model.parameters())))

    def _maybe_log_save_evaluate(self, *arguments: Any, **options: Any) -> None:
        """What callbacks decided on rank 0 holds for all: one that looks at a clock may see another on each rank."""
        self._take_decisions_of_rank_0()
        runs_callbacks = self.control.should_log or self.control.should_evaluate or self.control.should_save
        super()._maybe_log_save_evaluate(*arguments, **options)
        if runs_callbacks:
            self._take_decisions_of_rank_0()

    def _take_decisions_of_rank_0(self) -> None:
        if self.pipeline is not None and self.pipeline.position.world.world_size > 1:
            names = [name for name in vars(self.control) if name.startswith("should_")]
            with self.pipeline.collective("end of a step of Trainer", announces=False) as control:
                decisions = control.all_gather_row([getattr(self.control, name) for name in names], "to decide what follows")
            for name, value in zip(names, decisions[0], strict=True):
                setattr(self.control, name, bool(value))

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Those of all replicas. Trainer's own counts the model's parameters for each batch: here once."""
        count = super().floating_point_ops
        main_input = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        if getattr(count, "__func__", None) is not transformers.Trainer.floating_point_ops or not isinstance(
            main_input, Tensor
        ):
            return count(inputs) * self.args.replicas
        if self._flos_per_element is None:
            self._flos_per_element = count(inputs) // max(main_input.numel(), 1)
        return self._flos_per_element * main_input.numel() * self.args.replicas

    # -- evaluation --------------------------------------------------------------------------------------------------

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Loss, logits and labels of one batch, which is one microbatch, on every rank."""
        predict = super().prediction_step
        call = arguments_of_call(self.model, lambda view: predict(view, dict(inputs), prediction_loss_only, ignore_keys))
        pipe = self._pipeline_for(call)
        with self.accelerator.autocast():
            outputs = pipe.eval_microbatches([call])
        result = None
        with pipe.collective("prediction_step()"):
            if outputs is not None:
                view = ModelView(self.model, outputs_once(outputs[0], self.accelerator))
                result = predict(view, dict(inputs), prediction_loss_only, ignore_keys)
        return everywhere(pipe, result)

    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        """The loop of `evaluate` and `predict`, the same on each replica: a loss counts the items of its own rows."""
        with propagate_errors("evaluation_loop()"), self._without_replicas():
            return super().evaluation_loop(*arguments, **options)

    def get_eval_dataloader(self, *arguments: Any, **options: Any) -> Any:
        """All rows, on each replica."""
        with self._without_replicas():
            return super().get_eval_dataloader(*arguments, **options)

    def get_test_dataloader(self, *arguments: Any, **options: Any) -> Any:
        """All rows, on each replica."""
        with self._without_replicas():
            return super().get_test_dataloader(*arguments, **options)

    @contextmanager
    def _without_replicas(self) -> Iterator[None]:
        """Have accelerate neither share rows out to replicas nor multiply losses by their number."""
        states = self.args.distributed_state, self.accelerator.state  # accelerate copies one to the other now and then
        for state in states:
            state.num_processes = 1
        try:
            yield
        finally:
            for state in states:
                state.num_processes = self.args.replicas

    # -- files -------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **options: Any) -> Any:
        """As Trainer's. `resume_from_checkpoint=True` goes on from the newest checkpoint that was written to its end."""
        if resume_from_checkpoint is True:
            complete = [path.parent for path in Path(self.args.output_dir).glob("checkpoint-*/trainer_state.json")]
            newest = max(complete, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
            resume_from_checkpoint = newest and str(newest)
            if newest is None:
                raise ps.MismatchError(f"No valid checkpoint found in output directory ({self.args.output_dir})")
        with propagate_errors("train()"):
            return super().train(resume_from_checkpoint, *arguments, **options)

    def _load_from_checkpoint(self, *arguments: Any, **options: Any) -> None:
        """Every rank loads the whole model. peft reads names from it."""
        with allow_outdated_use(self.model):
            super()._load_from_checkpoint(*arguments, **options)

    def _load_best_model(self) -> None:
        """As `_load_from_checkpoint`."""
        with allow_outdated_use(self.model):
            super()._load_best_model()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """All ranks' weights, by rank 0, as plain Trainer saves its own."""
        folder = Path(output_dir or self.args.output_dir)
        if self.pipeline is None:
            super()._save(str(folder), state_dict)
            return
        path = folder / ".weights.safetensors"
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
        ps.checkpoint.export(self.pipeline, path)
        with self.pipeline.collective("save_model()"):
            if self.args.should_save:
                state = safetensors.torch.load_file(path)
                path.unlink()
                first_name: dict[int, str] = {}
                for name, parameter in self.model.named_parameters(remove_duplicate=False):  # tied ones share memory
                    state[name] = state[first_name.setdefault(id(parameter), name)]
                with allow_outdated_use(self.model):  # peft reads names from it, and values from `state`
                    super()._save(str(folder), state)
        self._wait_for_all("to save the model")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self._wait_for_all("to save a checkpoint")
        if not self.args.should_save:  # rank 0 has it from its callbacks
            folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
            state = transformers.TrainerState.load_from_json(str(folder / "trainer_state.json"))
            self.state.stateful_callbacks = state.stateful_callbacks

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As plain Trainer's: the state of all parameters, and the schedule's."""
        assert self.pipeline is not None
        assert self._rank_optimizer is not None
        self._rank_optimizer.save(self.pipeline, Path(output_dir) / "optimizer.pt")
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _save_rng_state(self, output_dir: str) -> None:
        """The same on all ranks of a pipeline: layers and losses draw from seeds of their own."""
        assert self.pipeline is not None
        if self.pipeline.topology.rank == 0:
            super()._save_rng_state(output_dir)

    def _wait_for_all(self, purpose: str) -> None:
        if self.pipeline is not None:
            self.pipeline.gather(lambda: None, purpose)

    # -- writing ranks --------------------------------------------------------------------------------------------------

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0."""
        return bool(self.args.should_save)

    def is_local_process_zero(self) -> bool:
        """Whether this is rank 0, which alone prints and shows progress."""
        return bool(self.args.should_log)

    def hyperparameter_search(self, *_: Any, **__: Any) -> Any:
        """Not built."""
        raise ps.MismatchError("hyperparameter_search is not built over ranks: start a training for each trial")


class Trainer(PipelineTrainerMixin, transformers.Trainer):
    """transformers' Trainer with a model that is cut over ranks. Started by torchrun, or in one process.

    The batches of one optimizer step are the microbatches of one step of the pipeline. See docs/howto/trainer.md.
    """


@contextmanager
def propagate_errors(call_name: str) -> Iterator[None]:
    """Around a call that all ranks make: what one rank alone raises, in a data set or a callback, all raise."""
    control = shared_control_group(ps.comms.current_topology())
    with control.collective_call(call_name):
        pass  # connects the ranks: only then do the others learn of an error on this one
    try:
        yield
    except ps.NonFiniteError:  # raised by all ranks already
        raise
    except BaseException as error:
        control.raise_error_on_all_ranks(error)


def share_scaler(scaler: torch.amp.GradScaler, device: str) -> torch.amp.GradScaler:
    """Return one like `scaler`, of which all ranks skip the same steps."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # the import takes a second

    return ShardedGradScaler(
        device,
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
    )


def everywhere(pipe: ps.Pipeline, result: Any) -> Any:
    """The last stage's `result`, tensors in tuples, lists and dicts, on every rank of its pipeline."""
    home, topology = pipe.last_rank, pipe.topology
    if topology.world_size == 1:
        return result
    data = torch.empty(0, dtype=torch.uint8)
    if topology.rank == home:
        buffer = io.BytesIO()
        torch.save(result, buffer)
        data = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    sizes = pipe.gather(data.numel)
    rank_of = topology.get_global_rank
    if topology.rank == home:
        for rank in range(topology.world_size):
            if rank != home:
                ps.comms.send_tensor(data, rank_of(rank))
        return result
    data = ps.comms.recv_tensor((sizes[rank_of(home)],), rank_of(home), torch.uint8, "cpu")
    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location=topology.device, weights_only=True)
