"""Tensor parallel: ranks along the mesh's axis `tp` share products inside the stages, by a plan of torch's styles."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import MismatchError
from penstock.mesh.position import MeshPosition
from penstock.stage import tied

# Names of submodules in the uncut model, with * for any part between two dots -> ColwiseParallel(), RowwiseParallel(), ..
Plan = Mapping[str, Any]


def check(plan: Plan | None, names: Sequence[Mapping[str, str]], position: MeshPosition) -> None:
    """Raises MismatchError for a `plan` without an axis `tp` or the reverse, and for a name in it that no submodule with
    parameters has; `names` as in `Parameters`.
    """
    axes = () if position.mesh is None else position.mesh.mesh_dim_names or ()
    if plan is not None and "tp" not in axes:
        raise MismatchError("tensor_parallel= needs a mesh with an axis 'tp': give mesh=, for instance of init_mesh(tp=2)")
    if position.tp is not None and plan is None:
        raise MismatchError(
            f"the mesh has {position.tp.size()} ranks along tp: say by tensor_parallel= which products they share"
        )
    modules = {module for stage in names for name in stage.values() for module in _around(name)}
    for pattern in plan or ():
        if not any(_fits(module, pattern) for module in modules):
            near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.4) or sorted(modules)[:5]
            raise MismatchError(
                f"tensor_parallel has {pattern!r}, but the model has no such part; it has {', '.join(near)}, .."
            )


def apply(plan: Plan, module: nn.Module, names: Mapping[str, str], mesh: DeviceMesh) -> None:
    """`parallelize_module` for a stage, whose own names are mapped to the uncut model's by `names`."""
    from torch.distributed.tensor.parallel import parallelize_module  # imports for a second

    around = [pair for name, whole in names.items() for pair in zip(_around(name), _around(whole), strict=False)]
    wholes = dict(around)  # a submodule's own name -> the uncut model's
    styles = {
        name: style
        for name, _ in module.named_modules()
        for pattern, style in plan.items()
        if name and _fits(wholes.get(name, name), pattern)
    }
    together = tied.names_of([module])
    parallelize_module(module, mesh, styles)
    now = tied.names_of([module])
    if lost := [group for group in together if group not in now]:
        apart = ", ".join(names[name] for _, name in lost[0])
        raise MismatchError(
            f"tensor_parallel would make several parameters of one ({apart}): leave out all parts that share it"
        )


def _around(name: str) -> list[str]:
    """The submodules that the entry `name` is in, from its own to the outermost."""
    return list(accumulate(name.split(".")[:-1], "{}.{}".format))[::-1]


def _fits(module: str, pattern: str) -> bool:
    parts, wanted = module.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def complete(parameters: Iterable[nn.Parameter]) -> None:
    """At the end of a step: sum gradients of which each rank has a term, as norms leave them that see parts of a sequence."""
    for parameter in parameters:
        gradient: Any = parameter.grad
        placements = getattr(parameter, "placements", None)
        if gradient is not None and placements is not None and gradient.placements != placements:
            parameter.grad = gradient.redistribute(placements=placements)
