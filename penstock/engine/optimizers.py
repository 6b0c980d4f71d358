"""Optimizers of all ranks that act as one: what must be equal, and which function iterates over `pipe.parameters()`.

`torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)` is in every script. A function that takes a norm needs the gradients
of all ranks, an optimizer only this rank's. Torch knows of no other ranks, but both iterate over our generator, which reads
from the stack which function does.
"""

from collections.abc import Mapping
from functools import cache
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from penstock.errors import MismatchError

PARAMETER_KEYS = ("params", "param_names")  # the keys of an optimizer's group that are no options


def group_options(group: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of an optimizer's group as text, to compare them between ranks."""
    return {key: repr(value) for key, value in group.items() if key not in PARAMETER_KEYS}


def check_has_no_remote_parameters(optimizer: Any, names: Mapping[int, str], rank: int) -> None:
    """Raise MismatchError if the optimizer has a parameter that is not in `names`, by id, all those of this rank."""
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names and parameter.numel():  # `Pipeline.parameters` may give an empty one
                raise MismatchError(
                    f"rank {rank}: parameter {position} of the optimizer's group {number} is not one of the pipeline's: "
                    "make the optimizer of pipe.parameters()"
                )


def check_same_group_options(expected: Mapping[str, str], options: Mapping[str, str], group: int, rank: int) -> None:
    """Raise MismatchError unless the `options` of `rank` in this group are those that a lower rank has."""
    for key in {**expected, **options}:
        if expected.get(key) != options.get(key):
            raise MismatchError(
                f"the optimizer's group {group} has {key} {options.get(key)} on rank {rank}, but {expected.get(key)} on a rank "
                "before: give all ranks the same options"
            )


@cache
def make_scaler_flags_binary() -> None:
    """Have ShardedGradScaler give fused optimizers a 0 or 1, not the number of ranks that overflow.

    They skip a step where the number is 1, so that an overflow on two ranks would be trained on (torch 2.13), and they take no
    tensor of one element.
    """

    def make_flag(optimizer: Any, *_: Any) -> None:
        found = getattr(optimizer, "found_inf", None)
        if isinstance(found, torch.Tensor):
            optimizer.found_inf = found.clamp(max=1).reshape(())

    register_optimizer_step_pre_hook(make_flag)


# -- which function iterates over the parameters --------------------------------------------------------------------------

NORM_FUNCTIONS = ("clip_grad_norm_", "get_total_norm", "_get_total_norm")
NORM_LIBRARIES = ("torch", "accelerate")  # whose functions of these names know of no other ranks; others' may
WHOLE_MODEL_OPTIMIZERS = ("LBFGS", "Prodigy", "DAdapt")  # prefixes: a step depends on all parameters at once


def norm_type_of_caller(frame: FrameType | None) -> float | None:
    """Return the `norm_type` of the norm function that iterates over the generator `frame`; None for other functions."""
    frame = _first_nongenerator_frame(frame)
    if frame is None or frame.f_code.co_name not in NORM_FUNCTIONS:
        return None
    library = str(frame.f_globals.get("__name__")).partition(".")[0]
    return float(frame.f_locals["norm_type"]) if library in NORM_LIBRARIES and "norm_type" in frame.f_locals else None


def optimizer_of_caller(frame: FrameType | None) -> torch.optim.Optimizer | None:
    """Return the optimizer that iterates over the generator `frame`; None for anything else."""
    frame = _first_nongenerator_frame(frame)
    caller = frame.f_locals.get("self") if frame else None
    return caller if isinstance(caller, torch.optim.Optimizer) else None


def _first_nongenerator_frame(frame: FrameType | None) -> FrameType | None:
    """Return the first frame from `frame` upwards that is no generator's."""
    while frame is not None and frame.f_code.co_flags & CO_GENERATOR:
        frame = frame.f_back
    return frame


def check_elementwise_optimizer(optimizer: Any, num_ranks: int) -> None:
    """Raise MismatchError for an optimizer whose step depends on the parameters of all ranks at once."""
    name = type(optimizer).__name__
    if num_ranks > 1 and name.startswith(WHOLE_MODEL_OPTIMIZERS):
        raise MismatchError(
            f"{name} decides by all parameters at once, and each of {num_ranks} ranks has its own: use an optimizer that works "
            "parameter by parameter, as all others of torch do (docs/howto/loss.md)"
        )
