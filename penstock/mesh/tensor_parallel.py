"""Tensor parallel: ranks along the mesh's axis `tp` share products inside the stages, by a plan of torch's styles."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import MismatchError

# Names of submodules in the uncut model, with * for any part between two dots -> ColwiseParallel(), RowwiseParallel(), ..
Plan = Mapping[str, Any]


def check(plan: Plan, names: Sequence[Mapping[str, str]]) -> None:
    """Raises MismatchError for a name in `plan` that no submodule with parameters has; `names` as in `Parameters`."""
    modules = {module for stage in names for name in stage.values() for module in _around(name)}
    for pattern in plan:
        if not any(_fits(module, pattern) for module in modules):
            near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.4) or sorted(modules)[:5]
            raise MismatchError(
                f"tensor_parallel has {pattern!r}, but the model has no such part; it has {', '.join(near)}, .."
            )


def apply(plan: Plan, module: nn.Module, names: Mapping[str, str], mesh: DeviceMesh) -> None:
    """`parallelize_module` for a stage, whose own names are mapped to the uncut model's by `names`."""
    from torch.distributed.tensor.parallel import parallelize_module  # imports for a second

    own: dict[str, str] = {}  # of the submodules
    for name, whole in names.items():
        for inside, outside in zip(_around(name), _around(whole), strict=False):
            own[inside] = outside
    styles = {
        name: style
        for name, _ in module.named_modules()
        for pattern, style in plan.items()
        if name and _fits(own.get(name, name), pattern)
    }
    together = _tied(module)
    parallelize_module(module, mesh, styles)
    if together != _tied(module):
        apart = ", ".join(names[name] for name in next(group for group in together if group not in _tied(module)))
        raise MismatchError(
            f"tensor_parallel would make several parameters of one ({apart}): leave out all parts that share it"
        )


def _tied(module: nn.Module) -> list[list[str]]:
    """The names that stand for one parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [sorted(group) for group in groups.values() if len(group) > 1]


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
