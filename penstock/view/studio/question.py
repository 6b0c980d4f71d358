"""What may stand in a question: each value as it must be, or a PenstockError that says so in a sentence for the page."""

from collections.abc import Mapping
from typing import Any

from penstock.errors import PenstockError


def shown(value: object) -> str:
    """`value` as an error says it: in 60 characters."""
    return repr(value) if len(repr(value)) < 60 else f"{repr(value)[:57]}..."


def mapping(value: object, name: str) -> Mapping[str, object]:
    """An object with names and values."""
    if not isinstance(value, dict):
        raise PenstockError(f"{name} is {shown(value)}: give an object with names and values")
    return value


def items(value: object, name: str) -> list[Any]:
    """A list."""
    if not isinstance(value, list):
        raise PenstockError(f"{name} is {shown(value)}: give a list")
    return value


def text(value: object, name: str, limit: int) -> str:
    """A text of `limit` characters at limit."""
    if not isinstance(value, str) or len(value) > limit:
        raise PenstockError(f"{name} is {shown(value)}: give a text of {limit} characters at most")
    return value


def whole(request: Mapping[str, object], name: str, limit: int) -> int:
    """What is `request` under the name `name`: a whole number from 1 to `limit`."""
    value = request.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise PenstockError(f"{name} is {shown(value)}: the studio takes a whole number from 1 to {limit}")
    return value


def number(value: object, name: str, limit: float = 1e9) -> float:
    """A cost or a size: a number from 0 to `limit`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= limit:
        raise PenstockError(f"{name} is {shown(value)}: a cost is a number from 0 to {limit:.0e}")
    return float(value)
