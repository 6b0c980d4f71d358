"""Packages whose names are imported when they are first used, so that what needs no torch does not wait for it."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of `package`.

    `homes`: public name -> the module of the package that has it; the module itself where it has that name.
    """

    def find(name: str) -> Any:
        """The value of `name`, imported now and kept in the package."""
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{homes[name]}")
        value = module if homes[name].split(".")[-1] == name else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted(homes)
