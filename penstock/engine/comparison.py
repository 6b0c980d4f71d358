"""What the ranks compare before they build a pipeline: they must all build the same one."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from penstock import partition
from penstock.engine.clock import machine
from penstock.engine.cut import Cut
from penstock.errors import MismatchError
from penstock.mesh.data_parallel import ApplyDataParallel
from penstock.mesh.position import MeshPosition
from penstock.mesh.tensor_parallel import Plan
from penstock.schedule import Schedule
from penstock.stage.keywords import takes


class Description(NamedTuple):
    """What one rank says of itself."""

    alike: Mapping[str, str]  # what must be the same on all ranks, in words
    tensors: Mapping[int, Mapping[str, str]]  # stage -> its state: what all who have a copy must have alike
    names: Mapping[int, Mapping[str, str]]  # stage -> the names of its state, see `partition.plain`
    takes: Mapping[int, Sequence[str]]  # stage -> the keywords that its forward takes
    machine: str


def describe(
    table: Schedule, cut: Cut, seed: int | None, position: MeshPosition, plan: Plan | None, way: str | ApplyDataParallel
) -> Description:
    """What this rank says of itself."""
    styles = {name: type(style).__name__ for name, style in (plan or {}).items()}
    alike = {
        "mesh": f"a mesh with the pipelines {position.pipelines}",
        "schedule": f"{table.name} with {table.microbatches} microbatches and {table.stages} stages",
        "table": f"another table of that name ({table.digest()[:12]})",
        "seed": f"seed {seed}",
        "backend": f"backend {position.world.backend}",
        "tied": f"tied parameters {cut.tied}",
        "skips": f"values that skip stages {sorted(cut.skips)}",
        "uncut": "stages" if cut.whole is None else f"a model of {len(cut.whole.state_dict())} names",
        "data_parallel": f"data_parallel={way if isinstance(way, str) else getattr(way, '__name__', type(way).__name__)}",
        "tensor_parallel": f"tensor_parallel={styles}",
    }
    modules = cut.modules.items()
    return Description(
        alike,
        {stage: _tensors(module) for stage, module in modules},
        {stage: partition.plain(module) for stage, module in modules},
        {stage: takes(module) for stage, module in modules},
        machine(),
    )


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


def by_stage(everyone: Sequence[Mapping[int, Any]]) -> list[Any]:
    """What the ranks say of their stages, in the order of the stages."""
    own = {stage: value for each in everyone for stage, value in each.items()}
    return [own[stage] for stage in sorted(own)]
