"""The list of a pipeline's observers, in the order in which they look on: a new check of a step is added here."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.engine.activation_memory import MemoryObserver
from penstock.engine.build import PipelineConfig
from penstock.engine.model_partition import AllStages, ModelPartition
from penstock.engine.observers import ObservedStep, Observer
from penstock.engine.profiling import ProfilerRanges
from penstock.engine.step import Engine
from penstock.guards.changed_weights import ChangedWeightsCheck
from penstock.guards.equal_values import BatchComparison, TiedCopiesCheck, has_several_readers
from penstock.guards.frozen_stages import FrozenStageCheck
from penstock.guards.loss_check import LossChecks
from penstock.guards.nonfinite import NonFiniteMonitor
from penstock.guards.outdated_weights import OutdatedUseRefusal, TensorsSharedBetweenPipelines
from penstock.guards.reachable_objects import SharedObject
from penstock.guards.shared_state import SharedStateCheck
from penstock.guards.token_mixing import TokenMixingCheck
from penstock.guards.unequal_updates import UnequalUpdatesCheck
from penstock.guards.unregistered_uses import RemoteParameterUseCheck
from penstock.plan.microbatch_costs import MicrobatchSamples
from penstock.plan.recut import RecentSteps
from penstock.stage.hooks import NoDataParallelHooks


class PipelineObservers(NamedTuple):
    """All observers of a pipeline, and those that it asks itself."""

    all: Sequence[Observer]
    update_check: UnequalUpdatesCheck
    memory: MemoryObserver
    samples: MicrobatchSamples
    recent_steps: RecentSteps
    monitor: NonFiniteMonitor | None


def make_observers(
    engine: Engine,
    config: PipelineConfig,
    partition: ModelPartition,
    all_stages: AllStages,
    shared_tensors: TensorsSharedBetweenPipelines,
    shared_objects: Sequence[SharedObject],
) -> PipelineObservers:
    """Return the observers of a pipeline that was built. Those with numbers are the same on all ranks."""
    control, position, table, options = engine.control, engine.position, engine.schedule, config.options
    rank, num_ranks, modules = position.world.rank, position.world.world_size, partition.modules

    # Uses of what is elsewhere. A user's own DistributedDataParallel may give borrowed parameters a gradient of zeros.
    remote_parameters = partition.remote_parameters(all_stages.names)
    if all(isinstance(hooks, NoDataParallelHooks) for hooks in partition.data_parallel_hooks.values()):
        remote_parameters += engine.tied.parameters_of_other_owners()

    stages = {index: stage for index, stage in engine.stages.items() if index < table.stages}  # without a teacher's
    update_check = UnequalUpdatesCheck(stages.values(), rank, num_ranks)
    memory = MemoryObserver(stages, table.slices)
    samples, recent_steps = MicrobatchSamples(memory, table.stages), RecentSteps(table.stages)
    cp_index = position.cp_index if position.cp_size > 1 else None
    names = all_stages.names
    monitor = NonFiniteMonitor(control, stages, engine.parameters, names) if options.on_nonfinite else None

    observers: list[Observer | None] = [
        StartCheck(engine.parameters.check_initialised) if engine.parameters.has_unset else None,
        StartCheck(config.cuttable.attributes.check_unchanged_since_cut) if config.cuttable else None,
        FrozenStageCheck(engine.stages, names, table.name) if table.forward_only else None,
        shared_tensors,
        BatchComparison(position, table.placement) if has_several_readers(position, table.placement) else None,
        update_check,
        TiedCopiesCheck(control, engine.tied) if engine.tied.owners else None,
        RemoteParameterUseCheck(rank, modules, remote_parameters),
        monitor,
        memory,
        ChangedWeightsCheck(control, stages, names, recomputes=options.recompute is not None),
        SharedStateCheck(control, shared_objects, position, table.placement, stages),
        TokenMixingCheck(engine.stages, engine.device, engine.layout, cp_index) if config.cut_context is not None else None,
        samples,
        recent_steps,
        _make_loss_checks(engine, config),
        ProfilerRanges(),
        OutdatedUseRefusal(config.cuttable.model) if config.cuttable and num_ranks > 1 else None,
    ]
    every = [observer for observer in observers if observer is not None]
    return PipelineObservers(every, update_check, memory, samples, recent_steps, monitor)


def _make_loss_checks(engine: Engine, config: PipelineConfig) -> LossChecks | None:
    """Return the checks of loss and target, on one rank that has them."""
    options, position, last_stage = config.options, engine.position, engine.schedule.num_stages - 1
    if options.loss_fn is None or position.stage_rank_index or last_stage not in engine.stages:
        return None
    tokens_dim = options.sequence_dim if config.cut_context is not None else None
    loss = options.loss_fn, options.reduction, options.loss_weight
    parts = tokens_dim, engine.reader.token_parts, options.rows_per_sample
    checks = LossChecks(*loss, engine.schedule.microbatches, config.rows_dim, *parts)
    checks.stage = engine.stages[last_stage]
    return checks


class StartCheck(Observer):
    """Refuses a step at whose start `check` raises."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def start(self, step: ObservedStep) -> Sequence[float]:
        """Raise as the check does."""
        self._check()
        return ()
