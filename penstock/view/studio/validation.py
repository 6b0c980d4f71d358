"""Check the values of a question. Each function returns the value, or raises PenstockError, a sentence for the page."""

from collections.abc import Mapping
from typing import Any

from penstock.errors import PenstockError


def short_repr(value: object) -> str:
    """Return the repr of `value`, cut to 60 characters."""
    return repr(value) if len(repr(value)) < 60 else f"{repr(value)[:57]}..."


def mapping(value: object, name: str) -> Mapping[str, object]:
    """Return a JSON object."""
    if not isinstance(value, dict):
        raise PenstockError(f"{name} is {short_repr(value)}: give an object with names and values")
    return value


def items(value: object, name: str) -> list[Any]:
    """Return a list."""
    if not isinstance(value, list):
        raise PenstockError(f"{name} is {short_repr(value)}: give a list")
    return value


def text(value: object, name: str, limit: int) -> str:
    """Return a text of at most `limit` characters."""
    if not isinstance(value, str) or len(value) > limit:
        raise PenstockError(f"{name} is {short_repr(value)}: give a text of {limit} characters at most")
    return value


def integer(request: Mapping[str, object], name: str, limit: int) -> int:
    """Return `request[name]`, a whole number from 1 to `limit`."""
    value = request.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise PenstockError(f"{name} is {short_repr(value)}: the studio takes a whole number from 1 to {limit}")
    return value


def number(value: object, name: str, limit: float = 1e9) -> float:
    """Return a cost or a size, a number from 0 to `limit`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= limit:
        raise PenstockError(f"{name} is {short_repr(value)}: a cost is a number from 0 to {limit:.0e}")
    return float(value)
