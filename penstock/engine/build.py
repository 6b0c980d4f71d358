"""From a pipeline's arguments to the engine: the table, proved; the model, in memory; the stages made of it, connected.

All ranks build at the same time and compare what they build (`guards/pipeline_comparison.py`), so that a mismatch raises
before data flows. `Pipeline.__init__` has the order of the steps.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock import partition, torch_private
from penstock.batch.call import CallReader, ModelForward, first_stage_signature, kwargs_with_position_ids
from penstock.batch.pieces import Layout, count_tokens, parse_slices
from penstock.comms.control_group import ControlGroup
from penstock.engine.loss import check_reduction, loss_with_teacher
from penstock.engine.model_partition import AllStages, ModelPartition, check_can_be_cut, modules_of
from penstock.engine.step import Engine
from penstock.engine.teacher import Teacher, check_teacher, check_teacher_placement
from penstock.errors import MismatchError, is_whole_number
from penstock.mesh.parallelize import parallelize_stages
from penstock.mesh.position import MeshPosition
from penstock.partition.graph_stage import move_stage_to_device
from penstock.partition.materialise import Init, has_meta_tensors, materialise
from penstock.rows import resolve_rows_dim
from penstock.schedule.catalog import build, did_you_mean, family_options
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
from penstock.timing.teacher import with_teacher

DEFAULT_MICROBATCHES = 8
PLAN_ARGUMENTS = ("schedule", "microbatches", "cuts", "recompute")  # of a pipeline, which a plan replaces
UNCHANGEABLE = {  # arguments of a pipeline that `rebuild` does not take -> why
    **dict.fromkeys(("model", "example_args", "example_kwargs", "init", "rows_dim"), "the model stays the one it was cut from"),
    "teacher": "the ranks have its stages already",
    **dict.fromkeys(("topology", "mesh", "data_parallel", "tensor_parallel"), "the ranks stay where they are"),
}
Modules = dict[int, nn.Module]  # by stage


class PlanLike(Protocol):
    """The attributes of a plan that a pipeline uses as its arguments."""

    @property
    def schedule(self) -> Schedule: ...  # noqa: D102
    @property
    def microbatches(self) -> int: ...  # noqa: D102
    @property
    def cuts(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def recompute(self) -> Sequence[Recompute | None]: ...  # noqa: D102
    @property
    def layers(self) -> Sequence[str]: ...  # noqa: D102


class PipelineConfig(NamedTuple):
    """The arguments of a pipeline, checked and completed as far as one rank alone can."""

    arguments: Any  # all of them, as attributes
    schedule: Schedule
    program: Program  # of the schedule
    rows_dim: int
    recompute: Sequence[Recompute | None]  # by stage
    cuttable: partition.CuttableModel | None  # the model, if it is to be cut
    plan_layers: Sequence[str]  # that a plan was made for
    slices: int | Sequence[int]  # of a microbatch's tokens, or their lengths
    cut_context: AttentionContext | None  # while the model is cut, if its tokens will be: into slices, or over ranks
    table_with_teacher: Schedule | None  # as the user gave it

    @property
    def equal_options(self) -> dict[str, Any]:
        """The options that must be equal on all ranks, besides those that the schedule and the model say themselves."""
        names = ("seed", "reduction", "data_parallel", "tensor_parallel", "on_nonfinite", "sequence_dim", "rows_per_sample")
        options = {name: getattr(self.arguments, name) for name in names}
        return options | {"rows_dim": self.rows_dim, "slices": self.slices}

    def with_frozen_stages(self, stages: frozenset[int]) -> "PipelineConfig":
        """Return the same with a table in which `stages` have forwards only. A table that the user gave stays as it is."""
        name = self.arguments.schedule
        if not stages or not isinstance(name, str) or name.endswith(".csv"):
            return self
        schedule = with_frozen_stages(self.schedule, stages)
        return self._replace(schedule=schedule, program=verify(schedule).program)


# -- arguments ------------------------------------------------------------------------------------------------------------


def parse_arguments(
    model: Any,
    arguments: Mapping[str, Any],
    num_ranks: int,
    recut: Callable[[Sequence[str] | None], partition.CuttableModel | None] | None,
    cp_size: int,
    mesh_axes: Sequence[str] = (),
) -> PipelineConfig:
    """Check the arguments of `Pipeline`, build its schedule and prove it.

    `recut`: gives the model, cut at other `cuts`, to `rebuild`. `cp_size`: the number of ranks that share a sequence's tokens.
    `mesh_axes`: the axes of the mesh.

    Raises MismatchError for an argument of another kind than `Pipeline` takes, ScheduleError for a table that cannot be proved.
    """
    config = SimpleNamespace(**arguments)
    _check_argument_types(model, config)
    config.seed = None if config.seed is None else int(config.seed)  # a numpy integer fits no file and no message
    check_reduction(config.loss_fn, config.reduction, config.loss_weight)
    if config.options:
        check_options(config.options, config.schedule, ["model", *arguments])
    if (plan := config.plan) is not None:
        check_plan(plan, config.cuts, config.recompute, config.options)
        vars(config).update({name: getattr(plan, name) for name in PLAN_ARGUMENTS})

    slices, num_slices = parse_slices(config.slices)
    schedule = user_table(config, num_ranks)
    table_with_teacher = None if schedule.teacher is None else schedule
    if table_with_teacher is not None:
        verify(schedule)
        schedule = without_teacher(schedule)
    if config.microbatches not in (None, schedule.microbatches):
        raise MismatchError(
            f"microbatches={config.microbatches}, but the table {schedule.name} has {schedule.microbatches}: leave out "
            "microbatches=, or give a table that has as many"
        )
    program = verify(schedule).program
    slices = schedule.slices if slices == 1 else slices
    if num_slices not in (1, schedule.slices):
        raise MismatchError(f"slices={config.slices} are {num_slices}, but the table {schedule.name} has {schedule.slices}")
    if cp_size > 1 and schedule.slices > 1:
        raise MismatchError("slices and an axis cp cut the same tokens: use slices=1, or a mesh without cp")
    cut_context = AttentionWhileTracing(schedule.slices > 1) if cp_size > 1 or schedule.slices > 1 else None

    if config.teacher is not None:
        check_teacher(model, config.teacher, config.loss_fn, schedule, mesh_axes)
        if table_with_teacher is not None:
            check_teacher_placement(table_with_teacher)
    elif table_with_teacher is not None:
        raise MismatchError(f"{table_with_teacher.name} is a table with a teacher: give Pipeline(.., teacher=model)")
    if not is_whole_number(config.sequence_dim, 0):
        raise MismatchError(f"sequence_dim is the dimension that has the tokens, 0 or more, not {config.sequence_dim!r}")
    if not is_whole_number(config.rows_per_sample, 1):
        raise MismatchError(f"rows_per_sample is how many rows stay together, 1 or more, not {config.rows_per_sample!r}")
    if cut_context is not None and isinstance(model, nn.Module) and (config.example_args or config.example_kwargs):
        config.example_kwargs = _example_with_position_ids(model, config)

    cutting = config.cuts, config.example_args, config.example_kwargs
    check_can_be_cut(model, schedule, *cutting)
    rows_dim = resolve_rows_dim(model, config.rows_dim)
    recompute = recompute_per_stage(config.recompute, schedule)
    with attention_context(cut_context):
        cuttable = recut(config.cuts) if recut else partition.as_cuttable(model, *cutting, rows_dim)
    plan_layers = () if plan is None else plan.layers
    settings = recompute, cuttable, plan_layers, slices, cut_context, table_with_teacher
    return PipelineConfig(config, schedule, program, rows_dim, *settings)


def _example_with_position_ids(model: nn.Module, config: Any) -> dict[str, Any]:
    """Return the example's keywords, with positions if the model takes them, as its steps will have them."""
    args = (config.example_args,) if isinstance(config.example_args, Tensor) else tuple(config.example_args or ())
    kwargs = config.example_kwargs or {}
    length = count_tokens((args, kwargs), "the example", config.sequence_dim)
    return kwargs_with_position_ids(first_stage_signature(model), args, kwargs, length)


