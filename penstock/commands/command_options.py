"""Make a frozen dataclass a command: fields are options, the lines below them their help, its docstring the command's help."""

import io
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, fields, replace
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

T = TypeVar("T")
_registry = ConstructorRegistry()


@dataclass_transform(frozen_default=True)
def command(**metavars: str) -> Callable[[type[T]], type[T]]:
    """Make a class a command. `metavars`: field -> the word for its value in `--help`, if not its type's."""

    def make(cls: type[T]) -> type[T]:
        """Return `cls`, with a frozen dataclass of its fields registered as the command."""
        frozen_class: Any = dataclass(frozen=True)(cls)
        hints = get_type_hints(frozen_class, include_extras=True)
        frozen_class.__annotations__ = {
            field.name: Annotated[
                hints[field.name], tyro.conf.arg(metavar=metavars.get(field.name), help_behavior_hint=_describe_default)
            ]
            for field in fields(frozen_class)
        }
        return cls

    return make


def _describe_default(default: str) -> str:
    return "" if default in ("", "None", "False") else f"(default: {default})"


@_registry.primitive_rule
def _without_none(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Show an `int | None` as `--steps INT` in `--help`, instead of `--steps {None}|INT`."""
    kinds = get_args(info.type)
    if get_origin(info.type) not in (Union, UnionType) or len(kinds) != 2 or NoneType not in kinds:
        return None
    [kind] = {*kinds} - {NoneType}
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, info.markers))
    if not isinstance(spec, PrimitiveConstructorSpec):  # a value of several words
        return None
    return replace(
        spec,
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: ["None"] if value is None else spec.str_from_instance(value),
    )


def parse_options(command: type[T], words: Sequence[str], name: str, default: T | None = None) -> T:
    """Parse the options `words` of the command called `name`. Raises SystemExit for wrong ones, and after `--help`."""
    printed = io.TextIOWrapper(io.BytesIO(), encoding=sys.stdout.encoding, errors="replace")
    try:
        with _registry, redirect_stdout(printed):  # only help is printed there
            return tyro.cli(
                command, args=words, prog=f"penstock {name}", default=tyro.MISSING_NONPROP if default is None else default
            )
    finally:
        width = shutil.get_terminal_size().columns
        printed.seek(0)
        for line in printed.read().splitlines():  # tyro leaves the paragraphs of a description unwrapped
            print(line if len(line) <= width else textwrap.fill(line, width))
