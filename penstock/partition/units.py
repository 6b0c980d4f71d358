"""The units of a model: the submodules between which it can be cut, each of which stays whole."""

from collections.abc import Collection, Iterator

from torch import nn

from penstock.torch_private import has_hooks

UNCALLED = (nn.ModuleList, nn.ModuleDict)  # containers without a forward
CONTAINERS = (*UNCALLED, nn.Sequential)


def units_of(model: nn.Module, cuts: Collection[str] = ()) -> dict[str, nn.Module]:
    """Names -> units, in the order of their definition.

    The elements of the outermost `ModuleList`, `ModuleDict` and `Sequential` modules are units (of a list in a list, its
    elements), and so is every submodule that neither contains such a container nor is inside one. A cut inside a unit makes
    units of its children instead.
    """
    seen: set[int] = set()
    return dict(_units("", model, cuts, seen, element=False))


def hooked(model: nn.Module) -> list[str]:
    """The names of the modules in which somebody listens."""
    return [name for name, module in model.named_modules() if name and has_hooks(module)]


def _units(
    name: str, module: nn.Module, cuts: Collection[str], seen: set[int], element: bool
) -> Iterator[tuple[str, nn.Module]]:
    """`element`: an element of a container, or a part of one, which stays whole unless a cut goes through it."""
    if id(module) in seen:  # under its first name, as in named_parameters()
        return
    seen.add(id(module))
    contains = any(isinstance(each, CONTAINERS) for each in module.modules())
    whole = (element and not isinstance(module, UNCALLED)) or not contains
    if name and whole and not any(cut.startswith(name + ".") for cut in cuts):
        yield name, module
        return
    for child_name, child in module.named_children():
        inside = element or isinstance(module, CONTAINERS)
        yield from _units(f"{name}.{child_name}" if name else child_name, child, cuts, seen, inside)
