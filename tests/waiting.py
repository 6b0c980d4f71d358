"""Wait until something is so; pytest's timeout ends a wait that does not."""

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def wait_until(true: Callable[[], Value]) -> Value:
    """Return the first value of `true()` that is true."""
    while not (value := true()):
        time.sleep(0.005)
    return value
