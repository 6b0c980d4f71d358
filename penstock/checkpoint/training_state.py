"""Training state besides the model, in a form that loads into any cut: the optimizer by parameter names, random states."""

import random
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.files.disk import errors_as_damaged
from penstock.checkpoint.files.packing import pack, unpack
from penstock.engine.optimizers import (
    PARAMETER_KEYS,
    check_has_no_remote_parameters,
    check_same_group_options,
    group_options,
    optimizer_title,
)
from penstock.errors import MismatchError, require_equal
from penstock.stage.dtensor import shard_like

NUMPY_GENERATOR = "MT19937"  # of numpy's global state
Names = Mapping[int, str]  # id of each of this rank's parameters -> the name that it is saved under


def pack_optimizers(
    optimizers: Sequence[Any], names: Names, names_to_write: Container[str], tensors: dict[str, Tensor], rank: int
) -> list[Any]:
    """Return a rank's optimizers as JSON: their groups' options and names, and the state of parameters in `names_to_write`.

    Puts the tensors into `tensors`, by name.
    """
    titles = _titles([type(optimizer).__name__ for optimizer in optimizers])
    return [
        _pack_optimizer(optimizer, number, title, names, names_to_write, tensors, rank)
        for number, (optimizer, title) in enumerate(zip(optimizers, titles, strict=True))
    ]


def _titles(kinds: Sequence[str]) -> list[str]:
    return [optimizer_title(number, kinds) for number in range(len(kinds))]


def _pack_optimizer(
    optimizer: Any,
    number_of_optimizer: int,
    title: str,
    names: Names,
    names_to_write: Container[str],
    tensors: dict[str, Tensor],
    rank: int,
) -> Any:
    packed, prefix = optimizer.state_dict(), f"optimizer{number_of_optimizer or ''}"
    check_has_no_remote_parameters(optimizer, names, rank, title)
    groups = []
    for number, (group, packed_group) in enumerate(zip(optimizer.param_groups, packed["param_groups"], strict=True)):
        options = {key: value for key, value in packed_group.items() if key not in PARAMETER_KEYS}
        groups.append(
            {
                "options": pack(options, f"{prefix}.groups.{rank}.{number}", tensors),
                "words": group_options(packed_group),  # to compare
                "names": [names[id(parameter)] for parameter in group["params"] if id(parameter) in names],
            }
        )
    state, packed_state = dict(packed["state"]), {}
    for parameter, index in _parameters_with_indices(optimizer, packed):
        if index in state:
            aside: dict[str, Tensor] = {}
            name = names[id(parameter)]
            value = pack(state.pop(index), f"{prefix}.{name}", aside)  # a collective of all ranks that have a shard
            if name in names_to_write:
                packed_state[name] = value
                tensors.update(aside)
    if state:
        raise MismatchError(f"rank {rank}: {title} keeps state of {', '.join(map(repr, state))}, which are no parameters")
    return {"kind": type(optimizer).__name__, "groups": groups, "state": packed_state}


def _parameters_with_indices(optimizer: Any, packed: Any) -> Iterator[tuple[Tensor, int]]:
    """Yield each parameter of the optimizer, and its index in the state dict `packed`."""
    for group, packed_group in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        yield from zip(group["params"], packed_group["params"], strict=True)


