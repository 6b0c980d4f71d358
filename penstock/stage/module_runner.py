"""How a stage runs its module: layer by layer, each with its own random numbers, and recomputed in the backward on demand."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.partition.graph_stage import GraphStage
from penstock.python_objects import preserve_training_flags
from penstock.randomness import default_generator, mix_in
from penstock.stage.recompute import ForwardRecomputer, Recompute
from penstock.torch_private import (
    children_by_name,
    fsdp_casts_inputs_or_outputs,
    has_hooks,
    has_hooks_of_user,
    has_hooks_or_patched_forward,
    is_compiled,
)

LOSS_NUMBER = 2**32  # no layer has this number

# Seeding costs a microsecond or two for each layer, so it is left out for those that draw no random numbers.
DETERMINISTIC_LAYERS = frozenset(
    (
        nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm,
        nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.Flatten,
    )
)  # fmt: skip
DETERMINISTIC_LOSSES = (nn.functional.cross_entropy, nn.functional.mse_loss)


def _may_draw_random_numbers(layer: Callable[..., Any]) -> bool:
    """Return whether `layer` may draw random numbers: itself, in a hook, or in a forward that replaces its class's."""
    return type(layer) not in DETERMINISTIC_LAYERS or has_hooks_or_patched_forward(layer)  # type: ignore[arg-type]


class ModuleRunner:
    """Runs a stage's module, layer by layer where its layers are known.

    `layer_numbers`: for a part of an `nn.Sequential`, the numbers of its children in the uncut model. With a seed, each layer
    draws its random numbers from that and its number. A module whose layers are not known is one layer, numbered `index`.
    `recompute`: keep only the input of the whole "stage", or of each "block" (layer), and run it again in the backward.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        device: torch.device,
        layer_numbers: Sequence[int] | None,
        recompute: Recompute | None,
    ) -> None:
        self.index, self.module, self.recompute = index, module, recompute
        self.generator = default_generator(device)
        self._recomputer = ForwardRecomputer()

        plain_sequential = type(module).forward is nn.Sequential.forward and "forward" not in vars(module)
        self._layer_numbers = layer_numbers if plain_sequential else None
        self._layers: tuple[tuple[int, nn.Module], ...] | None
        self._read_module()

    def begin_step(self) -> None:
        """Forget what was learned of the module in the last step, and look at it anew."""
        if self.recompute is not None:
            self._recomputer.begin_step()
        self._read_module()

    def _read_module(self) -> None:
        """Find how the module is run, once a step: a user may have compiled it since, added hooks or replaced a layer."""
        self._layers = None
        if self._layer_numbers is not None:
            children = children_by_name(self.module).values()
            is_known = len(self._layer_numbers) == len(children)
            self._layers = tuple(zip(self._layer_numbers, children, strict=True)) if is_known else None
        self._is_compiled, is_sharded = is_compiled(self.module), self._is_sharded
        # Hooks of `fully_shard` make zeros of a gradient that is None in a backward: `FSDPHooks` does all that they do.
        skips_hooks = is_sharded and not self._has_hooks_to_run() and not self._is_compiled
        self._call_module: Callable[..., Any] = self.module.forward if skips_hooks else self.module
        self._drawing_layers = {number for number, layer in self._layers or () if _may_draw_random_numbers(layer)}
        self._module_draws = _may_draw_random_numbers(self.module)
        self._is_one_layer = self._is_compiled or (self._layers is None and not isinstance(self.module, GraphStage))

    def run(self, seed: int | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the module's output. `seed`: of this step and microbatch; it moves the device's generator."""
        if self.recompute == "stage" and torch.is_grad_enabled():
            return self._recomputer.run(self.module, self._run_module, seed, args, kwargs)
        return self._run_module(seed, args, kwargs)

    def seed_loss(self, seed: int) -> None:
        """After the last layer, seed the loss: what it draws depends on `seed` alone."""
        self.generator.manual_seed(mix_in(seed, LOSS_NUMBER))

    def _run_module(self, seed: int | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        # Nothing has to be done between the layers.
        if seed is None and self.recompute != "block":
            return self._call_module(*args, **kwargs)

        # The layers are not known: the module is one layer.
        if self._is_one_layer and self.recompute != "block":  # `_run_layer`, written out
            if self._module_draws:
                self.generator.manual_seed(mix_in(seed, self.index))  # type: ignore[arg-type]
            return self._call_module(*args, **kwargs)
        run_layers = None if self._is_one_layer else self._find_layer_by_layer_method(args, kwargs)
        if run_layers is None:
            return self._run_layer(seed, self.index, self.module, args, kwargs)

        # Layer by layer. The module itself is not called, which nobody notices.
        if not self._has_hooks_to_run():
            return run_layers(seed, *args, **kwargs)

        # Layer by layer inside a call of the module, which runs its hooks. These may draw random numbers too.
        if seed is not None:
            self.generator.manual_seed(mix_in(seed, ~self.index))  # no layer has this number
        self.module.forward = partial(run_layers, seed)
        try:
            return self.module(*args, **kwargs)
        finally:
            del self.module.forward

    def _find_layer_by_layer_method(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
        """Return the method that runs the module's layers one by one; None if it has to be called as a whole."""
        if isinstance(self.module, GraphStage):
            return self._run_graph
        return self._run_sequential if self._layers is not None and not kwargs and len(args) == 1 else None

    def _has_hooks_to_run(self) -> bool:
        """Return whether hooks of the module must run. `FSDPHooks` does all that `fully_shard`'s do, except casts."""
        if self._is_sharded:
            return fsdp_casts_inputs_or_outputs(self.module) or has_hooks_of_user(self.module)
        return has_hooks(self.module)

    @property
    def _is_sharded(self) -> bool:
        return hasattr(type(self.module), "unshard")  # of the instance, nn.Module would look among its parameters

    def _run_graph(self, seed: int | None, *args: Any, **kwargs: Any) -> Any:
        return self.module.penstock(args, kwargs, partial(self._run_layer, seed))  # type: ignore[operator]

    def _run_sequential(self, seed: int | None, value: Any) -> Any:
        for number, layer in self._layers or ():
            if self.recompute == "block":
                value = self._run_layer(seed, number, layer, (value,), {})
            else:  # `_run_seeded`, written out: this runs for every layer and microbatch
                if seed is not None and number in self._drawing_layers:
                    self.generator.manual_seed(mix_in(seed, number))
                value = layer(value)
        return value

    def _run_layer(
        self, seed: int | None, number: int, layer: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if self.recompute == "block" and isinstance(layer, nn.Module) and torch.is_grad_enabled():
            return self._recomputer.run(layer, self._run_seeded, seed, number, layer, args, kwargs)
        return self._run_seeded(seed, number, layer, args, kwargs)

    def _run_seeded(
        self, seed: int | None, number: int, layer: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if seed is not None and _may_draw_random_numbers(layer):
            self.generator.manual_seed(mix_in(seed, number))
        return (self._call_module if layer is self.module else layer)(*args, **kwargs)


@contextmanager
def evaluation_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put all `modules` into evaluation mode; afterwards restore the mode of each submodule."""
    with preserve_training_flags(modules):
        for module in modules:
            module.eval()
        yield
