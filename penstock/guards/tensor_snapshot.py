"""What a tensor was at an earlier time: by its version, which autograd knows, and by some values, which `.data` changes too."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.comms.encoding import sample_bytes, sampled_layout, tensor_bytes
from penstock.stage.dtensor import local_shard
from penstock.torch_private import tensor_version


class TensorSnapshot(NamedTuple):
    """A tensor, and its version and (some) values at an earlier time."""

    tensor: Tensor
    version: int
    values: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSnapshot":
        """Return a snapshot of `tensor` as it is now, with some of its values."""
        return cls(tensor, tensor_version(tensor), sample_shard(tensor))

    def has_same_version(self) -> bool:
        """Whether autograd has seen no change since."""
        return tensor_version(self.tensor) == self.version

    def is_unchanged(self) -> bool:
        """Whether the tensor has the version and the values that it had. Waits for the tensor's device."""
        return self.has_same_version() and torch.equal(sample_shard(self.tensor), self.values)

    def has_other_values(self) -> Tensor:
        """Return whether one of the values has changed since, on the tensor's device."""
        return (sample_shard(self.tensor) != self.values).any()


class RepeatedSnapshot:
    """The last snapshot of a tensor, taken step by step: on a CPU without an operation of torch, in a fifth of its time."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None
        self._snapshot: TensorSnapshot | None = None  # of a tensor that is not read in place
        self._alias: Tensor | None = None  # of the tensor's memory, which is not freed while it may be read
        self._address = 0  # of that memory
        self._array: memoryview | None = None  # the sampled values, in that memory
        self._version, self._values = 0, b""

    def take(self, tensor: Tensor) -> None:
        """Take a snapshot of `tensor` as it is now, in the place of the last one."""
        if self._array is None or tensor is not self.tensor or tensor.data_ptr() != self._address or not tensor.is_contiguous():
            self._begin(tensor)
        if self._array is None:
            self._snapshot = TensorSnapshot.of(tensor)
        else:
            self._version, self._values = tensor_version(tensor), self._array.tobytes()

    def _begin(self, tensor: Tensor) -> None:
        """Prepare for snapshots of a tensor, or of the memory that it has now."""
        self.tensor, self._alias, self._array = tensor, None, None
        integer = _INTEGERS_BY_SIZE.get(tensor.itemsize)
        if integer is not None and is_read_in_place(tensor):
            self._alias, self._address = tensor.detach(), tensor.data_ptr()
            _, (step,) = sampled_layout(tensor)
            self._array = memoryview((integer * tensor.numel()).from_address(self._address))[::step]

    def is_unchanged(self) -> bool:
        """Whether the tensor has the version and the values that it had. Waits for the tensor's device."""
        assert self.tensor is not None
        if self._array is None:
            return self._snapshot is not None and self._snapshot.is_unchanged()
        return tensor_version(self.tensor) == self._version and tensor_bytes(sample_shard(self.tensor)) == self._values


_INTEGERS_BY_SIZE = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}


def is_read_in_place(tensor: Tensor) -> bool:
    """Return whether the host may read the tensor's memory without an operation of torch."""
    is_dense = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and tensor.is_contiguous()
    return is_dense and tensor.is_cpu and tensor.numel() > 0 and not tensor.is_inference()


def sample_shard(tensor: Tensor) -> Tensor:
    """Return some of the values that a tensor has on this rank, evenly spread, as bytes."""
    return sample_bytes(local_shard(tensor.detach()))
