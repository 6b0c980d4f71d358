"""The backward of a linear layer, in two.

y = x Wt + b. Its backward gets dy and makes two products: one for dx, which the stage before waits for, one for dW, which
nobody waits for. Zero-bubble schedules run them at different times.

Write `backward_input(dy, x, weight)`, which returns dx, and `backward_weight(dy, x, weight)`, which returns (dW, db). Each
may use one product of matrices and no more.

Target: for x of (rows, K), weight (N, K), dy (rows, N): the bits of autograd's own gradients.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from penstock.learn.puzzles.judge import Missed, Passed, equal, written, yours

PRODUCTS = ("matmul", "mm", "addmm", "__matmul__", "__rmatmul__", "bmm", "einsum", "linear")


@yours
def backward_input(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the input: (rows, K)."""
    return dy @ weight


@yours
def backward_weight(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of weight (N, K) and bias (N)."""
    return dy.t() @ x, dy.sum(0)


HINTS = (
    "The shapes leave one way only: dx is (rows, K), from dy (rows, N) and weight (N, K).",
    "dW is (N, K), from dy (rows, N) and x (rows, K); the bias is added to each row, so its gradient is the sum over them.",
)
EXPLANATION = """dx = dy W and dW = dyt x: the same cost each, so I and W are about equal for a linear layer. W needs x and
dy until it has run: that is the memory that putting it off costs. Penstock has such a rule for linear layers, embeddings,
convolutions and the projections of attention (penstock/stage/backward/rules.py); everything else stays with autograd in I."""


class _Products(TorchFunctionMode):
    """Counts products of matrices."""

    count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `function`."""
        self.count += getattr(function, "__name__", "") in PRODUCTS
        return function(*args, **(kwargs or {}))


def check(answers: Any) -> Passed:
    """Some shapes, beside autograd; and how many products are taken."""
    for rows, k, n in ((5, 3, 4), (16, 8, 8), (1, 7, 2)):
        torch.manual_seed(rows)
        x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((rows, k), (n, k), (n,)))
        dy = torch.randn(rows, n)
        expected = torch.autograd.grad(torch.nn.functional.linear(x, weight, bias), (x, weight, bias), dy)
        with torch.no_grad(), _Products() as input_products:
            dx = written(answers.backward_input(dy, x, weight), "backward_input()")
        with torch.no_grad(), _Products() as weight_products:
            weight_gradients = written(answers.backward_weight(dy, x, weight), "backward_weight()")
        if not isinstance(weight_gradients, tuple) or len(weight_gradients) != 2:
            raise Missed("backward_weight() returns two tensors: dW and db")
        for name, answer, gradient in zip(("dx", "dW", "db"), (dx, *weight_gradients), expected, strict=True):
            equal(name, answer, gradient)
        for name, products in (("backward_input()", input_products), ("backward_weight()", weight_products)):
            if products.count > 1:
                raise Missed(f"{name} takes {products.count} products, one will do: the other half is for another time")
    return Passed("dx, dW and db have autograd's bits, with one product each")
