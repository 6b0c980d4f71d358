"""Checks of a pipeline's loss: whether it is a mean or a sum over rows, as declared. It is weighted in `actions.py`."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from penstock.errors import MismatchError, is_whole_number
from penstock.guards import is_power_of_two_or_zero
from penstock.partition.rows import rows_dim_of, unwrap
from penstock.randomness import preserve_generator_state
from penstock.stage.microbatch import count_rows, microbatch_weights, nonempty_split_sizes, split
from penstock.trees import leaves, map_tensors, tensors

Reduction = Literal["mean", "sum"]
DEFAULT_IGNORE_INDEX = -100  # of torch's losses


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


def _loss_components(loss_fn: Any) -> Iterator[LossComponent]:
    """Return what `loss_fn` visibly consists of, outermost first: a partial's arguments, modules inside of modules."""
    if isinstance(loss_fn, partial):
        loss_fn, keywords = loss_fn.func, loss_fn.keywords
        outermost = next(_loss_components(loss_fn))
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

    loss = next(_loss_components(loss_fn))
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
    outermost, *inner = _loss_components(loss_fn)
    different = [part for part in inner if part.reduction not in (None, "none", reduction)]
    if outermost.reduction is None and different:
        name, inner_reduction = different[0].name, different[0].reduction
        warnings.warn(
            f"loss_fn has a {name} with reduction={inner_reduction!r}, and the pipeline takes what loss_fn returns for a "
            f"{reduction}: if that is a {inner_reduction}, pass Pipeline(.., reduction={inner_reduction!r})",
            stacklevel=4,
        )


# -- what steps show of a loss --------------------------------------------------------------------------------------------


class LossChecks:
    """The checks of loss and target while a pipeline trains, on one rank that has them."""

    def __init__(
        self,
        loss_fn: Any,
        reduction: Reduction,
        loss_weight: Callable[[Any], Any] | None,
        microbatches: int,
        rows_dim: int,
        tokens_dim: int | None = None,
        parts: int | Sequence[int] = 1,
    ) -> None:
        if loss_weight is None:
            warn_of_inner_reduction(loss_fn, reduction)
        weighs_by_rows = loss_weight is None and reduction == "mean"
        checks = [UnequalWeightsCheck(loss_fn, microbatches, rows_dim)]
        if tokens_dim is not None:
            checks.append(UnequalWeightsCheck(loss_fn, parts, tokens_dim, "parts of the sequences", "tokens"))
        self._unequal_weights = checks if weighs_by_rows else []
        self.rowwise_check: RowwiseLossCheck | None = None
        if tokens_dim is not None:  # tokens are cut
            self.rowwise_check = RowwiseLossCheck(loss_fn, reduction, loss_weight, tokens_dim, "tokens")
        elif microbatches > 1:
            self.rowwise_check = RowwiseLossCheck(loss_fn, reduction, loss_weight, rows_dim)

    def check_after_step(self, target: Any, is_list: bool = False) -> None:
        """Warn if a check finds something. Called after a step or evaluation with this `target`, or list of targets."""
        has_warned = False
        for check in self._unequal_weights if target is not None else ():
            has_warned |= check.check_target(target, is_list)
        if not has_warned and self.rowwise_check is not None:
            self.rowwise_check.warn()
            self.rowwise_check = None if self.rowwise_check.is_done else self.rowwise_check


