"""A stage whose parameters `fully_shard` has spread over its replicas: here to be used from its first action to its last.

Torch's own hooks would fetch the parameters for every microbatch, forward and backward, and send the gradients off as often.
Here that is part of a rank's program: the parameters of its first stage are fetched as soon as a step begins, those of
each further one while the stage before it has begun to work, and what remains of the gradients leaves after the stage's
last action.

The order of these is the same on all replicas, whose tables are alike. A rank fetches all its parameters before it averages
any gradient: no stage's backwards are complete before the last microbatch has been through all stages.
"""

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import nn

from penstock import torch_private
from penstock.mesh.gradient_presence import GradientPresence
from penstock.stage.replication import NoReplication, Replication

_averaging_pool = ThreadPoolExecutor(1, "penstock-average")  # on the CPU these collectives keep who calls them


class FSDPReplication(Replication):
    """A stage that `fully_shard` was applied to, or to submodules of; or torch's `replicate`, which is made of the same.

    `group` has its replicas. Without, they are pipelines that know nothing of each other, and must use the same parameters.
    """

    parameters_ready = False

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self._modules = fsdp_modules(module)
        self._group = group
        self._device = next(module.parameters()).device
        self._fetching: list[Any] = []
        self._averaging: Future[None] | None = None

    def prefetch_parameters(self) -> None:
        """Begin to fetch the parameters."""
        if self._fetching:
            return
        for module in self._modules:
            torch_private.init_fsdp(module)
        self._set_last_backward(False)
        for module in self._modules:
            if not torch_private.is_replicate_module(module):
                module.set_reshard_after_forward(False)
        self._fetching = [module.unshard(async_op=True) for module in self._modules]

    def _set_last_backward(self, last: bool) -> None:
        for module in self._modules:
            module.set_is_last_backward(last)
            module.set_requires_gradient_sync(last)
            module.set_reshard_after_backward(last)

    def wait_parameters(self) -> None:
        """Wait for them; those of the next stage come meanwhile."""
        self.prefetch_parameters()
        for handle in self._fetching:
            handle.wait()
        self.parameters_ready = True
        if self.next_stage is not None:
            self.next_stage.prefetch_parameters()

    def after_last_backward(self) -> None:
        """Begin to average the gradients; each rank keeps its share of them and of the parameters."""
        if self.backwards_match and self._device.type == "cpu":
            self._averaging = _averaging_pool.submit(self._average)
        elif self.backwards_match:
            self._average()

    def _average(self) -> None:
        self._set_last_backward(True)
        if self._group is not None:
            self._fill(self._group)
        torch_private.reduce_fsdp_gradients(self._modules)

    def _fill(self, group: dist.ProcessGroup) -> None:
        """Give zeros to parameters that have a gradient on another replica only: all must average the same ones."""
        parameters = [each for module in self._modules for each in torch_private.fsdp_parameters(module)]
        mine = [torch_private.has_unreduced_grad(each) for each in parameters]
        used = GradientPresence(mine, group, self._device).on_any_replica()
        for parameter, here, anywhere in zip(parameters, mine, used, strict=True):
            if anywhere and not here:
                torch_private.set_zero_grad(parameter)

    def finish_step(self, training: bool) -> None:
        """Wait until that is done; where the last backwards were not alike, do it only now."""
        if self._averaging is not None:
            self._averaging.result()
        if training and not self.backwards_match:
            self._average()
        for module in self._modules:
            module.reshard()
        self._fetching, self._averaging, self.parameters_ready = [], None, False


def fsdp_modules(module: nn.Module) -> list[Any]:
    """The parts of `module`, itself among them, that `fully_shard` was applied to."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # who has applied it has imported it, which takes a second
    return [each for each in module.modules() if isinstance(each, fsdp.FSDPModule)] if fsdp is not None else []


def begin_step(stages: list[Replication]) -> None:
    """Before a step: tell each of a rank's stages which comes into use after it, and fetch the first one's parameters."""
    for stage, after in pairwise([*stages, NoReplication()]):
        stage.begin_step()
        stage.next_stage = after
    for stage in stages[:1]:
        stage.prefetch_parameters()
