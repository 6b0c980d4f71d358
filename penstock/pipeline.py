"""Pipeline: a model cut into stages over the ranks, which trains like the uncut one."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock import comms
from penstock.batch.agreement import Reduction
from penstock.batch.ahead import AheadBatch
from penstock.batch.call import Call
from penstock.comms.control_group import shared_control_group
from penstock.comms.topology import Topology
from penstock.engine.build import table_of_options
from penstock.engine.hints import ModuleMisuseHints, add_backward_hint
from penstock.engine.last_step import LastStep
from penstock.engine.optimizers import optimizer_list
from penstock.engine.report import StepResult
from penstock.errors import format_count
from penstock.generate import GenerationOptions, generate_text
from penstock.guards.nonfinite import step_with_monitor
from penstock.guards.outdated_weights import allow_outdated_use
from penstock.mesh.data_parallel import ApplyDataParallel
from penstock.mesh.sampler import PipelineSamplers
from penstock.mesh.tensor_parallel import TensorParallelPlan
from penstock.options import LossFn, Model, OnNonfinite, PipelineOptions, PlanLike
from penstock.partition.materialise import Init
from penstock.pipeline_parameters import PipelineParameters
from penstock.pipeline_parts import NewModel, StageSource, build_parts
from penstock.plan.grouping import Limit
from penstock.plan.list_order import comparable_order, microbatch_order
from penstock.plan.microbatch_costs import MicrobatchCosts
from penstock.plan.recut import MEASURED, RECUT_CALL, choose_fastest_cut
from penstock.randomness import preserve_generator_state
from penstock.rebuild import Redistribution
from penstock.schedule.schedule import Schedule, ScheduleRule
from penstock.stage.module_runner import evaluation_mode
from penstock.stage.recompute import Recompute


class Pipeline(LastStep, PipelineParameters, PipelineSamplers, ModuleMisuseHints):
    """A model cut into stages over the ranks, trained as one. All ranks make the same calls.

    Each rank runs its own stages, at least one; the schedule says when.

        pipe = ps.Pipeline(model, nn.functional.mse_loss, "1f1b", microbatches=8)
        optimizer = torch.optim.Adam(pipe.parameters())  # this rank's part
        loss = pipe.step(inputs, target=targets)  # (rows, ..) each; gradients are in `.grad`, the loss is on every rank
        optimizer.step(), optimizer.zero_grad()

    model
        An `nn.Sequential`, cut here; any other model with `cuts` or an example (neither is needed for one stage); a list with
        one module for each stage; or `{stage: module}` with all stages that the schedule places on this rank, and no others.
        Stages may pass any tree of tensors, numbers and None: a forward of several parameters gets a tuple spread over them, a
        dict by name; any other forward gets the output of the stage before.
    loss_fn
        `loss_fn(output, target)` returns a floating-point scalar, the mean over its microbatch, or the sum (`reduction`). It
        runs on the last stage's rank. A loss that is a module has no trained parameters: those belong to the model.
    schedule
        A name of `ps.schedule.names()`, built with `microbatches` and the `options` of its family (`stages_per_rank`,
        `group_size`); the path of a CSV table; a `Schedule`; a function of (rank, ranks, microbatches) that returns the
        rank's row: `"0F0"`, `"1B0"`, ..; or a function of (ranks, microbatches) that returns a `Schedule`. In a table made by
        name, the first stages have forwards only as far as nothing in them is trained.
    microbatches
        The number of pieces into which a batch is split, M: by default 8, or a table's own number. A batch of fewer rows than M
        is split into its rows.
    loss_weight
        `loss_weight(target)` returns the weight of a microbatch in the batch's mean, from its target alone; by default its
        rows. For a mean over tokens, as with an `ignore_index` or class weights: `ps.tokens()`.
    topology
        This rank's place among all ranks; by default what `ps.comms.init_distributed()` finds.
    seed
        Seeds the random numbers that layers (dropout) and the loss draw in training: they depend on seed, step, microbatch and
        layer only. Also seeds the values of a model on the meta device. With None, torch's generator is used, and the numbers
        depend on the schedule.
    cuts
        The names of the submodules at which each stage but the first begins. See `ps.partition.split`.
    example_args, example_kwargs
        One microbatch. The model is traced with it, and cut where the times measured on it are balanced, or at `cuts`.
    recompute
        `"stage"` or `"block"`: keep only the input of every stage, or of every layer; the backward computes the rest again.
        Or a sequence of these and None with an entry for each stage.
    plan
        A plan of `ps.plan.plan` or `ps.plan.load`: its schedule, microbatches, cuts and recomputation replace these arguments.
        The model must have the layers that the plan was made for.
    scaler
        A GradScaler for float16: the backward starts with its scale. With several ranks, a `ShardedGradScaler`.
    init
        `init(submodule)` is called on each submodule of a model on the meta device, after its `reset_parameters()` and the
        `_init_weights(submodule)` of transformers' models. A rank allocates its own stages only, and the values are the same
        for any cut. Tensors that none of these initialises must be loaded before the first step.
    mesh
        A DeviceMesh of all ranks with any of the axes `pp`, `dp`, `cp`, `tp`, as of `ps.comms.init_mesh`. Pipelines along `dp`
        are replicas: each gets different rows, and the loss is the mean over all of them. Ranks along `tp` and `cp` get the
        same rows; along `cp` the pipeline takes the tokens of each from them. With an axis `dp`, `cp` or `tp`, no step can
        follow one that failed.
    data_parallel
        How replicas are kept equal: `"ddp"`, `"fsdp"` (`fully_shard`), or a function of (stage, the axis `dp`) that applies
        one of the two and returns the stage; with an axis `cp`, it gets both axes as one. Gradients are averaged once a step,
        while the last backwards run.
    tensor_parallel
        A dict from names of submodules in the uncut model, where `*` is any part between two dots, to torch's styles
        (`ColwiseParallel()`, ..): how ranks along `tp` divide them.
    on_nonfinite
        Test losses, outputs of layers and stages, and gradients of every step for NaN and infinity. If one is found: `"raise"`
        an error that names rank, stage, layer, microbatch and action; or `"skip"` the step, and restore what it has changed. By
        default nothing is tested. See docs/howto/audit.md.
    rows_dim
        The batch dimension of inputs, targets and outputs, along which they are split and joined. 0 by default; for a model
        with modules of `batch_first=False`, where it is 1, it must be given. `ps.Rows(tensor, dim)` wraps a tensor of a batch
        with another one, `ps.Replicated(tensor)` a tensor without.
    sequence_dim
        The dimension of inputs and targets that has the tokens, along which `slices` or an axis `cp` of the mesh cut them.
    slices
        Into how many slices of tokens each microbatch is cut, K, or their lengths: they pass through the ranks one after the
        other, and meet in `ps.attention`. For the schedules `gpipe`, `1f1b`, `interleaved-1f1b`, `zb-h1`, and tables with
        slices. See docs/howto/long-contexts.md.
    reduction
        What `loss_fn` returns: `"mean"`, or `"sum"` over the rows. For a sum, the losses of all microbatches and replicas are
        added. See docs/howto/loss.md.
    teacher
        A second, frozen model, given as `model`: for distillation, or the reference of DPO. It gets the inputs of the model, in
        evaluation mode and without a graph, in the ranks' idle time, and `loss_fn(output, target, teacher_output)` its outputs.
        Its parameters are not the pipeline's. See docs/howto/teacher.md.
    rows_per_sample
        How many rows, one after the other, are one sample, and stay in one microbatch: 2 for pairs of (chosen, rejected).

    Once built, its options cannot be set: `pipe.schedule = ..` raises AttributeError. `step_count` can.

    Raises ScheduleError if the table cannot be proved, MismatchError if ranks, schedule and model do not fit together,
    LostRankError if a rank does not answer.
    """

    def __init__(
        self,
        model: Model,
        loss_fn: LossFn | None = None,
        schedule: str | Schedule | ScheduleRule = "1f1b",
        microbatches: int | None = None,
        loss_weight: Callable[[Any], Any] | None = None,
        topology: Topology | None = None,
        *,
        seed: int | None = 0,
        cuts: Sequence[str] | None = None,
        example_args: Sequence[Any] | None = None,
        example_kwargs: Mapping[str, Any] | None = None,
        recompute: Recompute | Sequence[Recompute | None] | None = None,
        plan: PlanLike | None = None,
        scaler: torch.amp.GradScaler | None = None,
        init: Init | None = None,
        mesh: DeviceMesh | None = None,
        data_parallel: str | ApplyDataParallel = "ddp",
        tensor_parallel: TensorParallelPlan | None = None,
        on_nonfinite: OnNonfinite | None = None,
        rows_dim: int | None = None,
        sequence_dim: int = 1,
        slices: int | Sequence[int] = 1,
        reduction: Reduction = "mean",
        rows_per_sample: int = 1,
        teacher: Model | None = None,
        **options: Any,
    ) -> None:
        all_options = PipelineOptions(
            model=model,
            loss_fn=loss_fn,
            schedule=schedule,
            microbatches=microbatches,
            loss_weight=loss_weight,
            topology=topology,
            seed=seed,
            cuts=cuts,
            example_args=example_args,
            example_kwargs=example_kwargs,
            recompute=recompute,
            plan=plan,
            scaler=scaler,
            init=init,
            mesh=mesh,
            data_parallel=data_parallel,
            tensor_parallel=tensor_parallel,
            on_nonfinite=on_nonfinite,
            rows_dim=rows_dim,
            sequence_dim=sequence_dim,
            slices=slices,
            reduction=reduction,
            rows_per_sample=rows_per_sample,
            teacher=teacher,
            family_options=options,
        )
        self._build(all_options, NewModel(all_options))

    def _build(self, options: PipelineOptions, source: StageSource) -> None:
        """Build this pipeline together with all ranks, of stages from `source`."""
        super().__init__(shared_control_group(options.topology or comms.init_distributed()))
        with self.collective("Pipeline(..)"), allow_outdated_use(options.model):
            parts = build_parts(options, source, self._control)

        # What was built.
        self._number, self.position, self.topology = parts.number, parts.position, parts.position.pipeline
        self._engine, self._observers, self._parameters = parts.engine, parts.observers, parts.engine.parameters
        self._original, self._first_attributes = parts.original, parts.first_attributes
        self._memory, self._update_check = parts.observers.memory, parts.observers.update_check
        self._recut_call = RECUT_CALL if parts.original.cuttable is not None else ""
        self._run_step = self._engine.step
        if options.on_nonfinite is not None and self._observers.monitor is not None:
            self._run_step = partial(step_with_monitor, self._engine, self._observers.monitor, options.on_nonfinite)

        # Its options, as far as users read them.
        config = parts.config
        self.schedule, self.rows_dim = config.schedule, config.rows_dim
        self.seed, self.slices = config.options.seed, config.options.slices
        self.loss_fn, self.loss_weight, self.reduction = options.loss_fn, options.loss_weight, options.reduction
        self.scaler, self.sequence_dim, self._cuts_tokens = options.scaler, options.sequence_dim, bool(config.cut_context)
        self._options = replace(options, microbatches=self.schedule.microbatches)
        self.balance = parts.partition.balance  # how even the cut is, on the rank that chose it
        self.cuts = list(parts.partition.starts)  # where each stage but the first begins; empty if the stages were given
        self.first_rank, self.last_rank = self.schedule.placement[0], self.schedule.placement[-1]

        # What changes.
        self.step_count = 0  # steps done; dropout depends on it, so set it when training is resumed
        self._announced: AheadBatch | None = None  # the next batch, for which the teacher has run
        self._microbatch_costs: MicrobatchCosts | None = None  # fitted to steps over lists, the same on every rank
        # Layers with a seed of the pipeline's do not advance the user's generator.
        self._random_state = nullcontext() if self.seed is None else preserve_generator_state(self.topology.device)
        self._empty_parameter = nn.Parameter(torch.empty(0, device=self.topology.device))  # see `parameters`
        self._is_built = True

    def __repr__(self) -> str:
        """Return the schedule, its size, the cut and the steps done, in one line."""
        if not self._is_built:
            return f"Pipeline({vars(self).get('_end_reason', 'not built')})"
        table, own_stages = self.schedule, ", ".join(map(str, self.stages))
        is_given = self._options.cuts is not None or self._options.plan is not None
        cut = f" that begin at {', '.join(self.cuts)} ({'given' if is_given else 'chosen'})" if self.cuts else ""
        return (
            f"Pipeline({table.name}, {format_count(table.ranks, 'rank')}, {format_count(table.stages, 'stage')}{cut}, "
            f"{format_count(table.microbatches, 'microbatch', 'es')}, "
            f"step {self.step_count}; rank {self.position.world.rank} has stage {own_stages})"
        )

    # -- training and evaluation ------------------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        target: Any = None,
        scale: float = 1.0,
        losses: list[Tensor] | None = None,
        return_outputs: bool = False,
        next_args: Sequence[Any] = (),
        next_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forward and backward of one batch, add gradients to the parameters' `.grad`, and return the loss on every rank.

        To clip them, use `pipe.clip_grad_norm_`: it takes the norm of the whole model, not of this rank's part.

        args, kwargs
            The first stage's input: any tree of tensors of (rows, ..), or with the rows in dimension `rows_dim`. Numbers, None
            and `ps.Replicated(tensor)` go to every microbatch. If the model has a keyword that is a parameter of this method,
            give that by position.
        target
            The loss's target, a tree of the same kind. Only the first stage's rank reads the inputs and only the last stage's
            the target: others may pass None. If both are given the target, they compare some of its values.
        scale
            A factor of the gradients, the same on every rank: 1/k in each of k calls adds up the gradients of the mean over k
            batches (docs/howto/data.md). The loss is not scaled.
        losses
            A list, whose contents are replaced by each microbatch's loss, in the order of the rows, on every rank that gives
            one; NaN for a microbatch of weight 0. With replicas, the losses of this one.
        return_outputs
            Return (loss, outputs): the batch's outputs, detached, on the last stage's rank, None on the others.
        next_args, next_kwargs
            The args and kwargs of the next step, if the pipeline has a teacher: its forwards of that batch run in this step's
            idle time. All ranks give them; on ranks that do not read the inputs the values may be None.

        The loss is the mean over the whole batch (the sum, with `reduction="sum"`), a detached scalar. A batch of fewer rows
        than microbatches is split into its rows.

        Raises, on every rank: MismatchError for a batch that does not fit; StageError when the model or the loss raises;
        LostRankError when a rank dies or is silent. Gradients are restored, buffers only with `on_nonfinite`. After the first
        two the next step works, unless there is an axis dp, cp or tp. If a checkpoint in the background could not be written,
        its error is raised here, once, before the step begins: call again to run the step.
        """
        used = {
            "target": target is not None,
            "scale": not isinstance(scale, int | float) or scale != 1,
            "losses": losses is not None,
            "return_outputs": return_outputs,
            "next_args": not isinstance(next_args, tuple | list) or bool(next_args),
            "next_kwargs": next_kwargs is not None,
        }
        batch = args, kwargs, target
        options = [name for name, is_used in used.items() if is_used]
        call = self._call("step()", True, *batch, scale=scale, losses=losses, wants_outputs=return_outputs, options=options)
        next_batch = AheadBatch(next_args, next_kwargs or {}) if used["next_args"] or next_kwargs else None
        result = self._run_with_teacher(call, next_batch)
        loss = add_backward_hint(result.loss)
        return (loss, result.joined_outputs(self.rows_dim)) if return_outputs else loss

    def _run_with_teacher(self, call: Call, next_batch: AheadBatch | None) -> StepResult:
        """Run a training step, in which the teacher may run for the next batch; before the first such step, for its own."""
        if self._announced is None and next_batch is None:
            return self._run(call)
        batch, self._announced = self._announced, None
        if next_batch is not None and batch is None:
            batch = AheadBatch(call.args, call.kwargs)
            self._run(self._call(call.name, False, (), {}, next_batch=batch))
        result = self._run(call._replace(next_batch=next_batch, teacher_batch=batch))
        self._announced = next_batch
        return result

    def step_microbatches(
        self,
        inputs: Sequence[Any] | None,
        targets: Sequence[Any] | None = None,
        order: str | Sequence[int] = "given",
        losses: list[Tensor] | None = None,
        scale: float = 1.0,
        limit: Limit = None,
        return_outputs: bool = False,
    ) -> Any:
        """A step over microbatches of any rows and lengths, as many as there are; the next step may have others.

            loss = pipe.step_microbatches([inputs[:9], inputs[9:12]], [targets[:9], targets[9:12]], order="planned")

        inputs
            A list with an entry for each microbatch: a tensor, a tuple of arguments or a dict of keywords. Only the first
            stage's rank reads it, others may pass None.
        targets
            A list with the target of each, of as many rows. Only the last stage's rank reads it.
        order
            "given"; "planned": the fastest of all orders of up to 7 microbatches, and of more the fastest that a short search
            finds; or the order itself, each index of the list once. Microbatches cost what `plan_costs` last returned, and the
            search takes at most 2 % of the step; before, as much as they have elements. The gradients are added in the order
            that runs; loss, `losses` and random numbers are as in the given one.
        losses, scale
            As for `step`; the losses are in the order of the list.
        limit
            The most padded tokens that a rank may have in flight: elements of the largest inputs of the microbatches whose
            activations it holds at once. Or the most bytes of these activations, and of a teacher's outputs that wait for their
            losses, as "2GB", once `plan_costs` was called.
            "planned" takes an order that keeps it; an order that does not is refused.

        Returns the mean over all rows of the list (or over what `loss_weight` counts), on every rank. Gradients have the bits
        of one process that accumulates them over the same microbatches in the order that runs.

        Raises as `step`: MismatchError, on every rank and before data flows, for an empty list, targets of another number or
        of other rows, an invalid order or one that differs between ranks, one that does not keep `limit`, and for more
        microbatches than a schedule that is a table has.
        """
        call = self._call("step_microbatches()", True, (inputs,), {}, targets, scale=scale, losses=losses, is_list=True)
        if order != "given" or limit is not None:
            table_of, costs = self._engine.programs.table, self._microbatch_costs
            both_of = self._engine.programs.table_with_teacher if self._options.teacher is not None else None
            call = call._replace(order_rule=lambda shapes: microbatch_order(order, shapes, table_of, costs, limit, both_of))
        call = call._replace(order_option=comparable_order(order), limit_option=limit, wants_outputs=return_outputs)
        result = self._run(call)
        loss = add_backward_hint(result.loss)
        return (loss, list(result.outputs) or None) if return_outputs else loss

    def plan_costs(self) -> MicrobatchCosts:
        """Fit what a microbatch of any size takes to the lists that ran. All ranks call it, and get the same.

            groups = ps.plan.group_rows(lengths, microbatches=16, cost=pipe.plan_costs(), limit="2GB")

        Each stage takes a x tokens + b x tokens x longest + c seconds, fitted to its last 1024 microbatches, and so many bytes,
        fitted to the first list of each number of microbatches; printed, the result has these numbers and their errors. The
        tokens of a microbatch are the elements of its largest input with rows, padding included: rows x longest. From now on
        `order="planned"` plans with these costs, until the next call.

        Raises PenstockError before a list has run, other than the first of as many microbatches.
        """
        with self.collective("plan_costs()") as control:
            self._microbatch_costs = costs = self._observers.samples.gather_costs(control, self._engine)
        return costs

    def eval(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """Run the forward of one batch, with modules in evaluation mode meanwhile. Changes no gradient and no buffer.

        To only set the mode, as `nn.Module.eval` does, use `train(False)`. See docs/howto/validate.md.

        Returns the outputs of the whole batch on the last stage's rank, None on the others; with a `target`, (outputs, loss),
        the loss on every rank. Raises as `step` does.
        """
        options = [] if target is None else ["target"]
        result = self._run(self._call("eval()", False, args, kwargs, target, wants_outputs=True, options=options))
        outputs = result.joined_outputs(self.rows_dim)
        return outputs if target is None else (outputs, result.loss)

    def eval_microbatches(self, inputs: Sequence[Any] | None, targets: Sequence[Any] | None = None) -> Any:
        """As `eval`, of a list of microbatches of any shapes (see `step_microbatches`), each of them run as it is.

        Returns the list of their outputs on the last stage's rank, None on the others; with `targets`, (outputs, loss).
        """
        result = self._run(self._call("eval_microbatches()", False, (inputs,), {}, targets, is_list=True, wants_outputs=True))
        outputs = list(result.outputs) or None
        return outputs if targets is None else (outputs, result.loss)

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
        """Generate text after `tokens`: (batch, time) int64 -> (batch, time + new) int64, the same on every rank.

            text = pipe.generate(prompt, max_new_tokens=64)  # greedy: the uncut model's own tokens

        tokens
            Rows of one length, the same on every rank; along `dp` each replica may have different rows.
        max_new_tokens
            The most tokens that are added to each row.
        temperature, top_k
            At temperature 0 always the likeliest token. Else tokens are drawn from softmax(logits / temperature), over the
            `top_k` likeliest if that is given.
        eos
            The token that ends a row; it fills up the rest. Generation ends when all rows, of all replicas, have ended.
        seed
            Seeds the drawing, which depends on seed, row and position: not on ranks, schedule or microbatches.
        on_token
            Called on every rank with each column of new tokens, (batch,).
        kwargs
            Further arguments of the model's forward, the same in every pass (`use_cache=False`).

        The model takes tokens and returns logits, (batch, time, vocabulary), or an object with them as `logits`; with
        `rows_dim=1` it takes (time, batch) and returns (time, batch, vocabulary). It is in evaluation mode. Layers that use
        `ps.cache`, as our GPT's do, get new tokens only; any other model runs over the whole text for each token. For a text
        longer than the model's context, the model gets its last `context` tokens.

        Raises, on every rank: MismatchError for arguments out of range or different between ranks, and for another kind of
        output; else as `step` does.
        """
        generation_options = GenerationOptions(max_new_tokens, temperature, top_k, eos, seed)
        with (
            self.collective("generate()", announces=False),
            evaluation_mode(list(self.stages.values())),
            self.topology.context.activity.during_step(self.step_count, False),
        ):
            self._check_not_ended()
            if self._original.cuttable is not None:
                self._original.cuttable.attributes.check_unchanged_since_cut()
            return generate_text(self._engine, tokens, kwargs, generation_options, on_token, self.rows_dim)

    def rebuild(
        self,
        schedule: str | Schedule | ScheduleRule | None = None,
        microbatches: int | None = None,
        *,
        cuts: Sequence[str] | Literal["measured"] | None = None,
        optimizer: Any = None,
        **options: Any,
    ) -> Any:
        """Replace this pipeline by one with another schedule, number of microbatches or cut, and go on with the training.

            pipe, optimizer = pipe.rebuild("zb-v", microbatches=8, optimizer=optimizer)

        Each rank receives the weights, buffers, gradients and optimizer state of its new stages from the rank that has them.
        Later steps have the bits of a training that was so from the start. Nothing is written to disk. Step count, modes,
        frozen parameters, and attributes of layers that are numbers or texts stay. All ranks make the same call, between steps.

        schedule, microbatches
            As for `Pipeline`; by default unchanged.
        cuts
            The names at which each stage but the first begins. By default unchanged if they were given; if an example was, a
            cut is chosen again. "measured": the cut that is fastest at the times of the last steps (up to five, the first of a
            kind not counted), whether layers are heavy or a rank is slow. If it would make the step less than 1 % shorter and
            nothing else changes, this pipeline is returned as it is. See docs/howto/slow-step.md.
        optimizer
            The optimizer of this rank's `pipe.parameters()`, or a list of several. Each parameter stays in its group, on
            whichever rank it is. The object stays the same: schedulers and scalers that refer to it remain valid.
        options
            Other changes: arguments of `Pipeline` (`loss_fn`, `recompute`, `plan`, ..) or options of the schedule's family
            (`stages_per_rank`, ..). A new schedule drops the options of the old one. `slices=None` leaves them unchanged; 1 is
            none. The model and the mesh stay.

        Returns the new pipeline, or (pipeline, optimizer) if there is one. This one ends: further calls raise. Changes of
        `pipe.stages`' modules, as by compiling them, must be made again.

        Raises, on every rank and before anything changes: ScheduleError and MismatchError as `Pipeline`; MismatchError for
        optimizers that differ between ranks, hooks that would be lost, and parameters in shards (`fsdp`, `tp`); PenstockError
        for "measured" before two steps have run. Unless there is an axis dp, this pipeline can be used on then. Raises the
        error of a checkpoint in the background, as `step`.
        """
        self._engine.finish_background_save()
        changes = {"schedule": schedule, "microbatches": microbatches, "cuts": cuts, "slices": options.pop("slices", None)}
        changes = options | {name: value for name, value in changes.items() if value is not None}
        source: Redistribution | None = None
        try:
            with self.collective(f'rebuild(cuts="{MEASURED}")' if cuts == MEASURED else "rebuild()") as control:
                self._check_not_ended()
                self._parameters.check_initialised()
                next_options = self._options.with_changes(changes)
                optimizers = optimizer_list(optimizer, "rebuild()", self.topology.world_size)
                if cuts == MEASURED:
                    table = table_of_options(next_options, self.topology.world_size)
                    recent_steps, cuttable = self._observers.recent_steps, self._original.cuttable
                    cut = choose_fastest_cut(control, self._engine, recent_steps, cuttable, self.cuts, table)
                    if changes.keys() == {"cuts"} and not cut.is_notable:
                        return self if optimizer is None else (self, optimizer)
                    next_options = replace(next_options, cuts=cut.cuts)
                was_trained = self._has_optimizer or self.step_count > 0
                source = Redistribution(
                    self._original, self.stages, optimizers, self._first_attributes, self._cuts_tokens, was_trained
                )
                pipe = Pipeline.__new__(Pipeline)
                pipe._build(next_options, source)
        except BaseException:
            if source is not None and source.has_started:
                self._end("this pipeline ended when rebuild() failed half-way: start the ranks again")
            raise

        pipe.step_count = self.step_count
        self._end("this pipeline was rebuilt: use the one that rebuild() returned")
        return pipe if optimizer is None else (pipe, optimizer)

    def _call(self, name: str, training: bool, args: Any, kwargs: Any, target: Any = None, **options: Any) -> Call:
        """Return a call with these `options`, and with what it takes from this pipeline."""
        cuttable, scaler = self._original.cuttable, self.scaler if training else None
        mode = "evaluation mode" if training and cuttable is not None and not cuttable.model.training else "training mode"
        return Call(name, training, args, kwargs, target, self.step_count, mode=mode, scaler=scaler, **options)

    def _run(self, call: Call) -> StepResult:
        """Run one training step or evaluation on all ranks."""
        training, last_result = call.is_training, self._engine.last_result
        if training and self._engine.background_save is not None and last_result and last_result.background_save_failed:
            self._engine.finish_background_save()

        state = self._random_state if training else evaluation_mode(list(self.stages.values()))
        step_number = self.step_count + training  # of the step that begins, or of the last
        with (
            self.collective(call.name, announces=False, runs_actions=True),
            self.topology.context.activity.during_step(step_number, training),
            state,
        ):
            self._check_not_ended()
            result = self._run_step(call)
            vars(self)["step_count"] += training  # `__setattr__` looks for misspelt options

        if call.next_batch is not None:
            call.next_batch.teacher_state = self._engine.reader.teacher_state()
        # Outputs are not kept alive: they are the caller's.
        self._engine.last_result = result._replace(outputs=()) if result.outputs else result
        if call.losses is not None:
            call.losses[:] = result.losses
        return result
