"""The model that this rank was given, and its partition into stages, cut here or given by the user."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import index
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from penstock import partition
from penstock.comms.control_group import ControlGroup
from penstock.errors import MismatchError, format_count, is_whole_number, require_equal
from penstock.mesh import data_parallel
from penstock.mesh.position import MeshPosition
from penstock.options import Model, describe_value
from penstock.partition.attributes import attributes_to_send
from penstock.partition.balance import Balance
from penstock.partition.graph_stage import skip_routes
from penstock.schedule.schedule import Schedule
from penstock.schedule.table import Skip
from penstock.stage import tied_parameters
from penstock.stage.connections import StageParameter, tied_parameter_skips
from penstock.stage.hooks import DataParallelHooks
from penstock.torch_private import TensorSlot, is_cuda_graphed, strip_compiled_prefix, tensor_slots, unwrap_compiled


class OriginalModel(NamedTuple):
    """The model of a pipeline, or its stages, as the user has it, with a name for each tensor and submodule.

    Names are those in the uncut model; of stages that the user gave, by stage and name. They are the same on all ranks. A
    tensor with several names has the first, even where a stage has only another one.
    """

    model: Any
    cuttable: partition.CuttableModel | None  # the same, if it was cut
    user_stages: Mapping[int, nn.Module]  # if it was not: all stages that this rank was given

    def _modules_by_prefix(self) -> dict[str, nn.Module]:
        if self.cuttable:
            return {"": self.cuttable.model}
        return {f"{stage}.": module for stage, module in self.user_stages.items()}

    def _slots(self) -> Iterator[tuple[str, TensorSlot]]:
        return ((prefix + slot.name, slot) for prefix, root in self._modules_by_prefix().items() for slot in tensor_slots(root))

    def stage_tensors(self, stages: Mapping[int, nn.Module]) -> dict[str, Tensor]:
        """Return the tensors of `stages` by name, each once, in their order."""
        names = {id(slot.tensor): name for name, slot in reversed([*self._slots()])}
        known_names, named_tensors = {*names.values()}, dict[str, Tensor]()
        for stage, module in stages.items():
            for slot in tensor_slots(module):
                slot_name = slot.name if self.cuttable else f"{stage}.{slot.name}"
                name = names.get(id(slot.tensor), slot_name)  # a stage may have a copy of a buffer, on its device
                if name in known_names:
                    named_tensors.setdefault(name, slot.tensor)
        return named_tensors

    def remote_tensors(self, stages: Mapping[int, nn.Module]) -> dict[str, Tensor]:
        """Return the tensors that only other ranks run, by name. `stages`: all that this rank runs."""
        local_names, named_tensors = self.stage_tensors(stages), dict[int, tuple[str, Tensor]]()
        for name, slot in self._slots():
            named_tensors.setdefault(id(slot.tensor), (name, slot.tensor))
        return {name: tensor for name, tensor in named_tensors.values() if name not in local_names}

    def submodules(self) -> dict[str, nn.Module]:
        """Return all submodules by name, each once."""
        return {
            prefix + name: module for prefix, root in self._modules_by_prefix().items() for name, module in root.named_modules()
        }

    @property
    def first_attributes(self) -> dict[str, dict[str, Any]]:
        """Return the `attributes_to_send` of each submodule, by its name: for pipelines that are rebuilt from this one."""
        return {name: attributes_to_send(module) for name, module in self.submodules().items()}

    def stage_submodules(self, stages: Mapping[int, nn.Module]) -> dict[str, nn.Module]:
        """Return the submodules of `stages` by name. A stage that was cut is itself no submodule of the model."""
        names = {id(module): name for name, module in reversed(self.submodules().items())}
        return {names[id(module)]: module for stage in stages.values() for module in stage.modules() if id(module) in names}


class UncutModelClassAndConfig(NamedTuple):
    """Class and configuration of an uncut model, which transformers saves next to the weights."""

    model_class: type[nn.Module]
    config: Any
    generation_config: Any


class AllStages(NamedTuple):
    """What a rank knows of all stages of the model, its own and the other ranks'."""

    names: Sequence[Mapping[str, str]]  # of each stage: its own name of each entry of its state -> the name in the uncut model
    keywords: Sequence[Sequence[str]]  # of each stage: those that its forward takes


