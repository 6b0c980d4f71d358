"""From a pipeline's options to the engine: the table, proved; the model, in memory; the stages made of it, connected.

All ranks build at the same time and compare what they build (`guards/pipeline_comparison.py`), so that a mismatch raises
before data flows. `penstock/pipeline_parts.py` has the order of the steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from penstock import torch_private
from penstock.batch.call import CallReader, ModelForward, first_stage_signature, kwargs_with_position_ids
from penstock.batch.pieces import Layout, count_tokens, parse_slices
from penstock.comms.control_group import ControlGroup
from penstock.engine.loss import check_reduction, loss_with_teacher
from penstock.engine.model_partition import AllStages, ModelPartition, check_can_be_cut, check_modules, modules_of
from penstock.engine.step import Engine
from penstock.engine.teacher import Teacher, check_teacher
from penstock.errors import MismatchError
from penstock.mesh.parallelize import parallelize_stages
from penstock.mesh.position import MeshPosition
from penstock.options import Model, PipelineOptions, is_family_name
from penstock.partition import CuttableModel
from penstock.partition.graph_stage import move_stage_to_device
from penstock.partition.materialise import Init, has_meta_tensors, materialise
from penstock.rows import resolve_rows_dim
from penstock.schedule.catalog import build
from penstock.schedule.program import Program, channels_between
from penstock.schedule.proof import verify
from penstock.schedule.rank_program import RankPrograms
from penstock.schedule.schedule import Schedule, ScheduleRule, from_rows, from_rule, read_csv_cells
from penstock.schedule.table import Chains, Table
from penstock.schedule.transform import with_frozen_stages, with_full_backwards, without_teacher
from penstock.stage.attention import AttentionContext, AttentionWhileTracing, attention_context
from penstock.stage.connections import stage_connections
from penstock.stage.hooks import DataParallelHooks
from penstock.stage.rank_parameters import RankParameters
from penstock.stage.recompute import Recompute
from penstock.stage.stage import Stage
from penstock.stage.tied_parameters import TiedParameters
from penstock.timing.teacher_stages import with_passed_inputs

DEFAULT_MICROBATCHES = 8
Modules = dict[int, nn.Module]  # by stage


class PipelineConfig(NamedTuple):
    """The options of a pipeline, checked and completed as far as one rank alone can, and what follows from them."""

    options: PipelineOptions  # with those of the plan; rows and slices as the model and the table have them
    schedule: Schedule
    program: Program  # of the schedule
    recompute: Sequence[Recompute | None]  # by stage
    cuttable: CuttableModel | None  # the model, if it is to be cut
    cut_context: AttentionContext | None  # while the model is cut, if its tokens will be: into slices, or over ranks
    table_with_teacher: Schedule | None  # as the user gave it

    @property
    def rows_dim(self) -> int:
        """The dimension of a batch's rows."""
        return self.options.rows_dim or 0

    @property
    def plan_layers(self) -> Sequence[str]:
        """The layers that the plan was made for."""
        return () if self.options.plan is None else self.options.plan.layers

    def with_frozen_stages(self, stages: frozenset[int]) -> "PipelineConfig":
        """Return the same with a table in which `stages` have forwards only. A table that the user gave stays as it is."""
        if not stages or not is_family_name(self.options.schedule):
            return self
        schedule = with_frozen_stages(self.schedule, stages)
        return self._replace(schedule=schedule, program=verify(schedule).program)


# -- options --------------------------------------------------------------------------------------------------------------


