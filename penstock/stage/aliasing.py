"""In-place changes that would be lost: of values that share memory, and of parameters that several stages have.

In the uncut model an in-place change of one of them changes all. On another rank they no longer share memory, so a stage must
not change any. The stage that sends marks which of its values share memory. The stage that takes them compares their versions
before and after its forward. Inference tensors have no versions, so changes of them are not found.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import MismatchError
from penstock.torch_private import storage_key, tensor_version, tree_leaves

# For the error: what was changed, and what to do.
ALIASED_VALUE = (
    "a value of shape {} that shares memory with another one",
    "clone one of them in the stage that makes them, or cut elsewhere",
)
SHARED_PARAMETER = (
    "a parameter of shape {} that another stage has too",
    "leave out what changes it, as max_norm= of an embedding does, or cut elsewhere",
)
Versions = Sequence[tuple[Tensor, int]]  # tensors that must not change, and their versions before the forward


class AliasedMessage(NamedTuple):
    """A message with the numbers of its leaves that share memory with another of its leaves, or of a later message's."""

    message: Any
    leaf_numbers: list[int]


def mark_aliased(messages: list[Any], arrived: Versions) -> list[Any]:
    """Return `messages`, one for each destination; those with values that share memory as `AliasedMessage`.

    `arrived`: the values that shared memory when this stage received them. If it passes them on they still count as shared.
    """
    arrived_memory = {storage_key(tensor) for tensor, _ in arrived}
    by_memory = defaultdict[int, list[tuple[int, int, Tensor]]](list)  # 0: all memory that `arrived` has
    for destination, message in enumerate(messages):
        for number, leaf in enumerate(tree_leaves(message)):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.numel():
                key = storage_key(leaf)
                by_memory[0 if key in arrived_memory else key].append((destination, number, leaf))

    aliased = defaultdict[int, set[int]](set)
    for key, leaves in by_memory.items():
        for (destination, number, leaf), (later_destination, later_number, later_leaf) in combinations(leaves, 2):
            if not key or _have_common_elements(_geometry(leaf), _geometry(later_leaf)):
                aliased[destination] |= {number, later_number} if destination == later_destination else {number}
    return [
        AliasedMessage(message, sorted(aliased[destination])) if destination in aliased else message
        for destination, message in enumerate(messages)
    ]


def unwrap_aliased_messages(messages: Sequence[Any]) -> tuple[Sequence[Any], Versions]:
    """Return `messages` without marks, and the tensors in them that share memory."""
    if AliasedMessage not in map(type, messages):  # the common case
        return messages, ()
    tensors = [
        tree_leaves(message.message)[n] for message in messages if type(message) is AliasedMessage for n in message.leaf_numbers
    ]
    return [message.message if type(message) is AliasedMessage else message for message in messages], record_versions(tensors)


def record_versions(tensors: Iterable[Tensor]) -> Versions:
    """Return `tensors` with their versions, for `check_unchanged`."""
    return [(tensor, tensor_version(tensor)) for tensor in tensors if not tensor.is_inference()]


def check_unchanged(versions: Versions, stage: int, what: tuple[str, str]) -> None:
    """Raise MismatchError if a forward of `stage` has changed one of these tensors in place.

    `what`: ALIASED_VALUE or SHARED_PARAMETER.
    """
    for tensor, version in versions:
        if tensor_version(tensor) != version:
            changed, advice = what
            raise MismatchError(
                f"stage {stage} changes in place {changed.format(tuple(tensor.shape))}, which would change with it in the "
                f"uncut model, but not here: {advice}"
            )


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.itemsize


@lru_cache(256)
def _have_common_elements(geometry: tuple[Any, ...], other_geometry: tuple[Any, ...]) -> bool:
    """Return whether tensors of these geometries, in the same memory, have elements in common: columns do not."""
    if geometry == other_geometry or geometry[-1] != other_geometry[-1]:
        return True
    ends = [
        offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        for shape, stride, offset, _ in (geometry, other_geometry)
    ]
    covered = torch.zeros(max(ends) + 1, dtype=torch.bool, device="cpu")
    covered.as_strided(*geometry[:3]).fill_(True)
    return bool(covered.as_strided(*other_geometry[:3]).any())
