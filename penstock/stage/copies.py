"""What other ranks have of a stage: where copies of it, or shards, are told what happens to this one."""

from collections.abc import Sequence

from torch import Tensor


class StageCopies:
    """Of a stage that nobody else has: what a kind with copies does has its place here, and does nothing.

    A stage calls `get_ready`, `expect`, `complete` and `ends_of` at their moments; `begin`, `gather` and `end` belong to the
    step as a whole.
    """

    ready = True  # whether the parameters are here to be used
    alike = True  # whether the copies' backwards are alike in this step: if not, gradients are averaged at its end only
    hooked = False  # whether it must see each gradient reach its parameter
    next: "StageCopies | None" = None  # of the stage of this rank that comes into use after this one

    def begin(self) -> None:
        """Before a step."""

    def gather(self) -> None:
        """Begin to fetch what of the parameters is elsewhere."""

    def get_ready(self) -> None:
        """Before the first forward: wait for it."""

    def expect(self, ends: Sequence[Tensor] = ()) -> None:
        """Before the backward with which the gradients of this step are complete; `ends` of its graph, from `ends_of`."""

    def complete(self) -> None:
        """After it: begin to average them."""

    def end(self, training: bool) -> None:
        """At the end of a step: wait until they are averaged."""

    def ends_of(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What `expect` must know of the graph of `outputs`, without their memory."""
        return ()
