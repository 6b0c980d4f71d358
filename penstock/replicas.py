"""A stage that DistributedDataParallel holds equal over several processes: gradients are summed once, at a step's end."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Replicas:
    """Tells DistributedDataParallel which backward is the step's last; it would take each forward's as that."""

    def __init__(self, module: nn.Module) -> None:
        self._parallel = module if isinstance(module, DistributedDataParallel) else None

    def __bool__(self) -> bool:
        return self._parallel is not None

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Around a forward: no backward is expected to sum yet."""
        if self._parallel is None:
            yield
        else:
            with self._parallel.no_sync():
                yield

    def expect(self, ends: Sequence[Tensor]) -> None:
        """Before the last backward: it makes the gradients complete, sum them.

        With `find_unused_parameters`, those that the graph's `ends` do not depend on are not waited for.
        """
        if self._parallel is not None:
            self._parallel.reducer.prepare_for_backward(list(ends) if self._parallel.find_unused_parameters else [])

    def ends(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What `expect` must know of the graph of `outputs`, without their memory."""
        wanted = self._parallel is not None and self._parallel.find_unused_parameters and len(outputs) > 0
        return (_End.apply(*outputs),) if wanted else ()


class _End(torch.autograd.Function):
    """An empty tensor that depends on others."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        raise AssertionError("nothing goes back from here")
