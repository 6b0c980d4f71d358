"""A pipeline's teacher: a second, frozen model, cut into stages on the same ranks, whose outputs the loss takes."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from penstock import partition
from penstock.batch.ahead import check_can_be_passed_on
from penstock.comms.control_group import ControlGroup
from penstock.engine.model_partition import (
    AllStages,
    ModelPartition,
    check_can_be_cut,
    check_modules,
    modules_of,
    partition_model,
)
from penstock.errors import MismatchError
from penstock.mesh.data_parallel import ApplyDataParallel
from penstock.mesh.parallelize import parallelize_teacher
from penstock.mesh.position import MeshPosition
from penstock.mesh.tensor_parallel import TensorParallelPlan
from penstock.options import PipelineOptions
from penstock.partition.graph_stage import move_stage_to_device
from penstock.partition.materialise import has_meta_tensors
from penstock.schedule.schedule import Schedule
from penstock.schedule.table import Skip
from penstock.stage.connections import StageConnections, stage_connections
from penstock.stage.hooks import DataParallelHooks
from penstock.stage.stage import Stage
from penstock.timing.costs import UNIT_COSTS
from penstock.timing.teacher_stages import costs_with_teacher, teacher_ranks, with_even_teacher, with_passed_inputs


class Teacher(NamedTuple):
    """The teacher's table, and its stages on this rank."""

    table: Schedule  # the stages that it has, without actions
    reader: int  # the rank that reads the inputs
    forward_ratio: float  # the time of its forward, in times the model's
    partition: ModelPartition
    all_stages: AllStages
    modules: Mapping[int, nn.Module]  # in evaluation mode, on this rank's device

    @property
    def passes_inputs(self) -> bool:
        """Whether a stage before its own passes the inputs on, from the rank that reads them to its first stage's."""
        return self.table.placement[0] != self.reader

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage, with the one that passes the inputs on."""
        return ((self.reader,) if self.passes_inputs else ()) + self.table.placement

    def skips(self, first_stage: int) -> frozenset[Skip]:
        """Return its skip connections, where its stages are numbered from `first_stage` on."""
        first_stage += self.passes_inputs
        return frozenset((first_stage + start, first_stage + end) for start, end in self.partition.skips)

    def add_forwards(self, table: Schedule, ahead: bool) -> Schedule:
        """Return a table of the model with the forwards of the teacher's stages."""
        costs = costs_with_teacher(UNIT_COSTS, table.stages, self.table.stages, self.forward_ratio)
        return with_passed_inputs(with_even_teacher(table, self.table.placement, ahead, self.forward_ratio), costs)

    def make_stages(
        self,
        position: MeshPosition,
        first_stage: int,
        tensor_parallel: TensorParallelPlan | None,
        data_parallel: str | ApplyDataParallel,
        hooks_of_model: Iterable[DataParallelHooks],
    ) -> dict[int, Stage]:
        """Return its stages on this rank, numbered from `first_stage` on. They only run forwards, without a graph.

        All ranks call it. `tensor_parallel`, `data_parallel`, `hooks_of_model`: see `parallelize_teacher`.
        """
        connections = stage_connections(self.table.stages, self.partition.skips, ())
        names, keywords = self.all_stages
        hooks = parallelize_teacher(position, self.modules, names, tensor_parallel, data_parallel, hooks_of_model)
        device, passing = position.pipeline.device, dict[int, Stage]()
        if self.passes_inputs and position.pipeline.rank == self.reader:
            passing[first_stage] = Stage(0, PassInputs(), device, connections=StageConnections((), (1,)))
        first_stage += self.passes_inputs
        return passing | {
            first_stage + index: Stage(
                index,
                module,
                device,
                layer_numbers=self.partition.layer_numbers.get(index),
                connections=connections[index],
                later_keywords=frozenset().union(*keywords[index + 1 :]),
                data_parallel=hooks[index],
            )
            for index, module in self.modules.items()
        }


def check_teacher(model: Any, teacher: Any, loss_fn: Any, table: Schedule) -> None:
    """Raise MismatchError for a teacher or a loss that do not fit together, before ranks exchange anything."""
    check_modules(teacher, "the teacher")
    check_loss_takes_teacher(loss_fn)
    if table.slices > 1:
        raise MismatchError("a teacher does not run in slices: use slices=1, or a mesh whose ranks along cp share the tokens")

    parameters = {id(parameter): name for module in modules_of(model) for name, parameter in module.named_parameters()}
    for module in modules_of(teacher):
        for name, parameter in module.named_parameters():
            if id(parameter) in parameters:
                raise MismatchError(
                    f"the teacher's {name} is the trained model's own {parameters[id(parameter)]}: a teacher is another model, "
                    "in evaluation mode; give it a copy, teacher=copy.deepcopy(model)"
                )


