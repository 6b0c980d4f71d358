"""A stage that DistributedDataParallel replicates: gradients are averaged over the replicas once, after the last backward.

DistributedDataParallel's own forward is not called: it would average the gradients in the backward of every microbatch. Instead
its reducer is controlled by `DataParallelHooks`:

    begin_step            wrap the module again if other parameters are trainable now
    F F .. B B ..         forwards and all backwards but the last: the reducer does nothing
    before_last_backward  the reducer expects one gradient for each trainable parameter; `_LastBackward` records which arrive
      last B or W         a bucket is complete -> `_average_bucket` begins to all-reduce it, without waiting
    after_last_backward   add zeros for parameters without a gradient, so that every bucket is completed;
                          begin an all-reduce of which parameters had a gradient (`GradientPresenceReduce`)
    finish_step           wait for the all-reduces; set `grad = None` for parameters that had a gradient on no replica
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from penstock import torch_private
from penstock.mesh.gradient_presence import GradientPresenceReduce
from penstock.stage.hooks import DataParallelHooks
from penstock.torch_private import run_backward


class DDPHooks(DataParallelHooks):
    """The hooks of a stage by DistributedDataParallel, which averages its gradients: see above.

    `ddp_module`: None as long as no parameter is trainable.
    `wrap`: returns a new `ddp_module`. With it the all-reduces overlap with the rank's further actions until `finish_step`,
        unless `ddp_module` has a communication hook already, or copies its buckets into the gradients. None for replicas that
        are separate pipelines.
    """

    hooks_gradients = True

    def __init__(
        self,
        module: nn.Module,
        ddp_module: DistributedDataParallel | None,
        group: dist.ProcessGroup | None,
        wrap: Callable[[], Any] | None,
    ) -> None:
        self._module, self._group, self._wrap = module, group, wrap
        self._last_backward: _LastBackward | None = None  # of this step
        self._set_ddp_module(ddp_module)

    def _set_ddp_module(self, ddp_module: DistributedDataParallel | None) -> None:
        self._ddp_module = ddp_module
        self._trainable = self._trainable_parameters()

        if ddp_module is None or self._wrap is None:
            return
        if ddp_module.gradient_as_bucket_view and not torch_private.has_comm_hook(ddp_module):
            ddp_module.register_comm_hook(None, self._average_bucket)

    def _trainable_parameters(self) -> list[nn.Parameter]:
        ignored = torch_private.ddp_ignored_names(self._module)
        named = self._module.named_parameters()
        return [parameter for name, parameter in named if parameter.requires_grad and name not in ignored]

    def _average_bucket(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Begin to average `bucket`, whose views are the gradients. This is a communication hook.

        The returned future is done at once, so that the backward does not wait for the all-reduce. `finish_step` does.
        """
        assert self._ddp_module is not None
        assert self._last_backward is not None
        buffer, group = bucket.buffer(), self._ddp_module.process_group

        buffer.div_(group.size())
        self._last_backward.all_reduces.append(dist.all_reduce(buffer, group=group, async_op=True))

        future = torch.futures.Future[Tensor](devices=[buffer.device] if buffer.is_cuda else None)
        future.set_result(buffer)
        return future

    def begin_step(self) -> None:
        """Wrap the module again if other parameters are frozen now: DistributedDataParallel checks that only when created."""
        if self._wrap is not None and list(map(id, self._trainable_parameters())) != list(map(id, self._trainable)):
            self._set_ddp_module(self._wrap() if self._trainable_parameters() else None)

    def before_last_backward(self, graph_ends: Sequence[Tensor] = ()) -> None:
        """Make the next backward average the gradients.

        With `find_unused_parameters`, parameters that `graph_ends` do not depend on are not waited for.
        """
        if self.backwards_match:
            self._expect_last_backward(graph_ends)

    def _expect_last_backward(self, graph_ends: Sequence[Tensor]) -> "_LastBackward":
        if self._ddp_module is not None:
            torch_private.prepare_ddp_last_backward(self._ddp_module, self.graph_ends(graph_ends))

        finds_unused = self._ddp_module is not None and self._ddp_module.find_unused_parameters
        self._last_backward = _LastBackward(() if finds_unused else self._trainable)
        return self._last_backward

    def after_last_backward(self) -> None:
        """Add zeros for parameters that the last backward did not reach: DistributedDataParallel waits for all of them."""
        if self._last_backward is not None:
            self._last_backward.add_missing_gradients(self._group)

    def finish_step(self, training: bool) -> None:
        """Wait until the gradients are averaged; if the replicas' backwards did not match, average them only now."""
        already_averaged = self._last_backward is not None or (self._wrap is not None and self.backwards_match)
        if training and not already_averaged:
            if not self._expect_last_backward(self._trainable).parameters:
                _add_zero_gradients(self._trainable)
            self.after_last_backward()

        if self._last_backward is not None:
            self._last_backward.finish()
        self._last_backward = None

    def graph_ends(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return one empty tensor that depends on all of `outputs`, in a tuple; () unless `find_unused_parameters` needs it."""
        is_needed = self._ddp_module is not None and self._ddp_module.find_unused_parameters and len(outputs) > 0
        with torch.enable_grad():
            return (_GraphEnd.apply(*outputs),) if is_needed else ()  # an output may be a parameter, which has no graph


class _LastBackward:
    """The last backward of a step: which of `parameters` got a gradient in it, and the all-reduces that it began."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.all_reduces: list[dist.Work] = []  # works to wait for
        self._presence: GradientPresenceReduce | None = None

        self._reached_ids: set[int] = set()  # of the parameters
        add = self._reached_ids.add  # the hooks must not hold `self`, or it would outlive its step
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda parameter: add(id(parameter))) for parameter in parameters
        ]

    def add_missing_gradients(self, group: dist.ProcessGroup | None) -> None:
        """Add zeros to the gradients of parameters that got none, and begin to reduce which gradients any replica has."""
        for hook in self._hooks:
            hook.remove()

        has_gradient = [parameter.grad is not None for parameter in self.parameters]
        _add_zero_gradients([parameter for parameter in self.parameters if id(parameter) not in self._reached_ids])
        if group is not None and self.parameters:
            self._presence = GradientPresenceReduce(has_gradient, group, self.parameters[0].device)

    def finish(self) -> None:
        """Wait for the all-reduces; set gradients that no replica has to None."""
        for work in self.all_reduces:
            work.wait()

        if self._presence is not None:
            for parameter, on_any_replica in zip(self.parameters, self._presence.on_any_replica(), strict=True):
                if not on_any_replica:
                    parameter.grad = None


def _add_zero_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Add zeros to the gradients by a backward, so that DistributedDataParallel's hooks on the parameters are called."""
    if parameters:
        run_backward(list(map(get_gradient_edge, parameters)), list(map(torch.zeros_like, parameters)))


class _GraphEnd(torch.autograd.Function):
    """Returns an empty tensor that depends on other tensors, without keeping their memory."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        raise AssertionError("no gradient is ever computed from here")
