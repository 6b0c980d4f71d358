"""Where the host waits for a device: what `torch.cuda.set_sync_debug_mode` tells on a GPU, told by a stub where there is none.

The stub is the meta device, which has shapes and no values: whatever asks for a value there would have to wait on a GPU. It is
noted with its place in the package, and answered with ones.
"""

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import penstock

HOUSE = Path(penstock.__file__).parent
SYNC = "synchronizing"  # so torch calls an operation that the host waits in
VALUES = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default)


class _Asked(TorchDispatchMode):
    """Notes what asks a meta tensor for its values."""

    def __init__(self, places: list[str]) -> None:
        super().__init__()
        self.places = places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if func in VALUES and first is not None and first.is_meta:
            self.places.append(place())
            return 1 if not first.is_floating_point() else 1.0
        if func is torch.ops.aten._to_copy.default and first is not None and leaves(first, kwargs):
            if not kwargs.get("non_blocking"):
                self.places.append(place())
            return torch.ones(first.shape, dtype=kwargs.get("dtype") or first.dtype)
        return func(*args, **(kwargs or {}))


def leaves(tensor: Tensor, kwargs: Any) -> bool:
    """Whether it is copied from the device to the host."""
    return tensor.is_meta and (kwargs or {}).get("device") == torch.device("cpu")


def place() -> str:
    """The innermost line of the package that is running, without its number, which changes."""
    stack = traceback.extract_stack()
    frame = next((frame for frame in reversed(stack) if Path(frame.filename).is_relative_to(HOUSE)), None)
    if frame is None:
        return f"outside: {stack[0].line}"
    return f"{Path(frame.filename).relative_to(HOUSE)} {frame.name}: {frame.line}"


@contextmanager
def waits(device: torch.device) -> Iterator[list[str]]:
    """Inside: the places where the host waits for `device`, a GPU or the stub, in order."""
    places: list[str] = []
    if device.type != "cuda":
        knows = torch.is_autocast_enabled
        with (
            patch.object(torch, "is_autocast_enabled", lambda kind="cpu": kind != "meta" and knows(kind)),
            _Asked(places),
        ):
            yield places
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: places.append(place()) if SYNC in str(message) else print(message)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(mode)
