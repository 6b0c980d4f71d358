"""Packages that import a public name when it is first used, so that commands that need no torch do not wait for it."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for `package`.

    `modules`: public name -> the module of the package that defines it, or one of another package by its full name. Where the
    two are equal, the module itself is exported.
    """

    def import_name(name: str) -> Any:
        """Import the value of `name`, and keep it in the package."""
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        prefix = "" if modules[name].startswith("penstock.") else f"{package}."
        module = importlib.import_module(prefix + modules[name])
        value = module if modules[name].split(".")[-1] == name else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return import_name, lambda: sorted(modules)
