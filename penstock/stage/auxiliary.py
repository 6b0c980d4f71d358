"""Losses that arise inside a model, as those that balance a mixture of experts: they are added to the batch's loss."""

from torch import Tensor

from penstock.errors import MismatchError

_collected: list[Tensor] | None = None


def auxiliary_loss(value: Tensor) -> None:
    """Add `value`, a scalar, to this microbatch's loss, from anywhere in a model's forward.

    In a pipeline's step it counts as the microbatch's loss does: its weighted sum over the microbatches is part of what
    `step()` returns and of every gradient. Outside of a step, and in an evaluation without a target, nothing happens.
    Raises MismatchError if it is no floating-point scalar.
    """
    if value.numel() != 1 or not value.is_floating_point():
        raise MismatchError(f"an auxiliary loss is a floating-point scalar, got {value.dtype} of shape {tuple(value.shape)}")
    if _collected is not None:
        _collected.append(value)


class AuxiliaryLossCollector:
    """A context for a stage's forward. Its value is a list that collects the auxiliary losses."""

    def __enter__(self) -> list[Tensor]:
        global _collected
        self._outer, _collected = _collected, []
        return _collected

    def __exit__(self, *_: object) -> None:
        global _collected
        _collected = self._outer
