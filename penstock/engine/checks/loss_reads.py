"""A loss that reads what a layer's forward leaves in an attribute (`encoder.kl`), whose value is on another rank."""

import dis
import inspect
from collections.abc import Callable, Collection, Iterator
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from penstock.errors import MismatchError


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
