"""The tokens of a batch: how many there are, the part of them that one rank takes, and their positions."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import MismatchError, is_whole_number
from penstock.partition.graph_inputs import arguments_by_parameter_name
from penstock.partition.graph_stage import GraphStage
from penstock.partition.rows import Replicated, Rows, unwrap
from penstock.stage.microbatch import split_sizes
from penstock.torch_private import unwrap_compiled
from penstock.trees import flatten, leaves, unflatten

POSITION_IDS = "position_ids"  # the parameter of a forward that takes the tokens' positions


def sequence_length(batch: Any, what: str, sequence_dim: int) -> int:
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
        return (tuple(map(int, slices)), len(slices)) if len(slices) > 1 else (1, 1)
    raise MismatchError(f"slices is a number of slices, 1 or more, or a list of their lengths in tokens, not {slices!r}")


def slice_lengths(slices: int | Sequence[int], num_tokens: int) -> Sequence[int]:
    """Return the tokens of each slice of a sequence; `slices`: how many, or their lengths.

    Equal ones differ by a token at most; the first are the longer ones, since they have the fewest to attend to. Raises
    MismatchError for a sequence with fewer tokens than slices, or with another number of tokens than the lengths have.
    """
    if not isinstance(slices, int):
        if sum(slices) != num_tokens:
            lengths = ", ".join(map(str, slices))
            raise MismatchError(
                f"slices=[{lengths}] have {sum(slices)} tokens, but the sequences have {num_tokens}: give lengths that add up "
                "to it, or the number of slices"
            )
        return slices
    if num_tokens < slices:
        raise MismatchError(f"{num_tokens} tokens cannot be cut into {slices} slices: each needs one")
    return split_sizes(num_tokens, slices)


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


def first_stage_signature(module: nn.Module) -> inspect.Signature:
    """Return what the first stage's forward takes: the model's arguments, if the stage was cut from one."""
    return module.penstock.signature if isinstance(module, GraphStage) else inspect.signature(unwrap_compiled(module).forward)


def kwargs_with_position_ids(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], length: int
) -> dict[str, Any]:
    """Return `kwargs`, with the positions of `length` tokens if the forward takes them and the call has none.

    Positions have the shape (1, time), for all rows.
    """
    if (
        POSITION_IDS not in signature.parameters
        or arguments_by_parameter_name(signature, args, kwargs).get(POSITION_IDS) is not None
    ):
        return dict(kwargs)
    positions = torch.arange(length, device="cpu")[None]
    return {**kwargs, POSITION_IDS: Replicated(positions)}


def check_arguments_can_be_cut(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise MismatchError for arguments of a call that mean another thing once the tokens are cut."""
    if not {"labels", POSITION_IDS} & signature.parameters.keys():
        return
    arguments = arguments_by_parameter_name(signature, args, kwargs)
    if arguments.get("labels") is not None:
        raise MismatchError(
            "labels= are shifted by a token inside the model, which has a part of the tokens only: give target=, shifted, and "
            "the loss as loss_fn"
        )
    positions = unwrap(arguments.get(POSITION_IDS))
    if positions is not None and arguments.get("attention_mask") is None and (positions.diff(dim=-1) != 1).any():
        raise MismatchError(
            "position_ids begin anew within a row, as for packed documents, whose borders are not known where tokens are cut: "
            "give rows of one document each"
        )
