"""A stand-in for the model where Trainer calls it."""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import maybe_install_capturing_hooks

import penstock as ps


class ModelView:
    """Has all attributes and the type of the uncut model, but calling it calls `forward`."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        self._model, self._forward = model, forward

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for isinstance
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`. Raises MismatchError for positional arguments."""
        if args:
            raise ps.MismatchError(
                "compute_loss calls the model with arguments by position: give them by name, model(**inputs)"
            )
        return self._forward(**kwargs)


def prepare_for_cut(model: nn.Module) -> None:
    """Turn off the cache in the model's outputs, and install the hooks that transformers installs at the first forward."""
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        if getattr(module.config, "use_cache", False):  # a decoder may have its own config, which Trainer does not change
            module.config.use_cache = False
        records = getattr(module, "_can_record_outputs", None) or {}
        if any(getattr(module.config, f"output_{name}", False) for name in records):  # as the routers' logits
            maybe_install_capturing_hooks(module)
