"""What a pipeline takes a loss for: a mean or a sum over its rows; and what each microbatch counts in the mean."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from penstock.engine.checks import is_power_of_two
from penstock.errors import MismatchError, is_whole_number
from penstock.partition.rows import rows_dim_of, unwrap
from penstock.randomness import fork_generator
from penstock.stage.microbatch import count_rows, microbatch_weights, nonempty_split_sizes, split
from penstock.trees import leaves, map_tensors, tensors

Reduction = Literal["mean", "sum"]
IGNORED = -100  # the value of a target that torch's losses ignore unless they are given another


def tokens(ignore_index: int = IGNORED, weight: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """A `loss_weight`: how many values of a target are not ignored; with class weights, the sum of theirs.

        pipe = ps.Pipeline(model, nn.CrossEntropyLoss(), microbatches=8, loss_weight=ps.tokens())

    It is what the mean of `cross_entropy` and `nll_loss` divides by, with label smoothing too.

    ignore_index
        The value that does not count, the loss's own.
    weight
        (classes,): the loss's own `weight`, in any dtype and on any device.

    The function that it returns takes a microbatch's target, a tensor of class numbers of any shape. Where the target is a
    tree, or the loss leaves a part of it out, call it with what the loss sees: `lambda target: ps.tokens()(target[:, 1:])`.

    Raises MismatchError for an `ignore_index` or a `weight` of another kind, and for a target that has no class numbers.
    """
    if not is_whole_number(ignore_index):
        raise MismatchError(f"ps.tokens() takes a whole number as ignore_index, got {ignore_index!r}")
    if weight is not None and not (isinstance(weight, Tensor) and weight.dim() == 1):
        got = f"one of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else f"a {type(weight).__name__}"
        raise MismatchError(f"ps.tokens() takes a tensor with one weight for each class as weight, got {got}")
    return partial(_count, ignore_index, None if weight is None else weight.detach().double().cpu())


def _count(ignore_index: int, weight: Tensor | None, target: Tensor) -> Tensor:
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


def check_reduction(loss_fn: Any, reduction: Any, loss_weight: Any) -> None:
    """Raises MismatchError for a `reduction` that there is not, and for a loss that says another of itself."""
    if reduction not in get_args(Reduction):
        raise MismatchError(f"reduction is 'mean' or 'sum', what loss_fn returns of a microbatch's rows, not {reduction!r}")
    if reduction == "sum" and loss_weight is not None:
        raise MismatchError("loss_weight says what microbatches count in a mean, and reduction='sum' adds them: leave out one")
    part = next(_parts(loss_fn))
    if part.reduction == "none":
        raise MismatchError(
            f"{part.name} has reduction='none', and a loss is one number: give it reduction={reduction!r}; or, where it "
            "reduces in its own way, a function of it, lambda output, target: loss(output, target)"
        )
    if part.reduction not in (None, reduction):
        raise MismatchError(
            f"{part.name} has reduction={part.reduction!r}, and the pipeline takes what it returns for a {reduction}: pass "
            f"Pipeline(.., reduction={part.reduction!r}), or give the loss reduction={reduction!r}"
        )


def warn_of_inner_reduction(loss_fn: Any, reduction: Reduction) -> None:
    """Warn of a module inside the loss that has another reduction: the loss may divide by the count itself, or may not."""
    outermost, *inner = _parts(loss_fn)
    others = [part for part in inner if part.reduction not in (None, "none", reduction)]
    if outermost.reduction is None and others:
        said = others[0].reduction
        warnings.warn(
            f"loss_fn has a {others[0].name} with reduction={said!r}, and the pipeline takes what loss_fn returns for a "
            f"{reduction}: if that is a {said}, pass Pipeline(.., reduction={said!r})",
            stacklevel=4,
        )


class LossPart(NamedTuple):
    """A function or a module of a loss."""

    name: str
    settings: Any  # has them as attributes

    @property
    def reduction(self) -> str | None:
        """What it says of itself, if it is one of those that are told apart here."""
        said = getattr(self.settings, "reduction", None)
        return said if isinstance(said, str) and said in (*get_args(Reduction), "none") else None

    @property
    def ignore_index(self) -> int | None:
        """The value of a target that it says it ignores."""
        said = getattr(self.settings, "ignore_index", None)
        return said if isinstance(said, int) else None

    @property
    def class_weight(self) -> Tensor | None:
        """The weights by which it takes the mean: other losses of torch multiply by theirs, and divide by the rows."""
        by_weight = self.name in ("CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss")
        said = getattr(self.settings, "weight", None) if by_weight or self.ignore_index is not None else None
        return said if isinstance(said, Tensor) and said.dim() == 1 else None


def _parts(loss_fn: Any) -> Iterator[LossPart]:
    """What `loss_fn` is made of, as far as it shows: a partial's arguments, modules in modules. What is called comes first."""
    if isinstance(loss_fn, partial):
        loss_fn, keywords = loss_fn.func, loss_fn.keywords
        called = next(_parts(loss_fn))
        yield LossPart(called.name, SimpleNamespace(**{"reduction": called.reduction, **keywords}))
    owner = getattr(loss_fn, "__self__", loss_fn)  # `loss.forward` is a method of a module
    for each in owner.modules() if isinstance(owner, nn.Module) else [owner]:
        yield LossPart(getattr(each, "__name__", type(each).__name__), each)


