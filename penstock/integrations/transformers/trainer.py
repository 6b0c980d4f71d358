"""Trainer whose model is cut over ranks: the batches of one optimizer step are the microbatches of a pipeline step."""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
import transformers
from torch import Tensor, nn
from transformers.utils import ModelOutput

import penstock as ps
from penstock.comms.control_group import shared_control_group
from penstock.guards.outdated_weights import allow_outdated_use
from penstock.integrations.transformers.grouping_collator import GroupingCollator, RowBatch
from penstock.integrations.transformers.loss_effects import LossEffects, record_logs
from penstock.integrations.transformers.model_call import ModelCall, TrainerLoss
from penstock.integrations.transformers.model_view import ModelView, prepare_for_cut
from penstock.integrations.transformers.optimizer import RankOptimizer
from penstock.integrations.transformers.overrides import BatchResult, MixinAboveTrainer, batch_content, check_overrides
from penstock.integrations.transformers.progress_bar import replace_progress
from penstock.integrations.transformers.reference import ReferenceOutputs, take_reference
from penstock.integrations.transformers.token_loss import TokenLoss, check_tokens_can_be_cut
from penstock.integrations.transformers.training_arguments import TrainingArguments, check_arguments

if TYPE_CHECKING:
    from transformers import Trainer as Mixin
else:
    Mixin = object


