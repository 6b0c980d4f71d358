"""A stage that `fully_shard` shards over its replicas: its parameters are gathered once a step, not for each microbatch.

torch's own hooks would gather the parameters for the forward and the backward of every microbatch, and reduce the gradients as
often. Here the parameters of a rank's first stage are gathered when a step begins, and those of each further stage once the
stage before it begins its first action. The gradients of a stage are reduced after its last action.

These collectives have the same order on all replicas. A rank gathers its stages in the order of their numbers, and all of
them before it averages any gradient. For the model's stages that is so anyway: a rank uses them first in that order, and one
completes its backwards only after the last microbatch has been through all. A teacher's forwards may begin earlier or later.
"""

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch.distributed as dist
from torch import nn

from penstock import torch_private
from penstock.mesh.gradient_presence import GradientPresenceReduce
from penstock.stage.hooks import DataParallelHooks

_averaging_pool = ThreadPoolExecutor(1, "penstock-average")  # on the CPU the reduce-scatters block their caller


class FSDPHooks(DataParallelHooks):
    """The hooks of a stage that is sharded by `fully_shard`, or by torch's `replicate`, of the stage or of its submodules.

    `group`: the replicas; None for replicas that are separate pipelines, which must use the same parameters.
    """

    parameters_ready = False

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self._modules = fsdp_modules(module)
        self._group = group
        self._device = next(module.parameters()).device
        self._unshard_handles: list[Any] = []
        self._averaging: Future[None] | None = None

    def prefetch_parameters(self) -> None:
        """Begin to gather the parameters, unless that has begun."""
        if self._unshard_handles:
            return

        for module in self._modules:
            torch_private.init_fsdp(module)
        self._set_gradient_sync(False)
        for module in self._modules:
            if not torch_private.is_replicate_module(module):
                module.set_reshard_after_forward(False)

        self._unshard_handles = [module.unshard(async_op=True) for module in self._modules]

    def _set_gradient_sync(self, enabled: bool) -> None:
        for module in self._modules:
            module.set_is_last_backward(enabled)
            module.set_requires_gradient_sync(enabled)
            module.set_reshard_after_backward(enabled)

    def wait_parameters(self) -> None:
        """Wait until the parameters are gathered; begin to gather those of the next stage."""
        for hooks in self.in_use[: self.in_use.index(self) + 2]:
            hooks.prefetch_parameters()

        for handle in self._unshard_handles:
            handle.wait()
        self.parameters_ready = True

    def after_last_backward(self) -> None:
        """Begin to reduce-scatter the gradients, and free the gathered parameters."""
        for hooks in self.in_use:
            hooks.prefetch_parameters()

        if self.backwards_match and self._device.type == "cpu":
            self._averaging = _averaging_pool.submit(self._reduce_scatter_gradients)
        elif self.backwards_match:
            self._reduce_scatter_gradients()

    def _reduce_scatter_gradients(self) -> None:
        self._set_gradient_sync(True)
        if self._group is not None:
            self._add_zero_gradients(self._group)
        torch_private.reduce_fsdp_gradients(self._modules)

    def _add_zero_gradients(self, group: dist.ProcessGroup) -> None:
        """Set the gradient to zero for parameters that have one on another replica only: all replicas must average the same."""
        parameters = [parameter for module in self._modules for parameter in torch_private.fsdp_parameters(module)]
        has_gradient = [torch_private.has_unreduced_grad(parameter) for parameter in parameters]

        on_any_replica = GradientPresenceReduce(has_gradient, group, self._device).on_any_replica()
        for parameter, on_this, on_any in zip(parameters, has_gradient, on_any_replica, strict=True):
            if on_any and not on_this:
                torch_private.set_zero_grad(parameter)

    def finish_step(self, training: bool) -> None:
        """Wait until the gradients are averaged; if the replicas' backwards did not match, average them only now."""
        if self._averaging is not None:
            self._averaging.result()
        if training and not self.backwards_match:
            self._reduce_scatter_gradients()

        for module in self._modules:
            module.reshard()
        self._unshard_handles, self._averaging, self.parameters_ready = [], None, False


class FrozenFSDPHooks(FSDPHooks):
    """The hooks of a sharded stage of a teacher: it has no gradients, and runs in some steps only."""

    def finish_step(self, training: bool) -> None:
        """Free the gathered parameters."""
        if self._unshard_handles:
            super().finish_step(training=False)


def fsdp_modules(module: nn.Module) -> list[Any]:
    """Return the submodules of `module`, itself among them, that `fully_shard` was applied to."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # imported if it was applied; the import takes a second
    return [submodule for submodule in module.modules() if isinstance(submodule, fsdp.FSDPModule)] if fsdp is not None else []