class UnequalCounts:
    """Warns, once, of microbatches that count unequally in a mean that weighs them by their rows.

    It looks at the target of step 1, 2, 4, 8, ..: one that is on a GPU is waited for there, and in no other step.
    """

    def __init__(self, loss_fn: Any, microbatches: int, rows_dim: int = 0) -> None:
        parts = list(_parts(loss_fn))
        self._index = next((part.ignore_index for part in parts if part.ignore_index is not None), IGNORED)
        self._weight = next((part.class_weight for part in parts if part.class_weight is not None), None)
        self._microbatches, self._rows_dim = microbatches, rows_dim
        self._steps, self._warned = 0, False

    def look(self, target: Any) -> bool:
        """After a step with this `target`; whether there is anything to warn of."""
        self._steps += 1
        if self._warned or not is_power_of_two(self._steps):
            return self._warned
        sizes = nonempty_split_sizes(target, "the target", self._microbatches, self._rows_dim)
        for leaf in leaves(target):
            values = unwrap(leaf)
            if rows_dim_of(leaf, self._rows_dim) is not None and not (values.is_floating_point() or values.is_complex()):
                self._weight = self._weight if self._are_classes(values) else None
                parts = split(leaf, sizes, rows_dim=self._rows_dim)
                found = microbatch_weights(parts, tokens(self._index, self._weight))
                if any(not math.isclose(each * sizes[0], found[0] * size) for each, size in zip(found, sizes, strict=True)):
                    self._warned = True
                    self._warn(found)
                    return True
        return False

    def _are_classes(self, values: Tensor) -> bool:
        """Whether there is a weight for each: the loss may make its classes of other numbers."""
        counted = values[values != self._index]
        return self._weight is not None and bool(((counted >= 0) & (counted < len(self._weight))).all())

    def _warn(self, found: Sequence[float]) -> None:
        several = ", ".join(f"{each:.6g}" for each in found[:8]) + (", .." if len(found) > 8 else "")
        by_rows = f"lambda target: target.shape[{self._rows_dim}]" if self._rows_dim else "len"
        arguments = [] if self._index == IGNORED else [f"ignore_index={self._index}"]
        if self._weight is None:
            told = f"the target of the microbatches has {several} values that are not {self._index}, which the loss ignores"
        else:
            told = f"the class weights of the microbatches' targets add up to {several}"
            arguments.append("weight=class_weights")
        warnings.warn(
            f"{told}, but microbatches are weighed by their rows, so that loss and gradients are not those of the whole batch: "
            f"pass Pipeline(.., loss_weight=ps.tokens({', '.join(arguments)})), or loss_weight={by_rows} if rows are right",
            stacklevel=6,
        )


