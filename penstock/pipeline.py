"""Pipeline: a model cut into stages over the ranks, which trains like the uncut one."""

import inspect
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from penstock import comms
from penstock.comms.control_group import ControlGroup, shared_control_group
from penstock.comms.topology import Topology
from penstock.engine.batch import StepCall
from penstock.engine.build import PlanLike, ScheduleRule, build_engine, materialise_stages, parse_arguments
from penstock.engine.checks import stale_weights
from penstock.engine.checks.nonfinite import OnNonfinite
from penstock.engine.generation import GenerationOptions, generate_text
from penstock.engine.hints import NotAModule, add_backward_hint
from penstock.engine.last_step import LastStep
from penstock.engine.loss import LossChecks, Reduction
from penstock.engine.model_partition import OriginalModel, partition_model
from penstock.engine.optimizers import check_elementwise_optimizer, norm_type_of_caller, optimizer_of_caller
from penstock.engine.rank_comparison import compare_ranks
from penstock.engine.redistribute import Redistribution, merge_arguments, optimizer_list
from penstock.engine.report import StepReport, StepResult
from penstock.errors import LostRankError, MismatchError, PenstockError
from penstock.mesh.data_parallel import ApplyDataParallel
from penstock.mesh.position import mesh_position
from penstock.mesh.sampler import ReplicaSampler
from penstock.mesh.tensor_parallel import TensorParallelPlan
from penstock.partition.materialise import Init
from penstock.randomness import fork_generator
from penstock.schedule import MeasuredTimeline, Schedule
from penstock.schedule.catalog import all_options
from penstock.stage.module_runner import Recompute, evaluation_mode

LossFn = Callable[[Any, Any], Tensor]
_pipeline_numbers = itertools.count(1)  # pipelines are built in the same order on every rank