def complete_options(
    options: PipelineOptions, position: MeshPosition, cut: Callable[[PipelineOptions], CuttableModel | None]
) -> PipelineConfig:
    """Check the options of a pipeline, build its schedule and prove it, and make its model ready to be cut.

    `cut`: returns the model to be cut, None for stages that were given.

    Raises MismatchError for an option of another kind than `Pipeline` takes, ScheduleError for a table that cannot be proved.
    """
    # 1. One by one.
    check_modules(options.model)
    options.check()
    check_reduction(options.loss_fn, options.reduction, options.loss_weight)
    if isinstance(options.loss_fn, nn.Module):
        _check_loss_parameters(options.loss_fn, options.model)
    options = options.with_plan()

    # 2. The table.
    schedule = user_table(options, position.pipeline.world_size)
    table_with_teacher = None if schedule.teacher is None else schedule
    if table_with_teacher is not None:
        verify(schedule)
        schedule = without_teacher(schedule)
    program = verify(schedule).program
    if options.microbatches not in (None, schedule.microbatches):
        raise MismatchError(
            f"microbatches={options.microbatches}, but the table {schedule.name} has {schedule.microbatches}: leave out "
            "microbatches=, or give a table that has as many"
        )
    slices = _check_slices(options, schedule, position)
    _check_teacher(options, table_with_teacher, schedule)

    # 3. The model.
    cut_context = AttentionWhileTracing(schedule.slices > 1) if position.cp_size > 1 or schedule.slices > 1 else None
    check_can_be_cut(options.model, schedule, options.cuts, options.example_args, options.example_kwargs)
    options = replace(
        options,
        seed=None if options.seed is None else int(options.seed),  # a numpy integer fits no file and no message
        slices=slices,
        rows_dim=resolve_rows_dim(options.model, options.rows_dim),
        example_kwargs=_example_with_position_ids(options) if cut_context else options.example_kwargs,
    )
    recompute = recompute_per_stage(options.recompute, schedule)
    with attention_context(cut_context):
        cuttable = cut(options)
    return PipelineConfig(options, schedule, program, recompute, cuttable, cut_context, table_with_teacher)


def _check_slices(options: PipelineOptions, schedule: Schedule, position: MeshPosition) -> int | Sequence[int]:
    """Return the slices of a microbatch's tokens, their number or lengths. Raise MismatchError if the table has others."""
    slices, num_slices = parse_slices(options.slices)
    if num_slices not in (1, schedule.slices):
        raise MismatchError(f"slices={options.slices} are {num_slices}, but the table {schedule.name} has {schedule.slices}")
    if position.cp_size > 1 and schedule.slices > 1:
        raise MismatchError("slices and an axis cp cut the same tokens: use slices=1, or a mesh without cp")
    return schedule.slices if slices == 1 else slices


def _check_teacher(options: PipelineOptions, table: Schedule | None, schedule: Schedule) -> None:
    """Raise MismatchError for a teacher that does not fit, or a `table` with a teacher for a pipeline without one."""
    if options.teacher is not None:
        check_teacher(options.model, options.teacher, options.loss_fn, schedule)
    elif table is not None:
        raise MismatchError(f"{table.name} is a table with a teacher: give Pipeline(.., teacher=model)")


def _example_with_position_ids(options: PipelineOptions) -> Mapping[str, Any] | None:
    """Return the example's keywords, with positions if the model takes them, as its steps will have them."""
    example: Any = options.example_args
    args = (example,) if isinstance(example, Tensor) else tuple(example or ())
    kwargs = options.example_kwargs or {}
    if not isinstance(options.model, nn.Module) or not (args or kwargs):
        return options.example_kwargs
    length = count_tokens((args, kwargs), "the example", options.sequence_dim)
    return kwargs_with_position_ids(first_stage_signature(options.model), args, kwargs, length)


def _check_loss_parameters(loss_fn: nn.Module, model: Model) -> None:
    """Raise MismatchError if the loss has trained parameters that are in no stage: no optimizer or checkpoint has them."""
    model_ids = {id(parameter) for module in modules_of(model) for parameter in module.parameters()}
    names = [
        name for name, parameter in loss_fn.named_parameters() if parameter.requires_grad and id(parameter) not in model_ids
    ]
    if names:
        raise MismatchError(
            f"loss_fn has {len(names)} trained parameters that the model has not ({', '.join(names[:3])}): have its last layer "
            "own them and give them to the loss, or freeze them"
        )


def table_of_options(options: PipelineOptions, num_ranks: int) -> Schedule:
    """Return the model's table in a pipeline of these options. Raises as `build_table`."""
    return without_teacher(user_table(options, num_ranks))


