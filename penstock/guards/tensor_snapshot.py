"""What a tensor was at an earlier time: by its version, which autograd knows, and by some values, which `.data` changes too."""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.comms.encoding import sample_bytes
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
        return cls(tensor, tensor_version(tensor), _sample(tensor))

    def has_same_version(self) -> bool:
        """Whether autograd has seen no change since."""
        return tensor_version(self.tensor) == self.version

    def is_unchanged(self) -> bool:
        """Whether the tensor has the version and the values that it had. Waits for the tensor's device."""
        return self.has_same_version() and torch.equal(_sample(self.tensor), self.values)

    def has_other_values(self) -> Tensor:
        """Return whether one of the values has changed since, on the tensor's device."""
        return (_sample(self.tensor) != self.values).any()


def _sample(tensor: Tensor) -> Tensor:
    return sample_bytes(local_shard(tensor.detach()))
