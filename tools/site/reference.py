"""The reference that the code writes itself: the public names with their docstrings, the commands with their --help."""

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from types import FunctionType
from typing import Any

from docstrings import from_docstring

import penstock
from penstock.commands.cli import COMMANDS

MODULES = ("schedule", "plan", "comms", "partition", "model", "checkpoint")


def api_pages() -> dict[str, str]:
    """A page for the package itself and one for each of its public modules."""
    top = [name for name in penstock.__all__ if name not in (*MODULES, "cache", "microbatch")]
    top.sort(key=lambda name: (name.endswith("Error"), name not in ("Pipeline", "launch")))
    said = "The names that most programs need, after `import penstock as ps`."
    pages = {"reference/api/penstock.md": _page("penstock", said, penstock, top)}
    for name in MODULES:
        module = getattr(penstock, name)
        said = (inspect.getdoc(module) or "").partition("\n\n")[0]
        pages[f"reference/api/{name}.md"] = _page(f"penstock.{name}", said, module, public(module))
    return pages


def public(module: Any) -> list[str]:
    """The names a module gives to its users, in the order it lists them."""
    listed = getattr(module, "__all__", None) or [name for name in dir(module) if not name.startswith("_")]
    return [name for name in listed if not inspect.ismodule(getattr(module, name)) and _of_penstock(getattr(module, name))]


def _of_penstock(value: Any) -> bool:
    return getattr(value, "__module__", "").startswith("penstock") and bool(inspect.getdoc(value))


def _page(title: str, said: str, module: Any, names: list[str]) -> str:
    entries = [entry for name in names for entry in _entry(f"{title}.{name}", getattr(module, name))]
    return "\n\n".join([f"# {title}", from_docstring(said), *entries]) + "\n"


def _entry(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        yield f"## {name.rpartition('.')[2]}"
        signature = "" if issubclass(value, BaseException | Enum) else _signature(value)
        yield _directive("class", name + signature, value, [_member(name, *member) for member in _members(value)])
    else:
        yield f"## {name.rpartition('.')[2]}"
        yield _directive("function", name + _signature(value), value, [])


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """What a class defines itself and says something of."""
    kinds = (FunctionType, property, classmethod, staticmethod)
    for name, value in vars(cls).items():
        if not name.startswith("_") and isinstance(value, kinds) and inspect.getdoc(getattr(value, "__func__", value)):
            yield name, value


def _member(cls: str, name: str, value: Any) -> str:
    kind = "property" if isinstance(value, property) else "method"
    function = getattr(value, "__func__", value)
    return _directive(f"{kind}", f"{name}{'' if kind == 'property' else _signature(function)}", function, [])


def _directive(kind: str, signature: str, value: Any, inner: list[str]) -> str:
    fence = "::::" if inner else ":::"
    body = "\n\n".join([from_docstring(inspect.getdoc(value) or ""), *inner])
    return f"{fence}{{py:{kind}}} {signature}\n\n{body}\n{fence}"


def _signature(value: Any) -> str:
    """Names and defaults; what each must be stands in the text."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "()"
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty, default=_told(parameter.default))
        for parameter in signature.parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


class _Text(str):
    """A default as it is written in a signature."""

    def __repr__(self) -> str:
        return str(self)


def _told(default: Any) -> Any:
    plain = default is inspect.Parameter.empty or isinstance(default, int | float | str | None)
    return default if plain else _Text("...")


def with_options(page: str) -> str:
    """The page of commands, and behind it every command's own --help."""
    with ThreadPoolExecutor(2) as at_once:
        helps = at_once.map(_help, COMMANDS)
    parts = [f"\n### penstock {name}\n\n```text\n{text}\n```\n" for name, text in zip(COMMANDS, helps, strict=True)]
    return page + "\n## All options\n" + "".join(parts)


def _help(command: str) -> str:
    environment = {**os.environ, "COLUMNS": "92", "NO_COLOR": "1", "TERM": "dumb"}
    said = subprocess.run(
        [sys.executable, "-m", "penstock", *command.split(), "--help"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return "\n".join(line.rstrip() for line in said.stdout.strip().splitlines())
