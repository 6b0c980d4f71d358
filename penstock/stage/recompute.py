"""Recomputation: a forward keeps only its inputs, and runs again in the backward, from the same state."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.stage.attention import AttentionContext, current_context
from penstock.stage.backward.parameter_slot import replace_temporarily
from penstock.torch_private import TensorSlot, buffer_slots, tensor_version, tree_flatten, tree_unflatten

Recompute = Literal["stage", "block"]


class ForwardRecomputer:
    """Runs forwards of modules twice. It remembers, for a step, which buffers they have and whether they change inputs."""

    def __init__(self) -> None:
        self._buffers: dict[nn.Module, list[TensorSlot]] = {}
        self._keep_inputs: set[nn.Module] = set()  # modules that have left their inputs unchanged

    def begin_step(self) -> None:
        """Forget the last step: modules may have other buffers now, and do something else."""
        self._buffers.clear()
        self._keep_inputs.clear()

    def run(self, module: nn.Module, forward: Callable[..., Any], seed: int | None, *args: Any) -> Any:
        """Return `forward(seed, *args)`, which runs `module`, and run it again in the backward.

        A seed makes its random numbers the same; without one torch restores the state of the generators.
        """
        if (slots := self._buffers.get(module)) is None:
            slots = self._buffers[module] = buffer_slots(module)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": seed is None}
        if slots:
            changed_buffers: dict[str, Tensor] = {}  # name -> the value before the forward
            options["context_fn"] = lambda: (
                _record_changed_buffers(slots, changed_buffers),
                _use_former_buffers(slots, changed_buffers),
            )

        inputs = _RecomputedInputs(forward, args, copy_inputs=module not in self._keep_inputs)
        output = checkpoint(inputs.run, seed, *args, **options)
        if not inputs.drop_unneeded_copies():
            self._keep_inputs.add(module)
        return output


class _RecomputedInputs:
    """Calls a forward twice with the same inputs, although it may change them in place.

    `copy_inputs`: copy them beforehand, in case it does.
    """

    def __init__(self, forward: Callable[..., Any], args: Sequence[Any], copy_inputs: bool) -> None:
        leaves, self._structure = tree_flatten(args)
        self._forward, self._has_run = forward, False
        self._num_calls = 0  # of `attention`, before the first run
        self._tensors = {
            index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not leaf.is_inference()
        }
        self._versions = {index: tensor_version(tensor) for index, tensor in self._tensors.items()}
        self._copies = {
            index: tensor.detach().clone().requires_grad_(tensor.requires_grad)
            for index, tensor in self._tensors.items()
            if copy_inputs
        }

    def drop_unneeded_copies(self) -> bool:
        """Keep copies only of the inputs that the first run has changed. Return whether it has changed any."""
        changed = [index for index, tensor in self._tensors.items() if tensor_version(tensor) != self._versions[index]]
        self._copies = {index: self._copies[index] for index in changed if index in self._copies}
        return bool(changed)

    def run(self, seed: int | None, *args: Any) -> Any:
        """Run the forward. Raises RuntimeError, as autograd does, if another operation has changed an input in between."""
        context = current_context() or AttentionContext()
        if not self._has_run:
            self._has_run, self._num_calls = True, context.num_calls
            return self._forward(seed, *args)

        leaves, _ = tree_flatten(args)
        for index, version in self._versions.items():
            if index in self._copies:
                leaves[index] = self._copies[index].clone()  # which is no leaf of autograd's, so the forward may change it
            elif tensor_version(leaves[index]) != version:
                raise RuntimeError(
                    f"the input {list(leaves[index].shape)} of what recompute= runs again was modified by an inplace operation "
                    "after it"
                )

        # The context must know which calls of `attention` are run again.
        num_calls, context.num_calls = context.num_calls, self._num_calls
        try:
            return self._forward(seed, *tree_unflatten(leaves, self._structure))
        finally:
            context.num_calls = num_calls


@contextmanager
def _record_changed_buffers(slots: Sequence[TensorSlot], changed: dict[str, Tensor]) -> Iterator[None]:
    """Run the first forward inside. Put the former values of the buffers that it changes into `changed`."""
    values = [(slot, tensor_version(slot.tensor), slot.tensor.clone()) for slot in _current_buffers(slots)]
    yield
    for slot, version, value in values:
        if slot.registry.get(slot.key) is not slot.tensor or tensor_version(slot.tensor) != version:
            changed[slot.name] = value


@contextmanager
def _use_former_buffers(slots: Sequence[TensorSlot], changed: dict[str, Tensor]) -> Iterator[None]:
    """Run the second forward inside. Buffers are copies with the values that they had before the first forward."""
    current = _current_buffers(slots)
    with replace_temporarily([(slot, changed[slot.name] if slot.name in changed else slot.tensor.clone()) for slot in current]):
        yield


def _current_buffers(slots: Sequence[TensorSlot]) -> list[TensorSlot]:
    """Return the slots with the tensors that are there now: a forward may put another one into a buffer's place."""
    return [slot._replace(tensor=tensor) for slot in slots if (tensor := slot.registry.get(slot.key)) is not None]
