"""What calls say that must fail, or that may."""

from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps

NO_ERROR = "no error"


def error_text(call: Callable[[], Any], kind: type[ps.PenstockError] = ps.MismatchError) -> str:
    """The text of the error of this `kind` that `call` must raise."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def outcome(call: Callable[[], Any], kind: type[ps.PenstockError] = ps.PenstockError) -> str:
    """The text of the error of this `kind` that `call` raises; NO_ERROR if it raises none."""
    try:
        call()
    except kind as error:
        return str(error)
    return NO_ERROR


def named_outcome(call: Callable[..., Any], *args: Any) -> str:
    """The name and the text of the PenstockError that `call(*args)` raises; NO_ERROR if it raises none."""
    try:
        call(*args)
    except ps.PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return NO_ERROR
