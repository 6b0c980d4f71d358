"""What travels between two stages: a tree of tensors, described once and then sent as bare memory."""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.comms.encoding import decode, encode_to_tensor, tensor_bytes
from penstock.errors import MismatchError
from penstock.torch_private import TreeSpec
from penstock.trees import flatten, unflatten


class TensorSpec(NamedTuple):
    """A tensor to be sent: enough to make the receive's buffer, memory layout included, so that kernels see the same bits."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]  # dense: a permutation of contiguous
    dtype: torch.dtype
    requires_grad: bool
    bytes: int

    @property
    def layout(self) -> tuple[Any, ...]:
        """How its bytes are read."""
        return self[:3]

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


class ConstantSpec(NamedTuple):
    """A leaf that is no tensor (a number, None, a string): it is part of the description."""

    value: Any
    kind: type  # 1, 1.0 and True are equal, but not the same

    def __str__(self) -> str:
        return repr(self.value)


class MessageSpec(NamedTuple):
    """The description of one message: its structure and its leaves."""

    tree: TreeSpec
    leaves: tuple[TensorSpec | ConstantSpec, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.leaves)) or "nothing"

    @property
    def tensors(self) -> list[TensorSpec]:
        """The leaves that travel."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorSpec)]

    def describes(self, tensor: Tensor) -> bool:
        """Whether a bare tensor is exactly what is described: a quick `describe(...) == self`."""
        spec = self.leaves[0] if len(self.leaves) == 1 else None
        return (
            isinstance(spec, TensorSpec)
            and tensor.shape == spec.shape
            and tensor.stride() == spec.stride
            and tensor.dtype is spec.dtype
            and tensor.requires_grad is spec.requires_grad
            and self.tree.is_leaf()
        )


def describe_message(leaves: list[Any], tree: TreeSpec) -> MessageSpec:
    """The description of a message."""
    described = [describe_tensor(leaf) if isinstance(leaf, Tensor) else ConstantSpec(leaf, type(leaf)) for leaf in leaves]
    return MessageSpec(tree, tuple(described))


def describe_tensor(tensor: Tensor) -> TensorSpec:
    """The description of one tensor."""
    stride = tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
    return TensorSpec(tuple(tensor.shape), stride, tensor.dtype, tensor.requires_grad, tensor.nbytes)


def flat_memory(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """The bare memory of `tensor` in the layout of `spec`, as a contiguous tensor; `tensor` itself where it is that."""
    tensor = tensor.detach().resolve_conj().resolve_neg()  # those two are flags, not memory
    if tensor.stride() != spec.stride:
        tensor = empty_tensor(spec, tensor.device).copy_(tensor)
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def empty_tensor(spec: TensorSpec, device: torch.device) -> Tensor:
    """A buffer for a tensor of `spec`."""
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)


def rebuild_message(spec: MessageSpec, tensors: list[Tensor]) -> Any:
    """The message `spec` describes, its tensors in place and requiring a gradient where the sender's did."""
    rest = iter(tensors)
    leaves = [_of(leaf, next(rest)) if isinstance(leaf, TensorSpec) else leaf.value for leaf in spec.leaves]
    return unflatten(leaves, spec.tree)


def _of(spec: TensorSpec, tensor: Tensor) -> Tensor:
    return tensor.requires_grad_() if spec.requires_grad else tensor


def tensor_from_bytes(data: Tensor, spec: TensorSpec) -> Tensor:
    """Bare bytes as the tensor `spec` describes."""
    return data.view(spec.dtype).as_strided(spec.shape, spec.stride)


def pack_spec(spec: MessageSpec) -> Tensor:
    """`spec` as bytes; its structure travels as an example of it. Raises MismatchError for what does not travel."""
    example = unflatten(range(len(spec.leaves)), spec.tree)
    leaves = [leaf if isinstance(leaf, TensorSpec) else [leaf.value] for leaf in spec.leaves]
    return encode_to_tensor((example, leaves))


def unpack_spec(data: Tensor) -> MessageSpec:
    """The description `pack` made bytes of. Raises MismatchError for anything else."""
    return _unpacked(tensor_bytes(data))


@lru_cache(64)  # of one step many are alike
def _unpacked(data: bytes) -> MessageSpec:
    match decode(data):
        case (example, list(leaves)) if all(_is_leaf(leaf) for leaf in leaves):
            numbers, tree = flatten(example)
            if numbers == list(range(len(leaves))):
                told = [leaf if isinstance(leaf, TensorSpec) else ConstantSpec(leaf[0], type(leaf[0])) for leaf in leaves]
                return MessageSpec(tree, tuple(told))
    raise MismatchError("what another rank sent describes no message: all ranks must run the same release of Penstock")


def _is_leaf(told: Any) -> bool:
    """Whether it is a constant in a list, or describes a tensor that can be."""
    if not isinstance(told, TensorSpec):
        return isinstance(told, list) and len(told) == 1
    shape, stride, dtype, requires_grad, size = told
    numbers = (*shape, *stride) if type(shape) is type(stride) is tuple and len(shape) == len(stride) else (-1,)
    if not (isinstance(dtype, torch.dtype) and type(requires_grad) is bool and all(type(n) is int and n >= 0 for n in numbers)):
        return False
    dense = 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    return dense == math.prod(shape) and size == dense * dtype.itemsize
