"""What a tensor was at an earlier time: by its version, which autograd knows, and by some values, which `.data` changes too."""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.comms.encoding import sample_bytes, sampled_layout
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
    """Takes snapshots of a tensor that it had before in a fifth of the time: with one operation, into the same memory."""

    def __init__(self) -> None:
        self._tensor: Tensor | None = None
        self._address = 0  # of the tensor's memory
        self._view = self._values = self._bytes = torch.empty(0, device="cpu")  # of the sampled values; of their copies

    def take(self, tensor: Tensor) -> TensorSnapshot:
        """Return a snapshot of `tensor` as it is now. That of the last call is no longer valid."""
        if tensor is not self._tensor or tensor.data_ptr() != self._address or not tensor.is_contiguous():
            if hasattr(tensor, "placements") or tensor.is_meta or tensor.layout != torch.strided or not tensor.is_contiguous():
                return TensorSnapshot.of(tensor)
            self._tensor, self._address = tensor, tensor.data_ptr()
            self._view = tensor.detach().as_strided(*sampled_layout(tensor))
            self._values = torch.empty_like(self._view, memory_format=torch.contiguous_format)
            self._bytes = self._values.view(torch.uint8)
        self._values.copy_(self._view)
        return TensorSnapshot(tensor, tensor_version(tensor), self._bytes)


def sample_shard(tensor: Tensor) -> Tensor:
    """Return some of the values that a tensor has on this rank, evenly spread, as bytes."""
    return sample_bytes(local_shard(tensor.detach()))
