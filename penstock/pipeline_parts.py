"""The parts of a pipeline, which all ranks build together, in five steps of which three exchange messages."""

import itertools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

from torch import nn

from penstock import partition
from penstock.comms.control_group import ControlGroup
from penstock.comms.topology import Topology
from penstock.engine.build import PipelineConfig, build_engine, complete_options, materialise_stages
from penstock.engine.model_partition import AllStages, ModelPartition, OriginalModel, partition_model
from penstock.engine.optimizers import check_scaler
from penstock.engine.step import Engine
from penstock.engine.teacher import build_teacher
from penstock.guards import outdated_weights
from penstock.guards.attention_check import check_attention, check_tokens_mix_in_attention
from penstock.guards.observer_list import PipelineObservers, make_observers
from penstock.guards.outdated_weights import TensorKey
from penstock.guards.pipeline_comparison import compare_pipeline_on_ranks
from penstock.guards.reachable_objects import find_shared_objects
from penstock.mesh.position import MeshPosition, mesh_position
from penstock.options import PipelineOptions
from penstock.stage.attention import attention_context

Attributes = Mapping[str, Mapping[str, Any]]  # of submodules, by name
_pipeline_numbers = itertools.count(1)  # pipelines are built in the same order on every rank


class StageSource(Protocol):
    """Where a pipeline's stages come from: a model that the user gives, or the pipeline before (`rebuild.Redistribution`)."""

    @property
    def cut_tokens_before(self) -> bool | None:
        """Whether the pipeline before cut its tokens; None without one."""

    def cut(self, options: PipelineOptions) -> partition.CuttableModel | None:
        """Return the model that is to be cut; None for stages that were given."""

    def fill_stages(
        self,
        control: ControlGroup,
        topology: Topology,
        original: OriginalModel,
        partition: ModelPartition,
        all_stages: AllStages,
        changed_keys: Collection[TensorKey],
    ) -> tuple[dict[int, nn.Module], set[str]]:
        """Return this rank's stages on its device, with their values; and the names of tensors that have none yet."""

    @property
    def first_attributes(self) -> Attributes | None:
        """The attributes of submodules when the first pipeline of the model was made; None without one."""


class NewModel:
    """A model, or stages, as the user gives them to `Pipeline`."""

    cut_tokens_before = None
    first_attributes = None

    def __init__(self, options: PipelineOptions) -> None:
        self._options = options

    def cut(self, options: PipelineOptions) -> partition.CuttableModel | None:
        """Return the model, cut as `options` say, unless it is stages."""
        example = options.example_args, options.example_kwargs
        return partition.as_cuttable(options.model, options.cuts, *example, options.rows_dim or 0)

    def fill_stages(
        self,
        control: ControlGroup,
        topology: Topology,
        original: OriginalModel,
        partition: ModelPartition,
        all_stages: AllStages,
        changed_keys: Collection[TensorKey],
    ) -> tuple[dict[int, nn.Module], set[str]]:
        """Initialise what is on the meta device. Raise MismatchError for weights that another pipeline has outdated."""
        tensors = original.stage_tensors(partition.modules)
        outdated_weights.check_no_outdated_weights(tensors, changed_keys, control.topology.rank)
        return materialise_stages(partition, all_stages, topology.device, self._options.seed, self._options.init)


class PipelineParts(NamedTuple):
    """What a pipeline consists of on this rank."""

    number: int  # the same on every rank
    position: MeshPosition
    config: PipelineConfig
    partition: ModelPartition
    original: OriginalModel
    first_attributes: Attributes
    engine: Engine
    observers: PipelineObservers


def build_parts(options: PipelineOptions, source: StageSource, control: ControlGroup) -> PipelineParts:
    """Build the parts of a pipeline. All ranks call it together, and raise together."""
    # 1. This rank's place in the mesh.
    number, position = next(_pipeline_numbers), mesh_position(options.mesh, control.topology)
    control.add_mesh_groups(number, position.peer_groups)

    # 2. Check the options, then partition the model as rank 0 chooses (a message).
    config = complete_options(options, position, source.cut)
    options, cuttable = config.options, config.cuttable
    check_scaler(options.scaler, position.world)
    with attention_context(config.cut_context):
        partition = partition_model(control, position, config.schedule, cuttable or options.model, config.plan_layers)
    shared_objects = find_shared_objects(partition.user_stages, options.loss_fn, config.schedule.stages)
    original = OriginalModel(options.model, cuttable, {} if cuttable else partition.user_stages)
    first_attributes = original.first_attributes if source.first_attributes is None else source.first_attributes
    if cuttable is not None:
        cuttable.trace_context = outdated_weights.allow_outdated_use
    if config.cut_context is not None:
        in_slices = config.schedule.slices > 1
        check_attention(partition.modules.values(), cuttable, config.cut_context, in_slices, source.cut_tokens_before)

    # 3. Compare what all ranks are about to build (a message).
    all_ranks = compare_pipeline_on_ranks(control, position, config.schedule, partition, options.equal_values())
    config = config.with_frozen_stages(all_ranks.frozen_stages)

    # 4. Bring this rank's stages to its device, with their values (messages, if those are on other ranks).
    modules, unset_names = source.fill_stages(
        control, position.pipeline, original, partition, all_ranks.stages, all_ranks.changed_keys
    )

    # 5. Connect them to those of other ranks (messages).
    teacher = None
    if options.teacher is not None:
        with attention_context(config.cut_context):
            teacher = build_teacher(
                control,
                position,
                options,
                config.schedule,
                config.table_with_teacher,
                partition.user_stages,
                lambda table, parts: compare_pipeline_on_ranks(control, position, table, parts, {}, "teacher").stages,
            )
        for module in teacher.modules.values() if config.cut_context is not None else ():
            check_tokens_mix_in_attention(module)
    engine = build_engine(
        control, position, config, partition, all_ranks.stages, modules, unset_names, all_ranks.clock_ids, teacher
    )
    local_tensors, remote_tensors = original.stage_tensors(modules), original.remote_tensors(modules)
    num_ranks, changed = position.pipeline.world_size, all_ranks.changed_keys
    shared_tensors = outdated_weights.record_pipeline(number, local_tensors, remote_tensors, changed, num_ranks)
    observers = make_observers(engine, config, partition, all_ranks.stages, shared_tensors, shared_objects)
    engine.observe(observers.all)
    return PipelineParts(number, position, config, partition, original, first_attributes, engine, observers)