class UnequalWeightsCheck:
    """Warns, once, if microbatches, or parts of the tokens, count unequally in a mean that weighs them by their size.

    It reads the target in steps 1, 2, 4, 8, ..: only those wait for a target on a GPU.
    """

    def __init__(
        self, loss_fn: Any, microbatches: int | Sequence[int], rows_dim: int = 0, what: str = "microbatches", unit: str = "rows"
    ) -> None:
        self._what, self._unit = what, unit
        parts = list(_loss_components(loss_fn))
        indices = (part.ignore_index for part in parts if part.ignore_index is not None)
        self._ignore_index = next(indices, DEFAULT_IGNORE_INDEX)
        self._class_weight = next((part.class_weight for part in parts if part.class_weight is not None), None)
        self._microbatches, self._rows_dim = microbatches, rows_dim
        self._num_steps, self._has_warned = 0, False

    def check_target(self, target: Any, is_list: bool = False) -> bool:
        """Count what each microbatch of this `target`, or list of targets, weighs. Return whether it has warned."""
        self._num_steps += 1
        if self._has_warned or not is_power_of_two_or_zero(self._num_steps):
            return self._has_warned

        sizes, columns = self._split_target(target, is_list)
        for microbatches in columns:
            if rows_dim_of(microbatches[0], self._rows_dim) is None:
                continue
            microbatches = [unwrap(values) for values in microbatches]
            if microbatches[0].is_floating_point() or microbatches[0].is_complex():
                continue
            if not all(map(self._are_classes, microbatches)):
                self._class_weight = None
            weights = microbatch_weights(microbatches, tokens(self._ignore_index, self._class_weight))
            equal = (math.isclose(weight * sizes[0], weights[0] * size) for weight, size in zip(weights, sizes, strict=True))
            if not all(equal):
                self._has_warned = True
                self._warn(weights)
                return True
        return False

    def _split_target(self, target: Any, is_list: bool) -> tuple[list[int], list[Sequence[Any]]]:
        """Return the rows of each microbatch, and every tensor of the target as a sequence over microbatches."""
        if is_list:
            sizes = [count_rows(entry, rows_dim=self._rows_dim) or 0 for entry in target]
            return sizes, list(zip(*map(leaves, target), strict=False))
        parts = self._microbatches
        sizes = nonempty_split_sizes(target, "the target", parts, self._rows_dim) if isinstance(parts, int) else list(parts)
        return sizes, [
            split(leaf, sizes, rows_dim=self._rows_dim)
            for leaf in leaves(target)
            if rows_dim_of(leaf, self._rows_dim) is not None
        ]

    def _are_classes(self, values: Tensor) -> bool:
        """Whether there is a class weight for each value: the loss may compute its classes from other numbers."""
        counted = values[values != self._ignore_index]
        return self._class_weight is not None and bool(((counted >= 0) & (counted < len(self._class_weight))).all())

    def _warn(self, weights: Sequence[float]) -> None:
        numbers = ", ".join(f"{weight:.6g}" for weight in weights[:8]) + (", .." if len(weights) > 8 else "")
        by_rows = f"lambda target: target.shape[{self._rows_dim}]" if self._rows_dim else "len"
        by_rows = "lambda target: target.numel()" if self._unit == "tokens" else by_rows
        arguments = [] if self._ignore_index == DEFAULT_IGNORE_INDEX else [f"ignore_index={self._ignore_index}"]
        if self._class_weight is None:
            index = self._ignore_index
            finding = f"the target of the {self._what} has {numbers} values that are not {index}, which the loss ignores"
        else:
            finding = f"the class weights in the targets of the {self._what} add up to {numbers}"
            arguments.append("weight=class_weights")
        warnings.warn(
            f"{finding}, but {self._what} are weighed by their {self._unit}, so that loss and gradients are not those of the "
            f"whole batch: pass Pipeline(.., loss_weight=ps.tokens({', '.join(arguments)})), or loss_weight={by_rows} if "
            f"{self._unit} are right",
            stacklevel=6,
        )


