"""What a loss declares: a mean or a sum, and what it ignores. It is weighted in `actions.py`."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

from torch import Tensor, nn

from penstock.batch.agreement import Reduction
from penstock.errors import MismatchError, is_whole_number

DEFAULT_IGNORE_INDEX = -100  # of torch's losses


class TargetWithTeacher(NamedTuple):
    """What the loss of a pipeline with a teacher takes besides the model's output."""

    target: Any
    teacher_output: Any


def loss_arguments(target: Any) -> tuple[Any, ...]:
    """Return what a loss takes behind the model's output: the target, and a teacher's output if there is one."""
    return tuple(target) if isinstance(target, TargetWithTeacher) else (target,)


def loss_with_teacher(loss_fn: Callable[..., Any], output: Any, target: TargetWithTeacher) -> Any:
    """Call `loss_fn(output, target, teacher_output)`."""
    return loss_fn(output, *loss_arguments(target))


def tokens(ignore_index: int = DEFAULT_IGNORE_INDEX, weight: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return a `loss_weight` that counts the values of a target that are not ignored; with class weights, it sums theirs.

        pipe = ps.Pipeline(model, nn.CrossEntropyLoss(), microbatches=8, loss_weight=ps.tokens())

    The mean of `cross_entropy` and `nll_loss` divides by the same number, with label smoothing too.

    ignore_index
        The value that does not count, the loss's own.
    weight
        (classes,): the loss's own `weight`, in any dtype and on any device.

    The returned function takes a microbatch's target, a tensor of class numbers of any shape. If the target is a tree, or the
    loss uses a part of it only, call it with that part: `lambda target: ps.tokens()(target[:, 1:])`.

    Raises MismatchError for an `ignore_index` or a `weight` of another kind, and for a target that has no class numbers.
    """
    if not is_whole_number(ignore_index):
        raise MismatchError(f"ps.tokens() takes a whole number as ignore_index, got {ignore_index!r}")
    if weight is not None and not (isinstance(weight, Tensor) and weight.dim() == 1):
        got = f"one of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else f"a {type(weight).__name__}"
        raise MismatchError(f"ps.tokens() takes a tensor with one weight for each class as weight, got {got}")
    return partial(_count_tokens, ignore_index, None if weight is None else weight.detach().double().cpu())


def _count_tokens(ignore_index: int, weight: Tensor | None, target: Tensor) -> Tensor:
    if not isinstance(target, Tensor) or target.is_floating_point() or target.is_complex():
        got = f"one of {target.dtype}" if isinstance(target, Tensor) else f"a {type(target).__name__}"
        raise MismatchError(
            f"ps.tokens() counts in a tensor of class numbers, got {got}: of a tree take the part that the loss sees, "
            "loss_weight=lambda target: ps.tokens()(target['labels']); probabilities need no loss_weight"
        )
    target = target.long()  # in uint8 -100 would be 156
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    weight = weight.to(target.device, non_blocking=True)
    return weight[target.where(counted, 0)].where(counted, 0).sum()


# -- what a loss says of itself -------------------------------------------------------------------------------------------


class LossComponent(NamedTuple):
    """A function or module that a loss consists of, and the settings that it declares."""

    name: str
    settings: Any  # an object with them as attributes

    @property
    def reduction(self) -> str | None:
        """The reduction it declares: "mean", "sum" or "none"; None if it declares another or none."""
        value = getattr(self.settings, "reduction", None)
        return value if isinstance(value, str) and value in (*get_args(Reduction), "none") else None

    @property
    def ignore_index(self) -> int | None:
        """The value of a target that it ignores."""
        value = getattr(self.settings, "ignore_index", None)
        return value if isinstance(value, int) else None

    @property
    def class_weight(self) -> Tensor | None:
        """The class weights by whose sum it divides. Other losses of torch multiply by weights, and divide by the rows."""
        divides = self.name in ("CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss") or self.ignore_index is not None
        value = getattr(self.settings, "weight", None) if divides else None
        return value if isinstance(value, Tensor) and value.dim() == 1 else None


def loss_components(loss_fn: Any) -> Iterator[LossComponent]:
    """Return what `loss_fn` visibly consists of, outermost first: a partial's arguments, modules inside of modules."""
    if isinstance(loss_fn, partial):
        loss_fn, keywords = loss_fn.func, loss_fn.keywords
        outermost = next(loss_components(loss_fn))
        yield LossComponent(outermost.name, SimpleNamespace(**{"reduction": outermost.reduction, **keywords}))
    owner = getattr(loss_fn, "__self__", loss_fn)  # `loss.forward` is a method of a module
    for part in owner.modules() if isinstance(owner, nn.Module) else [owner]:
        yield LossComponent(getattr(part, "__name__", type(part).__name__), part)


def check_reduction(loss_fn: Any, reduction: Any, loss_weight: Any) -> None:
    """Raise MismatchError for an unknown `reduction`, and for a loss that declares another one."""
    if reduction not in get_args(Reduction):
        raise MismatchError(f"reduction is 'mean' or 'sum', what loss_fn returns of a microbatch's rows, not {reduction!r}")
    if reduction == "sum" and loss_weight is not None:
        raise MismatchError("loss_weight says what microbatches count in a mean, and reduction='sum' adds them: leave out one")

    loss = next(loss_components(loss_fn))
    if loss.reduction == "none":
        raise MismatchError(
            f"{loss.name} has reduction='none', and a loss is one number: give it reduction={reduction!r}; or, where it "
            "reduces in its own way, a function of it, lambda output, target: loss(output, target)"
        )
    if loss.reduction not in (None, reduction):
        raise MismatchError(
            f"{loss.name} has reduction={loss.reduction!r}, and the pipeline takes what it returns for a {reduction}: pass "
            f"Pipeline(.., reduction={loss.reduction!r}), or give the loss reduction={reduction!r}"
        )


def warn_of_inner_reduction(loss_fn: Any, reduction: Reduction) -> None:
    """Warn if a module inside of the loss has another reduction: the loss may divide by the count itself, or may not."""
    outermost, *inner = loss_components(loss_fn)
    different = [part for part in inner if part.reduction not in (None, "none", reduction)]
    if outermost.reduction is None and different:
        name, inner_reduction = different[0].name, different[0].reduction
        warnings.warn(
            f"loss_fn has a {name} with reduction={inner_reduction!r}, and the pipeline takes what loss_fn returns for a "
            f"{reduction}: if that is a {inner_reduction}, pass Pipeline(.., reduction={inner_reduction!r})",
            stacklevel=4,
        )
