"""The backward of a linear layer, in two.

y = x Wt + b. The backward gets dy and computes two matrix products: one for dx, which the previous stage waits for, and one
for dW, which no rank waits for. Zero-bubble schedules run them at different times.

Write `backward_input(dy, x, weight)`, which returns dx, and `backward_weight(dy, x, weight)`, which returns (dW, db). Each may
compute at most one matrix product.

Target: for x of (rows, K), weight of (N, K), dy of (rows, N): the bits of autograd's gradients.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from penstock.learn.puzzles.check_helpers import CheckFailed, CheckPassed, check_equal, require_answer, solution

PRODUCT_FUNCTIONS = ("matmul", "mm", "addmm", "__matmul__", "__rmatmul__", "bmm", "einsum", "linear")


@solution
def backward_input(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the input: (rows, K)."""
    return dy @ weight


@solution
def backward_weight(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight, (N, K), and bias, (N)."""
    return dy.t() @ x, dy.sum(0)


HINTS = (
    "The shapes allow one way only: dx is (rows, K), from dy (rows, N) and weight (N, K).",
    "dW is (N, K), from dy (rows, N) and x (rows, K). The bias is added to each row, so its gradient is the sum over the rows.",
)
EXPLANATION = """dx = dy W and dW = dyt x cost the same, so I and W take about equal time for a linear layer. W needs x and
dy until it has run: deferring it costs that memory. Penstock has such rules for linear layers, embeddings, convolutions and
the projections of attention (penstock/stage/backward/rules.py); everything else runs in I, by autograd."""


class _ProductCounter(TorchFunctionMode):
    """Counts matrix products."""

    count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `function`; count it if it is a matrix product."""
        self.count += getattr(function, "__name__", "") in PRODUCT_FUNCTIONS
        return function(*args, **(kwargs or {}))


def check(answers: Any) -> CheckPassed:
    """Compare some shapes with autograd, and count the products. Raises CheckFailed."""
    for rows, k, n in ((5, 3, 4), (16, 8, 8), (1, 7, 2)):
        torch.manual_seed(rows)
        x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((rows, k), (n, k), (n,)))
        dy = torch.randn(rows, n)
        expected = torch.autograd.grad(torch.nn.functional.linear(x, weight, bias), (x, weight, bias), dy)
        with torch.no_grad(), _ProductCounter() as input_counter:
            dx = require_answer(answers.backward_input(dy, x, weight), "backward_input()")
        with torch.no_grad(), _ProductCounter() as weight_counter:
            weight_gradients = require_answer(answers.backward_weight(dy, x, weight), "backward_weight()")
        if not isinstance(weight_gradients, tuple) or len(weight_gradients) != 2:
            raise CheckFailed("backward_weight() must return two tensors: (dW, db)")
        for name, answer, gradient in zip(("dx", "dW", "db"), (dx, *weight_gradients), expected, strict=True):
            check_equal(name, answer, gradient)
        for name, counter in (("backward_input()", input_counter), ("backward_weight()", weight_counter)):
            if counter.count > 1:
                raise CheckFailed(f"{name} computes {counter.count} matrix products: compute only the one it needs")
    return CheckPassed("dx, dW and db have autograd's bits, with one product each")
