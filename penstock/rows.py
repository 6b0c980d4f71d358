"""Which dimension of a tensor has its rows: the pipeline's `rows_dim`, unless a wrapper of the tensor says otherwise."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from penstock.errors import MismatchError
from penstock.torch_private import tree_map


class Rows:
    """A tensor of a batch whose rows are not in the dimension `rows_dim` of the pipeline.

        pipe = ps.Pipeline(model, loss_fn, rows_dim=0)  # of targets and outputs
        pipe.step(ps.Rows(frames, 1), target=labels)  # (time, batch, width) and (batch, ..)

    `tensor`: part of a batch, in any place of it.
    `dim`: the dimension along which microbatches are cut.

    Raises MismatchError for what is no tensor, and for a dimension that the tensor does not have.
    """

    __slots__ = ("dim", "tensor")

    def __init__(self, tensor: Tensor, dim: int) -> None:
        _check_tensor("Rows", tensor)
        if type(dim) is not int or not -tensor.dim() <= dim < tensor.dim():
            raise MismatchError(f"Rows(tensor, {dim!r}): a tensor of shape {tuple(tensor.shape)} does not have that dimension")
        self.tensor, self.dim = tensor, dim % tensor.dim()

    def __repr__(self) -> str:
        return f"Rows({self.dim}) {tuple(self.tensor.shape)} {self.tensor.dtype}"


class Replicated:
    """A tensor that goes whole to every microbatch: a table of positions, a mask without rows.

        pipe.step(tokens, position_ids=ps.Replicated(torch.arange(512)[None]), target=targets)  # (1, 512)

    `tensor`: part of a batch, in any place of it. Numbers, None and 0-dimensional tensors need no wrapper.

    Raises MismatchError for what is no tensor.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        _check_tensor("Replicated", tensor)
        self.tensor = tensor

    def __repr__(self) -> str:
        return f"Replicated {tuple(self.tensor.shape)} {self.tensor.dtype}"


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise MismatchError(f"{name} takes a tensor, not a {type(tensor).__name__}: wrap the tensors inside")


def unwrap(leaf: Any) -> Any:
    """Return the tensor inside a wrapper, anything else unchanged."""
    return leaf.tensor if type(leaf) in (Rows, Replicated) else leaf


def unwrap_tree(tree: Any) -> Any:
    """Return `tree` without wrappers."""
    return tree_map(unwrap, tree)


def rows_dim_of(leaf: Any, rows_dim: int) -> int | None:
    """Return the dimension of the leaf's rows; None for a leaf that goes whole to every microbatch."""
    if isinstance(leaf, Tensor):
        return rows_dim if leaf.dim() else None
    return leaf.dim if isinstance(leaf, Rows) else None


def describe_rows_dim(rows_dim: int) -> str:
    """Return as text where rows are."""
    return f"dimension {rows_dim} (rows_dim={rows_dim})" if rows_dim else "the first dimension"


def resolve_rows_dim(model: nn.Module | Iterable[nn.Module] | Mapping[int, nn.Module], rows_dim: int | None) -> int:
    """Return `rows_dim`, or 0 for None.

    Raises MismatchError if it is no dimension, and if it is None, for a module that has `batch_first=False`: it
    takes (time, batch, ..), as torch's do by default, and its gradients would be wrong if time were cut into microbatches.
    """
    if rows_dim is not None:
        if type(rows_dim) is not int or rows_dim < 0:
            raise MismatchError(f"rows_dim={rows_dim!r}: give the number of the dimension that has a batch's rows, 0 or more")
        return rows_dim
    modules = model.values() if isinstance(model, Mapping) else [model] if isinstance(model, nn.Module) else model
    for root in modules:
        for name, module in root.named_modules():
            if getattr(module, "batch_first", None) is False:
                raise MismatchError(
                    f"{type(module).__name__}{f' {name}' * bool(name)} has batch_first=False: it takes (time, batch, ..), "
                    "while a batch is cut along its first dimension. Make it with batch_first=True, or give rows_dim=1 for "
                    "batches of (time, batch, ..), or rows_dim=0 if the model transposes what this module takes"
                )
    return 0