class ModelPartition(NamedTuple):
    """The stages of this rank, as modules, and how they are connected to those of other ranks."""

    modules: dict[int, nn.Module]  # stage -> module, without DistributedDataParallel around it
    data_parallel_hooks: dict[int, DataParallelHooks]  # stage -> the data parallelism that the user has applied to it
    user_stages: Mapping[int, nn.Module]  # stage -> module, of all stages that this rank has, as in `modules`
    layer_numbers: Mapping[int, range] = {}  # stage -> numbers of its layers in the uncut model, where it is a Sequential
    tied: Sequence[Sequence[StageParameter]] = ()  # parameters that several stages share
    skips: frozenset[Skip] = frozenset()  # stages between which values, or gradients of tied parameters, pass over others
    uncut_model: nn.Module | None = None  # if one was cut
    balance: Balance | None = None  # how even the cut is, on the rank that chose it
    starts: Sequence[str] = ()  # where each stage of a model that was cut begins, but the first

    @property
    def uncut_state_names(self) -> list[str] | None:
        """All names in the uncut model's state, in its order, if one was cut."""
        return None if self.uncut_model is None else [strip_compiled_prefix(name) for name in self.uncut_model.state_dict()]

    def first_name_by_alias(self, names: Sequence[Mapping[str, str]]) -> dict[str, str]:
        """Map further names of a tensor in the uncut model to its first. `names`: as in `RankParameters`.

        The first is the one that `named_parameters()` of the uncut model gives. Stages that this rank was not given are left
        out.
        """
        entries = self._named_entries(names, lambda module: module.state_dict(keep_vars=True).items())
        tensors = [(strip_compiled_prefix(name), value) for name, value in entries if isinstance(value, Tensor)]
        first_names = {id(tensor): name for name, tensor in reversed(tensors)}
        return {name: first_names[id(tensor)] for name, tensor in tensors if first_names[id(tensor)] != name}

    def remote_parameters(self, names: Sequence[Mapping[str, str]]) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that only other ranks run, by name in the uncut model. `names`: as in `RankParameters`."""
        local_ids = {id(parameter) for module in self.modules.values() for parameter in module.parameters()}
        entries = self._named_entries(names, nn.Module.named_parameters)
        return [(name, parameter) for name, parameter in entries if id(parameter) not in local_ids]

    def _named_entries(
        self, names: Sequence[Mapping[str, str]], list_entries: Callable[[nn.Module], Iterable[tuple[str, Any]]]
    ) -> list[tuple[str, Any]]:
        """Return what `list_entries` gives for the uncut model; else for all given stages, with names in the uncut model."""
        if self.uncut_model is not None:
            return list(list_entries(self.uncut_model))
        return [
            (names[stage].get(name, name), value)
            for stage, module in self.user_stages.items()
            for name, value in list_entries(module)
        ]

    @property
    def uncut_info(self) -> UncutModelClassAndConfig | None:
        """The class and configuration of the uncut model, if it has a configuration."""
        config, generation_config = (getattr(self.uncut_model, name, None) for name in ("config", "generation_config"))
        if self.uncut_model is None or config is None:
            return None
        return UncutModelClassAndConfig(type(self.uncut_model), config, generation_config)


def partition_model(
    control: ControlGroup,
    position: MeshPosition,
    table: Schedule,
    model: partition.CuttableModel | Model,
    plan_layers: Sequence[str],
) -> ModelPartition:
    """Partition `model` into the stages of `table`. Where that depends on measured times, rank 0 chooses for all.

    Raises MismatchError for another number of stages than the table's, for other layers than a plan's (`plan_layers`), and if
    ranks have different meshes, schedules or kinds of model.
    """
    cuttable = model if isinstance(model, partition.CuttableModel) else None
    own_stages = _stages_by_number(model, table) if isinstance(model, Mapping) else None
    stage_list = _check_stage_list(model, table) if cuttable is None and own_stages is None else ()

    # 1. Choose the cut.
    starts: list[str] = []
    if cuttable is not None:
        _check_plan_layers(plan_layers, cuttable.unit_order)
        leaves_choice_to_rank0 = cuttable.depends_on_measurement and position.world.rank
        starts = [] if leaves_choice_to_rank0 else cuttable.choose_cuts(table.stages, position.pipeline.device)

    # 2. Agree on it.
    own_structure = None if own_stages is None else _stage_structure(_without_ddp(own_stages))
    mesh = f"a mesh with the pipelines {position.pipelines}"
    schedule = f"{table.name} with {table.microbatches} microbatches and {table.stages} stages"
    announcement = mesh, schedule, _model_kind(model), starts, own_structure
    announcements = control.all_gather_value(announcement, "to agree on the cut")
    meshes, schedules, model_kinds, starts_by_rank, structures = zip(*announcements, strict=True)
    require_equal(meshes, "do not build the same pipeline")
    require_equal(schedules, "do not build the same pipeline")
    require_equal(model_kinds, "do not give the same", "gives {}")

    # 3. Cut. What a rank does not know of stages that it was not given, the others have sent.
    if own_stages is not None:
        _check_own_stages(structures, position, table)
        stages, structure = own_stages, _merge_structures(structures)
    else:
        stages = dict(enumerate(stage_list if cuttable is None else cuttable.cut(starts_by_rank[0])))
        structure = _stage_structure(_without_ddp(stages))

    bare = _without_ddp(stages)
    rank_stages = table.stages_of(position.pipeline.rank)
    result = ModelPartition(
        modules={stage: bare[stage] for stage in rank_stages},
        data_parallel_hooks={stage: data_parallel.data_parallel_hooks_of(bare[stage], stages[stage]) for stage in rank_stages},
        user_stages=bare,
        layer_numbers=_layer_ranges(bare, structure.num_layers),
        tied=structure.tied,
        skips=frozenset(structure.skips) | tied_parameter_skips(structure.tied),
    )
    if cuttable is None:
        return result
    return result._replace(uncut_model=cuttable.model, balance=cuttable.balance, starts=starts_by_rank[0])


class StageStructure(NamedTuple):
    """The connections between stages, of those that one rank knows."""

    num_layers: Mapping[int, int]  # by stage; 1 where it is no Sequential
    tied: Sequence[Sequence[StageParameter]]
    skips: Sequence[Skip]
    split_owners: Sequence[tuple[int, str, list[int]]] = ()  # stage, parameter, and all its stages, as `split` noted them


def _model_kind(model: Any) -> str:
    if isinstance(model, Mapping):
        return "stages of its own, {stage: module}"
    return "a model to be cut" if isinstance(model, partition.CuttableModel) else "a list of all stages"


def _stages_by_number(model: Mapping[Any, nn.Module], table: Schedule) -> dict[int, nn.Module]:
    """Return {stage: module} with Python's integers. Raise MismatchError for other keys."""
    for key in model:
        if not is_whole_number(key):
            numbers = f"whole numbers from 0 to {table.stages - 1}, not of class {type(key).__name__}"
            raise MismatchError(f"the keys of {{stage: module}} are the stages' numbers in {table.name}, {numbers}")
    return {index(key): module for key, module in model.items()}


