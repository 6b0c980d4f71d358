"""Tensor parallel: ranks along the mesh's axis `tp` share matrix products inside stages, by a plan of torch's styles."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from penstock.errors import MismatchError
from penstock.mesh.position import MeshPosition
from penstock.stage import tied_parameters

# Name of submodules in the uncut model, with * as a wildcard between two dots -> ColwiseParallel(), RowwiseParallel(), ..
TensorParallelPlan = Mapping[str, Any]


def check_tensor_parallel_plan(
    plan: TensorParallelPlan | None, names: Sequence[Mapping[str, str]], position: MeshPosition
) -> None:
    """Raise MismatchError unless there is a `plan` exactly if there is an axis `tp`, and its names are in the model.

    `names`: by stage, name of an entry in the stage -> in the uncut model.
    """
    axes = () if position.mesh is None else position.mesh.mesh_dim_names or ()
    if plan is not None and "tp" not in axes:
        raise MismatchError("tensor_parallel= needs a mesh with an axis 'tp': give mesh=, for instance of init_mesh(tp=2)")
    if position.tp is not None and plan is None:
        raise MismatchError(
            f"the mesh has {position.tp.size()} ranks along tp: say by tensor_parallel= which products they share"
        )
    for pattern in missing_parts(plan or (), names):
        modules = _modules_of_model(names)
        near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.4) or sorted(modules)[:5]
        raise MismatchError(f"tensor_parallel has {pattern!r}, but the model has no such part; it has {', '.join(near)}, ..")


def missing_parts(plan: Iterable[str], names: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the patterns of a `plan` that match no submodule of the model. `names`: as in `check_tensor_parallel_plan`."""
    modules = _modules_of_model(names)
    return [pattern for pattern in plan if not any(_matches(module, pattern) for module in modules)]


def _modules_of_model(names: Sequence[Mapping[str, str]]) -> set[str]:
    return {module for stage in names for name in stage.values() for module in _enclosing_modules(name)}


def parallelize_stage(plan: TensorParallelPlan, module: nn.Module, names: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Call `parallelize_module` on a stage. `names`: name of a parameter in the stage -> in the uncut model.

    Raises MismatchError if heads of attention would be divided, or if tied parameters would become several.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module  # this import takes a second

    install_mixed_groups_optimizer_check()

    model_name_of: dict[str, str] = {}  # a submodule's name in the stage -> in the uncut model
    for name, model_name in names.items():
        model_name_of |= zip(_enclosing_modules(name), _enclosing_modules(model_name), strict=False)

    styles = {
        name: style
        for name, _ in module.named_modules()
        for pattern, style in plan.items()
        if name and _matches(model_name_of.get(name, name), pattern)
    }
    for name, style in styles.items():
        if isinstance(style, ColwiseParallel) and style.use_local_output:
            _check_heads_divide(module, name, model_name_of.get(name, name), mesh.size())
            _check_norms_of_heads(module, name, model_name_of.get(name, name), styles)
    together = tied_parameters.names_by_parameter({0: module})
    parallelize_module(module, mesh, styles)
    tied_groups = tied_parameters.names_by_parameter({0: module})
    if untied_groups := [group for group in together if group not in tied_groups]:
        untied_names = ", ".join(names[name] for _, name in untied_groups[0])
        raise MismatchError(
            f"tensor_parallel would make several parameters of one ({untied_names}): leave out all parts that share it"
        )


def _check_heads_divide(module: nn.Module, name: str, whole_name: str, ranks: int) -> None:
    """Raise MismatchError if the projection `name` computes attention heads whose number does not divide by `ranks`.

    Models of transformers, and similar ones, have a `head_dim` beside their projections, and view the output as heads.
    """
    features = getattr(module.get_submodule(name), "out_features", 0)
    size = getattr(module.get_submodule(name.rpartition(".")[0]), "head_dim", 0)
    if not isinstance(size, int) or size < 1 or features % size or features // size % ranks == 0:
        return
    heads = features // size
    fits = ", ".join(str(ranks) for ranks in range(1, heads + 1) if heads % ranks == 0)
    raise MismatchError(
        f"{whole_name} makes {heads} head{'s' * (heads > 1)} of {size} features, which {ranks} ranks along tp cannot share: "
        f"each needs as many whole heads; use a mesh with tp of {fits}"
    )


def _check_norms_of_heads(module: nn.Module, name: str, whole_name: str, styles: Mapping[str, Any]) -> None:
    """Raise MismatchError for a norm over heads of which each rank has some: its gradient would be of these heads alone."""
    attention_name = name.rpartition(".")[0]
    attention = module.get_submodule(attention_name)
    for child, layer in attention.named_children():
        shape = getattr(getattr(layer, "weight", None), "shape", None)
        if shape == (getattr(attention, "head_dim", 0),) and f"{attention_name}.{child}".strip(".") not in styles:
            norm = f"{whole_name.rpartition('.')[0]}.{child}".strip(".")
            raise MismatchError(
                f"{norm} norms heads, of which {whole_name} gives each rank along tp some, so its gradient would be of these "
                f"alone: add '{norm}': SequenceParallel(use_local_output=True) to tensor_parallel, which sums them"
            )


@cache
def install_mixed_groups_optimizer_check() -> None:
    """Make all optimizers of this process check before each step that `foreach` and `fused` kernels can update their groups."""
    register_optimizer_step_pre_hook(lambda optimizer, *_: _check_no_mixed_groups(optimizer))


def _check_no_mixed_groups(optimizer: torch.optim.Optimizer) -> None:
    """Raise MismatchError for a group that has both tensors and DTensors, and that `foreach` or `fused` would update."""
    for number, group in enumerate(optimizer.param_groups):
        parameters = [param for param in group["params"] if param.grad is not None]
        was_requested = group.get("foreach") or group.get("fused")
        by_default = (
            "foreach" in group and group["foreach"] is None and all(parameter.device.type != "cpu" for parameter in parameters)
        )
        if (was_requested or by_default) and len({hasattr(parameter, "placements") for parameter in parameters}) > 1:
            raise MismatchError(
                f"group {number} of the {type(optimizer).__name__} has tensors and DTensors, since tensor_parallel shares some "
                "parameters only, and torch's foreach and fused kernels do not mix them: give it foreach=False, or make one "
                'group of those with hasattr(parameter, "placements") and one of the others'
            )


def _enclosing_modules(name: str) -> list[str]:
    """Return the names of the submodules that have the parameter or buffer `name` in them, from the innermost outwards."""
    return list(accumulate(name.split(".")[:-1], "{}.{}".format))[::-1]


def _matches(module: str, pattern: str) -> bool:
    parts, pattern_parts = module.split("."), pattern.split(".")
    return len(parts) == len(pattern_parts) and all(map(fnmatchcase, parts, pattern_parts))


def sum_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum gradients of which each rank has a term only, at the end of a step: those of norms under sequence parallel."""
    for parameter in parameters:
        gradient: Any = parameter.grad
        placements = getattr(parameter, "placements", None)
        if gradient is not None and placements is not None and gradient.placements != placements:
            parameter.grad = gradient.redistribute(placements=placements)
