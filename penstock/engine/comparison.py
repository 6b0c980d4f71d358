"""What the ranks compare before they build a pipeline: they must all build the same one."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from penstock import partition
from penstock.comms.control_group import ControlGroup
from penstock.engine.checks import trained_elsewhere
from penstock.engine.checks.digest import crc_of
from penstock.engine.clock import machine
from penstock.engine.cut import Cut
from penstock.errors import MismatchError
from penstock.mesh.position import MeshPosition
from penstock.schedule import Schedule
from penstock.stage.exchange import keyword_names


class Description(NamedTuple):
    """What one rank says of itself."""

    alike: Mapping[str, str]  # what must be the same on all ranks, in words
    tensors: Mapping[int, Mapping[str, str]]  # stage -> its state: what all who have a copy must have alike
    names: Mapping[int, Mapping[str, str]]  # stage -> the names of its state, see `partition.plain`
    takes: Mapping[int, Sequence[str]]  # stage -> the keywords that its forward takes
    machine: str
    changed: Collection[trained_elsewhere.Key]  # of what pipelines before have trained on this rank
    values: Mapping[str, int]  # digests of some values of all tensors of a whole model that is new; else nothing


def describe(position: MeshPosition, table: Schedule, cut: Cut, options: Mapping[str, Any]) -> Description:
    """What this rank says of itself; `options` are the pipeline's that must be the same on all ranks."""
    alike = {
        "mesh": f"a mesh with the pipelines {position.pipelines}",
        "schedule": f"{table.name} with {table.microbatches} microbatches and {table.stages} stages",
        "table": f"another table of that name ({table.digest()[:12]})",
        "backend": f"backend {position.world.backend}",
        "tied": f"tied parameters {cut.tied}",
        "skips": f"values that skip stages {sorted(cut.skips)}",
        "uncut": "stages" if cut.order is None else f"a model of {len(cut.order)} names",
        **{name: f"{name}={_told(value)}" for name, value in options.items()},
    }
    modules = cut.modules.items()
    return Description(
        alike,
        {stage: _tensors(module) for stage, module in modules},
        {stage: partition.uncompiled_names(module) for stage, module in modules},
        {stage: keyword_names(module) for stage, module in modules},
        machine(),
        trained_elsewhere.changed(),
        _values(cut.whole if position.world.world_size > 1 else None),
    )


def _told(option: Any) -> str:
    """In words that are the same in every process: functions by their names, styles of tensor parallel by their classes."""
    if isinstance(option, Mapping):
        return str({name: type(each).__name__ for name, each in option.items()})
    return getattr(option, "__name__", type(option).__name__) if callable(option) else str(option)


def _values(model: nn.Module | None) -> dict[str, int]:
    named = {} if model is None else model.state_dict(keep_vars=True)
    tensors = {name: value for name, value in named.items() if _has_values(value)}
    if trained_elsewhere.is_known(tensors.values()):
        return {}
    return {name: crc_of(trained_elsewhere.sample(each)) for name, each in tensors.items()}


def _has_values(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_meta and not hasattr(value, "placements")


def _tensors(module: nn.Module) -> dict[str, str]:
    tensors = {name: each for name, each in module.state_dict(keep_vars=True).items() if isinstance(each, Tensor)}
    return {name: f"{tuple(each.shape)} {each.dtype} {each.requires_grad}" for name, each in tensors.items()}


def check(everyone: Sequence[Description]) -> None:
    """Raises MismatchError unless all ranks build the same pipeline."""
    for key, expected in everyone[0].alike.items():
        for rank, each in enumerate(everyone):
            if each.alike[key] != expected:
                told = f"rank 0 has {expected}, rank {rank} has {each.alike[key]}"
                raise MismatchError(f"the ranks do not build the same pipeline: {told}")
    copies: dict[int, tuple[int, Mapping[str, str]]] = {}  # stage -> the first rank that has it, and its tensors
    for rank, each in enumerate(everyone):
        for stage, tensors in each.tensors.items():
            first, expected_tensors = copies.setdefault(stage, (rank, tensors))
            for name in {**expected_tensors, **tensors}:
                if expected_tensors.get(name) != tensors.get(name):
                    told = f"{name} is {expected_tensors.get(name)} on rank {first}, but {tensors.get(name)} on rank {rank}"
                    raise MismatchError(
                        f"stage {stage} is not the same on all ranks that have it: {told} (shape, dtype, trained)"
                    )


def _warn_of_other_values(everyone: Sequence[Mapping[str, int]]) -> None:
    """Of a whole model that has other values on another rank than here, where both have some."""
    for rank, values in enumerate(everyone):
        other = [name for name in values if name in everyone[0] and values[name] != everyone[0][name]]
        if other:
            warnings.warn(
                f"rank {rank} has built another model than rank 0: {len(other)} of its {len(values)} tensors have other values "
                f"({other[0]}, ..), and each stage keeps those of its own rank: seed all ranks alike, and load weights on all",
                stacklevel=4,
            )
            return


class Compared(NamedTuple):
    """What all ranks' descriptions come to; by stage of the whole model, but for the machines."""

    names: Sequence[Mapping[str, str]]  # its own name of each entry -> the name in the uncut model
    takes: Sequence[Sequence[str]]  # the keywords that its forward takes
    machines: Sequence[str]  # of every rank: the same for those that share a clock
    changed: Collection[trained_elsewhere.Key]  # what pipelines before have trained


def compare(control: ControlGroup, position: MeshPosition, table: Schedule, cut: Cut, options: Mapping[str, Any]) -> Compared:
    """Compare all ranks' descriptions. Raises MismatchError as `check`."""
    everyone = control.all_gather_object(describe(position, table, cut, options), "to build the pipeline")
    check(everyone)
    if position.world.rank == 0:
        _warn_of_other_values([each.values for each in everyone])
    own = {stage: names for each in everyone for stage, names in each.names.items()}
    takes = {stage: takes for each in everyone for stage, takes in each.takes.items()}
    plain, taken = ([found[stage] for stage in sorted(found)] for found in (own, takes))
    names = partition.model_names_of_stages(plain, cut.whole is not None)
    return Compared(names, taken, [each.machine for each in everyone], set().union(*[each.changed for each in everyone]))
