"""Optimizers of all ranks that act as one: what must be equal, and which function iterates over `pipe.parameters()`.

`torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)` is in every script. A function that takes a norm needs the gradients
of all ranks, an optimizer only this rank's. Torch knows of no other ranks, but both iterate over our generator, which reads
from the stack which function does.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from penstock.comms.control_group import ControlGroup
from penstock.comms.topology import Topology
from penstock.errors import MismatchError, require_equal
from penstock.stage.dtensor import ShardKey
from penstock.stage.rank_parameters import RankParameters

PARAMETER_KEYS = ("params", "param_names")  # the keys of an optimizer's group that are no options


def optimizer_list(optimizer: Any, call: str, num_ranks: int) -> list[Any]:
    """Return what the user gave to `call`, an optimizer, a list of them, or None, as a list.

    Raises MismatchError for a dict, for what is no optimizer, for one given twice, and as `check_elementwise_optimizer`.
    """
    optimizers = _given_list(optimizer, call, "optimizer")
    for item in optimizers:
        if not hasattr(item, "param_groups") or not hasattr(item, "state"):
            kind = type(item).__name__
            raise MismatchError(f"{call} takes an optimizer of pipe.parameters(), or a list of several, not a {kind}")
        check_elementwise_optimizer(item, num_ranks)
    return optimizers


def scheduler_list(scheduler: Any, call: str) -> list[Any]:
    """Return what the user gave to `call`, a learning-rate schedule, a list of them, or None, as a list.

    Raises MismatchError for a dict, for what has no state, and for one given twice.
    """
    schedulers = _given_list(scheduler, call, "scheduler")
    for item in schedulers:
        if not hasattr(item, "state_dict"):
            raise MismatchError(f"{call} takes something with a state_dict as scheduler, not a {type(item).__name__}")
    return schedulers


def _given_list(value: Any, call: str, argument: str) -> list[Any]:
    if isinstance(value, Mapping) and value and all(hasattr(item, "state_dict") for item in value.values()):
        raise MismatchError(
            f"{call} takes one {argument} or a list, not a dict: their order tells them apart, on every rank and in a later "
            f"run; give {argument}=[{', '.join(map(str, value))}]"
        )
    items = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    for position, item in enumerate(items):
        if any(item is earlier for earlier in items[:position]):
            raise MismatchError(f"{call} is given the same {argument} twice, a {type(item).__name__}: give each once")
    return items


def optimizer_title(number: int, kinds: Sequence[str]) -> str:
    """Return how messages call one of several optimizers of these classes: `optimizer 1 (AdamW)`."""
    return "the optimizer" if len(kinds) == 1 else f"optimizer {number} ({kinds[number]})"


def group_options(group: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of an optimizer's group as text, to compare them between ranks."""
    return {key: repr(value) for key, value in group.items() if key not in PARAMETER_KEYS}


def check_has_no_remote_parameters(optimizer: Any, names: Mapping[int, str], rank: int, title: str = "the optimizer") -> None:
    """Raise MismatchError if the optimizer has a parameter that is not in `names`, by id, all those of this rank."""
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names and parameter.numel():  # `Pipeline.parameters` may give an empty one
                raise MismatchError(
                    f"rank {rank}: parameter {position} of {title}'s group {number} is not one of the pipeline's: "
                    "make the optimizer of pipe.parameters()"
                )


def check_same_group_options(
    expected: Mapping[str, str], options: Mapping[str, str], group: int, rank: int, title: str = "the optimizer"
) -> None:
    """Raise MismatchError unless the `options` of `rank` in this group are those that a lower rank has."""
    for key in {**expected, **options}:
        if expected.get(key) != options.get(key):
            raise MismatchError(
                f"{title}'s group {group} has {key} {options.get(key)} on rank {rank}, but {expected.get(key)} on a rank "
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


def check_scaler(scaler: torch.amp.GradScaler | None, topology: Topology) -> None:
    """Raise MismatchError for a scaler that would skip steps on one rank alone."""
    if scaler is None or topology.world_size == 1:
        return
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # the import takes a second

    if scaler.is_enabled() and not isinstance(scaler, ShardedGradScaler):
        raise MismatchError(
            f"{type(scaler).__name__} would let each of {topology.world_size} ranks skip steps by itself: "
            "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
        )


def read_grad_scale(scaler: torch.amp.GradScaler, topology: Topology) -> float:
    """Return the scaler's scale. Raises as `check_scaler`."""
    check_scaler(scaler, topology)
    if topology.world_size > 1:
        make_scaler_flags_binary()
    scaler.scale(torch.ones((), device=topology.device))  # a scaler creates its scale at the first use
    return scaler.get_scale()


def gather_gradient_norms(
    control: ControlGroup, parameters: RankParameters, norm_type: float, max_norm: float
) -> list[Mapping[ShardKey, Tensor]]:
    """Return `gradient_norms_by_name` of each rank, by rank. All ranks call it.

    Raises MismatchError for a `max_norm` that is no number of 0 or more, and for arguments that differ between ranks.
    """
    if not isinstance(max_norm, int | float) or not max_norm >= 0:
        raise MismatchError(f"clip_grad_norm_() takes a number of 0 or more as max_norm, got {max_norm!r}")
    norms = parameters.gradient_norms_by_name(float(norm_type))  # "inf" too, as torch's
    answers = control.all_gather_value((norms, float(max_norm), float(norm_type)), "to clip their gradients")
    norms_of_ranks, *limits = zip(*answers, strict=True)
    for name, values in zip(("max_norm", "norm_type"), limits, strict=True):
        require_equal(values, "do not clip alike", f"has {name}={{:.12g}}")
    return list(norms_of_ranks)


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
