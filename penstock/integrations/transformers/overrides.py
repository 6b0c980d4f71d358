"""Which methods that a script overrides are called: the order of classes, and the overrides that are refused.

The mixin stands directly above transformers' Trainer in every class, wherever a script writes it. So a method of the script's
class is called with what plain Trainer calls it with, and its `super()` leads to the mixin.
"""

from abc import ABCMeta
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import transformers
from torch import Tensor

import penstock as ps
from penstock.torch_private import tensor_version

REFUSED_OVERRIDES = {  # method of transformers' Trainer: what the pipeline does in its place; what to do
    "_wrap_model": "runs the model's stages, and no wrapper around the model: change its layers before Trainer(model, ..)",
    "_move_model_to_device": "moves each rank's stages by itself: change the model before Trainer(model, ..)",
    "_prepare_context_parallel_inputs": "replaces accelerate's context parallelism: change the batch in _prepare_inputs",
    "_has_mixed_mesh_grads": "takes the norm over the gradients of all ranks: override _clip_grad_norm",
    "_mixed_mesh_grad_norm": "takes the norm over the gradients of all ranks: override _clip_grad_norm",
}


class MixinAboveTrainer(ABCMeta):
    """The metaclass of a mixin that stands directly above transformers' Trainer in the order of a class's methods."""

    def mro(cls) -> list[type]:
        """Return the order of Python, but with the mixin directly above Trainer."""
        order = super().mro()
        if transformers.Trainer in order:
            mixin = next(parent for parent in reversed(order) if isinstance(parent, MixinAboveTrainer))
            order.remove(mixin)
            order.insert(order.index(transformers.Trainer), mixin)
        return order


def check_overrides(trainer: Any) -> None:
    """Raise MismatchError if the trainer's class, or the trainer itself, has a method that would never be called."""
    for owner, attributes in _user_attributes(trainer):
        for name, replacement in REFUSED_OVERRIDES.items():
            if name in attributes:
                raise ps.MismatchError(f"{owner}.{name} would never be called, because a pipeline {replacement}")


def _user_attributes(trainer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return what is set on the trainer, and on its classes above the mixin, each with its name."""
    yield "trainer", vars(trainer)
    for parent in type(trainer).__mro__:
        if parent.__module__.startswith("penstock.") or parent is transformers.Trainer:
            return
        yield parent.__name__, dict(vars(parent))


class BatchResult(NamedTuple):
    """What the pipeline made of a batch: its loss, what `compute_loss` logged and decided, and the batch as it was then."""

    loss: Tensor
    logs: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]  # arguments of `Trainer.log`
    decisions: Mapping[str, bool]  # of `trainer.control`
    batch: list[tuple[str, Any, int]]

    def check_batch(self, inputs: Mapping[str, Any]) -> None:
        """Raise MismatchError if `inputs`, of which the script wants the loss, are not the batch that was run."""
        if len(inputs) != len(self.batch) or any(
            name not in inputs or inputs[name] is not value or _version(value) != version for name, value, version in self.batch
        ):
            raise ps.MismatchError(
                "training_step() gets another batch than get_batch_samples() has returned, but the pipeline has run all "
                "batches of the step at once: change batches in the collator, or in _prepare_inputs(self, inputs)"
            )


def batch_content(batch: Mapping[str, Any]) -> list[tuple[str, Any, int]]:
    """Return names, values and versions of the tensors of a batch."""
    return [(name, value, _version(value)) for name, value in batch.items()]


def _version(value: Any) -> int:
    return tensor_version(value) if isinstance(value, Tensor) and not value.is_inference() else 0