def _check_argument_types(model: Any, config: Any) -> None:
    modules = modules_of(model)
    for module in modules:
        if not isinstance(module, nn.Module):
            raise MismatchError(_not_a_module_text(module))
        if captured := [type(part).__name__ for part in module.modules() if torch_private.is_cuda_graphed(part)]:
            raise MismatchError(
                f"{captured[0]} was captured as a CUDA graph, whose one set of buffers cannot hold several microbatches: "
                "give the module as it was before make_graphed_callables"
            )
        if lazy := [name for name, value in module.state_dict(keep_vars=True).items() if is_lazy(value)]:
            raise MismatchError(f"{lazy[0]} has no shape yet: run one batch through the model before, `model(inputs)`")

    schedule = config.schedule
    if not isinstance(schedule, str | PathLike | Schedule) and not callable(schedule):
        got = _describe_value(schedule)
        raise MismatchError(f"the schedule is a name, a Schedule, a CSV file's path or a function, not {got}")
    for name, function in (("loss_fn", config.loss_fn), ("loss_weight", config.loss_weight)):
        if function is not None and (isinstance(function, type) or not callable(function)):
            raise MismatchError(f"{name} is a function or a module, not {_describe_value(function)}")
    if config.seed is not None and not is_whole_number(config.seed):
        raise MismatchError(f"seed is a whole number or None, not {_describe_value(config.seed)}")
    if not isinstance(config.scaler, torch.amp.GradScaler | None):
        raise MismatchError(f"scaler is a GradScaler or None, not {_describe_value(config.scaler)}")
    if isinstance(config.loss_fn, nn.Module):
        _check_loss_parameters(config.loss_fn, nn.ModuleList(modules))


