"""Uses of parameters and attributes of layers that other ranks run. This process' copies of them have no effect.

Every rank builds the whole model. A parameter that a forward reaches but does not register, as in a plain list, is this
process' copy of what another rank trains: no optimizer steps that copy, and its gradient is lost. An attribute that a layer's
forward leaves for the loss (`encoder.kl`) has its value on the layer's rank only.
"""

import dis
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from penstock.errors import MismatchError
from penstock.torch_private import tensor_version

GradientRecord = tuple[str, nn.Parameter, Tensor | None, int]  # a parameter, its gradient at an earlier time and its version


class RemoteParameterUseCheck:
    """Checks that no step of `rank`, which runs `stages`, adds to the gradient of a remote parameter, by name.

    These are the parameters of other ranks' stages, and this rank's that get their gradients there (`stage/connections.py`).
    They are not kept alive.
    """

    def __init__(self, rank: int, stages: Collection[int], remote_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._location = f"rank {rank}: stage {' or '.join(map(str, sorted(stages)))}"
        self._remote = [(name, weakref.ref(parameter)) for name, parameter in remote_parameters]

    def record_gradients(self) -> list[GradientRecord]:
        """Return the gradients of the remote parameters that still exist. Called before a step's first backward."""
        alive = [(name, parameter) for name, reference in self._remote if (parameter := reference()) is not None]
        return [(name, parameter, parameter.grad, _version(parameter.grad)) for name, parameter in alive]

    def check_gradients_unchanged(self, records: Sequence[GradientRecord]) -> None:
        """Raise MismatchError if one of the gradients has been added to since."""
        for name, parameter, grad, version in records:
            if parameter.grad is not grad or _version(grad) != version:
                raise MismatchError(
                    f"{self._location} uses the parameter {name} from where it is not registered (a plain list, a closure, the "
                    "loss), so its gradient would be lost: register it (self.layer = embedding), or pass the tensor on; a "
                    "tied parameter must be registered in both stages, and be used from there only"
                )


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None or grad.is_inference() else tensor_version(grad)


# -- attributes that a loss reads -----------------------------------------------------------------------------------------


def check_loss_reads_no_remote_attribute(loss_fn: Any, model: nn.Module, local_modules: Collection[nn.Module]) -> None:
    """Raise MismatchError if `loss_fn` reads an attribute that the forward of a module sets which runs elsewhere."""
    module_names = {module: name for name, module in model.named_modules()}
    names, roots = _names_and_modules_used(loss_fn)
    for module in dict.fromkeys(submodule for root in roots for submodule in root.modules()):
        if module in module_names and module not in local_modules:
            for attribute in sorted(names & _attributes_set_by_forward(type(module))):
                raise MismatchError(
                    f"loss_fn reads {attribute}, which the forward of {type(module).__name__} {module_names[module]} sets, but "
                    "that runs on another rank or stage: return the value with the layer's output, as far as the loss, or add "
                    "it to the loss where it is made: ps.auxiliary_loss(value)"
                )


def _names_and_modules_used(loss_fn: Any) -> tuple[set[str], list[nn.Module]]:
    """Return the names in the code of a loss and of the functions that it uses, and the modules that they refer to."""
    names, modules, visited = set[str](), list[nn.Module](), set[int]()
    queue = [loss_fn]
    while queue:
        value = queue.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))

        if isinstance(value, partial):
            queue += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, list | tuple):
            queue += [item for item in value if isinstance(item, nn.Module)]
        elif isinstance(value, nn.Module):
            modules.append(value)
            if value is loss_fn:
                queue += [type(value).forward, *vars(value).values()]
        elif inspect.ismethod(value):
            queue += [value.__func__, value.__self__]
        elif isinstance(value, FunctionType) and not value.__module__.startswith("torch."):
            code_names = [name for code in _nested_code(value.__code__) for name in code.co_names]
            names.update(code_names)
            queue += [value.__globals__[name] for name in code_names if name in value.__globals__]
            queue += [cell.cell_contents for cell in value.__closure__ or () if _has_contents(cell)]
            queue += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return names, modules


def _has_contents(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _nested_code(code: CodeType) -> Iterator[CodeType]:
    """Return `code` and the code of the functions and comprehensions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested_code(constant)


def _attributes_set_by_forward(module_class: type[nn.Module]) -> set[str]:
    """Return the attributes that a class' forward sets, directly or in methods that it names."""
    attributes, queue, visited = set[str](), ["forward"], set[str]()
    while queue:
        name = queue.pop()
        method: Callable[..., Any] | None = getattr(module_class, name, None)
        if name in visited or not isinstance(method, FunctionType) or method.__module__.startswith("torch."):
            continue
        visited.add(name)
        for code in _nested_code(method.__code__):
            instructions = dis.get_instructions(code)
            attributes |= {instruction.argval for instruction in instructions if instruction.opname == "STORE_ATTR"}
            queue += code.co_names
    return attributes