class RowwiseLossCheck:
    """Warns, once, if the loss is not the mean or sum of the losses of its rows: then splitting the batch changes it.

    In the first step whose microbatch 0 has two rows or more, it calls the loss on a few of them, together and in two halves.
    A loss that draws random numbers, or has buffers, is not checked. `unit`: what lies along `rows_dim`, where tokens are cut.
    """

    def __init__(
        self,
        loss_fn: Any,
        reduction: Reduction,
        loss_weight: Callable[[Any], Any] | None,
        rows_dim: int,
        unit: str = "rows",
    ) -> None:
        self._unit = unit
        self._loss_fn, self._reduction, self._loss_weight, self._rows_dim = loss_fn, reduction, loss_weight, rows_dim
        self.is_done = isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.buffers())
        self._half_rows = 0
        self._measured: tuple[list[Any], Any, bool] | None = None  # losses, targets of the halves, whether in 16 bits

    def probe(self, output: Any, target: Any) -> None:
        """Compute the losses, from copies of a microbatch's output and target. `warn` compares them, after the step."""
        if self.is_done:
            return
        with suppress(Exception), torch.no_grad():  # a loss may fail on another number of rows
            num_rows = count_rows(target, rows_dim=self._rows_dim)
            if num_rows is None or num_rows < 2 or count_rows(output, rows_dim=self._rows_dim) != num_rows:
                return
            self.is_done = True
            half = 2 if num_rows > 3 else 1
            device = next(iter(tensors(output))).device
            with preserve_generator_state(device):
                first, second = self._copy_first_rows((output, target), num_rows, (half, half))
                (both,) = self._copy_first_rows((output, target), num_rows, (2 * half,))
                repeated = map_tensors(Tensor.clone, first)
                losses = [self._loss_fn(*part) for part in (first, second, both, repeated)]
            dtypes = [tensor.dtype for tensor in tensors([losses, both[0]])]
            has_16_bits = any(dtype in (torch.float16, torch.bfloat16) for dtype in dtypes)
            self._half_rows, self._measured = half, (losses, [first[1], second[1]], has_16_bits)

    def _copy_first_rows(self, tree: Any, num_rows: int, sizes: Sequence[int]) -> list[Any]:
        """Return copies of the first rows, in parts of these sizes."""
        remainder = num_rows - sum(sizes)
        parts = split(tree, [*sizes, *[remainder] * bool(remainder)], rows_dim=self._rows_dim)
        return [map_tensors(Tensor.clone, part) for part in parts[: len(sizes)]]

    def warn(self) -> None:
        """Warn if the losses do not fit together. Called after the step, when reading a number waits for no device."""
        measured, self._measured = self._measured, None
        finding = ""
        if measured is not None:
            with suppress(Exception):  # the loss may be no number
                finding = self._describe_mismatch(*measured)
        if finding:
            warnings.warn(
                f"{finding}; else loss and gradients are not those of the whole batch (docs/howto/loss.md: what a loss may be)",
                stacklevel=5,
            )

    def _describe_mismatch(self, losses: Sequence[Any], targets: Any, has_16_bits: bool) -> str:
        """Return the warning, "" if the loss of all rows is the mean or sum of those of the halves."""
        first, second, both, repeated = map(float, losses)
        if first != repeated or not all(map(math.isfinite, (first, second, both))):
            return ""  # the loss is random

        total, mean = first + second, (first + second) / 2
        if self._loss_weight is not None:
            (first_weight, second_weight), total = microbatch_weights(targets, self._loss_weight), math.nan
            mean = (first * first_weight + second * second_weight) / (first_weight + second_weight)
        is_near = partial(math.isclose, both, rel_tol=0.05 if has_16_bits else 1e-3, abs_tol=1e-6)
        if is_near(total if self._reduction == "sum" else mean):
            return ""

        num_rows = 2 * self._half_rows
        prefix = f"loss_fn of {num_rows} {self._unit} is {both:.6g}, and of the two halves of them {first:.6g} and {second:.6g}"
        if self._reduction == "sum":
            return f"{prefix}, which is no sum over {self._unit}: " + "leave out reduction='sum'" * is_near(mean)
        if is_near(total):
            return f"{prefix}, which is a sum: pass Pipeline(.., reduction='sum')"
        weighting = "weighted by loss_weight" if self._loss_weight is not None else f"over {self._unit}"
        return f"{prefix}, which is no mean {weighting}: give loss_weight= what the loss divides by"