def user_table(options: PipelineOptions, num_ranks: int) -> Schedule:
    """Return the table of these options as the user gives it: it may have a teacher's forwards."""
    microbatches = DEFAULT_MICROBATCHES if options.microbatches is None else options.microbatches
    _, num_slices = parse_slices(options.slices)
    slices = {"slices": num_slices} if is_family_name(options.schedule) and num_slices > 1 else {}
    return build_table(options.schedule, num_ranks, microbatches, {**options.family_options, **slices})


def build_table(
    schedule: str | Schedule | ScheduleRule, num_ranks: int, microbatches: int, options: dict[str, Any]
) -> Schedule:
    """Return the table of a name, a CSV file, a rule, or a table. Raise MismatchError if it is for other ranks than run."""
    schedule = str(schedule) if isinstance(schedule, PathLike) else schedule
    if is_family_name(schedule):
        schedule = build(schedule, ranks=num_ranks, microbatches=microbatches, **options)
    elif isinstance(schedule, str):
        schedule = from_rows(schedule, read_csv_cells(schedule), **options)
    elif not isinstance(schedule, Schedule):
        schedule = from_rule(schedule, num_ranks, microbatches, **options)
    if schedule.ranks != num_ranks:
        raise MismatchError(f"schedule {schedule.name} is for {schedule.ranks} ranks, but {num_ranks} are running")
    return schedule


def recompute_per_stage(recompute: Recompute | Sequence[Recompute | None] | None, table: Schedule) -> list[Recompute | None]:
    """Return the recomputation of each stage of `table`. Raise MismatchError for an unknown one, or another number of them."""
    value: Any = recompute
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    per_stage = list(value) if is_list else [value] * table.stages
    if len(per_stage) != table.stages:
        raise MismatchError(f"recompute={per_stage} is for {len(per_stage)} stages, but {table.name} has {table.stages}")
    if unknown := [stage_recompute for stage_recompute in per_stage if stage_recompute not in (None, *get_args(Recompute))]:
        raise MismatchError(f"recompute={unknown[0]!r}: use 'stage', 'block' or None")
    return per_stage


# -- stages and engine ----------------------------------------------------------------------------------------------------


def materialise_stages(
    model_partition: ModelPartition, all_stages: AllStages, device: torch.device, seed: int | None, init: Init | None
) -> tuple[Modules, set[str]]:
    """Return this rank's stages on `device`; tensors on the meta device are given memory and initialised.

    Also returns the names in the uncut model of tensors that nothing initialises: they must be loaded.
    """
    unset_names: set[str] = set()
    uncut_model = model_partition.uncut_model
    for stage, module in model_partition.modules.items():
        if has_meta_tensors(module) and uncut_model is not None:
            ids = {id(slot.tensor) for slot in torch_private.tensor_slots(module)}  # a module may have two names
            names = {slot.name for slot in torch_private.tensor_slots(uncut_model) if id(slot.tensor) in ids}
            unset_names |= materialise(uncut_model, None, device, seed, init, names)
        elif has_meta_tensors(module):
            unset_names |= materialise(module, all_stages.names[stage], device, seed, init)
    return {stage: move_stage_to_device(module, device) for stage, module in model_partition.modules.items()}, unset_names


