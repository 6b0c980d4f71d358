"""Microbatches: split a batch into them, compute each one's share of the loss for `engine/actions.py`, join their outputs."""

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

WITHOUT_ROWS_DIM = -1  # as the rows of a tensor that lacks the dimension

# -- splitting ---------------------------------------------------------------------------------------------------------


def split_sizes(rows: int, microbatches: int) -> list[int]:
    """Return the rows of each microbatch: as equal as can be, the larger ones first; 0 if there are fewer rows than those."""
    return [rows // microbatches + (microbatch < rows % microbatches) for microbatch in range(microbatches)]


def nonempty_split_sizes(batch: Any, what: str, microbatches: int, rows_dim: int = 0) -> list[int]:
    """Return the rows of each of at most this many microbatches, none of them empty.

    Raises MismatchError if `batch` has no rows to split.
    """
    num_rows = count_rows(batch, what, rows_dim)
    if not num_rows:
        kinds = ", ".join(dict.fromkeys(map(_describe_kind, leaves(batch)))) or "nothing"
        raise MismatchError(
            f"{what} has no tensor with rows to split into microbatches, it is {kinds}: give tensors, a row or more"
        )
    return split_sizes(num_rows, min(num_rows, microbatches))


def count_rows(batch: Any, what: str = "batch", rows_dim: int = 0) -> int | None:
    """Return the rows of `batch`, any tree of tensors: the size of dimension `rows_dim`; None if it has no tensor.

    Numbers, None, strings, 0-dimensional tensors and `Replicated` ones go to every microbatch. Raises MismatchError if the
    sizes differ, and for tensors that cannot be split.
    """
    batch_leaves = flatten(batch)[0]
    for leaf in map(unwrap, batch_leaves):
        if isinstance(leaf, Tensor) and (leaf.layout != torch.strided or leaf.is_nested or leaf.is_meta):
            kind = "nested" if leaf.is_nested else "meta" if leaf.is_meta else leaf.layout
            raise MismatchError(f"{what} has a {kind} tensor, which is not split into microbatches: give dense tensors")

    sizes = {_count_leaf_rows(leaf, rows_dim) for leaf in batch_leaves} - {None}
    if len(sizes) > 1 or WITHOUT_ROWS_DIM in sizes:
        shapes = describe_shapes(batch, what, rows_dim)
        raise MismatchError(f"the tensors of a batch must have the same number of rows: {shapes}; {rows_dim_hint(rows_dim)}")
    return next(iter(sizes), None)


def rows_dim_hint(rows_dim: int) -> str:
    """Return as text what to do about tensors that have their rows in another dimension."""
    return (
        f"rows are {describe_rows_dim(rows_dim)}: give Pipeline(.., rows_dim=) if they are another one in all tensors, "
        "ps.Rows(tensor, dim) if in one, ps.Replicated(tensor) for a tensor without rows"
    )


def _count_leaf_rows(leaf: Any, rows_dim: int) -> int | None:
    dim = rows_dim_of(leaf, rows_dim)
    if dim is None:
        return None
    shape = unwrap(leaf).shape
    return shape[dim] if dim < len(shape) else WITHOUT_ROWS_DIM


def describe_shapes(batch: Any, what: str, rows_dim: int = 0) -> str:
    """Return as text the shapes of the tensors in `batch`, one for each number of rows."""
    by_rows: dict[int, str] = {}
    for path, leaf in tree_flatten_with_path(batch)[0]:
        if (num_rows := _count_leaf_rows(leaf, rows_dim)) is not None:
            by_rows.setdefault(num_rows, f"{what}{keystr(path)} has shape {tuple(unwrap(leaf).shape)}")
    return ", ".join(by_rows.values())


def split(batch: Any, sizes: Sequence[int], device: torch.device | None = None, rows_dim: int = 0) -> list[Any]:
    """Split `batch` along dimension `rows_dim` into microbatches of these `sizes`, on `device`; along the first as views."""
    batch_leaves, structure = flatten(batch)
    columns = [_split_leaf(leaf, sizes, device, rows_dim) for leaf in batch_leaves]
    return [unflatten([column[microbatch] for column in columns], structure) for microbatch in range(len(sizes))]


def _split_leaf(leaf: Any, sizes: Sequence[int], device: torch.device | None, rows_dim: int) -> Sequence[Any]:
    dim, leaf = rows_dim_of(leaf, rows_dim), unwrap(leaf)
    leaf = _copy_to_device(leaf, device) if device is not None and isinstance(leaf, Tensor) else leaf
    if dim is None:
        return [leaf] * len(sizes)

    # Pieces of an unsafe split count their versions separately: a layer may change one in place, the others stay valid.
    split_leaf = leaf.split if leaf.requires_grad else leaf.unsafe_split_with_sizes
    pieces = split_leaf(list(sizes), dim)
    return [piece.contiguous() for piece in pieces] if dim else pieces  # as from a data loader: a model may call view()


def _copy_to_device(leaf: Tensor, device: torch.device) -> Tensor:
    """Copy to `device`. A GPU copies while it computes only from pinned memory in one piece."""
    if device.type == "cuda" and leaf.is_cpu and leaf.layout == torch.strided and not (leaf.requires_grad or leaf.is_pinned()):
        leaf = torch.empty_like(leaf, pin_memory=True).copy_(leaf)
    return leaf.to(device, non_blocking=True)


def batch_signature(batch: Any) -> str:
    """Return the structure, shapes and dtypes of `batch` as a text, the same in every process."""
    if isinstance(batch, Tensor):  # the common case
        return f"{tuple(batch.shape)} {batch.dtype}"
    batch_leaves, structure = flatten(batch)
    return f"{structure} {[*map(_leaf_signature, batch_leaves)]}"


def _leaf_signature(leaf: Any) -> str:
    if isinstance(leaf, Rows | Replicated):
        return repr(leaf)
    return f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__qualname__


# -- outputs -----------------------------------------------------------------------------------------------------------


def check_output_rows(output: Any, num_rows: int, rows_dim: int) -> None:
    """Raise MismatchError unless all outputs of a microbatch have its `num_rows`, along which they are to be joined.

    Along the first dimension there may be several entries for each row: tokens, for instance.
    """
    for path, leaf in tree_flatten_with_path(output)[0]:
        output_rows = _count_leaf_rows(leaf, rows_dim)
        if output_rows is not None and output_rows != num_rows and (rows_dim or output_rows % num_rows):
            raise MismatchError(
                f"outputs are joined along {describe_rows_dim(rows_dim)}, but output{keystr(path)} of shape {tuple(leaf.shape)}"
                f" does not have the microbatch's {num_rows} rows there: give Pipeline(.., rows_dim=) the dimension that has "
                "them, or do not return it"
            )
        if output_rows and rows_dim and leaf.shape[0] == num_rows:
            warnings.warn(
                f"output{keystr(path)} of shape {tuple(leaf.shape)} is joined along dimension {rows_dim} (rows_dim), "
                f"but has the microbatch's {num_rows} rows in dimension 0 too: if those are the rows, give rows_dim=0 and "
                f"wrap the inputs: ps.Rows(tensor, {rows_dim})",
                stacklevel=2,
            )


def check_output_tokens(output: Any, num_tokens: int, sequence_dim: int) -> None:
    """Raise MismatchError unless all outputs of a slice have its `num_tokens`, along which they are to be joined."""
    for path, leaf in tree_flatten_with_path(output)[0]:
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[sequence_dim : sequence_dim + 1] != (num_tokens,):
            raise MismatchError(
                f"outputs of slices are joined along dimension {sequence_dim} (sequence_dim), but output{keystr(path)} of "
                f"shape {tuple(leaf.shape)} does not have the slice's {num_tokens} tokens there: use slices=1 for a model that "
                "returns anything but tokens"
            )


def join(outputs: Sequence[Any], dim: int = 0) -> Any:
    """Join outputs of microbatches or slices: tensors along `dim`, 0-dimensional ones stacked, of others the first's."""
    return tree_map(partial(_join_leaves, dim), *outputs)


def _join_leaves(dim: int, *outputs: Any) -> Any:
    if not isinstance(outputs[0], Tensor):
        return outputs[0]
    if not outputs[0].dim():
        return torch.stack(outputs)
    return torch.cat(outputs, dim) if len(outputs) > 1 else outputs[0]


# -- losses ------------------------------------------------------------------------------------------------------------


def microbatch_weights(targets: Sequence[Any], loss_weight: Callable[[Any], Any]) -> list[float]:
    """Return the weight of each microbatch in the batch's loss. Raises MismatchError unless it is finite, 0 or more."""
    scalars = [loss_weight(target) for target in targets]
    if any(scalar.numel() != 1 if isinstance(scalar, Tensor) else not isinstance(scalar, int | float) for scalar in scalars):
        raise MismatchError(f"loss_weight(target) must be one number for a microbatch, got {_describe_kind(scalars[0])}")

    weights = scalars_to_floats(scalars)
    for microbatch, weight in enumerate(weights):
        if not 0 <= weight < float("inf"):
            raise MismatchError(f"loss_weight is {weight} for microbatch {microbatch}: it must be a finite number, 0 or more")
    return weights


def scalars_to_floats(scalars: Sequence[Any]) -> list[float]:
    """Return numbers and scalar tensors as floats, with one transfer from the device for all tensors."""
    tensors = [scalar.detach().reshape(()) for scalar in scalars if isinstance(scalar, Tensor)]
    values = iter(torch.stack(tensors).tolist() if tensors else ())
    return [float(next(values) if isinstance(scalar, Tensor) else scalar) for scalar in scalars]


def _describe_kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def loss_shares(weights: Sequence[float], total: float) -> list[float]:
    """Return each weight's share of `total`: the sum of mean losses, each times its share, is the mean over the batch.

    A microbatch of weight 0 has the share 0; so have all if all weights are 0.
    """
    return [weight / total if total else 0.0 for weight in weights]
