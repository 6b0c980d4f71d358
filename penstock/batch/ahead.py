"""A batch that a teacher runs before its step: what was given as `next_args`, and the outputs that wait for its losses."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import MismatchError
from penstock.rows import unwrap
from penstock.torch_private import tensor_version
from penstock.trees import flatten


class AheadBatch:
    """A batch for a teacher, from the step in which its forwards run to the step whose losses take their outputs."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.args, self.kwargs = tuple(args), dict(kwargs)
        self.outputs: dict[int, Any] = {}  # microbatch -> the teacher's output, on the rank of the loss
        self._leaves, self._tree = flatten((self.args, self.kwargs))
        self._versions = list(map(_version, self._leaves))
        self._teacher_versions: list[int] = []  # of its parameters on this rank, when it ran

    def begin_forwards(self, teacher: Sequence[Tensor]) -> None:
        """Remember the state of the `teacher`'s parameters that will run."""
        self._teacher_versions = list(map(_version, teacher))

    def check_same_teacher(self, teacher: Sequence[Tensor]) -> None:
        """Raise MismatchError if the `teacher`'s parameters have changed since it ran."""
        if list(map(_version, teacher)) != self._teacher_versions:
            raise MismatchError(
                "the teacher's parameters have changed since it ran ahead on this batch, for next_args= of the step before: "
                "leave out next_args= if the teacher changes between steps, and keep its parameters out of the optimizer"
            )

    def check_is_batch(self, args: Sequence[Any], kwargs: Mapping[str, Any], call: str) -> None:
        """Raise MismatchError unless these have the values with which the teacher ran.

        The same tensors are not read; of others all values are compared.
        """
        given, tree = flatten((tuple(args), dict(kwargs)))
        if tree != self._tree or not all(map(_equal, given, self._leaves)):
            raise MismatchError(
                f"{call} was given another batch than the one that next_args= and next_kwargs= of the step before announced, "
                "for which the teacher has run: announce the batch that comes next, or none"
            )
        if list(map(_version, self._leaves)) != self._versions:
            raise MismatchError(
                f"{call} was given a batch that was changed in place after it was next_args= of the step before, for which the "
                "teacher has run: announce a batch when it is complete"
            )


def _version(leaf: Any) -> int:
    """Return how often a tensor was changed in place; 0 for anything else."""
    tensor = unwrap(leaf)
    return tensor_version(tensor) if isinstance(tensor, Tensor) and not tensor.is_inference() else 0


def _equal(given: Any, announced: Any) -> bool:
    tensor, other = unwrap(given), unwrap(announced)
    if tensor is other or not (isinstance(tensor, Tensor) and isinstance(other, Tensor)):
        return tensor is other or bool(tensor == other)
    same_kind = tensor.shape == other.shape and tensor.dtype == other.dtype and tensor.device == other.device
    return same_kind and torch.equal(tensor, other)
