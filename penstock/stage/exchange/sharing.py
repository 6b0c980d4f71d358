"""Values that share memory where a stage makes them, but not where they arrive: there none of them may be changed in place.

In the uncut model such a change is one of all of them. The message tells which they are, and the stage that takes it looks,
after its forward, whether they are as they came. Parameters of several stages are looked at likewise. Of inference tensors,
which count no changes, that is not seen.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import MismatchError
from penstock.torch_private import storage_key, tree_leaves, version_of

VALUE = (
    "a value of shape {} that shares memory with another one",
    "clone one of them in the stage that makes them, or cut elsewhere",
)
PARAMETER = (
    "a parameter of shape {} that another stage has too",
    "leave out what changes it, as max_norm= of an embedding does, or cut elsewhere",
)
Versions = Sequence[tuple[Tensor, int]]  # what is shared, and how often it had been changed before the forward


class Sharing(NamedTuple):
    """A message, and the numbers of its leaves that share memory with another one of it, or of a later stage's message."""

    message: Any
    leaves: list[int]


def marked(messages: list[Any], arrived: Versions) -> list[Any]:
    """`messages`, one for each taker in order, as Sharing where they are. What had `arrived` sharing memory still does."""
    before = {storage_key(each) for each, _ in arrived}
    places = defaultdict[int, list[tuple[int, int, Tensor]]](list)  # memory -> what lies there
    for taker, message in enumerate(messages):
        for number, leaf in enumerate(tree_leaves(message)):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.numel():
                key = storage_key(leaf)
                places[0 if key in before else key].append((taker, number, leaf))
    found = defaultdict[int, set[int]](set)
    for key, place in places.items():
        for (taker, number, leaf), (later, other, its) in combinations(place, 2):
            if not key or _overlap(_geometry(leaf), _geometry(its)):
                found[taker] |= {number, other} if taker == later else {number}
    return [Sharing(each, sorted(found[taker])) if taker in found else each for taker, each in enumerate(messages)]


def opened(messages: Sequence[Any]) -> tuple[Sequence[Any], Versions]:
    """`messages` as they were before they were marked, and what of them shares memory."""
    if Sharing not in map(type, messages):  # the common case
        return messages, ()
    shared = [tree_leaves(each.message)[number] for each in messages if type(each) is Sharing for number in each.leaves]
    return [each.message if type(each) is Sharing else each for each in messages], versions(shared)


def versions(tensors: Iterable[Tensor]) -> Versions:
    """Of `tensors`, before a forward."""
    return [(each, version_of(each)) for each in tensors if not each.is_inference()]


def check_unchanged(before: Versions, index: int, what: tuple[str, str] = VALUE) -> None:
    """After the forward of stage `index`. Raises MismatchError if it has changed in place what was as in `before`."""
    for each, version in before:
        if version_of(each) != version:
            told = f"stage {index} changes in place {what[0].format(tuple(each.shape))}"
            raise MismatchError(f"{told}, which would change with it in the uncut model, but not here: {what[1]}")


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.itemsize


@lru_cache(256)
def _overlap(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether tensors of these geometries, in the same memory, have elements in common; columns side by side have none."""
    if one == other or one[-1] != other[-1]:
        return True
    ends = [
        offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) for shape, stride, offset, _ in (one, other)
    ]
    taken = torch.zeros(max(ends) + 1, dtype=torch.bool, device="cpu")
    taken.as_strided(*one[:3]).fill_(True)
    return bool(taken.as_strided(*other[:3]).any())
