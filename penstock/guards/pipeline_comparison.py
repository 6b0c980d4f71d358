"""What the ranks compare before they build a pipeline: they must all build the same one."""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain, takewhile
from typing import Any, NamedTuple

from torch import Tensor, nn

from penstock import partition
from penstock.comms.control_group import ControlGroup
from penstock.digest import tensor_crc
from penstock.engine.clock import clock_id
from penstock.engine.model_partition import AllStages, ModelPartition
from penstock.errors import MismatchError, require_equal, warn_user
from penstock.guards import outdated_weights
from penstock.mesh.position import MeshPosition
from penstock.schedule.schedule import Schedule
from penstock.stage.forward_arguments import keyword_names


class RankDescription(NamedTuple):
    """A description of the pipeline that one rank is about to build."""

    settings: Mapping[str, str]  # what must be equal on all ranks, in words
    tensors: Mapping[int, Mapping[str, str]]  # stage -> name -> shape, dtype and whether it is trained
    names: Mapping[int, Mapping[str, str]]  # stage -> names of its state, of `partition.state_names_without_compile_prefix`
    keywords: Mapping[int, Sequence[str]]  # stage -> the keywords that its forward takes
    is_trained: Mapping[int, bool]  # stage -> whether anything in it requires a gradient
    clock_id: str
    changed_keys: Collection[outdated_weights.TensorKey]  # of tensors that earlier pipelines have trained on this rank
    value_digests: Mapping[str, int]  # of some values of all tensors of an uncut model that is new; else empty


class ComparisonResult(NamedTuple):
    """What follows from all ranks' descriptions."""

    stages: AllStages
    clock_ids: Sequence[str]  # of every rank: equal for those that share a clock
    changed_keys: Collection[outdated_weights.TensorKey]  # of tensors that earlier pipelines have trained
    frozen_stages: frozenset[int]  # the first ones of the model, as far as none of them is trained; never the last


def compare_pipeline_on_ranks(
    control: ControlGroup,
    position: MeshPosition,
    table: Schedule,
    model_partition: ModelPartition,
    options: Mapping[str, Any],
    model: str = "model",
) -> ComparisonResult:
    """Compare what all ranks are about to build. Raise MismatchError, the same on every rank, if they differ.

    `model`: what it is, in a warning of unequal values: "model" or "teacher".
    """
    description = describe_rank(position, table, model_partition, options)
    descriptions = control.all_gather_value(description, "to build the pipeline")
    check_same_pipeline(descriptions)
    if position.world.rank == 0:
        _warn_of_unequal_values([rank_description.value_digests for rank_description in descriptions], model)

    names_by_stage = {stage: names for rank in descriptions for stage, names in rank.names.items()}
    keywords_by_stage = {stage: keywords for rank in descriptions for stage, keywords in rank.keywords.items()}
    stages = sorted(names_by_stage)
    is_trained = {stage: value for rank in descriptions for stage, value in rank.is_trained.items()}
    names = partition.model_names_of_stages(
        [names_by_stage[stage] for stage in stages], model_partition.uncut_model is not None
    )
    return ComparisonResult(
        AllStages(names, [keywords_by_stage[stage] for stage in stages]),
        [rank_description.clock_id for rank_description in descriptions],
        set().union(*[rank_description.changed_keys for rank_description in descriptions]),
        frozenset(takewhile(lambda stage: not is_trained[stage], stages[:-1])),
    )


def describe_rank(
    position: MeshPosition, table: Schedule, model_partition: ModelPartition, options: Mapping[str, Any]
) -> RankDescription:
    """Describe what this rank is about to build. `options`: those of the pipeline that must be equal on all ranks."""
    state_names = model_partition.uncut_state_names
    settings = {
        "table": f"another table of that name ({table.digest()[:12]})",
        "backend": f"backend {position.world.backend}",
        "tied": f"tied parameters {model_partition.tied}",
        "skips": f"values that skip stages {sorted(model_partition.skips)}",
        "uncut": "stages" if state_names is None else f"a model of {len(state_names)} names",
        **{name: f"{name}={_option_text(value)}" for name, value in options.items()},
    }
    modules = model_partition.modules.items()
    return RankDescription(
        settings,
        {stage: _tensor_descriptions(module) for stage, module in modules},
        {stage: partition.state_names_without_compile_prefix(module) for stage, module in modules},
        {stage: keyword_names(module) for stage, module in modules},
        {stage: _has_trained_tensors(module) for stage, module in modules},
        clock_id(),
        outdated_weights.changed_keys(),
        _value_digests(model_partition.uncut_model if position.world.world_size > 1 else None),
    )


def _has_trained_tensors(module: nn.Module) -> bool:
    """Return whether a parameter, a buffer or an attribute of `module` or of its submodules requires a gradient."""
    values = chain.from_iterable(
        (*part.parameters(recurse=False), *part.buffers(recurse=False), *vars(part).values()) for part in module.modules()
    )
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


def _option_text(option: Any) -> str:
    """Return an option in words that are equal in every process: functions by name, styles of tensor parallel by class."""
    if isinstance(option, Mapping):
        return str({name: type(value).__name__ for name, value in option.items()})
    return getattr(option, "__name__", type(option).__name__) if callable(option) else str(option)


def _tensor_descriptions(module: nn.Module) -> dict[str, str]:
    return {
        name: f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
        for name, tensor in module.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }


def _value_digests(model: nn.Module | None) -> dict[str, int]:
    """Digest some values of each tensor; empty for a model that a pipeline had before, whose ranks differ by training."""
    state = {} if model is None else model.state_dict(keep_vars=True)
    tensors = {name: value for name, value in state.items() if _has_values(value)}
    if outdated_weights.any_recorded(tensors.values()):
        return {}
    return {name: tensor_crc(outdated_weights.sample_bytes(tensor)) for name, tensor in tensors.items()}


def _has_values(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_meta and not hasattr(value, "placements")


def check_same_pipeline(descriptions: Sequence[RankDescription]) -> None:
    """Raise MismatchError unless all ranks build the same pipeline."""
    for key in descriptions[0].settings:
        settings = [description.settings[key] for description in descriptions]
        require_equal(settings, "do not build the same pipeline")

    first_copies: dict[int, tuple[int, Mapping[str, str]]] = {}  # stage -> the first rank that has it, and its tensors
    for rank, description in enumerate(descriptions):
        for stage, tensors in description.tensors.items():
            first_rank, first_tensors = first_copies.setdefault(stage, (rank, tensors))
            for name in {**first_tensors, **tensors}:
                if first_tensors.get(name) != tensors.get(name):
                    difference = f"{first_tensors.get(name)} on rank {first_rank}, but {tensors.get(name)} on rank {rank}"
                    raise MismatchError(
                        f"stage {stage} is not the same on all ranks that have it: {name} is {difference} "
                        "(shape, dtype, trained)"
                    )


def _warn_of_unequal_values(rank_digests: Sequence[Mapping[str, int]], model: str) -> None:
    """Warn if a rank has built the uncut `model` with other values than rank 0."""
    for rank, digests in enumerate(rank_digests):
        unequal = [name for name in digests if name in rank_digests[0] and digests[name] != rank_digests[0][name]]
        if unequal:
            warn_user(
                f"rank {rank} has built another {model} than rank 0: {len(unequal)} of its {len(digests)} tensors have other "
                f"values ({unequal[0]}, ..), and each stage keeps those of its own rank: seed all ranks alike, and load "
                "weights on all"
            )
            return