def is_single_module(model: Any) -> bool:
    """Whether it is one module, neither a list nor a dict of stages."""
    return isinstance(model, nn.Module) and type(model) is not nn.ModuleList


def modules_of(model: Any) -> list[Any]:
    """Return the modules of a model or of its stages, as `Pipeline` takes them."""
    return list(model.values() if isinstance(model, Mapping) else model if isinstance(model, Sequence) else [model])


def check_modules(model: Any, role: str = "the model") -> None:
    """Raise MismatchError for a model, or stages, that are no modules or cannot be run by a pipeline. `role`: its name."""
    for module in modules_of(model):
        if not isinstance(module, nn.Module):
            raise MismatchError(_not_a_module_text(module, role))
        if captured := [type(part).__name__ for part in module.modules() if is_cuda_graphed(part)]:
            raise MismatchError(
                f"{captured[0]} was captured as a CUDA graph, whose one set of buffers cannot hold several microbatches: "
                "give the module as it was before make_graphed_callables"
            )
        if lazy := [name for name, value in module.state_dict(keep_vars=True).items() if is_lazy(value)]:
            raise MismatchError(f"{lazy[0]} has no shape yet: run one batch through {role} before, `model(inputs)`")


def _not_a_module_text(value: Any, role: str) -> str:
    got = describe_value(value)
    if hasattr(value, "submod") and hasattr(value, "stage_index"):  # torch.distributed.pipelining's
        return f"{role} is nn.Modules, not {got}s: give {{stage.stage_index: stage.submod for stage in stages}}"
    return f"{role} is an nn.Module, a list with one for each stage, or {{stage: module}}, not {got}"


def check_can_be_cut(model: Any, table: Schedule, *cutting_arguments: Any) -> None:
    """Raise MismatchError for a single module and several stages, unless it is an nn.Sequential or `cutting_arguments` say how.

    Without these, only its author knows whether it is the model or one stage of it.
    """
    is_wrapper = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) or unwrap_compiled(model) is not model
    if table.stages > 1 and is_wrapper:
        raise MismatchError(
            f"{type(model).__name__} is a wrapper of a model: give Pipeline the model itself; to compile it, stage.compile() "
            "for each stage of pipe.stages.values()"
        )

    says_how = any(argument is not None for argument in cutting_arguments)
    if table.stages == 1 or not is_single_module(model) or isinstance(model, nn.Sequential) or says_how:
        return
    names = f"{table.stages - 1} submodule{'s' * (table.stages > 2)} that stages begin with"
    raise MismatchError(
        f"{table.name} has {table.stages} stages, and {type(model).__name__} is no nn.Sequential, cut between its layers: "
        f"give cuts=[..], the names of {names}; or example_args=(..), a microbatch to trace and measure it with; or "
        "{stage: module}, if it is a stage of this rank's own"
    )