def check_loss_takes_teacher(loss_fn: Any) -> None:
    """Raise MismatchError for a loss that does not take a teacher's output as its third argument."""
    advice = "give Pipeline(.., loss_fn=) a function of (output, target, teacher_output)"
    if loss_fn is None:
        raise MismatchError(f"a teacher's outputs are for the loss: {advice}")
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    if (getattr(function, "__module__", None) or "").startswith("torch."):  # a third argument would be another setting
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise MismatchError(
            f"a teacher's outputs are for the loss, and {name} of torch takes the output and the target: {advice}"
        )
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError as error:
        raise MismatchError(
            f"a teacher's outputs are for the loss, which does not take three arguments ({error}): {advice}"
        ) from None
    except ValueError:  # a function written in C
        pass


class PassInputs(nn.Module):
    """The stage that passes the arguments of a teacher's forward on to the rank of its first stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the arguments. Raises MismatchError if they cannot be sent."""
        check_can_be_passed_on(args, kwargs)
        return args, kwargs


def build_teacher(
    control: ControlGroup,
    position: MeshPosition,
    options: PipelineOptions,
    schedule: Schedule,
    given: Schedule | None,
    trained_stages: Mapping[int, nn.Module],
    compare: Callable[[Schedule, ModelPartition], AllStages],
) -> Teacher:
    """Return the teacher of a pipeline's arguments, cut into stages. All ranks call it together.

    `schedule`: of the model. `given`: the table with the teacher, if the user gives one. `trained_stages`: of the model, those
    that this rank was given. `compare`: raises MismatchError unless all ranks are about to build the same stages.

    The teacher has the stages that a table from the user gives it. By default they are on the ranks of the model's, or in a V
    if it can be cut so and steps are shorter. It is cut by the example of the model, and at the same names if it has them.
    """
    model, plan = options.teacher, options.plan
    assert model is not None
    cuts, plan_layers = (plan.teacher_cuts or options.cuts, plan.teacher_layers) if plan is not None else (options.cuts, ())

    # 1. Choose the ranks of its stages.
    names = {name for name, _ in model.named_modules()} if isinstance(model, nn.Module) else set()
    placement = schedule.placement if given is None else given.placement[given.teacher :]
    table = Schedule(f"{schedule.name}'s teacher", placement, schedule.microbatches, ((),) * schedule.ranks)
    if not cuts or len(cuts) != table.stages - 1 or not names.issuperset(cuts):
        cuts = None
    cutting = cuts, options.example_args, options.example_kwargs
    check_can_be_cut(model, table, *cutting)
    cuttable = partition.as_cuttable(model, *cutting, options.rows_dim or 0)
    forward_ratio = _parameter_count_ratio(modules_of(model), list(trained_stages.values()), schedule.stages)
    forward_ratio = control.all_gather_value(forward_ratio, "to compare the teacher with the model")[0]
    if given is None and cuttable is not None and cuts is None:
        placement = teacher_ranks(schedule, forward_ratio=forward_ratio, max_stages=len(cuttable.unit_order))
        table = replace(table, placement=placement)

    # 2. Cut.
    model_partition = partition_model(control, position, table, cuttable or model, plan_layers)

    # 3. Compare: the ranks must have the same teacher.
    all_stages = compare(table, model_partition)
    for index, module in model_partition.modules.items():
        if has_meta_tensors(module):
            raise MismatchError(
                f"stage {index} of the teacher has tensors without values, on the meta device: load its weights before, or "
                "give {stage: module} with this rank's own stages"
            )

    # 4. This rank's stages.
    modules = {
        index: move_stage_to_device(module, position.pipeline.device).eval()
        for index, module in model_partition.modules.items()
    }
    return Teacher(table, schedule.placement[0], forward_ratio, model_partition, all_stages, modules)


def _parameter_count_ratio(teacher: Sequence[nn.Module], trained_stages: Sequence[nn.Module], num_stages: int) -> float:
    """Return how long the teacher's forward takes, in times the model's, taken from the numbers of their parameters.

    1 if one has none, or if this rank was not given all stages.
    """
    if len(trained_stages) < num_stages or len(teacher) not in (1, num_stages):
        return 1.0
    teacher_count, model_count = map(_count_parameters, (teacher, trained_stages))
    return teacher_count / model_count if teacher_count and model_count else 1.0


def _count_parameters(modules: Sequence[nn.Module]) -> int:
    return sum(parameter.numel() for parameter in {p for module in modules for p in module.parameters()})
