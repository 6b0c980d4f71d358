"""The ways to cut a batch into pieces. A piece is what one action runs: a microbatch, or a slice of its tokens.

    split_rows    a batch is split along its rows              `step`, `eval`, `generate`
    take_entries  a list has an entry for each microbatch      `step_microbatches`, `eval_microbatches`
    cut_tokens    each microbatch is cut along its tokens      slices; along `cp` a rank takes its part of each

Inputs and target are cut alike, each on the rank that reads it. Behind this module nobody asks what a batch was.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import MismatchError, is_whole_number, warn_user
from penstock.rows import Replicated, Rows, describe_rows_dim, rows_dim_of, unwrap
from penstock.torch_private import keystr, tree_flatten_with_path, tree_map
from penstock.trees import flatten, leaves, unflatten

WITHOUT_ROWS_DIM = -1  # as the rows of a tensor that lacks the dimension


class Piece(NamedTuple):
    """What all ranks know of one piece."""

    microbatch: int  # its number in the user's batch or list: random numbers, losses and outputs go by it
    slice: int = 0
    lengths: Sequence[int] = ()  # the tokens of each part of its microbatch, if its tokens are cut
    rows: int | None = None  # None: not known
    elements: int = 1  # of the largest tensor of its microbatch: the padded tokens
    share: float = 0.0  # in the loss over all replicas
    token_share: float = 1.0  # in its microbatch's loss


class Layout(NamedTuple):
    """Where the tensors of a batch have their rows and tokens, and the device that pieces are copied to."""

    rows_dim: int = 0
    sequence_dim: int = 1
    device: torch.device | None = None
    rows_per_sample: int = 1  # rows that stay together


class Microbatches(NamedTuple):
    """The inputs or the target of a call, microbatch by microbatch, on the rank that reads it."""

    values: Sequence[Any]
    rows: Sequence[int | None]


class Shape(NamedTuple):
    """One microbatch of the inputs or the target, as its reader describes it."""

    rows: int | None
    elements: int
    signature: str  # structure, shapes and dtypes


# -- by rows, or as given ----------------------------------------------------------------------------------------------


def split_rows(batch: Any, what: str, microbatches: int, layout: Layout) -> Microbatches:
    """Split `batch`, any tree of tensors, into at most this many microbatches, none of them empty.

    Raises MismatchError if it has no rows, no whole samples, or tensors that differ in rows or cannot be split.
    """
    sizes = nonempty_split_sizes(batch, what, microbatches, layout.rows_dim, layout.rows_per_sample)
    return Microbatches(split(batch, sizes, layout.device, layout.rows_dim), sizes)


def take_entries(entries: Sequence[Any], name: str, layout: Layout) -> Microbatches:
    """Return the entries of a list, unsplit. Rows of an entry are None if its tensors have none, or differ in them.

    Raises MismatchError for an entry without any row or whole samples, and for tensors that have none by their kind.
    """
    rows = [_count_entry_rows(entry, f"{name} {index}", layout) for index, entry in enumerate(entries)]
    return Microbatches([_copy_whole(entry, layout) for entry in entries], rows)


def _count_entry_rows(entry: Any, what: str, layout: Layout) -> int | None:
    sizes = _distinct_row_counts(entry, what, layout.rows_dim)
    if sizes == {0}:
        raise _no_rows_error(entry, what)
    if len(sizes) > 1 or WITHOUT_ROWS_DIM in sizes:
        return None
    rows = next(iter(sizes), None)
    if rows is not None:
        _count_samples(rows, what, layout.rows_per_sample)
    return rows


def _copy_whole(entry: Any, layout: Layout) -> Any:
    entry_leaves, structure = flatten(entry)
    return unflatten([_split_leaf(leaf, None, layout.device, layout.rows_dim)[0] for leaf in entry_leaves], structure)


def split_sizes(rows: int, microbatches: int) -> list[int]:
    """Return the rows of each microbatch: as equal as can be, the larger ones first; some are 0 if there are fewer rows."""
    smaller, num_larger = divmod(rows, microbatches)
    return [smaller + 1] * num_larger + [smaller] * (microbatches - num_larger)


def nonempty_split_sizes(batch: Any, what: str, microbatches: int, rows_dim: int = 0, rows_per_sample: int = 1) -> list[int]:
    """Return the rows of each of at most this many microbatches, none of them empty: whole samples.

    Raises MismatchError if `batch` has no rows to split, or no whole samples.
    """
    num_rows = count_rows(batch, what, rows_dim)
    if not num_rows:
        raise _no_rows_error(batch, what)
    return list(_sizes_in_rows(_count_samples(num_rows, what, rows_per_sample), microbatches, rows_per_sample))


@lru_cache(256)  # data that repeats from step to step
def _sizes_in_rows(samples: int, microbatches: int, rows_per_sample: int) -> tuple[int, ...]:
    return tuple([size * rows_per_sample for size in split_sizes(samples, min(samples, microbatches))])


def _count_samples(num_rows: int, what: str, rows_per_sample: int) -> int:
    if num_rows % rows_per_sample:
        raise MismatchError(
            f"{what} has {num_rows} rows, which are no whole samples of {rows_per_sample} rows (rows_per_sample="
            f"{rows_per_sample}): give a multiple of {rows_per_sample}, the rows of a sample one after the other"
        )
    return num_rows // rows_per_sample


def _no_rows_error(batch: Any, what: str) -> MismatchError:
    kinds = ", ".join(dict.fromkeys(map(describe_type, leaves(batch)))) or "nothing"
    return MismatchError(
        f"{what} has no tensor with rows to split into microbatches, it is {kinds}: give tensors, a row or more"
    )


def count_rows(batch: Any, what: str = "batch", rows_dim: int = 0) -> int | None:
    """Return the rows of `batch`, any tree of tensors: the size of dimension `rows_dim`; None if it has no tensor.

    Numbers, None, strings, 0-dimensional tensors and `Replicated` ones go to every microbatch. Raises MismatchError if the
    sizes differ, and for tensors that cannot be split.
    """
    if type(batch) is Tensor:  # the common case
        _check_is_dense(batch, what)
        if batch.dim() > rows_dim:
            return batch.shape[rows_dim]
    sizes = _distinct_row_counts(batch, what, rows_dim)
    if len(sizes) > 1 or WITHOUT_ROWS_DIM in sizes:
        shapes = describe_shapes(batch, what, rows_dim)
        raise MismatchError(f"the tensors of a batch must have the same number of rows: {shapes}; {rows_dim_hint(rows_dim)}")
    return next(iter(sizes), None)


def _distinct_row_counts(batch: Any, what: str, rows_dim: int) -> set[int]:
    """Return the different numbers of rows of the tensors in `batch`; WITHOUT_ROWS_DIM for one that lacks the dimension.

    Raises MismatchError for tensors that are sparse, nested or on the meta device.
    """
    rows: set[int] = set()
    for leaf in flatten(batch)[0]:
        tensor = unwrap(leaf)
        _check_is_dense(tensor, what)
        if (dim := rows_dim_of(leaf, rows_dim)) is not None:
            rows.add(tensor.shape[dim] if dim < tensor.dim() else WITHOUT_ROWS_DIM)
    return rows


def _check_is_dense(value: Any, what: str) -> None:
    if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_nested or value.is_meta):
        kind = "nested" if value.is_nested else "meta" if value.is_meta else value.layout
        raise MismatchError(f"{what} has a {kind} tensor, which is not split into microbatches: give dense tensors")


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


def describe_shapes(batch: Any, what: str, rows_dim: int) -> str:
    """Return as text the shapes of the tensors in `batch`, one for each number of rows."""
    by_rows: dict[int, str] = {}
    for path, leaf in tree_flatten_with_path(batch)[0]:
        if (num_rows := _count_leaf_rows(leaf, rows_dim)) is not None:
            by_rows.setdefault(num_rows, f"{what}{keystr(path)} has shape {tuple(unwrap(leaf).shape)}")
    return ", ".join(by_rows.values())


def split(batch: Any, sizes: Sequence[int], device: torch.device | None = None, rows_dim: int = 0) -> list[Any]:
    """Split `batch` along dimension `rows_dim` into microbatches of these `sizes`, on `device`; along the first as views."""
    if isinstance(batch, Tensor):  # the common case
        return list(_split_leaf(batch, sizes, device, rows_dim))
    batch_leaves, structure = flatten(batch)
    columns = [_split_leaf(leaf, sizes, device, rows_dim) for leaf in batch_leaves]
    return [unflatten(microbatch, structure) for microbatch in zip(*columns, strict=True)]


def _split_leaf(leaf: Any, sizes: Sequence[int] | None, device: torch.device | None, rows_dim: int) -> Sequence[Any]:
    """Return the parts of a leaf; of these `sizes`, None for one part with all that it has."""
    dim, leaf = rows_dim_of(leaf, rows_dim), unwrap(leaf)
    if device is not None and isinstance(leaf, Tensor) and leaf.device != device:
        leaf = _copy_to_device(leaf, device)
    if dim is None or (sizes is None and dim >= leaf.dim()):
        return [leaf] * (1 if sizes is None else len(sizes))
    sizes = [leaf.shape[dim]] if sizes is None else sizes

    # Pieces of an unsafe split count their versions separately: a layer may change one in place, the others stay valid.
    split_leaf = leaf.split if leaf.requires_grad else leaf.unsafe_split_with_sizes
    pieces = split_leaf(list(sizes), dim)
    return [piece.contiguous() for piece in pieces] if dim else pieces  # as from a data loader: a model may call view()


def _copy_to_device(leaf: Tensor, device: torch.device) -> Tensor:
    """Copy to another `device`. A GPU copies while it computes only from pinned memory in one piece."""
    if device.type == "cuda" and leaf.is_cpu and leaf.layout == torch.strided and not (leaf.requires_grad or leaf.is_pinned()):
        leaf = torch.empty_like(leaf, pin_memory=True).copy_(leaf)
    return leaf.to(device, non_blocking=True)


# -- by tokens ---------------------------------------------------------------------------------------------------------


def count_tokens(batch: Any, what: str, sequence_dim: int) -> int:
    """Return the tokens of `batch`, any tree of tensors: the size of dimension `sequence_dim` in those that have it.

    Raises MismatchError if they differ, or none has it.
    """
    tensors = [leaf for leaf in map(unwrap, leaves(batch)) if isinstance(leaf, Tensor)]
    sizes = {tensor.shape[sequence_dim] for tensor in tensors if tensor.dim() > sequence_dim}
    if len(sizes) != 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensors"
        raise MismatchError(
            f"{what} is cut along dimension {sequence_dim} (sequence_dim), which has the tokens, but it has {shapes}: give "
            "tensors of as many tokens; a mask over queries and keys cannot be cut, one of (batch, time) can"
        )
    return sizes.pop()


def parse_slices(slices: Any) -> tuple[int | Sequence[int], int]:
    """Return what `Pipeline(.., slices=)` was given, and how many slices that are. Raise MismatchError for anything else."""
    if is_whole_number(slices, 1):
        return int(slices), int(slices)
    if isinstance(slices, list | tuple) and slices and all(is_whole_number(length, 1) for length in slices):
        return (tuple(map(int, slices)), len(slices)) if len(slices) > 1 else (1, 1)  # one slice is all tokens, however many
    raise MismatchError(f"slices is a number of slices, 1 or more, or a list of their lengths in tokens, not {slices!r}")


def token_lengths(parts: int | Sequence[int], num_tokens: int, name: str = "slices") -> Sequence[int]:
    """Return the tokens of each part of a sequence; `parts`: how many, or their lengths. `name`: of parts, for an error.

    Equal ones differ by a token at most; the first are the longer ones, since they have the fewest to attend to. Raises
    MismatchError for a sequence with fewer tokens than parts, or with another number of tokens than the lengths have.
    """
    if not isinstance(parts, int):
        if sum(parts) != num_tokens:
            lengths = ", ".join(map(str, parts))
            raise MismatchError(
                f"slices=[{lengths}] have {sum(parts)} tokens, but the sequences have {num_tokens}: give lengths that add up "
                "to it, or the number of slices"
            )
        return parts
    if num_tokens < parts:
        raise MismatchError(f"{num_tokens} tokens cannot be cut into {parts} {name}: each needs one")
    return split_sizes(num_tokens, parts)


def cut_tokens(value: Any, lengths: Sequence[int], indices: Sequence[int], sequence_dim: int) -> list[Any]:
    """Return the parts of `value` with these `indices`, of parts of these `lengths` in tokens."""
    firsts = [0, *accumulate(lengths)]
    return [take_tokens(value, sequence_dim, firsts[index], lengths[index]) for index in indices]


def take_tokens(batch: Any, sequence_dim: int, first: int, length: int) -> Any:
    """Return `batch` with `length` tokens from number `first` on, contiguous: a model may call `view()`."""
    batch_leaves, structure = flatten(batch)
    return unflatten([_take_tokens_of_leaf(leaf, sequence_dim, first, length) for leaf in batch_leaves], structure)


def _take_tokens_of_leaf(leaf: Any, sequence_dim: int, first: int, length: int) -> Any:
    tensor = unwrap(leaf)
    if not isinstance(tensor, Tensor) or tensor.dim() <= sequence_dim:
        return leaf
    part = tensor.narrow(sequence_dim, first, length).contiguous()
    if isinstance(leaf, Rows):
        return Rows(part, leaf.dim)
    return Replicated(part) if isinstance(leaf, Replicated) else part


# -- as text -----------------------------------------------------------------------------------------------------------


def shape_of(batch: Any, rows: int | None, rows_dim: int) -> Shape:
    """Return what other ranks must know of a microbatch, from the tree that was given."""
    return Shape(rows, count_elements(batch, rows_dim), batch_signature(batch))


def count_elements(batch: Any, rows_dim: int) -> int:
    """Return the elements of the largest tensor with rows: proportional to the padded tokens of a microbatch."""
    tensors = [unwrap(leaf) for leaf in leaves(batch) if rows_dim_of(leaf, rows_dim) is not None]
    return max((tensor.numel() for tensor in tensors if isinstance(tensor, Tensor)), default=1)


def batch_signature(batch: Any) -> str:
    """Return the structure, shapes and dtypes of `batch` as a text, the same in every process."""
    if isinstance(batch, Tensor):  # the common case
        return _tensor_signature(batch.shape, batch.dtype)
    batch_leaves, structure = flatten(batch)
    return f"{structure} {[*map(_leaf_signature, batch_leaves)]}"


def _leaf_signature(leaf: Any) -> str:
    if isinstance(leaf, Rows | Replicated):
        return repr(leaf)
    return _tensor_signature(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf).__qualname__


@lru_cache(256)  # data that repeats from step to step
def _tensor_signature(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{tuple(shape)} {dtype}"


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
            warn_user(
                f"output{keystr(path)} of shape {tuple(leaf.shape)} is joined along dimension {rows_dim} (rows_dim), "
                f"but has the microbatch's {num_rows} rows in dimension 0 too: if those are the rows, give rows_dim=0 and "
                f"wrap the inputs: ps.Rows(tensor, {rows_dim})"
            )


def check_teacher_rows(output: Any, num_rows: int, rows_dim: int) -> None:
    """Raise MismatchError if a tensor of a teacher's output of a microbatch has other rows than its `num_rows`."""
    for path, leaf in tree_flatten_with_path(output)[0]:
        rows = _count_leaf_rows(leaf, rows_dim)
        if rows is not None and (rows == WITHOUT_ROWS_DIM or rows % num_rows):
            raise MismatchError(
                f"the teacher's output{keystr(path)} of shape {tuple(leaf.shape)} does not have the {num_rows} rows of the "
                f"microbatch in dimension {rows_dim}, so that the loss cannot compare it with the model's: let it keep rows"
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
    """Join outputs of microbatches or slices: tensors along `dim`, 0-dimensional ones stacked; of other values the first."""
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
    for scalar in scalars:
        if scalar.numel() != 1 if isinstance(scalar, Tensor) else not isinstance(scalar, int | float):
            raise MismatchError(f"loss_weight(target) must be one number for a microbatch, got {describe_type(scalar)}")

    weights = scalars_to_floats(scalars)
    for microbatch, weight in enumerate(weights):
        if not 0 <= weight < float("inf"):
            raise MismatchError(f"loss_weight is {weight} for microbatch {microbatch}: it must be a finite number, 0 or more")
    return weights


def scalars_to_floats(scalars: Sequence[Any]) -> list[float]:
    """Return numbers and scalar tensors as floats, with one transfer from a device for all its tensors."""
    if all(isinstance(scalar, Tensor) and scalar.is_cpu for scalar in scalars):  # the common case
        return list(map(Tensor.item, scalars))
    tensors = [scalar.detach().reshape(()) for scalar in scalars if isinstance(scalar, Tensor)]
    values = iter(torch.stack(tensors).tolist() if tensors else ())
    return [float(next(values) if isinstance(scalar, Tensor) else scalar) for scalar in scalars]


def describe_type(value: Any) -> str:
    """Return in words what `value` is."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def loss_shares(weights: Sequence[float], total: float) -> list[float]:
    """Return each weight's share of `total`: the sum of mean losses, each times its share, is the mean over the batch.

    A microbatch of weight 0 has the share 0; so have all if all weights are 0.
    """
    return [weight / total if total else 0.0 for weight in weights]
