"""What may stand in a question: each value as it must be, or a PenstockError that says so in a sentence for the page."""

from collections.abc import Mapping
from typing import Any

from penstock.errors import PenstockError


def shown(value: object) -> str:
    """`value` as an error says it: in 60 characters."""
    return repr(value) if len(repr(value)) < 60 else f"{repr(value)[:57]}..."


def mapping(value: object, what: str) -> Mapping[str, object]:
    """An object with names and values."""
    if not isinstance(value, dict):
        raise PenstockError(f"{what} is {shown(value)}: give an object with names and values")
    return value


def items(value: object, what: str) -> list[Any]:
    """A list."""
    if not isinstance(value, list):
        raise PenstockError(f"{what} is {shown(value)}: give a list")
    return value


def text(value: object, what: str, most: int) -> str:
    """A text of `most` characters at most."""
    if not isinstance(value, str) or len(value) > most:
        raise PenstockError(f"{what} is {shown(value)}: give a text of {most} characters at most")
    return value


def whole(asked: Mapping[str, object], what: str, most: int) -> int:
    """What is `asked` under the name `what`: a whole number from 1 to `most`."""
    value = asked.get(what)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise PenstockError(f"{what} is {shown(value)}: the studio takes a whole number from 1 to {most}")
    return value


def number(value: object, what: str, most: float = 1e9) -> float:
    """A cost or a size: a number from 0 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise PenstockError(f"{what} is {shown(value)}: a cost is a number from 0 to {most:.0e}")
    return float(value)