def merge_optimizers(optimizers_of_ranks: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the optimizers of all ranks, as many on each, as those of one process.

    Raises MismatchError if they differ in more than their parameters.
    """
    kinds = [part["kind"] for part in optimizers_of_ranks[0]]
    kinds_of_ranks = [", ".join(part["kind"] for part in parts) for parts in optimizers_of_ranks]
    require_equal(kinds_of_ranks, "have different optimizers", advice="; give the same, in the same order")
    by_number = zip(_titles(kinds), zip(*optimizers_of_ranks, strict=True), strict=True)
    return [_merge_optimizer(parts, title) for title, parts in by_number]


def _merge_optimizer(parts: Sequence[Any], title: str) -> Any:
    groups: list[dict[str, Any]] = []
    group_of: dict[str, int] = {}
    for rank, part in enumerate(parts):
        for number, group in enumerate(part["groups"]):
            if number == len(groups):
                groups.append({**group, "names": []})
            check_same_group_options(groups[number]["words"], group["words"], number, rank, title)
            for name in group["names"]:
                if (other_group := group_of.setdefault(name, number)) != number:
                    where = f"in {title}'s group {number} on rank {rank}, but in group {other_group} on a rank before"
                    raise MismatchError(f"{name} is {where}: make groups by the names of pipe.named_parameters()")
            groups[number]["names"] += [name for name in group["names"] if name not in groups[number]["names"]]
    merged = [{"options": group["options"], "names": group["names"]} for group in groups]
    state = {name: value for part in parts for name, value in part["state"].items()}
    return {"kind": parts[0]["kind"], "groups": merged, "state": state}


def check_optimizers_match(optimizers: Sequence[Any], saved: Sequence[Any], names: Names) -> None:
    """Raise MismatchError unless `restore_optimizer` can load each of `saved` into the optimizer of its number."""
    if not saved:
        raise MismatchError("the checkpoint holds no optimizer: it was saved without optimizer=")
    kinds, saved_kinds = [type(optimizer).__name__ for optimizer in optimizers], [part["kind"] for part in saved]
    if kinds != saved_kinds:
        several = ": give them all, in the order in which they were saved" * (len(saved_kinds) > 1)
        raise MismatchError(f"the checkpoint holds the state of {', '.join(saved_kinds)}, not of {', '.join(kinds)}{several}")
    for title, optimizer, part in zip(_titles(kinds), optimizers, saved, strict=True):
        _check_optimizer_matches(optimizer, part, names, title)


def _check_optimizer_matches(optimizer: Any, saved: Any, names: Names, title: str) -> None:
    if len(saved["groups"]) != len(optimizer.param_groups):
        counts = f"{len(saved['groups'])} parameter groups, but this one has {len(optimizer.param_groups)}"
        raise MismatchError(f"the checkpoint's {title.removeprefix('the ')} has {counts}: make it with the same groups")
    for number, (group, saved_group) in enumerate(zip(optimizer.param_groups, saved["groups"], strict=True)):
        _check_numbers_stay_numbers(group, saved_group["options"]["dict"], f"{title}'s group {number}")
    home = {name: number for number, group in enumerate(saved["groups"]) for name in group["names"]}
    for number, group in enumerate(optimizer.param_groups):
        for name in [names.get(id(parameter)) for parameter in group["params"] if id(parameter) in names or parameter.numel()]:
            if name is None or home.get(name) != number:
                saved_place = f"in group {home[name]}" if name in home else f"not in {title}"
                raise MismatchError(f"{name} is in {title}'s group {number}, but in the checkpoint it is {saved_place}")


def _check_numbers_stay_numbers(current: Mapping[str, Any], saved: Mapping[str, Any], where: str) -> None:
    """Raise MismatchError if a number in `current` is no number in `saved`, or if `saved` has keys of parameters."""
    for key in current.keys() & saved.keys():
        is_number = isinstance(current[key], int | float) and not isinstance(current[key], bool)
        if is_number and isinstance(saved[key], str | list | None):
            saved_text = str(saved[key])[:60]
            raise MismatchError(f"{where} has {key} {current[key]!r}, but {saved_text!r} in the checkpoint, which is no number")
    if clash := saved.keys() & set(PARAMETER_KEYS):
        raise MismatchError(f"{where} cannot have {', '.join(sorted(clash))} from a checkpoint")


def unpack_scheduler_states(
    schedulers: Sequence[Any], saved: Sequence[Any], tensors: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """Return the saved state of each scheduler. Raises MismatchError for another number of them, or another kind."""
    if schedulers and not saved:
        raise MismatchError("the checkpoint holds no learning-rate schedule: it was saved without scheduler=")
    if schedulers and len(schedulers) != len(saved):
        counts = f"{len(saved)} learning-rate schedules, not {len(schedulers)}"
        raise MismatchError(f"the checkpoint holds the state of {counts}: give as many, in the order in which they were saved")
    return [_unpack_scheduler_state(*pair, tensors) for pair in zip(schedulers, saved[: len(schedulers)], strict=True)]


def _unpack_scheduler_state(scheduler: Any, saved: Any, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    state, current, kind = unpack(saved, tensors), scheduler.state_dict(), type(scheduler).__name__
    _check_numbers_stay_numbers(current, state, f"the {kind}")
    if foreign := [key for key in state if key not in current and hasattr(scheduler, str(key))]:
        raise MismatchError(f"the checkpoint's schedule has {', '.join(map(str, foreign))}, which are no state of a {kind}")
    return state


def restore_optimizer(optimizer: Any, saved: Any, names: Names, tensors: Mapping[str, Tensor]) -> None:
    """Set the optimizer's state and options to those in `saved`, bit for bit."""
    packed = optimizer.state_dict()
    for group, saved_group in zip(packed["param_groups"], saved["groups"], strict=True):
        group.update(unpack(saved_group["options"], tensors))
    state = {
        index: {key: _with_layout_of(value, parameter) for key, value in unpack(saved["state"][name], tensors).items()}
        for parameter, index in _parameters_with_indices(optimizer, packed)
        if (name := names.get(id(parameter), "")) in saved["state"]
    }
    optimizer.load_state_dict({"state": state, "param_groups": packed["param_groups"]})
    for parameter, index in _parameters_with_indices(optimizer, packed):
        for key, value in state.get(index, {}).items():  # torch has cast them to the parameter's type
            loaded = optimizer.state[parameter][key]
            if isinstance(value, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device)


def _with_layout_of(value: Any, parameter: Tensor) -> Any:
    """Return `value`; if it is a tensor of the parameter's shape, with the parameter's memory layout or sharding."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    if hasattr(parameter, "placements"):
        return shard_like(value, parameter)
    return torch.empty_like(parameter, dtype=value.dtype, device="cpu", requires_grad=False).copy_(value)


def unpack_scaler_state(packed_state: Any, tensors: Mapping[str, Tensor], scaler: Any, checkpoint: Path) -> dict[str, Any]:
    """Return the saved state of a GradScaler; {} if there is none now, none was saved, or either is disabled.

    Raises MismatchError for a state that `scaler` cannot load.
    """
    if scaler is None or packed_state is None or not scaler.is_enabled():
        return {}
    state: dict[str, Any] = unpack(packed_state, tensors)
    fits = state.keys() == scaler.state_dict().keys() and all(isinstance(value, int | float) for value in state.values())
    if state and not fits:
        raise MismatchError(f"{checkpoint} holds the state of another scaler than this {type(scaler).__name__}: give that one")
    return state


def pack_random_states(rank: int, device: torch.device, tensors: dict[str, Tensor]) -> Any:
    """Return the states of this rank's random generators as JSON; put their tensors into `tensors`."""
    version, numbers, gauss = random.getstate()  # 625 numbers, for which JSON is slow
    states: dict[str, Any] = {"python": (version, torch.tensor(numbers, device="cpu"), gauss), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:  # else nobody has drawn from it
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        if kind == NUMPY_GENERATOR:  # else the program has replaced numpy's generator
            states["numpy"] = (torch.tensor(keys.tolist(), device="cpu"), *rest)
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return pack(states, f"random.{rank}", tensors)


def check_random_states(path: Path, saved: Sequence[Any], rank: int, tensors: Mapping[str, Tensor]) -> None:
    """Raise DamagedFileError unless `restore_random_states` can load `saved`."""
    with errors_as_damaged(path, "has random numbers' states that no generator takes"):
        states = _unpack_random_states(saved, rank, tensors)
        random.Random().setstate(states["python"])
        if "numpy" in states:
            _import_numpy_random().RandomState().set_state(states["numpy"])
        for name in ("torch", "cuda"):
            state = states.get(name, torch.empty(0, dtype=torch.uint8))
            if state.dtype != torch.uint8 or (name == "torch" and state.shape != torch.get_rng_state().shape):
                raise ValueError


def restore_random_states(saved: Sequence[Any], rank: int, device: torch.device, tensors: Mapping[str, Tensor]) -> None:
    """Set the random generators to the states saved on this rank, or on rank 0 if there were fewer ranks."""
    states = _unpack_random_states(saved, rank, tensors)
    random.setstate(states["python"])
    if "numpy" in states:
        _import_numpy_random().set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _import_numpy_random() -> Any:
    """Return numpy.random, imported only if a checkpoint has its state: the import is slow."""
    import numpy

    return numpy.random


def _unpack_random_states(saved: Sequence[Any], rank: int, tensors: Mapping[str, Tensor]) -> Any:
    states = unpack(saved[rank if rank < len(saved) else 0], tensors)
    version, numbers, gauss = states["python"]
    if isinstance(numbers, Tensor):  # a list in older checkpoints
        numbers = tuple(numbers.tolist())
    if "numpy" in states:
        keys, *rest = states["numpy"]
        states["numpy"] = (NUMPY_GENERATOR, keys.tolist(), *rest)
    return {**states, "python": (version, numbers, gauss)}
