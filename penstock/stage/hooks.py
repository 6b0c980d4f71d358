"""Replicating or sharding a stage over other ranks: the hooks that a `Stage` and the step call, in order.

begin_step                      of the step
  prefetch_parameters           of the step, for the first stage; then by others of `in_use`
  wait_parameters               before the stage's first action
    ..                          forwards and backwards; `graph_ends` after each forward
    before_last_backward        the next backward completes this step's gradients
    after_last_backward
finish_step                     of the step, after the last action of the rank
"""

from collections.abc import Sequence

from torch import Tensor


class DataParallelHooks:
    """The hooks of data parallelism around a stage's forwards and backwards. The base class does nothing."""

    parameters_ready = True  # whether the parameters are on this rank, ready for use
    backwards_match = True  # whether all replicas run the same backwards in this step; if not, only `finish_step` averages
    hooks_gradients = False  # whether it has to see the moment at which each gradient reaches its parameter
    in_use: "Sequence[DataParallelHooks]" = ()  # of all stages of this step on the rank, by number: one order on all replicas

    def begin_step(self) -> None:
        """Prepare for a step."""

    def prefetch_parameters(self) -> None:
        """Begin to fetch the parameters that are on other ranks."""

    def wait_parameters(self) -> None:
        """Wait for the parameters. Called before every action: only the first of a step waits."""

    def before_last_backward(self, graph_ends: Sequence[Tensor] = ()) -> None:
        """Prepare for the backward that completes this step's gradients. `graph_ends`: what `graph_ends(outputs)` returned."""

    def after_last_backward(self) -> None:
        """Begin to average the gradients."""

    def finish_step(self, training: bool) -> None:
        """Wait until the gradients are averaged."""

    def graph_ends(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return tensors that depend on `outputs` and keep their graph, but not their memory, for `before_last_backward`."""
        return ()


class NoDataParallelHooks(DataParallelHooks):
    """A stage that is on this rank only."""
