"""An optimizer on each rank, as one over all of them: what must be alike, and who goes through `pipe.parameters()`.

`torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)` is the line that every script has. A function that takes a norm needs
all ranks' parameters, an optimizer only this rank's. Torch has no place where such a function could learn of other ranks, but
what it goes through comes from us.
"""

from collections.abc import Mapping
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any

import torch

from penstock.errors import MismatchError

MEMBERS = ("params", "param_names")  # what of a group is no option


def options_of(group: Mapping[str, Any]) -> dict[str, str]:
    """The options of a group, in words by which those of ranks are compared."""
    return {key: repr(value) for key, value in group.items() if key not in MEMBERS}


def check_known(optimizer: Any, names: Mapping[int, str], rank: int) -> None:
    """Raises MismatchError for a parameter that is none of this rank's, whose ids are in `names`."""
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names and parameter.numel():  # an empty one stands for nothing to train
                raise MismatchError(
                    f"rank {rank}: parameter {position} of the optimizer's group {number} is not one of the pipeline's: "
                    "make the optimizer of pipe.parameters()"
                )


def check_same_options(expected: Mapping[str, str], got: Mapping[str, str], number: int, rank: int) -> None:
    """Raises MismatchError unless the group of this `number` has on `rank` the options that it has on a rank before."""
    for key in {**expected, **got}:
        if expected.get(key) != got.get(key):
            raise MismatchError(
                f"the optimizer's group {number} has {key} {got.get(key)} on rank {rank}, but {expected.get(key)} on a rank "
                "before: give all ranks the same options"
            )


# -- who goes through the parameters --------------------------------------------------------------------------------------

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