def _check_stage_list(model: Any, table: Schedule) -> Sequence[nn.Module]:
    """Return the list of all stages; a single module is one stage. Raise MismatchError for another number of them."""
    stages = [model] if is_single_module(model) else model
    if len(stages) != table.stages:
        num_stages, num_modules = format_count(table.stages, "stage"), format_count(len(stages), "module")
        raise MismatchError(f"{table.name} has {num_stages}, but the list has {num_modules}")
    return stages


def _stage_structure(stages: Mapping[int, nn.Module]) -> StageStructure:
    num_layers = {stage: len(module) if isinstance(module, nn.Sequential) else 1 for stage, module in stages.items()}
    split_owners = [
        (stage, name, owners)
        for stage, module in stages.items()
        for name, owners in partition.stages_by_shared_parameter(module).items()
    ]
    return StageStructure(num_layers, tied_parameters.find_tied_groups(stages), sorted(skip_routes(stages)), split_owners)


def _merge_structures(structures: Sequence[StageStructure]) -> StageStructure:
    """Return one structure from those of all ranks. Replicas have the same."""
    num_layers = {stage: count for structure in structures for stage, count in structure.num_layers.items()}
    tied_groups = dict.fromkeys(tuple(group) for structure in structures for group in structure.tied)
    return StageStructure(
        num_layers, sorted(tied_groups), sorted({skip for structure in structures for skip in structure.skips})
    )


def _check_own_stages(structures: Sequence[StageStructure], position: MeshPosition, table: Schedule) -> None:
    """Raise MismatchError unless each rank gives the stages that the table places on it, no more and no fewer."""
    for pipeline_rank, ranks in enumerate(position.stage_ranks):
        expected = table.stages_of(pipeline_rank)
        for rank in ranks:
            stages = list(structures[rank].num_layers)
            if set(stages) != set(expected):
                raise MismatchError(
                    f"{table.name} places {_stages_text(expected)} of {table.stages} on rank {rank}, which gives "
                    f"{_stages_text(stages)}: give {{{', '.join(f'{stage}: module' for stage in expected)}}} there"
                )
            for stage, name, owners in structures[rank].split_owners:
                if missing := set(owners) - set(expected):
                    raise MismatchError(
                        f"{name} of stage {stage} is a parameter of {_stages_text(sorted(missing))} too, and would be trained "
                        "there as another: give every rank all stages that split() made, as a list"
                    )


def _stages_text(stages: Sequence[Any]) -> str:
    if not stages:
        return "no stage"
    return f"stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))}"


def _check_plan_layers(plan_layers: Sequence[str], model_layers: Sequence[str]) -> None:
    """Raise MismatchError if a plan is for other layers. A cut inside of a layer may have divided it: prefixes match."""
    if not plan_layers:
        return
    for names, expected_names, place in ((model_layers, plan_layers, "the plan"), (plan_layers, model_layers, "the model")):
        for name in names:
            if not any(f"{name}.".startswith(f"{prefix}.") or prefix.startswith(f"{name}.") for prefix in expected_names):
                raise MismatchError(
                    f"the plan is for a model of {len(plan_layers)} layers, {plan_layers[0]} to {plan_layers[-1]}, and this "
                    f"one has {len(model_layers)}: {name} is not in {place}. Make a plan for this model: penstock plan, or "
                    "ps.plan.plan"
                )


def _without_ddp(stages: Mapping[int, nn.Module]) -> dict[int, nn.Module]:
    """Return the stages, those inside of DistributedDataParallel without it."""
    return {stage: module.module if isinstance(module, DistributedDataParallel) else module for stage, module in stages.items()}


def _layer_ranges(stages: Mapping[int, nn.Module], num_layers: Mapping[int, int]) -> dict[int, range]:
    """Return, for every stage that is a Sequential, the numbers of its layers, counted over all stages."""
    ends = list(accumulate(num_layers[stage] for stage in sorted(num_layers)))
    sequential = [stage for stage, module in stages.items() if isinstance(module, nn.Sequential)]
    return {stage: range(ends[stage] - num_layers[stage], ends[stage]) for stage in sequential}