class LossChecks:
    """What looks at the loss and its target while a pipeline trains, on the rank that has them."""

    def __init__(
        self,
        loss_fn: Any,
        reduction: Reduction,
        loss_weight: Callable[[Any], Any] | None,
        microbatches: int,
        rows_dim: int,
    ) -> None:
        if loss_weight is None:
            warn_of_inner_reduction(loss_fn, reduction)
        by_mean = loss_weight is None and reduction == "mean"
        self._unequal = UnequalCounts(loss_fn, microbatches, rows_dim) if by_mean else None
        self.by_rows = LossByRows(loss_fn, reduction, loss_weight, rows_dim) if microbatches > 1 else None

    def look(self, target: Any) -> None:
        """After a step or an evaluation with this `target`."""
        has_warned = self._unequal is not None and target is not None and self._unequal.look(target)
        if not has_warned and self.by_rows is not None:
            self.by_rows.tell()
            self.by_rows = None if self.by_rows.has_looked else self.by_rows


class LossByRows:
    """Warns, once, of a loss that the losses of its rows do not make up: microbatches could not either.

    It looks at microbatch 0 of the first step in which that has two rows or more, and calls the loss on a few of them, together
    and in two parts. A loss that draws random numbers, or has buffers, is not looked at.
    """

    def __init__(self, loss_fn: Any, reduction: Reduction, loss_weight: Callable[[Any], Any] | None, rows_dim: int) -> None:
        self._loss_fn, self._reduction, self._loss_weight, self._rows_dim = loss_fn, reduction, loss_weight, rows_dim
        self.has_looked = isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.buffers())
        self._half = 0  # the rows of each part
        self._seen: tuple[list[Any], Any, bool] | None = None  # losses, targets of two parts, whether they are in 16 bits

    def look(self, output: Any, target: Any) -> None:
        """At the loss of a microbatch, of which it takes copies. What it finds is told later."""
        if self.has_looked:
            return
        with suppress(Exception), torch.no_grad():  # whatever a loss does with another number of rows
            count = count_rows(target, rows_dim=self._rows_dim)
            if count is None or count < 2 or count_rows(output, rows_dim=self._rows_dim) != count:
                return
            self.has_looked = True
            half = 2 if count > 3 else 1
            device = next(iter(tensors(output))).device
            with fork_generator(device):
                one, other = self._parts((output, target), count, (half, half))
                (both,) = self._parts((output, target), count, (2 * half,))
                losses = [self._loss_fn(*part) for part in (one, other, both, map_tensors(Tensor.clone, one))]
            is_half = any(each.dtype in (torch.float16, torch.bfloat16) for each in tensors([losses, both[0]]))
            self._half, self._seen = half, (losses, [one[1], other[1]], is_half)

    def _parts(self, both: Any, count: int, sizes: Sequence[int]) -> list[Any]:
        """Copies of the first rows."""
        rest = count - sum(sizes)
        parts = split(both, [*sizes, *[rest] * bool(rest)], rows_dim=self._rows_dim)
        return [map_tensors(Tensor.clone, part) for part in parts[: len(sizes)]]

    def _compared(self, losses: Sequence[Any], targets: Any, is_half: bool) -> str:
        first, second, whole, repeated = map(float, losses)
        if first != repeated or not all(map(math.isfinite, (first, second, whole))):
            return ""
        total, mean = first + second, (first + second) / 2
        if self._loss_weight is not None:
            (weight, its), total = microbatch_weights(targets, self._loss_weight), math.nan
            mean = (first * weight + second * its) / (weight + its)
        is_near = partial(math.isclose, whole, rel_tol=0.05 if is_half else 1e-3, abs_tol=1e-6)
        if is_near(total if self._reduction == "sum" else mean):
            return ""
        told = f"loss_fn of {2 * self._half} rows is {whole:.6g}, and of the two halves of them {first:.6g} and {second:.6g}"
        if self._reduction == "sum":
            return f"{told}, which is no sum over rows: " + "leave out reduction='sum'" * is_near(mean)
        if is_near(total):
            return f"{told}, which is a sum: pass Pipeline(.., reduction='sum')"
        of = "weighted by loss_weight" if self._loss_weight is not None else "over rows"
        return f"{told}, which is no mean {of}: give loss_weight= what the loss divides by"

    def tell(self) -> None:
        """After the step, when nothing waits for a device any more: the warning, if there is one."""
        seen, self._seen = self._seen, None
        found = ""
        if seen is not None:
            with suppress(Exception):  # a loss that is no number, for one
                found = self._compared(*seen)
        if found:
            warnings.warn(
                f"{found}; else loss and gradients are not those of the whole batch (docs/howto/loss.md: what a loss may be)",
                stacklevel=5,
            )
