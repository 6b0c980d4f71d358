"""What calls say that must fail."""

from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps


def error_text(call: Callable[[], Any], kind: type[ps.PenstockError] = ps.MismatchError) -> str:
    """The text of the error of this `kind` that `call` must raise."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)
