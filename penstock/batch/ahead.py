"""What a teacher reads: inputs that are passed on to it, and a batch that it runs before its step, with the waiting outputs."""

from collections.abc import Mapping, Sequence
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from penstock.comms.encoding import sample_bytes
from penstock.comms.transport.message_spec import check_can_be_sent
from penstock.errors import MismatchError
from penstock.rows import unwrap
from penstock.stage.dtensor import local_shard
from penstock.torch_private import forward_hooks, tensor_version
from penstock.trees import flatten

PLAIN_TYPES = (int, float, str, type(None))


def check_can_be_passed_on(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise MismatchError for the inputs of a microbatch that cannot be sent to a teacher's first stage."""
    try:
        check_can_be_sent((args, kwargs))
    except MismatchError as error:
        raise MismatchError(
            f"the teacher's first stage is on another rank than the model's, which sends it its inputs: {error}. To keep "
            'it on the rank that reads them: schedule=ps.schedule.with_teacher(ps.schedule.build("1f1b", ranks, microbatches))'
        ) from error


class AheadBatch:
    """A batch for a teacher, from the step in which its forwards run to the step whose losses take their outputs."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.args, self.kwargs = args, dict(kwargs)
        self.outputs: dict[int, Any] = {}  # microbatch -> the teacher's output, on the rank of the loss
        self.teacher_state: TeacherState | None = None  # when it had run

    def check_arguments(self) -> None:
        """Raise MismatchError if the arguments are not in a tuple or list: a tensor alone would be one for each of its rows."""
        if not isinstance(self.args, tuple | list):
            raise MismatchError(
                f"next_args= has the arguments of the next step, in a tuple, not a {type(self.args).__name__}: give "
                "next_args=(inputs,)"
            )

    def record_values(self) -> None:
        """Remember the values with which the teacher runs, on the rank that reads them."""
        self._leaves, self._tree = flatten((tuple(self.args), self.kwargs))
        self._versions, self._samples = list(map(_version, self._leaves)), list(map(_sample, self._leaves))

    def check_same_teacher(self, state: "TeacherState") -> None:
        """Raise MismatchError if the teacher has another `state` than when it ran."""
        if self.teacher_state is not None and (what := self.teacher_state.find_change(state)):
            raise MismatchError(
                f"the teacher's {what} changed since it ran ahead on this batch, for next_args= of the step before: "
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
        is_unchanged = all(map(torch.equal, map(_sample, self._leaves), self._samples))
        if list(map(_version, self._leaves)) != self._versions or not is_unchanged:
            raise MismatchError(
                f"{call} was given a batch that was changed in place after it was next_args= of the step before, for which the "
                "teacher has run: announce a batch when it is complete"
            )


class TeacherState:
    """What a teacher's outputs depend on besides their inputs: `modules` of this rank, and `autocast` as text.

    Of tensors a few values are kept too: a change of `.data`, or through NumPy, is none for autograd.
    """

    def __init__(self, modules: Sequence[nn.Module], autocast: str) -> None:
        self._autocast = autocast
        self._layers = [layer for module in modules for layer in module.modules()]
        self._attributes = [(_plain_attributes(layer), forward_hooks(layer)) for layer in self._layers]
        tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        tensors = [local_shard(tensor) for tensor in tensors]
        self._versions = list(map(_version, tensors))
        self._samples = [sample for sample in map(_sample, tensors) if len(sample)]

    def find_change(self, later: "TeacherState") -> str:
        """Return as text what differs in a `later` state, with its verb; empty if nothing does."""
        if len(self._layers) != len(later._layers) or any(map(is_not, self._layers, later._layers)):
            return "layers have"
        if self._attributes != later._attributes:
            return "layers' attributes or hooks have"
        if self._autocast != later._autocast:
            return "autocast has"
        if self._versions != later._versions or list(map(len, self._samples)) != list(map(len, later._samples)):
            return "parameters or buffers have"
        # One comparison: on a GPU each is a wait.
        is_same = not self._samples or torch.equal(torch.cat(self._samples), torch.cat(later._samples))
        return "" if is_same else "parameters or buffers have"


def _plain_attributes(layer: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(layer).items() if isinstance(value, PLAIN_TYPES)}


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


def _sample(leaf: Any) -> Tensor:
    """Return the `sample_bytes` of a tensor; none of anything else."""
    tensor = unwrap(leaf)
    return sample_bytes(tensor.detach()) if isinstance(tensor, Tensor) else torch.empty(0, dtype=torch.uint8, device="cpu")
