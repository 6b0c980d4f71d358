"""What a stage or a loss uses past what it is given: it is of this process, and other ranks train or compute another one.

Every rank builds the whole model. A parameter that a forward reaches where it is not registered, as in a plain list, is this
process' copy of what another rank trains: no optimizer steps that copy, and its gradient goes nowhere. An attribute that a
layer's forward leaves for the loss (`encoder.kl`) has its value on the layer's rank.
"""

import dis
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn

from penstock.errors import MismatchError
from penstock.torch_private import tensor_version


class GradientBefore(NamedTuple):
    """What a parameter's gradient was."""

    name: str
    parameter: nn.Parameter
    grad: Tensor | None
    version: int


class UnregisteredParameters:
    """Looks for them on `rank`, which runs `stages`. No step of its adds to the gradient of one of the `others`, by name.

    These are the parameters of other ranks' stages, and its own that get their gradients there (`stage/neighbours.py`).
    They are not kept alive.
    """

    def __init__(self, rank: int, stages: Collection[int], others: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._who = f"rank {rank}: stage {' or '.join(map(str, sorted(stages)))}"
        self._others = [(name, weakref.ref(parameter)) for name, parameter in others]

    def begin(self) -> list[GradientBefore]:
        """Before a step's first backward: how it is with those that are there."""
        there = [(name, parameter) for name, reference in self._others if (parameter := reference()) is not None]
        return [GradientBefore(name, parameter, parameter.grad, _version(parameter.grad)) for name, parameter in there]

    def check(self, before: Sequence[GradientBefore]) -> None:
        """Raises MismatchError if one of their gradients has been added to."""
        for name, parameter, grad, version in before:
            if parameter.grad is not grad or _version(grad) != version:
                raise MismatchError(
                    f"{self._who} uses the parameter {name} from where it is not registered (a plain list, a closure, the "
                    "loss), so its gradient would be lost: register it (self.layer = embedding), or pass the tensor on; a "
                    "tied parameter must be registered in both stages, and be used from there only"
                )


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None or grad.is_inference() else tensor_version(grad)


# -- what a loss reads ----------------------------------------------------------------------------------------------------


def check_loss_reads(loss_fn: Any, model: nn.Module, here: Collection[nn.Module]) -> None:
    """Raises MismatchError if `loss_fn` reads an attribute that a forward sets, of a module of `model` that is not `here`."""
    names = {module: name for name, module in model.named_modules()}
    read, used = _reads(loss_fn)
    for module in dict.fromkeys(part for each in used for part in each.modules()):
        if module in names and module not in here:
            for attribute in sorted(read & _set_by_forward(type(module))):
                raise MismatchError(
                    f"loss_fn reads {attribute}, which the forward of {type(module).__name__} {names[module]} sets, but that "
                    "runs on another rank or stage: return the value with the layer's output, as far as the loss, or add it to "
                    "the loss where it is made: ps.auxiliary_loss(value)"
                )


def _reads(loss_fn: Any) -> tuple[set[str], list[nn.Module]]:
    """The names in the code of a loss and of the functions that it uses, and the modules that they refer to."""
    names, modules, seen = set[str](), list[nn.Module](), set[int]()
    waiting = [loss_fn]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, list | tuple):
            waiting += [each for each in value if isinstance(each, nn.Module)]
        elif isinstance(value, nn.Module):
            modules.append(value)
            if value is loss_fn:
                waiting += [type(value).forward, *vars(value).values()]
        elif inspect.ismethod(value):
            waiting += [value.__func__, value.__self__]
        elif isinstance(value, FunctionType) and not value.__module__.startswith("torch."):
            found = [name for code in _codes(value.__code__) for name in code.co_names]
            names.update(found)
            waiting += [value.__globals__[name] for name in found if name in value.__globals__]
            waiting += [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
            waiting += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return names, modules


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _codes(code: CodeType) -> Iterator[CodeType]:
    """`code` and that of the functions and comprehensions inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _set_by_forward(kind: type[nn.Module]) -> set[str]:
    """The attributes that the forward of a class sets, itself or by methods that it names."""
    found, waiting, seen = set[str](), ["forward"], set[str]()
    while waiting:
        name = waiting.pop()
        method: Callable[..., Any] | None = getattr(kind, name, None)
        if name in seen or not isinstance(method, FunctionType) or method.__module__.startswith("torch."):
            continue
        seen.add(name)
        for code in _codes(method.__code__):
            found |= {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR"}
            waiting += code.co_names
    return found
