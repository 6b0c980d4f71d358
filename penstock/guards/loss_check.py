"""What steps show of a loss: whether it is a mean or a sum over rows, as declared, and whether microbatches weigh alike."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.batch.agreement import Reduction
from penstock.batch.pieces import count_rows, microbatch_weights, nonempty_split_sizes, split
from penstock.engine.loss import (
    DEFAULT_IGNORE_INDEX,
    loss_arguments,
    loss_components,
    tokens,
    warn_of_inner_reduction,
)
from penstock.engine.observers import ObservedStep, Observer
from penstock.errors import warn_user
from penstock.guards import is_power_of_two_or_zero
from penstock.python_objects import preserve_attributes
from penstock.randomness import preserve_generator_state
from penstock.rows import rows_dim_of, unwrap
from penstock.stage.stage import Stage
from penstock.trees import leaves, map_tensors, tensors


class LossChecks(Observer):
    """The checks of loss and target while a pipeline trains, on one rank that has them."""

    stage: Stage | None = None  # the last one, whose loss is probed

    def __init__(
        self,
        loss_fn: Any,
        reduction: Reduction,
        loss_weight: Callable[[Any], Any] | None,
        microbatches: int,
        rows_dim: int,
        tokens_dim: int | None = None,
        parts: int | Sequence[int] = 1,
        rows_per_sample: int = 1,
    ) -> None:
        if loss_weight is None:
            warn_of_inner_reduction(loss_fn, reduction)
        weighs_by_rows = loss_weight is None and reduction == "mean"
        checks = [UnequalWeightsCheck(loss_fn, microbatches, rows_dim, rows_per_sample=rows_per_sample)]
        if tokens_dim is not None:
            checks.append(UnequalWeightsCheck(loss_fn, parts, tokens_dim, "parts of the sequences", "tokens"))
        self._unequal_weights = checks if weighs_by_rows else []
        self.rowwise_check: RowwiseLossCheck | None = None
        if tokens_dim is not None:  # tokens are cut
            self.rowwise_check = RowwiseLossCheck(loss_fn, reduction, loss_weight, tokens_dim, "tokens")
        elif microbatches > 1:
            self.rowwise_check = RowwiseLossCheck(loss_fn, reduction, loss_weight, rows_dim, "rows", rows_per_sample)

    def start(self, step: ObservedStep) -> Sequence[float]:
        """Have the loss probed in a training step."""
        if step.call.is_training and self.rowwise_check is not None and self.stage is not None:
            self.rowwise_check.probe_once(self.stage)
        return ()

    def after(self, step: ObservedStep, numbers: Sequence[float]) -> None:
        """Check the target, or list of targets."""
        self.check_after_step(step.call.target, step.call.is_list)

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
        self,
        loss_fn: Any,
        microbatches: int | Sequence[int],
        rows_dim: int = 0,
        what: str = "microbatches",
        unit: str = "rows",
        rows_per_sample: int = 1,
    ) -> None:
        self._what, self._unit = what, unit
        parts = list(loss_components(loss_fn))
        indices = (part.ignore_index for part in parts if part.ignore_index is not None)
        self._ignore_index = next(indices, DEFAULT_IGNORE_INDEX)
        self._class_weight = next((part.class_weight for part in parts if part.class_weight is not None), None)
        self._microbatches, self._rows_dim, self._rows_per_sample = microbatches, rows_dim, rows_per_sample
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
        parts, rows = self._microbatches, (self._rows_dim, self._rows_per_sample)
        sizes = nonempty_split_sizes(target, "the target", parts, *rows) if isinstance(parts, int) else list(parts)
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
        warn_user(
            f"{finding}, but {self._what} are weighed by their {self._unit}, so that loss and gradients are not those of the "
            f"whole batch: pass Pipeline(.., loss_weight=ps.tokens({', '.join(arguments)})), or loss_weight={by_rows} if "
            f"{self._unit} are right",
        )


def _attribute_owners(loss_fn: Any) -> list[Any]:
    """Return the objects whose attributes a loss may change: itself and its submodules, or that of which it is a method."""
    owner = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    owner = owner.__self__ if isinstance(owner, MethodType) else owner
    return list(owner.modules()) if isinstance(owner, nn.Module) else [owner] if hasattr(owner, "__dict__") else []


class RowwiseLossCheck:
    """Warns, once, if the loss is not the mean or sum of the losses of its rows: then splitting the batch changes it.

    In the first step whose microbatch 0 has two samples or more, it calls the loss on a few, together and in two halves.
    A loss that draws random numbers, or has buffers, is not checked. Attributes that it changes are restored.
    `unit`: what lies along `rows_dim`, where tokens are cut.
    """

    def __init__(
        self,
        loss_fn: Any,
        reduction: Reduction,
        loss_weight: Callable[[Any], Any] | None,
        rows_dim: int,
        unit: str = "rows",
        rows_per_sample: int = 1,
    ) -> None:
        self._unit, self._rows_per_sample = unit, rows_per_sample
        self._loss_fn, self._reduction, self._loss_weight, self._rows_dim = loss_fn, reduction, loss_weight, rows_dim
        self.is_done = isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.buffers())
        self._half_rows = 0
        self._loss_fn_of_stage: Callable[[Any, Any], Any] | None = None
        self._measured: tuple[list[Any], Any, bool] | None = None  # losses, targets of the halves, whether in 16 bits

    def probe_once(self, stage: Stage) -> None:
        """Probe the next loss of `stage`."""
        self._loss_fn_of_stage = self._loss_fn_of_stage or stage.loss_fn  # a step that failed may have left it wrapped
        stage.loss_fn = partial(self._run_and_probe, stage)

    def _run_and_probe(self, stage: Stage, output: Any, target: Any) -> Any:
        stage.loss_fn = self._loss_fn_of_stage
        assert stage.loss_fn is not None
        loss = stage.loss_fn(output, target)
        self.probe(output, target)
        return loss

    def probe(self, output: Any, target: Any) -> None:
        """Compute the losses, from copies of a microbatch's output and target. `warn` compares them, after the step."""
        if self.is_done:
            return
        with suppress(Exception), torch.no_grad():  # a loss may fail on another number of rows
            num_rows = count_rows(target, rows_dim=self._rows_dim)
            samples = (num_rows or 0) // self._rows_per_sample
            if num_rows is None or samples < 2 or count_rows(output, rows_dim=self._rows_dim) != num_rows:
                return
            self.is_done = True
            half = (2 if samples > 3 else 1) * self._rows_per_sample
            device = next(iter(tensors(output))).device
            with preserve_generator_state(device), preserve_attributes(_attribute_owners(self._loss_fn)):
                first, second = self._copy_first_rows((output, target), num_rows, (half, half))
                (both,) = self._copy_first_rows((output, target), num_rows, (2 * half,))
                repeated = map_tensors(Tensor.clone, first)
                parts = [(part, loss_arguments(target)) for part, target in (first, second, both, repeated)]
                losses = [self._loss_fn(part, *arguments) for part, arguments in parts]
            dtypes = [tensor.dtype for tensor in tensors([losses, both[0]])]
            has_16_bits = any(dtype in (torch.float16, torch.bfloat16) for dtype in dtypes)
            self._half_rows, self._measured = half, (losses, [arguments[0] for _, arguments in parts[:2]], has_16_bits)

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
            warn_user(
                f"{finding}; else loss and gradients are not those of the whole batch (docs/howto/loss.md: what a loss may be)",
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
            return (
                f"{prefix}, which adds up: if the loss is a sum, or a sum divided by one number of the whole batch, pass "
                "Pipeline(.., reduction='sum'); if it divides by a microbatch's usual size, let it divide by the size it gets"
            )
        weighting = "weighted by loss_weight" if self._loss_weight is not None else f"over {self._unit}"
        return f"{prefix}, which is no mean {weighting}: give loss_weight= what the loss divides by"
