"""Who goes through `pipe.parameters()`: a function that takes their norm needs all ranks', an optimizer only this rank's.

`torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)` is the line that every script has. Torch has no place where such a
function could learn of other ranks, but what it goes through comes from us.
"""

from inspect import CO_GENERATOR
from types import FrameType
from typing import Any

import torch

from penstock.errors import MismatchError

NORMS = ("clip_grad_norm_", "get_total_norm", "_get_total_norm")
LIBRARIES = ("torch", "accelerate")  # whose functions of these names know of no other ranks: others' may
AT_ONCE = ("LBFGS", "Prodigy", "DAdapt")  # how the names of optimizers begin whose step depends on all parameters at once


def norm_type_of(frame: FrameType | None) -> float | None:
    """The kind of norm that is taken by the function behind `frame`, which asks a generator for a value; None for any other."""
    frame = _consumer(frame)
    if frame is None or frame.f_code.co_name not in NORMS:
        return None
    library = str(frame.f_globals.get("__name__")).partition(".")[0]
    return float(frame.f_locals["norm_type"]) if library in LIBRARIES and "norm_type" in frame.f_locals else None


def optimizer_of(frame: FrameType | None) -> torch.optim.Optimizer | None:
    """The optimizer behind `frame`, likewise."""
    frame = _consumer(frame)
    found = frame.f_locals.get("self") if frame else None
    return found if isinstance(found, torch.optim.Optimizer) else None


def _consumer(frame: FrameType | None) -> FrameType | None:
    """`frame`, or what goes through the generators that it is one of."""
    while frame is not None and frame.f_code.co_flags & CO_GENERATOR:
        frame = frame.f_back
    return frame


def check_optimizer(optimizer: Any, ranks: int) -> None:
    """Raises MismatchError for an optimizer that would have to see the parameters of all `ranks` at once."""
    kind = type(optimizer).__name__
    if ranks > 1 and kind.startswith(AT_ONCE):
        raise MismatchError(
            f"{kind} decides by all parameters at once, and each of {ranks} ranks has its own: use an optimizer that works "
            "parameter by parameter, as all others of torch do (docs/howto/loss.md)"
        )
