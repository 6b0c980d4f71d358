"""Losses of stages in the middle, as those that balance a mixture of experts: added to the batch's loss where they arise."""

from torch import Tensor

from penstock.errors import MismatchError

_collecting: list[Tensor] | None = None


def auxiliary_loss(value: Tensor) -> None:
    """Add `value`, a scalar, to this microbatch's loss, from anywhere in a model's forward.

    In a pipeline's step it counts as the microbatch's loss does: its weighted sum over the microbatches is part of what
    `step()` returns and of every gradient. Outside of one, and in an evaluation without a target, nothing happens.
    Raises MismatchError if it is no floating-point scalar.
    """
    if value.numel() != 1 or not value.is_floating_point():
        raise MismatchError(f"an auxiliary loss is a floating-point scalar, got {value.dtype} of shape {tuple(value.shape)}")
    if _collecting is not None:
        _collecting.append(value)


class CollectAuxiliaryLosses:
    """Around a stage's forward: the auxiliary losses that arise inside."""

    def __enter__(self) -> list[Tensor]:
        global _collecting
        self._outer, _collecting = _collecting, []
        return _collecting

    def __exit__(self, *_: object) -> None:
        global _collecting
        _collecting = self._outer
