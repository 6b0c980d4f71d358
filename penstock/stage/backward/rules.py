"""The operations whose weight gradients can be deferred, and the formulas of these: one rule for each operation.

A rule replaces an operation while a stage runs its forward. It calls the operation with the weights outside the graph, so that
the backward computes the input's gradient only, and notes with `defer` a formula for the weights' gradients. Each formula makes
the calls, in the layout, that autograd makes for that operation in a whole backward
(pytorch/tools/autograd/derivatives.yaml, torch/csrc/autograd/FunctionsManual.cpp), so the bits are the same. A rule returns
NotImplemented for a case that it does not cover: then autograd does all of it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.stage.backward.deferred import DeferredGradients, WeightGradients


def linear(deferred: DeferredGradients, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: (.., K) and (N, K) -> (.., N). The bias' gradient is computed in `I`: it is a sum over the output's."""
    if input.dim() < 2 or weight.dim() != 2 or not deferred.are_standins(weight):
        return NotImplemented
    input, kernel = deferred.autocast_operands(input, weight)
    if input.dim() > 2 and not input.is_contiguous():  # autograd folds the rows, then adds the bias separately
        output = deferred.defer(F.linear(input.contiguous(), kernel), _linear_weight_grad, input, weight)
        return output if bias is None else output + bias.to(output.dtype)
    return deferred.defer(F.linear(input, kernel, bias), _linear_weight_grad, input, weight)


def matmul(deferred: DeferredGradients, input: Tensor, other: Tensor) -> Tensor:
    """`input @ weight`: (.., K) and (K, N) -> (.., N)."""
    if input.dim() < 2 or other.dim() != 2 or not deferred.are_standins(other):
        return NotImplemented
    input, matrix = deferred.autocast_operands(input, other)
    rows = input if input.dim() == 2 else input.contiguous()
    return deferred.defer(torch.matmul(rows, matrix), _matmul_weight_grad, input, other)


def addmm(
    deferred: DeferredGradients, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """`bias + mat1 @ weight`: (N), (M, K) and (K, N) -> (M, N)."""
    if (beta, alpha) != (1, 1) or not deferred.are_standins(mat2):
        return NotImplemented
    mat1, matrix = deferred.autocast_operands(mat1, mat2)
    return deferred.defer(torch.addmm(input, mat1, matrix), _matmul_weight_grad, mat1, mat2)


def embedding(
    deferred: DeferredGradients,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`F.embedding`: indices of any shape but () and (N, H) -> (.., H)."""
    by_microbatch = sparse or scale_grad_by_freq  # the gradient depends on what is in one microbatch
    if not input.dim() or max_norm is not None or by_microbatch or not deferred.are_standins(weight):
        return NotImplemented
    _, matrix = deferred.autocast_operands(input, weight)  # autocast does not cast for indices
    padding = -1 if padding_idx is None else padding_idx % len(weight)
    return deferred.defer(F.embedding(input, matrix, padding_idx), partial(_embedding_weight_grad, padding), input, weight)


def _convolution(
    num_dimensions: int,
    operation: Callable[..., Tensor],
    deferred: DeferredGradients,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """`F.conv1d`, `F.conv2d`, .. and `F.conv_transpose1d`, ..: (B, C, ..) and (N, C / groups, ..) -> (B, N, ..)."""
    if isinstance(padding, str) or input.dim() != num_dimensions + 2 or not deferred.are_standins(weight, bias):
        return NotImplemented
    transposed = operation in TRANSPOSED_CONVOLUTIONS
    names = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
    options = dict(zip(names, args, strict=False)) | kwargs
    input, kernel, shift = deferred.autocast_operands(input, weight, bias)
    output = operation(input, kernel, shift, stride, padding, **options)
    dilation, groups, output_padding = (options.get(name, default) for name, default in CONVOLUTION_DEFAULTS.items())
    strides, paddings, dilations, output_paddings = (
        _per_dimension(number, num_dimensions) for number in (stride, padding, dilation, output_padding)
    )
    settings = (strides, paddings, dilations, transposed, output_paddings, groups)
    formula = partial(_convolution_weight_grad, settings, bias is not None)
    return deferred.defer(output, formula, input, weight, bias)


CONVOLUTION_DEFAULTS = {"dilation": 1, "groups": 1, "output_padding": 0}
TRANSPOSED_CONVOLUTIONS = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
RULES: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.linear: linear,
    torch.matmul: matmul,
    Tensor.matmul: matmul,
    Tensor.__matmul__: matmul,
    torch.mm: matmul,
    Tensor.mm: matmul,
    torch.addmm: addmm,
    Tensor.addmm: addmm,
    F.embedding: embedding,
    **{op: partial(_convolution, n, op) for n, op in enumerate((F.conv1d, F.conv2d, F.conv3d), 1)},
    **{op: partial(_convolution, n, op) for n, op in enumerate(TRANSPOSED_CONVOLUTIONS, 1)},
}


def _linear_weight_grad(gradient: Tensor, value: Tensor, weight: Tensor) -> WeightGradients:
    gradient_rows, value_rows = _fold_rows(gradient), _fold_rows(value)
    if weight.stride(1) == 1 and weight.stride(0) == weight.shape[1]:
        return gradient_rows.t().mm(value_rows), None
    return value_rows.t().mm(gradient_rows).t(), None


def _matmul_weight_grad(gradient: Tensor, value: Tensor, weight: Tensor) -> WeightGradients:
    gradient_rows, value_rows = _fold_rows(gradient), _fold_rows(value)
    if weight.stride(0) == 1 and weight.stride(1) == weight.shape[0]:
        return gradient_rows.t().mm(value_rows).t(), None
    return value_rows.t().mm(gradient_rows), None


def _fold_rows(value: Tensor) -> Tensor:
    """Reshape (.., K) to (rows, K)."""
    return value if value.dim() == 2 else value.reshape(-1, value.shape[-1])


def _embedding_weight_grad(padding: int, gradient: Tensor, value: Tensor, weight: Tensor) -> WeightGradients:
    return torch.ops.aten.embedding_dense_backward(gradient, value, len(weight), padding, False), None


def _convolution_weight_grad(
    settings: tuple[Any, ...], has_bias: bool, gradient: Tensor, value: Tensor, weight: Tensor
) -> WeightGradients:
    bias_sizes = [gradient.shape[1]] if has_bias else None
    wanted = [False, True, has_bias]
    _, weight_gradient, bias_gradient = torch.ops.aten.convolution_backward(
        gradient, value, weight.to(value.dtype), bias_sizes, *settings, wanted
    )
    return weight_gradient, bias_gradient


def _per_dimension(number: Any, num_dimensions: int) -> list[int]:
    """Return a number for every dimension, from one number or a sequence of them."""
    if isinstance(number, int):
        return [number] * num_dimensions
    return list(number) * num_dimensions if len(number) == 1 else list(number)