class Pipeline(NotAModule):
    """A model cut into stages over the ranks, trained step by step as one. Every rank makes the same call.

    Each rank has its own part of the model, at least one stage; the schedule says which rank runs what when.

        pipe = ps.Pipeline(model, nn.functional.mse_loss, "1f1b", microbatches=8)
        optimizer = torch.optim.Adam(pipe.parameters())  # this rank's part
        loss = pipe.step(inputs, target=targets)  # (rows, ..) each; gradients are in `.grad`, the loss is on every rank
        optimizer.step(), optimizer.zero_grad()

    model
        An `nn.Sequential`, cut here; any other model with `cuts` or an example (where there is one stage, without); a list with
        one module for each stage; or `{stage: module}` with all stages that the schedule places on this rank, and no others.
        Any tree of tensors, numbers and None may pass between stages: a forward of several parameters gets a tuple spread over
        them and a dict by name, any other what the stage before gave.
    loss_fn
        `loss_fn(output, target)`: a floating-point scalar, the mean over its microbatch, or the sum (`reduction`). It runs on
        the last stage's rank. What is trained belongs to the model: a loss that is a module has no parameters, or frozen ones.
    schedule
        A name of `ps.schedule.names()`, built with `microbatches` and the `options` of its family (`stages_per_rank`,
        `group_size`); the path of a CSV table; a `Schedule`; or a function of (rank, ranks, microbatches) that gives the rank's
        row: `"0F0"`, `"1B0"`, ..
    microbatches
        Into how many pieces a batch is split, M. A batch of fewer rows runs as many as it has rows.
    loss_weight
        `loss_weight(target)`: what a microbatch counts in the batch's mean, from its target alone; by default its rows. For a
        mean over tokens, as with an `ignore_index` or class weights, `ps.tokens()`.
    topology
        Where this rank stands; by default what `ps.comms.init_distributed()` finds.
    seed
        Of the random numbers that layers (dropout) and the loss draw in training, which depend on it, the step, the microbatch
        and the layer only; and of weights that are on the meta device. None leaves them to torch's generator, and so to the
        schedule.
    cuts
        Names of submodules: where each stage but the first begins. See `ps.partition.split`.
    example_args, example_kwargs
        One microbatch: the model is traced with it, and cut by the times measured on it, unless `cuts` says where.
    merge_weight_gradients
        W of one stage that stand next to each other in the table are one product over their joined rows: faster, and exact to
        rounding only, since the order of the sums changes.
    recompute
        `"stage"` or `"block"`: keep only the input of every stage, or of every layer; the backward computes the rest again.
        Or a sequence of these and None, one for each stage.
    plan
        What `ps.plan.plan` found, or `ps.plan.load` read: its schedule, microbatches, cuts and recomputation, instead of yours.
        A model with other layers than it was made for is refused.
    scaler
        A GradScaler for float16, whose scale the backward starts with; `ShardedGradScaler` where there are several ranks.
    init
        `init(submodule)`, called on each submodule of a model on the meta device, after its `reset_parameters()` and the
        `_init_weights(submodule)` that models of transformers have. A rank gives memory to its own stages only, and the values
        are the same for any cut. What none of these writes must be loaded before the first step.
    mesh
        A DeviceMesh of all ranks with any of the axes `pp`, `dp`, `tp`, for instance of `ps.comms.init_mesh`. Pipelines along
        `dp` are replicas: each is given rows of its own, and the loss is the mean over all their rows. Ranks along `tp` are
        given the same rows. With an axis `dp` or `tp` a step that fails is the pipeline's last.
    data_parallel
        How replicas are held equal: `"ddp"`, `"fsdp"` (`fully_shard`), or a function of (stage, the axis `dp`) that applies one
        of the two in its own way and returns the stage. Gradients are averaged once a step, while the last backwards go on.
    tensor_parallel
        Names of submodules in the uncut model, `*` standing for any part between two dots -> torch's styles
        (`ColwiseParallel()`, ..), by which ranks along `tp` share their products.
    on_nonfinite
        Watch every step for values that are NaN or infinite, in losses, what layers and stages give, and gradients: `"raise"`
        an error that names rank, stage, layer, microbatch and action; `"skip"` the step as if its batch had not been; or
        `"retry"` it once, and raise if that was of no use. By default nothing is watched. See docs/howto/audit.md.
    rows_dim
        The dimension of inputs, targets and outputs that has the rows: microbatches are cut and outputs joined along it. 0 by
        default, which a model with modules of `batch_first=False` must say itself: theirs is 1. `ps.Rows(tensor, dim)` is a
        tensor of a batch that has them elsewhere, `ps.Replicated(tensor)` one that has none.
    reduction
        What `loss_fn` returns: `"mean"`, or `"sum"` over the rows, which adds the microbatches' losses, those of all replicas
        too. See docs/howto/loss.md.

    Once built, its options cannot be set: `pipe.schedule = ..` raises AttributeError. `step_count` can.

    Raises ScheduleError if the table cannot be proved, MismatchError where the ranks, the schedule and the model do not fit
    together, LostRankError if a rank does not come.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Mapping[int, nn.Module],
        loss_fn: LossFn | None = None,
        schedule: str | Schedule | ScheduleRule = "1f1b",
        microbatches: int = 8,
        loss_weight: Callable[[Any], Any] | None = None,
        topology: Topology | None = None,
        *,
        seed: int | None = 0,
        cuts: Sequence[str] | None = None,
        example_args: Sequence[Any] | None = None,
        example_kwargs: Mapping[str, Any] | None = None,
        merge_weight_gradients: bool = False,
        recompute: Recompute | Sequence[Recompute | None] | None = None,
        plan: PlanLike | None = None,
        scaler: torch.amp.GradScaler | None = None,
        init: Init | None = None,
        mesh: DeviceMesh | None = None,
        data_parallel: str | ApplyDataParallel = "ddp",
        tensor_parallel: TensorParallelPlan | None = None,
        on_nonfinite: OnNonfinite | None = None,
        rows_dim: int | None = None,
        reduction: Reduction = "mean",
        **options: Any,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "model")}
        redistribution = model if isinstance(model, Redistribution) else None  # `rebuild` gives one
        model = redistribution.model if redistribution else model
        self.loss_fn, self.loss_weight, self.reduction, self.scaler = loss_fn, loss_weight, reduction, scaler
        self.merge_weight_gradients = merge_weight_gradients
        self.step_count = 0  # steps done; dropout depends on it, so set it when training is resumed

        world = topology or comms.init_distributed()
        self._control = shared_control_group(world)
        self._number: int | None = None
        self._call_lock, self._process_id = threading.Lock(), os.getpid()

        # All ranks do the following together. Steps 2 to 5 each exchange a message between all of them.
        with self.collective("Pipeline(..)"), stale_weights.allow_stale_use(model):
            # 1. This rank's place in the mesh.
            self._number = next(_pipeline_numbers)
            self.position = mesh_position(mesh, world)
            self.topology = self.position.pipeline
            self._control.add_mesh_groups(self._number, self.position.peer_groups)

            # 2. Check the arguments, then partition the model as rank 0 chooses.
            config = parse_arguments(model, arguments, self.topology.world_size, redistribution)
            self.schedule, self.rows_dim, self.seed = config.schedule, config.rows_dim, config.arguments.seed
            partition = partition_model(
                self._control, self.position, self.schedule, config.cuttable or model, config.plan_layers
            )
            given_stages = {} if config.cuttable else partition.given_stages
            self._original = OriginalModel(model, config.cuttable, given_stages)

            # 3. Compare what all ranks are about to build.
            comparison = compare_ranks(self._control, self.position, self.schedule, partition, config.equal_options)

            # 4. Bring this rank's stages to its device, with their values.
            unset_names = set[str]()
            if redistribution:
                modules = redistribution.move_state(self._control, self.topology, partition.modules)
            else:
                tensors = self._original.stage_tensors(partition.modules)
                stale_weights.check_not_stale(tensors, comparison.changed_keys, world.rank)
                modules, unset_names = materialise_stages(partition, comparison, self.topology.device, self.seed, init)

            # 5. Connect them to those of other ranks.
            self._engine = build_engine(self._control, self.position, config, partition, comparison, modules, unset_names)
            self._engine.shared_tensors = stale_weights.record_pipeline(
                self._number,
                self._original.stage_tensors(modules),
                self._original.remote_tensors(modules),
                comparison.changed_keys,
                self.topology.world_size,
            )

        self._arguments = arguments | {"microbatches": self.schedule.microbatches}
        self._parameters = self._engine.parameters
        self._empty_parameter = nn.Parameter(torch.empty(0, device=self.topology.device))  # see `parameters`
        self.balance = partition.balance  # how even the cut is, on the rank that chose it
        self.first_rank, self.last_rank = self.schedule.placement[0], self.schedule.placement[-1]

        self._loss_checks: LossChecks | None = None  # on one rank that has the target
        if loss_fn is not None and self.position.stage_rank_index == 0 and self.topology.rank == self.last_rank:
            self._loss_checks = LossChecks(loss_fn, reduction, loss_weight, self.schedule.microbatches, self.rows_dim)

        self._options = ["model", *arguments, *all_options()]  # read-only from here on

    # -- training and evaluation ------------------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        target: Any = None,
        scale: float = 1.0,
        losses: list[Tensor] | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward of one batch; gradients are added to the parameters' `.grad`. Returns the loss, everywhere.

        What clips them afterwards is `clip_grad_norm_`, by the norm of the whole model: a list of parameters has this rank's.

        args, kwargs
            The first stage's input, any tree of tensors with the same number of rows, their first dimension unless `rows_dim`
            says another; numbers, None and `ps.Replicated(tensor)` go to every microbatch. A keyword of the model's that has
            the name of one of those below is given by position.
        target
            The loss's, likewise. Only the first stage's rank reads the inputs and only the last one's the target: others may
            pass None. Where both are given the target, they compare some of its values.
        scale
            What the gradients are multiplied by, the same on every rank: 1/k adds those of the mean over k batches up in k
            calls (docs/howto/data.md). The loss is not scaled.
        losses
            A list that gets each microbatch's loss instead of what it holds, in the order of the rows, on every rank that gives
            one; NaN for a microbatch that counts nothing. With replicas, those of this one.
        return_outputs
            Return (loss, outputs): the batch's, detached, on the last stage's rank, None on the others.

        The loss is the mean over the whole batch (the sum, with `reduction="sum"`), a scalar in its dtype, detached: the
        backward has been done. A batch of fewer rows than microbatches runs as many microbatches as it has rows.

        Raises, on every rank: MismatchError for a batch that does not fit; StageError when the model or the loss raises;
        LostRankError when a rank dies or is silent. Gradients are as before the step then, and after the first two the next
        step works, unless there is an axis dp or tp. A checkpoint that could not be written beside the steps is told here, once
        and before the step begins: the same call does it then.
        """
        if self.report is not None and any(self.report.background_save_failed):
            self._engine.settle_background_save()

        result = self._run(True, args, kwargs, target, user_scale=scale, losses_list=losses, wants_outputs=return_outputs)
        if losses is not None:
            losses[:] = result.losses
        loss = add_backward_hint(result.loss)
        return (loss, result.joined_outputs(self.rows_dim)) if return_outputs else loss

    def eval(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """Forward only, modules in evaluation mode for its time; touches no gradient and no buffer.

        The mode alone, as `nn.Module.eval` sets it, is set by `train(False)`. See docs/howto/validate.md.

        Returns the outputs of the whole batch on the last stage's rank, None on the others; with a `target`, (outputs, loss),
        the loss on every rank. Raises as `step` does.
        """
        result = self._run(False, args, kwargs, target, wants_outputs=True)
        outputs = result.joined_outputs(self.rows_dim)
        return outputs if target is None else (outputs, result.loss)

    def generate(
        self,
        tokens: Tensor,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        eos: int | None = None,
        seed: int = 0,
        on_token: Callable[[Tensor], object] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Go on with `tokens`: (batch, time) int64 -> (batch, time + new) int64, the same on every rank.

            text = pipe.generate(prompt, max_new_tokens=64)  # greedy: the uncut model's own tokens

        tokens
            Rows of one length, the same on every rank; along `dp` each replica has rows of its own.
        max_new_tokens
            How many each row gets, at most.
        temperature, top_k
            0: always the likeliest token. Else each is drawn from softmax(logits / temperature), over the `top_k` likeliest if
            that is given.
        eos
            The token that ends a row, which is filled up with it. Generation ends when all rows, of all replicas, have ended.
        seed
            Of what is drawn, which depends on it, the row and the position: not on ranks, schedule or microbatches.
        on_token
            Called on every rank with each column of new tokens, (batch,), as it comes.
        kwargs
            Further arguments of the model's forward, the same in every pass (`use_cache=False`).

        The model takes tokens and gives logits, (batch, time, vocabulary), itself or as `logits` of what it gives; with
        `rows_dim=1` it takes (time, batch) and gives (time, batch, vocabulary). It is in evaluation mode. Layers that use
        `ps.cache`, as our GPT's do, are given new tokens only; any other model runs over the whole text for each token. A text
        longer than the model's context goes on from its last `context` tokens.

        Raises, on every rank: MismatchError for arguments that cannot be or differ between ranks, and for another kind of
        output; else as `step` does.
        """
        generation_options = GenerationOptions(max_new_tokens, temperature, top_k, eos, seed)
        with (
            self.collective("generate()", announces=False),
            evaluation_mode(list(self.stages.values())),
            self.topology.context.activity.during_step(self.step_count, False),
        ):
            self._check_not_ended()
            return generate_text(self._engine, tokens, kwargs, generation_options, on_token, self.rows_dim)

    def rebuild(
        self,
        schedule: str | Schedule | ScheduleRule | None = None,
        microbatches: int | None = None,
        *,
        cuts: Sequence[str] | None = None,
        optimizer: Any = None,
        **options: Any,
    ) -> Any:
        """This training with another schedule, other microbatches or another cut: a new pipeline in the place of this one.

            pipe, optimizer = pipe.rebuild("zb-v", microbatches=8, optimizer=optimizer)

        Each rank gets the weights, buffers, gradients and optimizer state of its new stages from the rank that has them, and
        what follows has the bits of a training that was so from the start. Nothing is written to disk. The step count, modes
        and what is frozen go along. All ranks make the same call, between steps.

        schedule, microbatches
            As for `Pipeline`; what is left out stays.
        cuts
            Where each stage but the first begins. Left out, cuts that were given stay; a cut that was chosen is chosen again.
        optimizer
            Of this rank's `pipe.parameters()`, or a list of several. Each parameter stays in its group, on whichever rank it
            is. It is the same object afterwards, so schedulers and scalers that have it go on with it.
        options
            What else changes, of `Pipeline`'s own (`loss_fn`, `recompute`, `plan`, ..) or of the schedule's family
            (`stages_per_rank`, ..): those of the schedule before stay with that. The model and the mesh stay.

        Returns the new pipeline, or (pipeline, optimizer) where there is one. This one ends: it refuses further calls. What was
        done to `pipe.stages` themselves, as compiling them, is to be done again.

        Raises, on every rank and before anything changes: ScheduleError and MismatchError as `Pipeline`; MismatchError for
        optimizers that differ between ranks, hooks that would stay behind, and parameters in shards (`fsdp`, `tp`). This
        pipeline goes on then, unless there is an axis dp. What a checkpoint's writing came to is told as by `step`.
        """
        self._engine.settle_background_save()
        changes = {"schedule": schedule, "microbatches": microbatches, "cuts": cuts}
        changes = options | {name: value for name, value in changes.items() if value is not None}
        redistribution: Any = None
        try:
            with self.collective("rebuild()"):
                self._check_not_ended()
                self._parameters.check_initialised()
                arguments = merge_arguments(self._arguments, changes)
                optimizers = optimizer_list(optimizer, self.topology.world_size)
                redistribution = Redistribution(self._original, self.stages, optimizers)
                pipe = Pipeline(redistribution, **arguments)
        except BaseException:
            if redistribution is not None and redistribution.has_started:
                self._end("this pipeline ended when rebuild() failed half-way: start the ranks again")
            raise

        pipe.step_count = self.step_count
        self._end("this pipeline was rebuilt: use the one that rebuild() returned")
        return pipe if optimizer is None else (pipe, optimizer)

    def train(self, mode: bool = True) -> "Pipeline":
        """Put this rank's modules into training mode, which `step` leaves as it is, or out of it; as `nn.Module.train`."""
        for module in self.stages.values():
            module.train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of this rank's gradients, or set them to 0; as `nn.Module.zero_grad`."""
        for module in self.stages.values():
            module.zero_grad(set_to_none)

    def _run(self, training: bool, args: Any, kwargs: dict[str, Any], target: Any, **call_options: Any) -> StepResult:
        """Run one training step or evaluation on all ranks, and the checks after it."""
        loss_settings = self.loss_fn is not None, self.reduction, self.loss_weight, self.seed, self.scaler
        gradient_factor = self._engine.gradient_factor
        if training:
            call_options |= {
                "gradient_factor": gradient_factor.measure(),
                "weights_changed": gradient_factor.weights_changed(),
                "rowwise_check": self._loss_checks and self._loss_checks.rowwise_check,
            }
        call = StepCall(training, args, kwargs, target, self.step_count, *loss_settings, **call_options, rows_dim=self.rows_dim)

        # Layers with a seed of the pipeline's do not advance the user's generator.
        has_own_seed = training and self.seed is not None
        random_state = fork_generator(self.topology.device) if has_own_seed else nullcontext()
        mode = nullcontext() if training else evaluation_mode(list(self.stages.values()))
        step_number = self.step_count + training  # of the step that begins, or of the last
        with (
            self.collective("step()" if training else "eval()", announces=False),
            mode,
            self.topology.context.activity.during_step(step_number, training),
            random_state,
        ):
            self._check_not_ended()
            result = self._engine.step(call)
            self.step_count += training

        if training:
            gradient_factor.remember()
            if self._original.cuttable is not None and self.topology.world_size > 1:
                stale_weights.refuse_stale_use(self._original.cuttable.model)
        if self._loss_checks is not None:
            self._loss_checks.check_after_step(target)
        self._engine.last_result = result._replace(outputs=())  # not kept alive: they are the caller's
        return result

    @property
    def last(self) -> LastStep:
        """What the last step came to: `report`, `metrics()`, `timeline()`, `clock_error`, and `lines()`."""
        return LastStep(self._engine, self.collective)

    @property
    def report(self) -> StepReport | None:
        """What the last step took, the same on every rank; None before the first."""
        return self.last.report

    @property
    def preempted(self) -> bool:
        """Whether any rank has been asked to save and leave (`ps.comms.catch_preemption`): the same after the same step."""
        return self.report is not None and any(self.report.preempted)

    @contextmanager
    def collective(self, call: str, announces: bool = True) -> Iterator[ControlGroup]:
        """Around what all ranks do as one `call`: if a rank makes another call, or fails inside, all raise the same error.

        Gives the control group they exchange values over. `announces`: see `ControlGroup.collective_call`. One call at a time:
        two would mix their microbatches.
        """
        if os.getpid() != self._process_id:
            raise PenstockError(f"the pipeline is that of process {self._process_id}, which has forked this one: call it there")
        if not self._call_lock.acquire(blocking=False):
            raise PenstockError("the pipeline is in another call: one at a time, and none from a forward, a loss or a hook")
        try:
            with self._control.collective_call(call, self._number, announces):
                yield self._control
        finally:
            self._call_lock.release()

    def _check_not_ended(self) -> None:
        """Raise LostRankError once a failure has closed the process groups of this pipeline's mesh."""
        if self._number in self._control.ended_pipelines:
            reason = self._control.ended_pipelines[self._number]
            raise LostRankError(f"this pipeline ended when {reason}: start the ranks again")

    def sampler(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> ReplicaSampler:
        """Which rows of `dataset` this rank's loader reads: the same on all ranks of a pipeline, others on each replica.

            loader = DataLoader(dataset, batch_size=32, sampler=pipe.sampler(dataset))  # rows of one replica's batch

        Each iteration is the next epoch, `shuffle` makes each another shuffle, which depends on `seed` and the epoch only, and
        `set_epoch(n)` goes on at epoch n. Every replica gets len(dataset) // dp rows an epoch; the rows left over come first
        in the next. See docs/howto/data.md.

        Raises MismatchError for a dataset without a length, or with fewer rows than replicas.
        """
        if isinstance(dataset, DataLoader):
            raise MismatchError("sampler() takes the dataset: DataLoader(dataset, batch_size, sampler=pipe.sampler(dataset))")
        if not hasattr(dataset, "__len__"):
            raise MismatchError(
                f"a {type(dataset).__name__} has no length to sample from: let it share its rows out itself, by "
                "pipe.position.replica of pipe.position.num_replicas"
            )
        return ReplicaSampler(len(dataset), self.position.replica, self.position.num_replicas, shuffle, seed)

    # -- parameters: see parameters.py ------------------------------------------------------------------------------

    @property
    def stages(self) -> dict[int, nn.Module]:
        """This rank's stages, by number."""
        return self._parameters.modules

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, each once and by the name that `named_parameters()` of the uncut model has for it.

            groups = [{"params": [p for name, p in pipe.named_parameters() if "norm" in name], "weight_decay": 0.0}, ..]

        So one that several ranks share, as tied embeddings, has one name on all of them, and groups that are made by names put
        it into the same one everywhere. `state_dict()` has it under each of its names.
        """
        return self._parameters.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for its optimizer; one that several of its stages share comes once.

            optimizer = torch.optim.AdamW(pipe.parameters())
            torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)  # as pipe.clip_grad_norm_(1.0): all ranks call it

        A function that clips by the norm, or takes it, gets a number for each gradient of other ranks besides, so that the norm
        is the whole model's. It must be given what this returns, or a generator over it: a list of parameters, as
        `optimizer.param_groups` has, is this rank's only, and its norm too.

        Where none of them is trained there is an empty one that is: torch makes no optimizer of nothing. Raises MismatchError
        for an optimizer that decides by all parameters at once, such as LBFGS, where there are several ranks.
        """
        parameters = list(self._parameters.parameters())
        has_trained = any(parameter.requires_grad for parameter in parameters)
        return self._iterate_for_caller(parameters if has_trained else [*parameters, self._empty_parameter])

    def _iterate_for_caller(self, parameters: list[nn.Parameter]) -> Iterator[Any]:
        """Iterate over `parameters`; for a function that takes a norm, also over stand-ins for other ranks' gradients."""
        frame = inspect.currentframe()
        norm_type = norm_type_of_caller(frame)
        if norm_type is not None and self.position.world.world_size > 1:
            yield from self._parameters.with_remote_gradient_norms(self._gradient_norms(norm_type))
        else:
            check_elementwise_optimizer(optimizer_of_caller(frame), self.topology.world_size)
            yield from parameters

    def state_dict(self, strict: bool = True) -> dict[str, Any]:
        """This rank's part of the uncut model's state, under the uncut model's names; all ranks' parts make the whole.

        What `fully_shard` or `tensor_parallel` has spread over ranks comes as DTensors: `full_tensor()`, which all who have a
        piece call, is the whole of one. Raises MismatchError while something has no value yet, unless `strict` is False.
        """
        if strict:
            self._parameters.check_initialised()
        return self._parameters.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's part out of `state`, which may be the whole model's. Every rank that has a tied parameter loads it.

        Raises MismatchError, before anything is loaded, for a name this rank lacks in `state`, for one that no stage has
        (both unless `strict` is False), and for a shape that differs.
        """
        value: Any = state
        if not isinstance(value, Mapping):
            raise MismatchError(
                f"load_state_dict() takes names and tensors, not a {type(value).__name__}: of files, "
                "checkpoint.import_weights(pipe, path)"
            )
        self._parameters.load_state_dict(state, strict)

    def gather(self, make: Callable[[], Any], what: str = "to gather values") -> list[Any]:
        """What `make()` gives on every rank, by rank: numbers and texts, in lists and dicts. All ranks call it, between steps.

        If it raises on one rank, all do. `what` is said of a rank that does not come.
        """
        with self.collective("gather()") as control:
            return control.all_gather_object(make(), what)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all ranks' gradients so that their norm, taken together, is at most `max_norm`; returns the norm before.

        The norm is taken over the parameters in the uncut model's order, so it has the bits of the uncut model's. A tied
        parameter counts once. All ranks call it. Raises MismatchError for a `max_norm` that is no number of 0 or more.
        """
        norms = self._gradient_norms(norm_type, max_norm)
        total = self._parameters.clip_grads(norms, max_norm, float(norm_type))
        self._engine.gradient_factor.remember()
        return total

    def _gradient_norms(self, norm_type: float, max_norm: float = 0.0) -> list[Any]:
        """Those of all ranks, which all call it. Raises MismatchError for a `max_norm` that is no number of 0 or more."""
        with self.collective("clip_grad_norm_()", announces=self.position.num_stage_ranks > 1):  # a DTensor's norm waits
            if not isinstance(max_norm, int | float) or not max_norm >= 0:
                raise MismatchError(f"clip_grad_norm_() takes a number of 0 or more as max_norm, got {max_norm!r}")
            norms = self._parameters.gradient_norms_by_name(float(norm_type))  # "inf" too, as torch's
            return self._control.all_gather_object(norms, "to clip their gradients")

    def metrics(self) -> dict[str, float]:
        """What the last step came to, by name, for any logger (`wandb.log(pipe.metrics())`). All ranks call it.

        Times are in seconds, memory in bytes; `wait/..` are the shares of this pipeline's time that each cause of idle
        time took, `between_steps_seconds/..` what lay before the step since the one before: the optimizer, the next batch;
        `averaging_seconds/..` what replicas took after their last action until gradients were averaged.
        """
        return self.last.metrics()

    def timeline(self) -> MeasuredTimeline:
        """When every action of the last step ran, measured, in seconds of rank 0's clock. All ranks call it.

        Of pipelines side by side, each gets its own. Memory is in bytes (`engine/activation_memory.py`) unless a stage is
        compiled. Ranks on other machines compare their clocks first; `clock_error` says how far apart they may still be, in
        seconds.
        """
        return self.last.timeline()

    @property
    def clock_error(self) -> float:
        """Seconds by which the times of different machines in the last `timeline()` may be off."""
        return self.last.clock_error

    def lines(self) -> dict[str, str]:
        """What carries this rank's messages: `{"0-1": "memory that both processes see"}`. All ranks call it."""
        return self.last.lines()
