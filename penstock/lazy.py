"""Names and methods that are imported when first used, so that who needs no torch, or no picture, does not wait for it."""

import importlib
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any


def lazy_exports(
    package: str, names: Mapping[str, str], modules: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for `package`.

    `names`: public name -> the module that defines it. `modules`: public name -> the module that it stands for. A module is
    given by its name inside the package, or one of another package by its full name.
    """

    def import_name(name: str) -> Any:
        """Import the value of `name`, and keep it in the package."""
        if name not in names and name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module_name = modules[name] if name in modules else names[name]
        prefix = "" if module_name.startswith("penstock.") else f"{package}."
        module = importlib.import_module(prefix + module_name)
        value = module if name in modules else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return import_name, lambda: sorted([*names, *modules])


def lazy_method(module: str, function: str) -> Callable[[Any], Any]:
    """Return a method that calls `function(self)` of `module`, which it imports: how a low room's object shows a picture."""

    def method(self: Any) -> Any:
        return getattr(importlib.import_module(module), function)(self)

    method.__name__ = method.__qualname__ = function
    return method
