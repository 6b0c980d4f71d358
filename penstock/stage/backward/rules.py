"""The operations whose weight gradients can be put off, and how those are computed: one rule for each operation.

A rule stands in for an operation while a stage runs its forward. It calls the operation with the weights cut off from the
graph, so that the backward computes the input's gradient only, and leaves with `defer` a formula for the weights'
gradients. Each formula makes the same calls, in the same layout, as autograd does for that operation in a full backward
(pytorch/tools/autograd/derivatives.yaml, torch/csrc/autograd/FunctionsManual.cpp), so the bits are the same. A rule that
does not cover a case says NotImplemented: then autograd does all of it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.stage.backward.deferred import DeferredGradients, Formula, WeightGradients


def linear(deferred: DeferredGradients, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: (.., K) and (N, K) -> (.., N). The bias' gradient is a sum over what `I` has at hand, and stays there."""
    if input.dim() < 2 or weight.dim() != 2 or not deferred.owns(weight):
        return NotImplemented
    input, kernel = deferred.operands(input, weight)
    if input.dim() > 2 and not input.is_contiguous():  # autograd folds the rows, then adds the bias on its own
        output = deferred.defer(F.linear(input.contiguous(), kernel), _of_linear, input, weight)
        return output if bias is None else output + bias.to(output.dtype)
    return deferred.defer(F.linear(input, kernel, bias), _of_linear, input, weight)


def matmul(deferred: DeferredGradients, input: Tensor, other: Tensor) -> Tensor:
    """`input @ weight`: (.., K) and (K, N) -> (.., N)."""
    if input.dim() < 2 or other.dim() != 2 or not deferred.owns(other):
        return NotImplemented
    input, matrix = deferred.operands(input, other)
    folded = input if input.dim() == 2 else input.contiguous()
    return deferred.defer(torch.matmul(folded, matrix), _of_matmul, input, other)


def addmm(
    deferred: DeferredGradients, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """`bias + mat1 @ weight`: (N), (M, K) and (K, N) -> (M, N)."""
    if (beta, alpha) != (1, 1) or not deferred.owns(mat2):
        return NotImplemented
    mat1, matrix = deferred.operands(mat1, mat2)
    return deferred.defer(torch.addmm(input, mat1, matrix), _of_matmul, mat1, mat2)


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
    counts = sparse or scale_grad_by_freq  # in each microbatch
    if not input.dim() or max_norm is not None or counts or not deferred.owns(weight):
        return NotImplemented
    _, matrix = deferred.operands(input, weight)  # indices: autocast leaves it alone
    padding = -1 if padding_idx is None else padding_idx % len(weight)
    return deferred.defer(F.embedding(input, matrix, padding_idx), partial(_of_embedding, padding), input, weight)


def _convolution(
    dimensions: int,
    operation: Callable[..., Tensor],
    deferred: DeferredGradients,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    *further: Any,
    **named: Any,
) -> Tensor:
    """`F.conv1d` and its like, (B, C, ..) and (N, C / groups, ..) -> (B, N, ..); and `F.conv_transpose1d` and its like."""
    if isinstance(padding, str) or input.dim() != dimensions + 2 or not deferred.owns(weight, bias):
        return NotImplemented
    transposed = operation in TRANSPOSED
    names = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
    options = dict(zip(names, further, strict=False)) | named
    input, kernel, shift = deferred.operands(input, weight, bias)
    output = operation(input, kernel, shift, stride, padding, **options)
    dilation, groups, outside = (options.get(name, default) for name, default in CONVOLUTION.items())
    steps, pads, holes, rest = (_each(number, dimensions) for number in (stride, padding, dilation, outside))
    formula = partial(_of_convolution, (steps, pads, holes, transposed, rest, groups), bias is not None)
    return deferred.defer(output, formula, input, weight, bias)


CONVOLUTION = {"dilation": 1, "groups": 1, "output_padding": 0}
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
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
    **{op: partial(_convolution, n, op) for n, op in enumerate(TRANSPOSED, 1)},
}


def _of_linear(gradient: Tensor, value: Tensor, weight: Tensor) -> WeightGradients:
    flat, rows = _folded(gradient), _folded(value)
    if weight.stride(1) == 1 and weight.stride(0) == weight.shape[1]:
        return flat.t().mm(rows), None
    return rows.t().mm(flat).t(), None


def _of_matmul(gradient: Tensor, value: Tensor, weight: Tensor) -> WeightGradients:
    flat, rows = _folded(gradient), _folded(value)
    if weight.stride(0) == 1 and weight.stride(1) == weight.shape[0]:
        return flat.t().mm(rows).t(), None
    return rows.t().mm(flat), None


def _folded(value: Tensor) -> Tensor:
    """(.., K) -> (rows, K)."""
    return value if value.dim() == 2 else value.reshape(-1, value.shape[-1])


# The formulas that are one product, so that it can be added to a sum as it goes -> its factors, of output gradient and input.
PRODUCTS: dict[Formula, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    _of_linear: lambda gradient, value: (_folded(gradient).t(), _folded(value)),
    _of_matmul: lambda gradient, value: (_folded(value).t(), _folded(gradient)),
}


def _of_embedding(padding: int, gradient: Tensor, value: Tensor, weight: Tensor) -> WeightGradients:
    return torch.ops.aten.embedding_dense_backward(gradient, value, len(weight), padding, False), None


def _of_convolution(
    settings: tuple[Any, ...], biased: bool, gradient: Tensor, value: Tensor, weight: Tensor
) -> WeightGradients:
    shape = [gradient.shape[1]] if biased else None
    wanted = [False, True, biased]
    _, for_weight, for_bias = torch.ops.aten.convolution_backward(
        gradient, value, weight.to(value.dtype), shape, *settings, wanted
    )
    return for_weight, for_bias


def _each(number: Any, dimensions: int) -> list[int]:
    """A number for every dimension."""
    if isinstance(number, int):
        return [number] * dimensions
    return list(number) * dimensions if len(number) == 1 else list(number)
