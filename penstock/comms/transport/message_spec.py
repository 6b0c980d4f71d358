"""The description of a message between stages: its tree, and shapes and layouts of its tensors, sent without headers."""

import math
import struct
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.comms.encoding import DTYPES, class_error, decode, encode
from penstock.errors import MismatchError, warn_user
from penstock.python_objects import is_of_framework
from penstock.torch_private import TreeSpec
from penstock.trees import flatten, unflatten


class TensorSpec(NamedTuple):
    """The description of a tensor, from which the receiver creates a buffer with the same memory layout."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]  # dense: that of a contiguous tensor with its dimensions permuted
    dtype: torch.dtype
    requires_grad: bool
    bytes: int

    @property
    def layout(self) -> tuple[Any, ...]:
        """The shape, stride and dtype, by which the bytes are read."""
        return self[:3]


NOTHING = TensorSpec((0,), (1,), torch.uint8, False, 0)


class ConstantSpec(NamedTuple):
    """The description of a leaf that is no tensor (a number, None, a string, a set), with its value."""

    value: Any
    type: type  # compared too, as 1, 1.0 and True are equal

    @classmethod
    def of(cls, value: Any) -> "ConstantSpec":
        """Return the description of a value as it is now: a stage may change a set, and send it again."""
        return cls(_own_copy(value), type(value))


_UNCHANGING = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})


def _own_copy(value: Any) -> Any:
    if type(value) in _UNCHANGING:
        return value
    try:
        return deepcopy(value)
    except TypeError as error:  # of a generator, a lock, an open file
        raise class_error(type(value)) from error


@dataclass(frozen=True)
class MessageSpec:
    """The description of a message: its tree and its leaves."""

    tree: TreeSpec
    leaves: tuple[TensorSpec | ConstantSpec, ...]

    @cached_property
    def parts(self) -> list[TensorSpec]:
        """The tensors whose bytes are sent; one without bytes if there are none, as a receiver waits for every message."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorSpec) and leaf.bytes] or [NOTHING]

    @cached_property
    def tensor(self) -> TensorSpec | None:
        """The description of a message that is one tensor, not empty, the common case; None for another."""
        leaf = self.leaves[0] if len(self.leaves) == 1 and self.tree.is_leaf() else None
        return leaf if isinstance(leaf, TensorSpec) and leaf.bytes else None

    def fits_layout_of(self, known: "MessageSpec") -> bool:
        """Return whether such a message can be sent as `known`: at most strides are different."""
        if self == known:
            return True
        if self.tree != known.tree or len(self.leaves) != len(known.leaves):
            return False
        return all(map(_differs_in_stride_only, self.leaves, known.leaves))

    def describes(self, tensor: Tensor) -> bool:
        """Return whether this is the description of a message of one `tensor`, not empty; faster than by `message_spec_of`."""
        spec = self.tensor
        return (
            spec is not None
            and tensor.shape == spec.shape
            and tensor.stride() == spec.stride
            and tensor.dtype is spec.dtype
            and tensor.requires_grad is spec.requires_grad
        )


def _differs_in_stride_only(leaf: TensorSpec | ConstantSpec, known: TensorSpec | ConstantSpec) -> bool:
    if isinstance(leaf, TensorSpec) and isinstance(known, TensorSpec):
        return leaf._replace(stride=known.stride) == known
    return leaf == known


def message_spec_of(leaves: list[Any], tree: TreeSpec) -> MessageSpec:
    """Return the description of a message with these leaves."""
    specs = [tensor_spec_of(leaf) if isinstance(leaf, Tensor) else ConstantSpec.of(leaf) for leaf in leaves]
    return MessageSpec(tree, tuple(specs))


def check_can_be_sent(value: Any) -> None:
    """Raise MismatchError for a value that cannot be sent to another stage."""
    leaves, tree = flatten(value)
    if not all(type(leaf) in _UNCHANGING or (type(leaf) is Tensor and leaf.layout is torch.strided) for leaf in leaves):
        pack_spec(message_spec_of(leaves, tree))


def tensor_spec_of(tensor: Tensor) -> TensorSpec:
    """Return the description of one tensor. Raises MismatchError for one whose memory is not described by strides."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind, advice = ("nested", "its values and offsets") if tensor.is_nested else ("sparse", "tensor.to_dense()")
        raise MismatchError(
            f"a {kind} tensor cannot be sent to another stage: return {advice}, and make it {kind} in the layer that needs it"
        )
    if type(tensor) not in _CLASSES_KNOWN:
        _warn_of_class(type(tensor))
    stride = tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
    return TensorSpec(tuple(tensor.shape), stride, tensor.dtype, tensor.requires_grad, tensor.nbytes)


_CLASSES_KNOWN: set[type] = {Tensor, nn.Parameter}


def _warn_of_class(cls: type) -> None:
    """Warn, once, that the next stage gets a plain tensor in the place of one of a user's class."""
    _CLASSES_KNOWN.add(cls)
    if not is_of_framework(cls.__module__):
        warn_user(
            f"a stage returns a tensor of class {cls.__qualname__}, and the next stage gets the same values as a plain "
            f"torch.Tensor: if a layer depends on the class, make one there, tensor.as_subclass({cls.__qualname__})"
        )


