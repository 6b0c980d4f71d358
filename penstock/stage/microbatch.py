"""Microbatches: split a batch into them, weigh their losses, join their outputs."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.errors import MismatchError
from penstock.partition.rows import Replicated, Rows, describe_rows_dim, rows_dim_of, unwrap
from penstock.torch_private import keystr, tree_flatten_with_path, tree_map
from penstock.trees import flatten, leaves, unflatten

NO_ROWS = -1  # of a tensor that lacks the dimension


def split_sizes(rows: int, microbatches: int) -> list[int]:
    """Rows of each microbatch: as equal as can be, the larger ones first. If there are fewer rows, the last get none."""
    return [rows // microbatches + (microbatch < rows % microbatches) for microbatch in range(microbatches)]


def count_rows(batch: Any, what: str = "batch", rows_dim: int = 0) -> int | None:
    """The rows of `batch`, any tree of tensors: the size of dimension `rows_dim`, which all share; None if it has no tensor.

    Numbers, None, strings, 0-dimensional tensors and `Replicated` ones go to every microbatch. Raises MismatchError if the
    sizes differ, and for tensors that cannot be split.
    """
    leaves = flatten(batch)[0]
    for leaf in map(unwrap, leaves):
        if isinstance(leaf, Tensor) and (leaf.layout != torch.strided or leaf.is_nested or leaf.is_meta):
            kind = "nested" if leaf.is_nested else "meta" if leaf.is_meta else leaf.layout
            raise MismatchError(f"{what} has a {kind} tensor, which is not split into microbatches: give dense tensors")
    found = {_rows_of(leaf, rows_dim) for leaf in leaves} - {None}
    if len(found) > 1 or NO_ROWS in found:
        told = f"the tensors of a batch must have the same number of rows: {describe_shapes(batch, what, rows_dim)}"
        raise MismatchError(f"{told}; {rows_dim_hint(rows_dim)}")
    return next(iter(found), None)


def rows_dim_hint(rows_dim: int) -> str:
    """What to do with tensors whose rows are not where they are looked for."""
    return (
        f"rows are {describe_rows_dim(rows_dim)}: give Pipeline(.., rows_dim=) if they are another one in all tensors, "
        "ps.Rows(tensor, dim) if in one, ps.Replicated(tensor) for a tensor without rows"
    )


def _rows_of(leaf: Any, rows_dim: int) -> int | None:
    dim = rows_dim_of(leaf, rows_dim)
    if dim is None:
        return None
    shape = unwrap(leaf).shape
    return shape[dim] if dim < len(shape) else NO_ROWS


def describe_shapes(batch: Any, what: str, rows_dim: int = 0) -> str:
    """The shapes of the tensors in `batch`, one for each number of rows."""
    found: dict[int, str] = {}
    for path, leaf in tree_flatten_with_path(batch)[0]:
        if (count := _rows_of(leaf, rows_dim)) is not None:
            found.setdefault(count, f"{what}{keystr(path)} has shape {tuple(unwrap(leaf).shape)}")
    return ", ".join(found.values())


def split(batch: Any, rows_each: Sequence[int], device: torch.device | None = None, rows_dim: int = 0) -> list[Any]:
    """`batch` cut along dimension `rows_dim` into microbatches of these many rows, on `device`; views if that is the first."""
    leaves, tree = flatten(batch)
    columns = [_split_leaf(leaf, rows_each, device, rows_dim) for leaf in leaves]
    return [unflatten([column[microbatch] for column in columns], tree) for microbatch in range(len(rows_each))]


def nonempty_split_sizes(batch: Any, what: str, microbatches: int, rows_dim: int = 0) -> list[int]:
    """Rows of each of at most so many microbatches, none of them empty. Raises MismatchError if there are none to split."""
    count = count_rows(batch, what, rows_dim)
    if not count:
        kinds = ", ".join(dict.fromkeys(map(_told_kind, leaves(batch)))) or "nothing"
        raise MismatchError(
            f"{what} has no tensor with rows to split into microbatches, it is {kinds}: give tensors, a row or more"
        )
    return split_sizes(count, min(count, microbatches))


def batch_signature(batch: Any) -> str:
    """The structure, shapes and dtypes of `batch` as a text, the same in every process."""
    if isinstance(batch, Tensor):  # the common case, a short way
        return f"{tuple(batch.shape)} {batch.dtype}"
    leaves, tree = flatten(batch)
    return f"{tree} {[*map(_kind_of, leaves)]}"


def _kind_of(leaf: Any) -> str:
    if isinstance(leaf, Rows | Replicated):
        return repr(leaf)
    return f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__qualname__


def _split_leaf(leaf: Any, rows_each: Sequence[int], device: torch.device | None, rows_dim: int) -> Sequence[Any]:
    dim, leaf = rows_dim_of(leaf, rows_dim), unwrap(leaf)
    leaf = _sent(leaf, device) if device is not None and isinstance(leaf, Tensor) else leaf
    if dim is None:
        return [leaf] * len(rows_each)
    cut = (
        leaf.split if leaf.requires_grad else leaf.unsafe_split_with_sizes
    )  # a layer may change one in place, others stay valid
    pieces = cut(list(rows_each), dim)
    return [piece.contiguous() for piece in pieces] if dim else pieces  # as a loader would give them: a model may call view()


def _sent(leaf: Tensor, device: torch.device) -> Tensor:
    """`leaf` on `device`. A GPU copies beside what it has to do, but only from memory that is pinned and in one piece."""
    if device.type == "cuda" and leaf.is_cpu and leaf.layout == torch.strided and not (leaf.requires_grad or leaf.is_pinned()):
        leaf = torch.empty_like(leaf, pin_memory=True).copy_(leaf)
    return leaf.to(device, non_blocking=True)


def check_output_rows(output: Any, count: int, rows_dim: int) -> None:
    """Raises MismatchError unless a microbatch of so many rows has them in all its outputs, which are to be joined along them.

    Along the first dimension there may be several entries for each row: tokens, for instance.
    """
    for path, leaf in tree_flatten_with_path(output)[0]:
        found = _rows_of(leaf, rows_dim)
        if found is not None and found != count and (rows_dim or found % count):
            told = (
                f"outputs are joined along {describe_rows_dim(rows_dim)}, but output{keystr(path)} of shape {tuple(leaf.shape)}"
            )
            raise MismatchError(
                f"{told} does not have the microbatch's {count} rows there: give Pipeline(.., rows_dim=) the dimension that "
                "has them, or do not return it"
            )
        if found and rows_dim and leaf.shape[0] == count:
            warnings.warn(
                f"output{keystr(path)} of shape {tuple(leaf.shape)} is joined along dimension {rows_dim} (rows_dim), "
                f"but has the microbatch's {count} rows in dimension 0 too: if those are the rows, give rows_dim=0 and "
                f"wrap the inputs: ps.Rows(tensor, {rows_dim})",
                stacklevel=2,
            )


def join(outputs: Sequence[Any], rows_dim: int = 0) -> Any:
    """The outputs of all as one: tensors joined along their rows, 0-dimensional ones stacked, others the first's."""
    return tree_map(partial(_join_leaves, rows_dim), *outputs)


