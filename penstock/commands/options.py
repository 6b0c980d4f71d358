"""How options are typed that may be left out: where one is given, it is read and told as what it then is, without None."""

from collections.abc import Sequence
from dataclasses import replace
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

_registry = ConstructorRegistry()


@_registry.primitive_rule
def _without_none(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """`--steps INT` of an `int | None`, instead of `--steps {None}|INT`."""
    kinds = get_args(info.type)
    if get_origin(info.type) not in (Union, UnionType) or len(kinds) != 2 or NoneType not in kinds:
        return None
    [kind] = {*kinds} - {NoneType}
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, info.markers))
    if not isinstance(spec, PrimitiveConstructorSpec):  # nothing that is typed as one word
        return None
    return replace(
        spec,
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: ["None"] if value is None else spec.str_from_instance(value),
    )


def parsed(command: Any, words: Sequence[str], **how: Any) -> Any:
    """A `command`, a class or a union of such, with the options in `words`; `how` is tyro's. Raises SystemExit."""
    with _registry:
        return tyro.cli(command, args=words, **how)