def _not_a_module_text(value: Any) -> str:
    got = _describe_value(value)
    if hasattr(value, "submod") and hasattr(value, "stage_index"):  # torch.distributed.pipelining's
        return f"the model is nn.Modules, not {got}s: give {{stage.stage_index: stage.submod for stage in stages}}"
    return f"the model is an nn.Module, a list with one for each stage, or {{stage: module}}, not {got}"


def _describe_value(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}: make one, {value.__name__}(..)"
    return "None" if value is None else f"a {type(value).__name__}"


def _check_loss_parameters(loss_fn: nn.Module, model: nn.Module) -> None:
    """Raise MismatchError if the loss has trained parameters that are in no stage: no optimizer or checkpoint has them."""
    model_ids = {id(parameter) for parameter in model.parameters()}
    names = [
        name for name, parameter in loss_fn.named_parameters() if parameter.requires_grad and id(parameter) not in model_ids
    ]
    if names:
        raise MismatchError(
            f"loss_fn has {len(names)} trained parameters that the model has not ({', '.join(names[:3])}): have its last layer "
            "own them and give them to the loss, or freeze them"
        )


def check_plan(plan: Any, *replaced_arguments: Any) -> None:
    """Raise MismatchError for what is no plan, and for any of the arguments that a plan replaces: it has its own."""
    if not hasattr(plan, "schedule") or not hasattr(plan, "recompute"):
        raise MismatchError(f"plan is what ps.plan.plan found, or ps.plan.load(path) reads, not {_describe_value(plan)}")
    if any(replaced_arguments):
        raise MismatchError("the plan has its own cuts, recomputation and stages: leave out cuts=, recompute= and options")


def check_options(options: Iterable[str], schedule: Any, arguments: Iterable[str]) -> None:
    """Raise MismatchError for an option that is neither one of the pipeline's `arguments` nor one of its schedule's."""
    if isinstance(schedule, Schedule):
        schedule_options, source = [], f"the table of {schedule.name}"
    elif isinstance(schedule, str) and not schedule.endswith(".csv"):
        schedule_options, source = family_options(schedule), f"the schedule {schedule}"
    else:
        schedule_options, source = ["placement"], "a table from rows"
    for name in options:
        if name not in schedule_options:
            guess = did_you_mean(name, [*arguments, *schedule_options])
            takes = f"takes {', '.join(schedule_options)}" if schedule_options else "takes no options"
            raise MismatchError(f"a Pipeline has no argument {name}{guess}, and {source} {takes}")


