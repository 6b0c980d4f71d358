"""A pipeline's teacher: a second, frozen model, cut into stages on the same ranks, whose outputs the loss takes."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from penstock import partition
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
from penstock.partition.graph_stage import move_stage_to_device
from penstock.partition.materialise import has_meta_tensors
from penstock.schedule.schedule import Schedule
from penstock.schedule.table import Skip
from penstock.stage.connections import stage_connections
from penstock.stage.hooks import DataParallelHooks
from penstock.stage.stage import Stage


class Teacher(NamedTuple):
    """The teacher's table, and its stages on this rank."""

    table: Schedule  # the stages that it has, without actions
    partition: ModelPartition
    all_stages: AllStages
    modules: Mapping[int, nn.Module]  # in evaluation mode, on this rank's device

    def skips(self, first_stage: int) -> frozenset[Skip]:
        """Return its skip connections, where its stages are numbered from `first_stage` on."""
        return frozenset((first_stage + start, first_stage + end) for start, end in self.partition.skips)

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
        return {
            first_stage + index: Stage(
                index,
                module,
                position.pipeline.device,
                layer_numbers=self.partition.layer_numbers.get(index),
                connections=connections[index],
                later_keywords=frozenset().union(*keywords[index + 1 :]),
                data_parallel=hooks[index],
            )
            for index, module in self.modules.items()
        }


def check_teacher(model: Any, teacher: Any, loss_fn: Any, table: Schedule, cp_size: int) -> None:
    """Raise MismatchError for a teacher or a loss that do not fit together, before ranks exchange anything."""
    check_modules(teacher, "the teacher")
    check_loss_takes_teacher(loss_fn)
    if table.slices > 1 or cp_size > 1:
        raise MismatchError("a teacher runs on whole sequences: use slices=1, and a mesh without cp")

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


def check_teacher_placement(table: Schedule) -> None:
    """Raise MismatchError unless a table's teacher begins on the rank that reads the inputs."""
    first = table.placement[table.num_trained_stages]
    if first != table.placement[0]:
        raise MismatchError(
            f"{table.name} places the teacher's first stage on rank {first}, and the inputs are read on rank "
            f"{table.placement[0]}, with stage 0: place both on one rank"
        )


def build_teacher(
    control: ControlGroup, position: MeshPosition, config: Any, compare: Callable[[Schedule, ModelPartition], AllStages]
) -> Teacher:
    """Return the teacher of a pipeline's arguments, cut into stages. All ranks call it together.

    `config`: a PipelineConfig. `compare`: raises MismatchError unless all ranks are about to build the same stages. The teacher
    has the stages that a table from the user gives it, by default those of the model; it is cut by the same example, and at the
    same names if it has them.
    """
    schedule, given, options = config.schedule, config.table_with_teacher, config.options
    placement = schedule.placement if given is None else given.placement[given.teacher :]
    table = Schedule(f"{schedule.name}'s teacher", placement, schedule.microbatches, ((),) * schedule.ranks)
    model, cuts = options.teacher, options.cuts

    # 1. Cut.
    names = {name for name, _ in model.named_modules()} if isinstance(model, nn.Module) else set()
    if not cuts or len(cuts) != table.stages - 1 or not names.issuperset(cuts):
        cuts = None
    cutting = cuts, options.example_args, options.example_kwargs
    check_can_be_cut(model, table, *cutting)
    cuttable = partition.as_cuttable(model, *cutting, config.rows_dim)
    model_partition = partition_model(control, position, table, cuttable or model, ())

    # 2. Compare: the ranks must have the same teacher.
    all_stages = compare(table, model_partition)
    for index, module in model_partition.modules.items():
        if has_meta_tensors(module):
            raise MismatchError(
                f"stage {index} of the teacher has tensors without values, on the meta device: load its weights before, or "
                "give {stage: module} with this rank's own stages"
            )

    # 3. This rank's stages.
    modules = {
        index: move_stage_to_device(module, position.pipeline.device).eval()
        for index, module in model_partition.modules.items()
    }
    return Teacher(table, model_partition, all_stages, modules)