class PipelineTrainerMixin(Mixin, metaclass=MixinAboveTrainer):
    """Makes any subclass of transformers' Trainer train over ranks: `class Yours(PipelineTrainerMixin, YourTrainer)`.

    Its methods stand directly above those of transformers' Trainer, so an override of the subclass is called as in plain
    Trainer, and `super()` there leads to the mixin. `overrides.py` lists the overrides that are refused.

    Every rank must make the same calls, also those that save and evaluate. The first batch cuts the model. `compute_loss` may
    be overridden: it must call the model once, with named arguments, and may read the outputs and the batch.

    `ref_model`: a second, frozen model for the loss, the pipeline's teacher. `compute_loss_func` gets its outputs after the
    labels; a `compute_loss` gets them where it calls `self.ref_model(**inputs)`, after the model and with the same arguments.
    """

    def __init__(
        self, model: Any = None, args: Any = None, *more: Any, ref_model: nn.Module | None = None, **options: Any
    ) -> None:
        args = TrainingArguments("tmp_trainer") if args is None else args
        check_arguments(args)
        check_overrides(self)
        script_names = set(vars(self))
        super().__init__(model, args, *more, **options)
        if self.accelerator.scaler is not None and ps.comms.current_topology().world_size > 1:
            self.accelerator.scaler = share_scaler(self.accelerator.scaler, args.device.type)
        if args.group is not None:
            self._check_divides_by_tokens()
        self._pipelines: dict[tuple[frozenset[str], bool], ps.Pipeline] = {}  # by arguments of the model, and if it cuts tokens
        self._loss: TrainerLoss | TokenLoss = TrainerLoss(self._as_accelerate_converts)
        if args.cuts_tokens:
            check_tokens_can_be_cut(self)
            self._loss = TokenLoss(self.model, self._as_accelerate_converts, args.replicas)
        self._reference = ref_model
        if ref_model is not None:
            take_reference(self, ref_model)
        self._accumulated: list[dict[str, Any]] = []  # the batches of one optimizer step
        self._results: list[BatchResult] = []  # of batches for which `training_step` is not called yet
        self._rank_optimizer: RankOptimizer | None = None
        self._flos_per_element: int | None = None  # floating-point operations for an element of the model's main input
        replace_progress(self.callback_handler.callbacks, lambda: None if self.pipeline is None else self.pipeline.report)
        ranks, replicas = ps.comms.current_topology().world_size, args.replicas
        pp = ranks // (replicas * args.cp)
        self._mesh = ps.comms.init_mesh(pp=pp, dp=replicas, cp=args.cp) if pp < ranks else None
        self._whole_mesh = ps.comms.init_mesh(pp=pp, dp=replicas * args.cp) if args.cp > 1 else self._mesh  # of whole sequences
        self._loss_effects = LossEffects(self, {*vars(self), "_loss_effects"} - script_names)

    @property
    def pipeline(self) -> ps.Pipeline | None:
        """Return the pipeline that trains; None before the first batch."""
        key = max(self._pipelines, key=lambda key: key[1], default=None)  # one that cuts tokens, which evaluation does not
        return None if key is None else self._pipelines[key]

    def _pipeline_for(self, call: dict[str, Any], cuts_tokens: bool = False) -> ps.Pipeline:
        """Return the pipeline for a call with these arguments. A call without labels has another graph, with the same cut."""
        key = frozenset(name for name, value in call.items() if value is not None), cuts_tokens
        if key not in self._pipelines:
            prepare_for_cut(self.model)
            previous, options = self.pipeline, self.args.pipeline_options()
            if previous is not None and "plan" not in options:
                options["cuts"] = previous.cuts
            options |= {"seed": self.args.seed, "reduction": "sum", "example_kwargs": call}
            options |= {"mesh": self._mesh, "slices": self.args.slices} if cuts_tokens else {"mesh": self._whole_mesh}
            options |= {"scaler": self.accelerator.scaler, "teacher": self._reference}
            self._pipelines[key] = ps.Pipeline(self.model, self._loss, **options)
            self._remove_other_ranks_parameters()
        return self._pipelines[key]

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Return a new model, and drop the pipelines of the old one."""
        self._pipelines, self._rank_optimizer, self._flos_per_element = {}, None, None
        return super().call_model_init(trial)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> ModelView:
        return ModelView(self.model, self._evaluate_model)

    def _evaluate_model(self, **arguments: Any) -> Any:
        """Return the model's outputs on every rank, without gradients: a forward by a script. All ranks call it.

        Raises MismatchError where gradients are on.
        """
        if torch.is_grad_enabled():
            raise ps.MismatchError(
                "the model is cut over the ranks, and trains in super().training_step() only: call it under torch.no_grad()"
            )
        pipe = self._pipeline_for(arguments)
        with self.accelerator.autocast():
            outputs = pipe.eval_microbatches([arguments])
        if outputs is not None:
            converted = self._as_accelerate_converts(outputs[0])
            outputs = dict(converted) if isinstance(converted, Mapping) else converted
        outputs = broadcast_from_last_stage(pipe, outputs)
        return ModelOutput(outputs) if isinstance(outputs, dict) else outputs

    # -- training ----------------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Return the batches of one optimizer step, and keep them: the first `training_step` runs them all."""
        if self.args.group is not None:
            epoch_iterator = self._grouped_batches(list(islice(epoch_iterator, num_batches)))
        self._accumulated, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._results = []
        return self._accumulated, num_items

    def get_train_dataloader(self) -> Any:
        """Return the loader; with `group="planned"` one of uncollated rows, which `get_batch_samples` groups and collates."""
        if self.args.group is None:
            return super().get_train_dataloader()
        collate: Any = self.data_collator
        self.data_collator: Any = RowBatch
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = collate

    def _check_divides_by_tokens(self) -> None:
        """Raise MismatchError if the loss is a mean over each batch: then batches of unequal rows would have equal weights."""
        is_causal = getattr(self.model, "loss_type", None) == "ForCausalLM" and not self.args.label_smoothing_factor
        if not is_causal and self.compute_loss_func is None:
            raise ps.MismatchError(
                "group='planned' makes batches of unequal rows, so it needs a loss divided by the tokens of the whole step: "
                "that of a ..ForCausalLM model without label smoothing, or a compute_loss_func that uses num_items_in_batch"
            )

    def _grouped_batches(self, batches: Sequence[RowBatch]) -> Iterator[Any]:
        """Return as many batches of the same rows, regrouped by similar lengths."""
        rows = [row for batch in batches for row in batch.rows]
        return iter(GroupingCollator(self.data_collator, len(batches))(rows) if rows else ())

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Return the loss of one batch. The first call of an optimizer step runs forward and backward of all its batches."""
        if not self._results:
            batches = self._accumulated if len(self._accumulated) > 1 else [inputs]
            self._accumulated = []
            self._results = self._step(batches, num_items_in_batch)
        result = self._results.pop(0)
        result.check_batch(inputs)
        for arguments, options in result.logs:
            self.log(*arguments, **options)
        self._decide(result.decisions)
        return result.loss

    def _step(self, batches: Sequence[dict[str, Any]], num_items: Tensor | None) -> list[BatchResult]:
        """Run forward and backward of all `batches`. Return the loss of each, scaled as in plain Trainer."""
        num_items = self._sum_over_replicas(num_items)
        optimizer_train = getattr(self.optimizer, "train", None)
        if callable(optimizer_train):  # of optimizers without a schedule
            optimizer_train()
        self.model.train()  # which `compute_loss` may look at

        with self._model_calls(self._batch_loss, [(batch, num_items) for batch in batches]) as calls:
            arguments, targets = self._loss.begin_step(calls)
            pipe = self._pipeline_for(arguments[0], self.args.cuts_tokens)
            pipe.train()
            pipe.step_count = self.state.global_step
            losses: list[Tensor] = []
            with self.accelerator.autocast(), self.compute_loss_context_manager():
                total = pipe.step_microbatches(arguments, targets, losses=losses, scale=1 / self.args.replicas)
            logs, decisions = self._share_loss_effects(pipe, calls)
        self._remove_other_ranks_parameters()

        if self.args.replicas > 1 or self.args.cp > 1:  # the mean over replicas is what plain Trainer logs
            losses = [total / self.args.replicas, *[torch.zeros_like(total) for _ in batches[1:]]]
        losses = [loss.to(self.args.device) for loss in losses]
        decisions_of_batches = [*[{} for _ in batches[1:]], decisions]  # a step is not ended in its middle
        return list(map(BatchResult, losses, logs, decisions_of_batches, map(batch_content, batches)))

    def _sum_over_replicas(self, num_items: Tensor | None) -> Tensor | None:
        """Return the tokens of the step on all replicas."""
        if self.args.replicas == 1 or num_items is None:
            return num_items
        control = shared_control_group(ps.comms.current_topology())
        with control.collective_call("training_step()", announces=False):
            counts = control.all_gather_row([num_items.item()], "to add up the tokens of the step")
        cp, replicas = self.args.cp, self.args.replicas  # ranks 0, cp, 2 cp, .. are each a replica's
        return torch.full_like(num_items, sum(count for (count,) in counts[: replicas * cp : cp]))

    def _batch_loss(self, model: Any, inputs: dict[str, Any], num_items: Tensor | None) -> Tensor:
        """Return the loss of one batch, scaled as by `Trainer.training_step` so that the losses of a step add up."""
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items)

        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            is_scaled = (self.model_accepts_loss_kwargs and num_items is not None) or self.compute_loss_func is not None
        return loss if is_scaled else loss / self.current_gradient_accumulation_steps

    @contextmanager
    def _model_calls(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Iterator[list[ModelCall]]:
        """Yield the calls of the model by `function(model, *arguments)`, for each of `arguments`. The last stage ends them."""
        with ExitStack() as stack:
            stack.enter_context(record_logs(self))
            calls = []
            for values in arguments:
                calls.append(ModelCall(self.model, function, values))
                stack.callback(calls[-1].abort)
            self._loss_effects.begin()
            yield calls

    def _as_accelerate_converts(self, outputs: Any) -> Any:
        """Return the model's outputs in float32, if accelerate would convert them."""
        if not self.accelerator.native_amp:
            return outputs
        from accelerate.utils import convert_to_fp32  # the attention of this package needs no accelerate

        return convert_to_fp32(outputs)

    def _share_loss_effects(self, pipe: ps.Pipeline, calls: Sequence[ModelCall]) -> tuple[Sequence[Any], dict[str, bool]]:
        """Bring what `compute_loss` has collected from the last stage's rank to all. Return each call's logs, and decisions."""
        if not self._loss_effects.may_exist():
            return [()] * len(calls), {}
        is_last = pipe.topology.rank == pipe.last_rank
        message = self._loss_effects.message(calls) if is_last else None
        return self._loss_effects.apply(broadcast_from_last_stage(pipe, message), is_last)

    def _clip_grad_norm(self, model: Any, max_norm: float | None = None) -> Tensor:
        assert self.pipeline is not None
        self.accelerator.unscale_gradients()
        return self.pipeline.clip_grad_norm_(self.args.max_grad_norm if max_norm is None else max_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Tensor | None = None) -> Tensor:
        return self._clip_grad_norm(model, float("inf")) if grad_norm is None else grad_norm

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the optimizer with all parameters; once the model is cut, only this rank's stay."""
        super().create_optimizer(self.model)
        self._remove_other_ranks_parameters()
        return self.optimizer

    def _remove_other_ranks_parameters(self) -> None:
        """Remove other ranks' parameters from the optimizer, once both it and the pipeline exist."""
        pipe, optimizer = self.pipeline, getattr(self.optimizer, "optimizer", self.optimizer)
        if pipe is None or optimizer is None or (self._rank_optimizer and self._rank_optimizer.optimizer is optimizer):
            return
        own_ids = {id(parameter) for _, parameter in pipe.named_parameters()}
        self._rank_optimizer = RankOptimizer(optimizer, own_ids, set(map(id, self.model.parameters())))

    def _maybe_log_save_evaluate(self, *arguments: Any, **options: Any) -> None:
        """Take rank 0's decisions on all ranks: a callback that reads a clock may decide differently on each."""
        self._take_decisions_of_rank_0()
        calls_callbacks = self.control.should_log or self.control.should_evaluate or self.control.should_save
        super()._maybe_log_save_evaluate(*arguments, **options)
        if calls_callbacks:
            self._take_decisions_of_rank_0()

    def _take_decisions_of_rank_0(self) -> None:
        if self.pipeline is not None and self.pipeline.position.world.world_size > 1:
            names = [name for name in vars(self.control) if name.startswith("should_")]
            with self.pipeline.collective("end of a step of Trainer", announces=False) as control:
                decisions = control.all_gather_row([getattr(self.control, name) for name in names], "to decide what follows")
            self._decide({name: bool(value) for name, value in zip(names, decisions[0], strict=True)})

    def _decide(self, decisions: Mapping[str, bool]) -> None:
        for name, value in decisions.items():
            setattr(self.control, name, value)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return the operations of all replicas. Trainer's own counts the parameters for each batch; this counts them once."""
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
        """Return loss, logits and labels of one batch, run as one microbatch, on every rank."""
        predict = super().prediction_step
        with self._model_calls(predict, [(inputs, prediction_loss_only, ignore_keys)]) as calls:
            (call,) = calls
            pipe = self._pipeline_for(call.arguments)
            reference = ReferenceOutputs()
            with self.accelerator.autocast(), self.compute_loss_context_manager():
                if self._reference is None:
                    outputs = pipe.eval_microbatches([call.arguments])
                else:
                    outputs, _ = pipe.eval_microbatches([call.arguments], self._loss_of_reference(reference, call))
            message = None
            with pipe.collective("prediction_step()"):
                if outputs is not None:
                    result = call.finish(self._as_accelerate_converts(outputs[0]), reference.outputs)
                    message = result, self._loss_effects.message(calls)
        result, effects = broadcast_from_last_stage(pipe, message)
        logs, decisions = self._loss_effects.apply(effects, outputs is not None)
        for arguments, options in logs[0] if logs else ():
            self.log(*arguments, **options)
        self._decide(decisions)
        return result

    def _loss_of_reference(self, reference: ReferenceOutputs, call: ModelCall) -> Sequence[Any]:
        """Return the targets with which the loss of an evaluation gives the reference's outputs to `reference`."""
        assert isinstance(self._loss, TrainerLoss)
        self._loss.calls = [reference]
        return [(call.arguments, 0)]

    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        """Run the loop of `evaluate` and `predict`, on each replica with all rows."""
        check_overrides(self)
        with propagate_errors("evaluation_loop()"), self._without_replicas():
            return super().evaluation_loop(*arguments, **options)

    def get_eval_dataloader(self, *arguments: Any, **options: Any) -> Any:
        """Return a loader of all rows, on each replica."""
        with self._without_replicas():
            return super().get_eval_dataloader(*arguments, **options)

    def get_test_dataloader(self, *arguments: Any, **options: Any) -> Any:
        """Return a loader of all rows, on each replica."""
        with self._without_replicas():
            return super().get_test_dataloader(*arguments, **options)

    @contextmanager
    def _without_replicas(self) -> Iterator[None]:
        """Hide the replicas from accelerate, which would share rows out to them and multiply losses by their number."""
        states = (
            self.args.distributed_state,
            self.accelerator.state,
        )  # accelerate copies one to the other
        for state in states:
            state.num_processes = 1
        try:
            yield
        finally:
            for state in states:
                state.num_processes = self.args.replicas

    # -- files -------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **options: Any) -> Any:
        """Train as Trainer. `resume_from_checkpoint=True` resumes the newest complete checkpoint."""
        if resume_from_checkpoint is True:
            complete = [path.parent for path in Path(self.args.output_dir).glob("checkpoint-*/trainer_state.json")]
            newest = max(complete, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
            resume_from_checkpoint = newest and str(newest)
            if newest is None:
                raise ps.MismatchError(f"No valid checkpoint found in output directory ({self.args.output_dir})")
        check_overrides(self)
        with propagate_errors("train()"):
            return super().train(resume_from_checkpoint, *arguments, **options)

    def _load_from_checkpoint(self, *arguments: Any, **options: Any) -> None:
        """Load the whole model on every rank. Old values may be read, because peft reads names from it."""
        with allow_outdated_use(self.model):
            super()._load_from_checkpoint(*arguments, **options)

    def _load_best_model(self) -> None:
        """Load the best model as `_load_from_checkpoint`."""
        with allow_outdated_use(self.model):
            super()._load_best_model()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save all ranks' weights on rank 0, as plain Trainer saves its own."""
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
                for name, parameter in self.model.named_parameters(remove_duplicate=False):  # tied ones have several
                    state[name] = state[first_name.setdefault(id(parameter), name)]
                with allow_outdated_use(self.model):  # peft reads names from the model, and values from `state`
                    super()._save(str(folder), state)
        self._wait_for_all("to save the model")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self._wait_for_all("to save a checkpoint")
        if not self.args.should_save:  # on rank 0 they are up to date
            folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
            state = transformers.TrainerState.load_from_json(str(folder / "trainer_state.json"))
            self.state.stateful_callbacks = state.stateful_callbacks

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the optimizer's state of all parameters, and the learning-rate scheduler's, in plain Trainer's form."""
        assert self.pipeline is not None
        assert self._rank_optimizer is not None
        self._rank_optimizer.save(self.pipeline, Path(output_dir) / "optimizer.pt")
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random state on one rank of each replica. It is equal on all: layers and losses have their own seeds."""
        assert self.pipeline is not None
        if self.pipeline.topology.rank == 0 and self.pipeline.position.shard == 0:
            super()._save_rng_state(output_dir)

    def _wait_for_all(self, purpose: str) -> None:
        if self.pipeline is not None:
            self.pipeline.gather(lambda: None, purpose)

    # -- writing ranks --------------------------------------------------------------------------------------------------

    def is_world_process_zero(self) -> bool:
        """Return whether this is rank 0."""
        return bool(self.args.should_save)

    def is_local_process_zero(self) -> bool:
        """Return whether this is rank 0: only it prints and shows progress."""
        return bool(self.args.should_log)

    def hyperparameter_search(self, *_: Any, **__: Any) -> Any:
        """Raise MismatchError: a hyperparameter search over ranks is not built."""
        raise ps.MismatchError("hyperparameter_search is not built over ranks: start a training for each trial")


class Trainer(PipelineTrainerMixin, transformers.Trainer):
    """transformers' Trainer with a model that is cut over ranks, started by torchrun or in one process.

    The batches of one optimizer step are the microbatches of one step of the pipeline. See docs/howto/trainer.md.
    """


@contextmanager
def propagate_errors(call_name: str) -> Iterator[None]:
    """Raise an error of one rank in this block, as in a data set or a callback, on all ranks. All ranks must enter it."""
    control = shared_control_group(ps.comms.current_topology())
    with control.collective_call(call_name):
        pass  # connects the ranks: only then do the others learn of an error on this one
    try:
        yield
    except ps.NonFiniteError:  # all ranks have raised it already
        raise
    except BaseException as error:
        control.raise_error_on_all_ranks(error)


def share_scaler(scaler: torch.amp.GradScaler, device: str) -> torch.amp.GradScaler:
    """Return a scaler with the settings of `scaler` that skips the same steps on all ranks."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # the import takes a second

    return ShardedGradScaler(
        device,
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
    )


def broadcast_from_last_stage(pipe: ps.Pipeline, result: Any) -> Any:
    """Return the last stage's `result`, tensors in tuples, lists and dicts, on every rank of its pipeline."""
    last_rank, topology = pipe.last_rank, pipe.topology
    if topology.world_size == 1:
        return result
    data = torch.empty(0, dtype=torch.uint8)
    if topology.rank == last_rank:
        buffer = io.BytesIO()
        torch.save(result, buffer)
        data = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    sizes = pipe.gather(data.numel)
    rank_of = topology.get_global_rank
    if topology.rank == last_rank:
        for rank in range(topology.world_size):
            if rank != last_rank:
                ps.comms.send_tensor(data, rank_of(rank))
        return result
    data = ps.comms.recv_tensor((sizes[rank_of(last_rank)],), rank_of(last_rank), torch.uint8, "cpu")
    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location=topology.device, weights_only=True)