def build_engine(
    control: ControlGroup,
    position: MeshPosition,
    config: PipelineConfig,
    model_partition: ModelPartition,
    all_stages: AllStages,
    modules: Modules,
    unset_names: set[str],
    clock_ids: Sequence[str],
    teacher: Teacher | None,
) -> Engine:
    """Return this rank's engine: its stages, in memory as `modules`, connected to those of other ranks. All ranks call it.

    `unset_names`: in the uncut model, of tensors that nothing has initialised. `clock_ids`: of every rank.
    """
    options, names = config.options, all_stages.names
    aliases = model_partition.first_name_by_alias(names)

    # 1. The program. I and W right after each other are one B; skip connections add messages.
    def prove(schedule: Schedule, proved: Program | None = None) -> Program:
        table = with_full_backwards(schedule)
        if proved is None or model_partition.skips or table.actions != schedule.actions:
            return verify(table, skips=model_partition.skips).program
        return proved

    def build_larger(microbatches: int) -> Program:
        """Return the proved program of a list of more microbatches. Raise MismatchError if the schedule has no such table."""
        larger = table_of_options(replace(options, microbatches=microbatches), config.schedule.ranks)
        larger = with_frozen_stages(larger, config.schedule.forward_only)
        if larger.microbatches < microbatches:
            raise MismatchError(
                f"a list of {microbatches} microbatches does not fit {larger.name}, a table of {larger.microbatches}: give at "
                "most that many, or Pipeline(.., schedule=) the name of a family, which has a table for any number"
            )
        return prove(larger)

    program = prove(config.schedule, config.program)
    table = program.schedule

    def add_teacher(student: Table, ahead: bool) -> Program:
        """Return the proved program of a table of the model and the teacher's forwards."""
        assert isinstance(student, Schedule)
        assert teacher is not None
        given = config.table_with_teacher
        if given is not None and (given.ahead, given.microbatches) == (ahead, student.microbatches):
            table_of_both = with_passed_inputs(given)
        else:
            table_of_both = teacher.add_forwards(student, ahead)
        return verify(with_full_backwards(table_of_both), skips=model_partition.skips | teacher.skips(student.stages)).program

    # 2. Data parallelism, then stages. A rank that fails before this exchange is heard by the others here.
    parallelism = options.tensor_parallel, options.data_parallel
    data_parallel_hooks = parallelize_stages(
        position, modules, model_partition.data_parallel_hooks, model_partition.tied, names, *parallelism
    )
    teacher_stages = teacher.make_stages(position, table.stages, *parallelism, data_parallel_hooks.values()) if teacher else {}
    control.all_gather_value(None, "to build the pipeline")
    stages = _build_stages(config, model_partition, all_stages, modules, data_parallel_hooks, table, position) | teacher_stages

    # 3. RankParameters, and those that stages share.
    tied = TiedParameters(model_partition.tied, table.placement, modules, names, aliases, position.pipeline)
    tied.broadcast_values()
    parameters = RankParameters(
        modules, names, aliases, model_partition.uncut_state_names, unset_names, model_partition.uncut_info
    )

    # 4. What reads calls, and what runs them.
    later_keywords = frozenset().union(*all_stages.keywords[1:])
    reader = CallReader(
        position,
        table,
        Layout(config.rows_dim, options.sequence_dim, position.pipeline.device, options.rows_per_sample),
        position.cp_size if position.cp_size > 1 else options.slices,
        options.seed,
        options.loss_fn is not None,
        None if teacher is None else list(teacher.modules.values()),
        teacher is not None and teacher.passes_inputs,
        options.loss_weight,
        ModelForward(modules[0], later_keywords) if 0 in modules else None,
    )
    links = None
    if teacher is not None:
        chains = Chains(table.stages + len(teacher.placement), teacher=table.stages, ahead=True)
        skips = model_partition.skips | teacher.skips(table.stages)
        links = channels_between((*table.placement, *teacher.placement), chains, skips)
    programs = RankPrograms(program, position.pipeline.rank, build_larger, add_teacher if teacher else None, links)
    return Engine(control, position, programs, reader, stages, parameters, tied, options.reduction, clock_ids)


def _build_stages(
    config: PipelineConfig,
    model_partition: ModelPartition,
    all_stages: AllStages,
    modules: Modules,
    data_parallel_hooks: Mapping[int, DataParallelHooks],
    table: Table,
    position: MeshPosition,
) -> dict[int, Stage]:
    """Return this rank's stages, ready to run `table`."""
    connections = stage_connections(table.chains, model_partition.skips, model_partition.tied)
    loss_fn = config.options.loss_fn
    if loss_fn is not None and config.options.teacher is not None:
        loss_fn = partial(loss_with_teacher, loss_fn)
    return {
        index: Stage(
            index,
            module,
            position.pipeline.device,
            loss_fn if index == table.stages - 1 else None,
            layer_numbers=model_partition.layer_numbers.get(index),
            connections=connections[index],
            later_keywords=frozenset().union(*all_stages.keywords[index + 1 :]),
            recompute=config.recompute[index],
            data_parallel=data_parallel_hooks[index],
            in_order=table.has_weights_in_backward_order(index),
            is_frozen=index in table.forward_only,
        )
        for index, module in modules.items()
    }