def table_of_arguments(config: Any, num_ranks: int) -> Schedule:
    """Return the model's table in a pipeline of these arguments; raises as `build_table`. `config`: has them as attributes."""
    return without_teacher(user_table(config, num_ranks))


def user_table(config: Any, num_ranks: int) -> Schedule:
    """Return the same with a teacher's forwards, where the user's table has them."""
    microbatches = DEFAULT_MICROBATCHES if config.microbatches is None else config.microbatches
    _, num_slices = parse_slices(config.slices)
    is_family = isinstance(config.schedule, str) and not config.schedule.endswith(".csv")
    options = config.options | ({"slices": num_slices} if is_family and num_slices > 1 else {})
    return build_table(config.schedule, num_ranks, microbatches, options)


def build_table(
    schedule: str | Schedule | ScheduleRule, num_ranks: int, microbatches: int, options: dict[str, Any]
) -> Schedule:
    """Return the table of a name, a CSV file, a rule, or a table. Raise MismatchError if it is for other ranks than run."""
    schedule = str(schedule) if isinstance(schedule, PathLike) else schedule
    if isinstance(schedule, str) and schedule.endswith(".csv"):
        schedule = from_rows(schedule, read_csv_cells(schedule), **options)
    elif isinstance(schedule, str):
        schedule = build(schedule, ranks=num_ranks, microbatches=microbatches, **options)
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
    teacher: Teacher | None = None,
) -> Engine:
    """Return this rank's engine: its stages, in memory as `modules`, connected to those of other ranks. All ranks call it.

    `unset_names`: in the uncut model, of tensors that nothing has initialised. `clock_ids`: of every rank.
    """
    arguments, names = config.arguments, all_stages.names
    aliases = model_partition.first_name_by_alias(names)

    # 1. The program. I and W right after each other are one B; skip connections add messages.
    def prove(schedule: Schedule, proved: Program | None = None) -> Program:
        table = with_full_backwards(schedule)
        if proved is None or model_partition.skips or table.actions != schedule.actions:
            return verify(table, skips=model_partition.skips).program
        return proved

    def build_larger(microbatches: int) -> Program:
        """Return the proved program of a list of more microbatches. Raise MismatchError if the schedule has no such table."""
        larger = table_of_arguments(SimpleNamespace(**{**vars(arguments), "microbatches": microbatches}), config.schedule.ranks)
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
            both = with_full_backwards(given)
        else:
            both = with_full_backwards(with_teacher(student, teacher.table.placement, ahead))
        return verify(both, skips=model_partition.skips | teacher.skips(student.stages)).program

    # 2. Data parallelism, then stages. A rank that fails before this exchange is heard by the others here.
    parallelism = arguments.tensor_parallel, arguments.data_parallel
    data_parallel_hooks = parallelize_stages(
        position, modules, model_partition.data_parallel_hooks, model_partition.tied, names, *parallelism
    )
    control.all_gather_value(None, "to build the pipeline")
    stages = _build_stages(config, model_partition, all_stages, modules, data_parallel_hooks, table, position)
    if teacher is not None:
        stages |= teacher.make_stages(position.pipeline.device, table.stages)

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
        Layout(config.rows_dim, arguments.sequence_dim, position.pipeline.device, arguments.rows_per_sample),
        position.cp_size if position.cp_size > 1 else config.slices,
        arguments.seed,
        arguments.loss_fn is not None,
        None if teacher is None else list(teacher.modules.values()),
        arguments.loss_weight,
        ModelForward(modules[0], later_keywords) if 0 in modules else None,
    )
    links = None
    if teacher is not None:
        chains = Chains(table.stages + teacher.table.stages, teacher=table.stages, ahead=True)
        skips = model_partition.skips | teacher.skips(table.stages)
        links = channels_between((*table.placement, *teacher.table.placement), chains, skips)
    programs = RankPrograms(program, position.pipeline.rank, build_larger, add_teacher if teacher else None, links)
    return Engine(control, position, programs, reader, stages, parameters, tied, arguments.reduction, clock_ids)


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
    loss_fn = config.arguments.loss_fn
    if config.arguments.teacher is not None:
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