def _join_leaves(rows_dim: int, *leaves: Any) -> Any:
    if not isinstance(leaves[0], Tensor):
        return leaves[0]
    if not leaves[0].dim():
        return torch.stack(leaves)
    return torch.cat(leaves, rows_dim) if len(leaves) > 1 else leaves[0]


def microbatch_weights(targets: Sequence[Any], loss_weight: Callable[[Any], Any]) -> list[float]:
    """What each microbatch counts in the batch's loss. Raises MismatchError for what is negative or not a finite number."""
    weights = [loss_weight(target) for target in targets]
    if any(each.numel() != 1 if isinstance(each, Tensor) else not isinstance(each, int | float) for each in weights):
        raise MismatchError(f"loss_weight(target) must be one number for a microbatch, got {_told_kind(weights[0])}")
    counted = scalars_to_floats(weights)
    for microbatch, count in enumerate(counted):
        if not 0 <= count < float("inf"):
            raise MismatchError(f"loss_weight is {count} for microbatch {microbatch}: it must be a finite number, 0 or more")
    return counted


def scalars_to_floats(scalars: Sequence[Any]) -> list[float]:
    """Their values, with one wait for the device of those that are tensors."""
    tensors = [each.detach().reshape(()) for each in scalars if isinstance(each, Tensor)]
    values = iter(torch.stack(tensors).tolist() if tensors else ())
    return [float(next(values) if isinstance(each, Tensor) else each) for each in scalars]


def _told_kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def loss_shares(counts: Sequence[float], total: float) -> list[float]:
    """Each count's share of `total`: the sum of mean losses, weighted so, is the mean over the batch.

    A microbatch that counts nothing has the share 0; so have all when nothing counts.
    """
    return [count / total if total else 0.0 for count in counts]