def flat_memory(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """Return the memory of `tensor` in the layout of `spec` as a contiguous tensor, copied only if the strides differ."""
    tensor = tensor.detach().resolve_conj().resolve_neg()  # conjugation and negation are flags, not bytes
    if tensor.stride() != spec.stride:
        tensor = empty_tensor(spec, tensor.device).copy_(tensor)
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def empty_tensor(spec: TensorSpec, device: torch.device) -> Tensor:
    """Return an uninitialised tensor of `spec`."""
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)


def rebuild_message(spec: MessageSpec, parts: Sequence[Tensor], device: torch.device) -> Any:
    """Return the message of `spec` from its `parts`, which require a gradient where the sender's did.

    Later messages are made of the same `spec`, and a stage may change what it receives in place; so constants are copied.
    """
    if spec.tensor is not None:
        return parts[0].requires_grad_() if spec.tensor.requires_grad else parts[0]
    remaining = iter(parts)
    leaves = [
        _rebuild_tensor(remaining, leaf, device) if isinstance(leaf, TensorSpec) else _own_copy(leaf.value)
        for leaf in spec.leaves
    ]
    return unflatten(leaves, spec.tree)


def _rebuild_tensor(remaining: Iterator[Tensor], spec: TensorSpec, device: torch.device) -> Tensor:
    tensor = next(remaining) if spec.bytes else empty_tensor(spec, device)
    return tensor.requires_grad_() if spec.requires_grad else tensor


def tensor_from_bytes(data: Tensor, spec: TensorSpec) -> Tensor:
    """Return a view of `data`, a tensor of bytes, as a tensor of `spec`."""
    return data.view(spec.dtype).as_strided(spec.shape, spec.stride)


# A single tensor, the common case, is described in fewer bytes, as receivers wait for descriptions of new shapes:
#     | ONE_TENSOR | number of dimensions | requires_grad | shape, 8 bytes each | stride, 8 bytes each | name of the dtype |
ONE_TENSOR = b"1 tensor"  # `encode` begins with a length, whose last bytes are 0
_TENSOR_HEAD, _LEAF = struct.Struct("<8sB?"), flatten(0)[1]


def pack_spec(spec: MessageSpec) -> bytes:
    """Return `spec` as bytes. Its tree is encoded as an example value with the leaves 0, 1, ..

    Raises MismatchError for a value that cannot be sent.
    """
    if spec.tree.is_leaf() and isinstance(spec.leaves[0], TensorSpec):
        shape, stride, dtype, requires_grad, _ = spec.leaves[0]
        numbers = struct.pack(f"<{2 * len(shape)}q", *shape, *stride)
        return _TENSOR_HEAD.pack(ONE_TENSOR, len(shape), requires_grad) + numbers + str(dtype).encode()
    example = unflatten(range(len(spec.leaves)), spec.tree)
    leaves = [leaf if isinstance(leaf, TensorSpec) else [leaf.value] for leaf in spec.leaves]
    return encode((example, leaves))


@lru_cache(64)  # many messages of a step have the same description
def unpack_spec(data: bytes) -> MessageSpec:
    """Return the description that `pack_spec` encoded as `data`. Raises MismatchError for any other bytes."""
    if data.startswith(ONE_TENSOR):
        leaf = _parse_tensor_spec(data)
        if leaf is not None and _is_valid_leaf(leaf):
            return MessageSpec(_LEAF, (leaf,))
        raise invalid_description_error()
    match decode(data):
        case (example, list(leaves)) if all(_is_valid_leaf(leaf) for leaf in leaves):
            numbers, tree = flatten(example)
            if numbers == list(range(len(leaves))):
                specs = [leaf if isinstance(leaf, TensorSpec) else ConstantSpec(leaf[0], type(leaf[0])) for leaf in leaves]
                return MessageSpec(tree, tuple(specs))
    raise invalid_description_error()


def _parse_tensor_spec(data: bytes) -> TensorSpec | None:
    """Return the description of one tensor, not yet checked; None if these bytes are no description."""
    try:
        _, dims, requires_grad = _TENSOR_HEAD.unpack_from(data)
        numbers = struct.unpack_from(f"<{2 * dims}q", data, _TENSOR_HEAD.size)
        dtype = DTYPES[data[_TENSOR_HEAD.size + 16 * dims :].decode()]
    except (struct.error, ValueError, KeyError):
        return None
    shape, stride = numbers[:dims], numbers[dims:]
    return TensorSpec(shape, stride, dtype, requires_grad, math.prod(shape) * dtype.itemsize)


def invalid_description_error() -> MismatchError:
    """Return the error for bytes that are no description, or are none where one is needed."""
    return MismatchError("the bytes from another rank describe no message: all ranks must run the same release of Penstock")


def _is_valid_leaf(leaf: Any) -> bool:
    """Return whether `leaf` is a list with one constant, or a TensorSpec that is possible."""
    if not isinstance(leaf, TensorSpec):
        return isinstance(leaf, list) and len(leaf) == 1

    shape, stride, dtype, requires_grad, size = leaf
    numbers = (*shape, *stride) if type(shape) is type(stride) is tuple and len(shape) == len(stride) else (-1,)
    are_sizes = {*map(type, numbers)} <= {int} and min(numbers, default=0) >= 0
    if not (isinstance(dtype, torch.dtype) and type(requires_grad) is bool and are_sizes):
        return False

    extent = 1 + sum(map(mul, shape, stride)) - sum(stride) if 0 not in shape else 0
    return extent == math.prod(shape) and size == extent * dtype.itemsize
