"""Microbatches: split a batch into them, weigh their losses, join their outputs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.comms.messages.wire import flatten
from penstock.errors import MismatchError
from penstock.torch_private import keystr, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten


def sizes(rows: int, microbatches: int) -> list[int]:
    """Rows of each microbatch: as equal as can be, the larger ones first. If there are fewer rows, the last get none."""
    return [rows // microbatches + (microbatch < rows % microbatches) for microbatch in range(microbatches)]


def rows(batch: Any, what: str = "batch") -> int | None:
    """The rows of `batch`, any tree of tensors: the first dimension all its tensors share; None if it has no tensor.

    Numbers, None, strings and 0-dimensional tensors go to every microbatch. Raises MismatchError if first dimensions differ,
    and for tensors that cannot be split.
    """
    tensors = [leaf for leaf in flatten(batch)[0] if isinstance(leaf, Tensor)]
    for leaf in tensors:
        if leaf.layout != torch.strided or leaf.is_nested or leaf.is_meta:
            kind = "nested" if leaf.is_nested else "meta" if leaf.is_meta else leaf.layout
            raise MismatchError(f"{what} has a {kind} tensor, which is not split into microbatches: give dense tensors")
    found = {leaf.shape[0] for leaf in tensors if leaf.dim()}
    if len(found) > 1:
        raise MismatchError(f"the tensors of a batch must have the same number of rows (first dimension): {_told(batch, what)}")
    return next(iter(found), None)


def _told(batch: Any, what: str) -> str:
    """Which tensors of `batch` have how many rows, one of each number."""
    found: dict[int, str] = {}
    for path, leaf in tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, Tensor) and leaf.dim():
            found.setdefault(leaf.shape[0], f"{what}{keystr(path)}")
    return ", ".join(f"{name} has {size}" for size, name in found.items())


def split(batch: Any, rows_each: Sequence[int], device: torch.device | None = None) -> list[Any]:
    """`batch` cut along the first dimension into microbatches of these many rows, as views, on `device`."""
    if isinstance(batch, Tensor):  # the common case, a short way
        return list(_split_leaf(batch, rows_each, device))
    leaves, tree = flatten(batch)
    columns = [_split_leaf(leaf, rows_each, device) for leaf in leaves]
    return [tree_unflatten([column[microbatch] for column in columns], tree) for microbatch in range(len(rows_each))]


def sizes_of(batch: Any, what: str, microbatches: int) -> list[int]:
    """Rows of each of at most so many microbatches, none of them empty. Raises MismatchError if there are none to split."""
    count = rows(batch, what)
    if not count:
        kinds = ", ".join(dict.fromkeys(map(_told_kind, tree_leaves(batch)))) or "nothing"
        raise MismatchError(
            f"{what} has no tensor with rows to split into microbatches, it is {kinds}: give tensors, a row or more"
        )
    return sizes(count, min(count, microbatches))


def signature(batch: Any) -> str:
    """The structure, shapes and dtypes of `batch` as a text, the same in every process."""
    if isinstance(batch, Tensor):  # the common case, a short way
        return f"{tuple(batch.shape)} {batch.dtype}"
    leaves, tree = flatten(batch)
    kinds = [f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__qualname__ for leaf in leaves]
    return f"{tree} {kinds}"


def _split_leaf(leaf: Any, rows_each: Sequence[int], device: torch.device | None) -> Sequence[Any]:
    if not isinstance(leaf, Tensor):
        return [leaf] * len(rows_each)
    leaf = _sent(leaf, device) if device is not None else leaf
    if not leaf.dim():
        return [leaf] * len(rows_each)
    if leaf.requires_grad:
        return leaf.split(list(rows_each))
    return leaf.unsafe_split_with_sizes(list(rows_each))  # a layer may change one in place, others stay valid


def _sent(leaf: Tensor, device: torch.device) -> Tensor:
    """`leaf` on `device`. A GPU copies beside what it has to do, but only from memory that is pinned and in one piece."""
    if device.type == "cuda" and leaf.is_cpu and leaf.layout == torch.strided and not (leaf.requires_grad or leaf.is_pinned()):
        leaf = torch.empty_like(leaf, pin_memory=True).copy_(leaf)
    return leaf.to(device, non_blocking=True)


def join(outputs: Sequence[Any]) -> Any:
    """The outputs of all as one: tensors joined along their rows, 0-dimensional ones stacked, others the first's."""
    return tree_map(_join_leaves, *outputs)


def _join_leaves(*leaves: Any) -> Any:
    if not isinstance(leaves[0], Tensor):
        return leaves[0]
    if not leaves[0].dim():
        return torch.stack(leaves)
    return torch.cat(leaves) if len(leaves) > 1 else leaves[0]


def counts(targets: Sequence[Any], loss_weight: Callable[[Any], Any]) -> list[float]:
    """What each microbatch counts in the batch's loss. Raises MismatchError for what is negative or not a finite number."""
    weights = [loss_weight(target) for target in targets]
    if any(each.numel() != 1 if isinstance(each, Tensor) else not isinstance(each, int | float) for each in weights):
        raise MismatchError(f"loss_weight(target) must be one number for a microbatch, got {_told_kind(weights[0])}")
    counted = numbers(weights)
    for microbatch, count in enumerate(counted):
        if not 0 <= count < float("inf"):
            raise MismatchError(f"loss_weight is {count} for microbatch {microbatch}: it must be a finite number, 0 or more")
    return counted


def numbers(scalars: Sequence[Any]) -> list[float]:
    """Their values, with one wait for the device of those that are tensors."""
    tensors = [each.detach().reshape(()) for each in scalars if isinstance(each, Tensor)]
    values = iter(torch.stack(tensors).tolist() if tensors else ())
    return [float(next(values) if isinstance(each, Tensor) else each) for each in scalars]


def _told_kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def shares(counts: Sequence[float], total: float) -> list[float]:
    """Each count's share of `total`: the sum of mean losses, weighted so, is the mean over the batch.

    A microbatch that counts nothing has the share 0; so have all when nothing counts.
    """
    return [count / total if total else 0.0 for count in counts]
