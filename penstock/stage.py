"""One stage: its forward, its backward, and what it keeps alive in between."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock import wire
from penstock.randomness import advance, generator_of
from penstock.replicas import Replicas
from penstock.split_backward import Splitter
from penstock.standins import PutOff
from penstock.uses import run_backward

# Layers that draw no random numbers need no seed, which would cost them a microsecond or two each time.
NEVER_RANDOM = frozenset(
    (
        nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm,
        nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.Flatten,
    )
)  # fmt: skip


class Entry:
    """A stage's input: where the gradients of its tensors are put when the backward reaches them."""

    def __init__(self) -> None:
        self.tensors: tuple[Tensor, ...] = ()
        self.gradients: tuple[Tensor | None, ...] = ()

    def admit(self, value: Any) -> Any:
        """`value` with those of its tensors that require a gradient connected to this entry."""
        if isinstance(value, Tensor):  # the common case, a short way
            return self._admit([value])[0] if value.requires_grad else value
        leaves, tree = wire.flatten(value)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not places:
            return value
        for place, admitted in zip(places, self._admit([leaves[place] for place in places]), strict=True):
            leaves[place] = admitted
        return wire.tree_unflatten(leaves, tree)

    def _admit(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        self.tensors = tuple([tensor.detach() for tensor in tensors])
        self.gradients = (None,) * len(tensors)
        return _Admit.apply(_ANCHOR, self)


class _Admit(torch.autograd.Function):
    """Turns received memory into tensors of the graph. They are not leaves: a layer may change them in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, entry: Entry) -> tuple[Tensor, ...]:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        tensors, entry.tensors = entry.tensors, ()
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        ctx.entry.gradients = gradients
        return None, None


_ANCHOR = torch.empty(0, requires_grad=True)


class Kept(NamedTuple):
    """What a microbatch in flight keeps alive on a stage, besides what its graph saved."""

    entry: Entry
    edges: tuple[GradientEdge, ...]  # of the outputs: an output itself goes as soon as it is sent
    put_off: PutOff | None  # if the backward is split
    ends: tuple[Tensor, ...]  # what replicas must know of the graph


class Stage:
    """A stage of the model on this rank.

    `layers` are the numbers, in the uncut model, of the module's children where it is a piece of a Sequential: each layer
    then draws its random numbers from a seed of its own. Otherwise the whole stage draws from one, numbered `index`.
    `merge`: weights' gradients that were put off may be summed in another order (see `split_backward.py`).
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        device: torch.device,
        layers: Sequence[int] | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        merge: bool = False,
    ) -> None:
        self.index, self.module, self.device, self.loss_fn = index, module, device, loss_fn
        self.layers = None if layers is None else tuple(zip(layers, module.children(), strict=True))
        self.generator = generator_of(device)
        self.spread = _takes_several(module)
        self.kept: dict[int, Kept] = {}
        self._replicas = Replicas(module)
        self._splitter = Splitter(module, merge and not self._replicas)
        self._put_off: dict[int, PutOff] = {}  # microbatch -> what its W will do

    def forward(self, microbatch: int, value: Any, seed: int | None = None, keep: bool = True, split: bool = False) -> Any:
        """The output for the `value` the stage before sent; keeps what the backward needs unless told not to.

        `split`: the backward will be `backward_input` and `backward_weight`. With a `seed`, every layer's random numbers
        depend on it, the microbatch and the layer alone. Seeding moves the device's generator; whoever calls puts it back.
        """
        entry = Entry()
        with _grad_mode(keep):
            args, kwargs = self._arguments(entry.admit(value))
        return self._forward(microbatch, entry, args, kwargs, seed, keep, split)

    def first_forward(
        self, microbatch: int, args: Any, kwargs: Any, seed: int | None = None, keep: bool = True, split: bool = False
    ) -> Any:
        """As `forward`, for the stage that the batch goes into."""
        return self._forward(microbatch, Entry(), args, kwargs, seed, keep, split)

    def _forward(self, microbatch: int, entry: Entry, args: Any, kwargs: Any, seed: int | None, keep: bool, split: bool) -> Any:
        put_off = self._splitter.begin() if split and keep else None
        with _grad_mode(keep), self._replicas.quiet(), put_off.installed() if put_off else _NOTHING:
            output = self._seeded(microbatch, seed, args, kwargs)
        if keep:
            self._keep(microbatch, entry, output, put_off)
        return output

    def loss(self, microbatch: int, output: Any, target: Any, keep: bool = True) -> Tensor:
        """The loss of `output`; if kept, the backward of `microbatch` now starts there. Raises ValueError if not a scalar."""
        assert self.loss_fn is not None
        with _grad_mode(keep):
            loss = self.loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn must return a floating-point scalar tensor, got {got}")
        if keep:
            kept = self.kept[microbatch]
            self._keep(microbatch, kept.entry, loss, kept.put_off)
        return loss.detach()

    def backward(self, microbatch: int, gradients: Sequence[Tensor | None], last: bool = False) -> list[Tensor | None]:
        """Backward from the `gradients` of the outputs that require one; returns those of the inputs that do.

        Full, unless the forward was told that it will be split: then the weights' gradients are left for
        `backward_weight`. On the last stage the one output is the loss, if anything below it requires a gradient at all.
        `last`: the weights' gradients of this step are complete with it.
        """
        entry, edges, put_off, ends = self.kept.pop(microbatch)
        pairs = [(edge, gradient) for edge, gradient in zip(edges, gradients, strict=True) if gradient is not None]
        if put_off is not None:
            self._put_off[microbatch] = put_off
        if last:
            self._replicas.expect(ends)
        if pairs:
            with put_off.installed() if put_off else _NOTHING:  # a checkpoint runs the forward again
                run_backward(*zip(*pairs, strict=True))
        return list(entry.gradients)

    def backward_weight(self, microbatches: Sequence[int], last: bool = False) -> None:
        """Add the weights' gradients that `backward` left, those of several microbatches as one; `last` as there."""
        put_off = [self._put_off.pop(microbatch) for microbatch in microbatches]
        self._splitter.end(put_off, last, self._replicas.expect if last and self._replicas else None)

    def forget(self) -> None:
        """Before a step: let go of all microbatches that a step which did not end left in flight."""
        self.kept.clear()
        self._put_off.clear()
        self._splitter.refresh()

    def _keep(self, microbatch: int, entry: Entry, output: Any, put_off: PutOff | None) -> None:
        leaves, _ = wire.flatten(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        edges = tuple([get_gradient_edge(tensor) for tensor in tensors])
        self.kept[microbatch] = Kept(entry, edges, put_off, self._replicas.ends(tensors))

    def _arguments(self, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward of several parameters gets a tuple or list spread over them, a dict by name; else the value is one."""
        if self.spread and isinstance(value, tuple | list):
            return tuple(value), {}
        if self.spread and isinstance(value, dict) and value.keys() <= self.spread:
            return (), value
        return (value,), {}

    def _seeded(self, microbatch: int, seed: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if seed is None:
            return self.module(*args, **kwargs)
        seed, generator = advance(seed, microbatch), self.generator
        if self.layers is None or kwargs or len(args) != 1:
            generator.manual_seed(advance(seed, self.index))
            return self.module(*args, **kwargs)
        (value,) = args
        for number, layer in self.layers:
            if type(layer) not in NEVER_RANDOM:
                generator.manual_seed(advance(seed, number))
            value = layer(value)
        return value


def _grad_mode(enabled: bool) -> AbstractContextManager[Any]:
    """Gradients on or off; nothing to do in the common case."""
    return _NOTHING if torch.is_grad_enabled() == enabled else torch.set_grad_enabled(enabled)


_NOTHING: AbstractContextManager[Any] = nullcontext()


def _takes_several(module: nn.Module) -> frozenset[str]:
    """The parameters of the module's forward if they are several, else nothing."""
    parameters = inspect.signature(module.forward).parameters.values()
    several = len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return frozenset(p.name for p in parameters) if several else frozenset()


def handed_over(value: Any) -> Any:
    """`value` as the next stage of the same rank receives it: the same memory, cut off from the graph that made it."""
    leaves, tree = wire.flatten(value)
    cut = [leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return cut[0] if isinstance(value, Tensor) else wire.tree_unflatten(cut, tree)
