"""How a stage runs its module: layer by layer, each with random numbers of its own, and recomputed where that is asked for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import MismatchError
from penstock.partition.graph_stage import GraphStage
from penstock.randomness import default_generator, mix_in
from penstock.stage.parameter_slot import installed
from penstock.torch_private import (
    TensorSlot,
    buffer_slots,
    children_by_name,
    fsdp_casts_inputs_or_outputs,
    has_hooks,
    has_hooks_or_patched_forward,
    is_compiled,
    tensor_version,
    tree_flatten,
    tree_unflatten,
)

Recompute = Literal["stage", "block"]
LOSS = 2**32  # no layer's number

# Layers that draw no random numbers need no seed, which would cost them a microsecond or two each time.
NEVER_RANDOM = frozenset(
    (
        nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm,
        nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.Flatten,
    )
)  # fmt: skip


def check_recompute(recompute: object) -> None:
    """Raises MismatchError for what is no way to compute again."""
    if recompute not in (None, "stage", "block"):
        raise MismatchError(f"recompute={recompute!r}: use 'stage', 'block' or None")


DETERMINISTIC_LOSSES = (nn.functional.cross_entropy, nn.functional.mse_loss)  # which draw none either


def _may_draw(layer: Callable[..., Any]) -> bool:
    """Whether `layer` may draw random numbers: of those that do not, its hooks may, or what was put over its forward."""
    return type(layer) not in NEVER_RANDOM or has_hooks_or_patched_forward(layer)  # type: ignore[arg-type]


class ModuleRunner:
    """A stage's module, run layer by layer where its layers are known.

    `numbers` are those, in the uncut model, of the children of a part of a Sequential. With a seed, each layer draws its
    random numbers from that and its own number; a module whose layers are not known draws from one seed, numbered `index`.
    `recompute`: keep only the input of the whole `stage`, or of each `block` (layer), and run it again in the backward.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        device: torch.device,
        numbers: Sequence[int] | None = None,
        recompute: Recompute | None = None,
    ) -> None:
        check_recompute(recompute)
        self.index, self.module, self.recompute = index, module, recompute
        self.generator = default_generator(device)
        self._buffers: dict[nn.Module, list[TensorSlot]] = {}  # of what runs again
        self._changes_nothing: set[nn.Module] = set()  # of that, what left its input as it was
        known = numbers is not None and type(module).forward is nn.Sequential.forward and "forward" not in vars(module)
        self._layers = tuple(zip(numbers or (), children_by_name(module).values(), strict=True)) if known else None

    def run(self, seed: int | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The module's output. `seed` is of this step and microbatch; it moves the device's generator."""
        if self.recompute == "stage" and torch.is_grad_enabled():
            return self._again(self.module, self._run, seed, args, kwargs)
        return self._run(seed, args, kwargs)

    def forget(self) -> None:
        """Before a step: there may be other buffers, and layers may do something else."""
        self._buffers.clear()
        self._changes_nothing.clear()

    def seed_loss(self, seed: int) -> None:
        """After the last layer: what the loss draws depends on `seed` alone."""
        self.generator.manual_seed(mix_in(seed, LOSS))

    def _run(self, seed: int | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if seed is None and self.recompute != "block":
            return self.module(*args, **kwargs)
        known = isinstance(self.module, GraphStage) or (self._layers is not None and not kwargs and len(args) == 1)
        if not known or is_compiled(self.module):
            return self._call(seed, self.index, self.module, args, kwargs)
        forward = self._graph if isinstance(self.module, GraphStage) else self._chain
        if not self._hooks_matter():
            return forward(seed, *args, **kwargs)
        if seed is not None:  # hooks may draw too; ~index is no layer's number
            self.generator.manual_seed(mix_in(seed, ~self.index))
        self.module.forward = partial(forward, seed)
        try:
            return self.module(*args, **kwargs)
        finally:
            del self.module.forward

    def _hooks_matter(self) -> bool:
        """Whether hooks of the module must run: of those of `fully_shard`, `FSDPReplication` does all but casts."""
        is_sharded = hasattr(self.module, "unshard")
        return fsdp_casts_inputs_or_outputs(self.module) if is_sharded else has_hooks(self.module)

    def _graph(self, seed: int | None, *args: Any, **kwargs: Any) -> Any:
        return self.module.penstock(args, kwargs, partial(self._call, seed))  # type: ignore[operator]

    def _chain(self, seed: int | None, value: Any) -> Any:
        for number, layer in self._layers or ():
            if self.recompute == "block":
                value = self._call(seed, number, layer, (value,), {})
            else:  # the short way: this runs for every layer and microbatch
                if seed is not None and _may_draw(layer):
                    self.generator.manual_seed(mix_in(seed, number))
                value = layer(value)
        return value

    def _call(
        self, seed: int | None, number: int, layer: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if self.recompute == "block" and isinstance(layer, nn.Module) and torch.is_grad_enabled():
            return self._again(layer, self._seeded, seed, number, layer, args, kwargs)
        return self._seeded(seed, number, layer, args, kwargs)

    def _seeded(
        self, seed: int | None, number: int, layer: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if seed is not None and _may_draw(layer):
            self.generator.manual_seed(mix_in(seed, number))
        return layer(*args, **kwargs)

    def _again(self, module: nn.Module, run: Callable[..., Any], seed: int | None, *further: Any) -> Any:
        """`run(seed, ..)`, and in the backward once more; a seed makes random numbers the same, else torch brings them back."""
        if (slots := self._buffers.get(module)) is None:
            slots = self._buffers[module] = buffer_slots(module)
        moved, options = dict[str, Tensor](), dict[str, Any](use_reentrant=False, preserve_rng_state=seed is None)
        if slots:
            options["context_fn"] = lambda: (_noting(slots, moved), _as_before(slots, moved))
        given = _Given(run, further, copies=module not in self._changes_nothing)
        output = checkpoint(given.run, seed, *further, **options)
        if not given.changed():
            self._changes_nothing.add(module)
        return output


class _Given:
    """What a forward that runs again is given, the second time as it was: the forward may change it in place.

    `copies`: keep some of what it was, in case it does.
    """

    def __init__(self, run: Callable[..., Any], given: Sequence[Any], copies: bool) -> None:
        leaves, self._tree = tree_flatten(given)
        tensors = {place: each for place, each in enumerate(leaves) if isinstance(each, Tensor) and not each.is_inference()}
        self._run, self._tensors, self._ran = run, tensors, False
        self._versions = {place: tensor_version(each) for place, each in tensors.items()}
        self._copies = {
            place: each.detach().clone().requires_grad_(each.requires_grad) for place, each in tensors.items() if copies
        }

    def changed(self) -> bool:
        """After the forward: whether it has changed any of it; copies of the rest are let go."""
        changed = [place for place, each in self._tensors.items() if tensor_version(each) != self._versions[place]]
        self._copies = {place: self._copies[place] for place in changed if place in self._copies}
        return bool(changed)

    def run(self, seed: int | None, *given: Any) -> Any:
        """The forward, once and again. Raises RuntimeError, as autograd does, if what it needs was changed by others."""
        if not self._ran:
            self._ran = True
            return self._run(seed, *given)
        leaves, _ = tree_flatten(given)
        for place, version in self._versions.items():
            if place in self._copies:
                leaves[place] = self._copies[place].clone()  # no leaf of autograd's: the forward changes it again
            elif tensor_version(leaves[place]) != version:
                told = f"the input {list(leaves[place].shape)} of what recompute= runs again"
                raise RuntimeError(f"{told} was modified by an inplace operation after it")
        return self._run(seed, *tree_unflatten(leaves, self._tree))


@contextmanager
def _noting(slots: Sequence[TensorSlot], moved: dict[str, Tensor]) -> Iterator[None]:
    """Around a forward: notes which buffers it moves, and what they were."""
    before = [(slot, tensor_version(slot.tensor), slot.tensor.clone()) for slot in _now(slots)]
    yield
    for slot, version, copied in before:
        if slot.registry.get(slot.key) is not slot.tensor or tensor_version(slot.tensor) != version:
            moved[slot.name] = copied


@contextmanager
def _as_before(slots: Sequence[TensorSlot], moved: dict[str, Tensor]) -> Iterator[None]:
    """Around the same forward once more: it begins with what it had moved as that was, and moves only copies."""
    with installed([(slot, moved[slot.name] if slot.name in moved else slot.tensor.clone()) for slot in _now(slots)]):
        yield


def _now(slots: Sequence[TensorSlot]) -> list[TensorSlot]:
    """With what is there now: a forward may put another tensor in a buffer's place."""
    return [slot._replace(tensor=here) for slot in slots if (here := slot.registry.get(slot.key)) is not None]


@contextmanager
def evaluation_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """All of `modules` in evaluation mode, each submodule back in its own afterwards."""
    training = [(submodule, submodule.training) for module in modules for submodule in module.modules()]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for submodule, mode in training:
            submodule.training = mode
