"""A stage that DistributedDataParallel holds equal over several processes: gradients are summed once, at a step's end."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Replicas:
    """Tells DistributedDataParallel which backward is the step's last; it would take each forward's as that."""

    def __init__(self, module: nn.Module) -> None:
        self._parallel = module if isinstance(module, DistributedDataParallel) else None

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Around a forward: no backward is expected to sum yet."""
        if self._parallel is None:
            yield
        else:
            with self._parallel.no_sync():
                yield

    def expect(self, outputs: Sequence[Tensor] = ()) -> None:
        """Before the last backward: its gradients are complete, sum them.

        With `find_unused_parameters`, those that `outputs` do not depend on are not waited for.
        """
        if self._parallel is not None:
            self._parallel.reducer.prepare_for_backward(list(outputs) if self._parallel.find_unused_parameters else [])
