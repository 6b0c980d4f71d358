"""Recomputation: a forward keeps only its inputs, and runs again in the backward, from the same state."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.python_objects import MODULE_ATTRIBUTES, SavedAttributes
from penstock.randomness import GeneratorAccess, list_generators, use_generator_states
from penstock.stage.attention import AttentionContext, current_context
from penstock.stage.backward.parameter_slot import replace_temporarily
from penstock.torch_private import TensorSlot, buffer_slots, tensor_version, tree_flatten, tree_unflatten

Recompute = Literal["stage", "block"]


class ForwardRecomputer:
    """Runs forwards of modules twice. For a step, it remembers what they may change, and whether they change inputs."""

    def __init__(self) -> None:
        self._state: dict[nn.Module, tuple[list[TensorSlot], list[GeneratorAccess], list[nn.Module]]] = {}
        self._keep_inputs: set[nn.Module] = set()  # modules that have left their inputs unchanged

    def begin_step(self) -> None:
        """Forget the last step: modules may have other buffers and generators now, and do something else."""
        self._state.clear()
        self._keep_inputs.clear()

    def run(self, module: nn.Module, forward: Callable[..., Any], seed: int | None, *args: Any) -> Any:
        """Return `forward(seed, *args)`, which runs `module`, and run it again in the backward.

        Its random numbers are the same: a seed sets the device's generator, without one torch restores its state, and the
        states of other generators, buffers and attributes are restored here.
        """
        if (state := self._state.get(module)) is None:
            owners = [submodule for submodule in module.modules() if not type(submodule).__module__.startswith("torch.nn.")]
            state = self._state[module] = _tensor_slots(module, owners), list_generators(module), owners
        slots, generators, owners = state
        changed_buffers: dict[str, Tensor] = {}  # name -> the value before the forward
        generator_states = [generator.read() for generator in generators]
        attributes = SavedAttributes(owners, MODULE_ATTRIBUTES)

        def make_contexts() -> tuple[Any, Any]:
            return (
                _record_changed_buffers(slots, changed_buffers) if slots else nullcontext(),
                _use_former_state(slots, changed_buffers, attributes, generators, generator_states),
            )

        inputs = _RecomputedInputs(forward, args, copy_inputs=module not in self._keep_inputs)
        output = checkpoint(
            inputs.run, seed, *args, use_reentrant=False, preserve_rng_state=seed is None, context_fn=make_contexts
        )
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
                    "in it or after it"
                )
            elif leaves[index].requires_grad:  # a hook that the forward puts on its gradient has been there since the first run
                leaves[index] = leaves[index].detach().requires_grad_()

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
def _use_former_state(
    slots: Sequence[TensorSlot],
    changed: dict[str, Tensor],
    attributes: SavedAttributes,
    generators: Sequence[GeneratorAccess],
    generator_states: Sequence[Any],
) -> Iterator[None]:
    """Run the second forward inside. All state is that from before the first forward; buffers are copies."""
    current_attributes = SavedAttributes(attributes.owners, MODULE_ATTRIBUTES)
    attributes.restore()
    try:
        buffers = _current_buffers(slots)
        copies = [(slot, changed[slot.name] if slot.name in changed else slot.tensor.clone()) for slot in buffers]
        with replace_temporarily(copies), use_generator_states(generators, generator_states):
            yield
    finally:
        current_attributes.restore()


def _current_buffers(slots: Sequence[TensorSlot]) -> list[TensorSlot]:
    """Return the slots with the tensors that are there now: a forward may put another one into a buffer's place."""
    tensors = [(slot, slot.registry.get(slot.key)) for slot in slots]
    return [slot._replace(tensor=tensor) for slot, tensor in tensors if isinstance(tensor, Tensor)]


def _tensor_slots(module: nn.Module, owners: Sequence[nn.Module]) -> list[TensorSlot]:
    """Return the slots of buffers, and of tensors that modules have as plain attributes."""
    names = {id(owner): name for name, owner in module.named_modules()}
    attributes = [
        TensorSlot(f"{names[id(owner)]}.{key}", owner, key, value, vars(owner))
        for owner in owners
        for key, value in vars(owner).items()
        if isinstance(value, Tensor)
    ]
    return buffer_slots(module) + attributes
