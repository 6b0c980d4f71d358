"""A stage whose parameters `fully_shard` has spread over its replicas: here to be used from its first action to its last.

Torch's own hooks would fetch the parameters for every microbatch, forward and backward, and send the gradients off as often.
Here that is part of a rank's program: the parameters of its first stage are fetched as soon as a step begins, those of
each further one while the stage before it has begun to work, and what remains of the gradients leaves after the stage's
last action. The calls are those with which `torch.distributed.pipelining` steers `fully_shard` (its `stage.py`).

The order of these is the same on all replicas, whose tables are alike. A rank fetches all its parameters before it averages
any gradient: no stage's backwards are complete before the last microbatch has been through all stages.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.stage.copies import StageCopies

_beside = ThreadPoolExecutor(1, "penstock-average")  # on the CPU these collectives keep who calls them


class FSDPCopies(StageCopies):
    """A stage that `fully_shard` was applied to, or to submodules of; or `replicate`, which is made of the same."""

    ready = False

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        from torch.distributed._composable.replicate_with_fsdp import ReplicateModule  # both import for a second
        from torch.distributed.fsdp import FSDPModule

        self._modules = [each for each in module.modules() if isinstance(each, FSDPModule)]
        self._spread = [each for each in self._modules if not issubclass(type(each), ReplicateModule)]
        self._states = [each._get_fsdp_state() for each in self._modules]
        self._group = group
        self._fetching: list[Any] | None = None
        self._averaging: Future[None] | None = None
        self._on_cpu = next(module.parameters()).device.type == "cpu"

    def gather(self) -> None:
        """Begin to fetch the parameters."""
        if self._fetching is None:
            for state in self._states:
                state._lazy_init()
            for module in self._modules:
                module.set_is_last_backward(False)
                module.set_requires_gradient_sync(False)
                module.set_reshard_after_backward(False)
            for module in self._spread:
                module.set_reshard_after_forward(False)
            self._fetching = [module.unshard(async_op=True) for module in self._modules]

    def get_ready(self) -> None:
        """Wait for them; those of the next stage come meanwhile."""
        self.gather()
        for handle in self._fetching or ():
            handle.wait()
        self.ready = True
        if self.next is not None:
            self.next.gather()

    def complete(self) -> None:
        """Begin to average the gradients; each rank keeps its share of them and of the parameters."""
        if self.alike and self._on_cpu:
            self._averaging = _beside.submit(self._average)
        elif self.alike:
            self._average()

    def _average(self) -> None:
        for module in self._modules:
            module.set_is_last_backward(True)
            module.set_requires_gradient_sync(True)
            module.set_reshard_after_backward(True)
        self._fill()
        for state in self._states:
            for group in state._fsdp_param_groups:
                group.post_backward()
        for state in self._states:
            if state._is_root:
                state._root_post_backward_final_callback()

    def _fill(self) -> None:
        """Give zeros to parameters that have a gradient on another replica only: all must average the same ones."""
        if self._group is None:
            return
        every = [each for state in self._states for group in state._fsdp_param_groups for each in group.fsdp_params]
        mine = [hasattr(each, "_unsharded_param") and _has_gradient(each) for each in every]
        used = torch.tensor(mine, dtype=torch.uint8, device="cpu" if self._on_cpu else "cuda")
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group)
        for each, here, anywhere in zip(every, mine, used.tolist(), strict=True):
            if anywhere and not here:
                each.unsharded_param.grad = torch.zeros_like(each.unsharded_param)

    def end(self, training: bool) -> None:
        """Wait until that is done; where the last backwards were not alike, do it only now."""
        if self._averaging is not None:
            self._averaging.result()
        if training and not self.alike:
            self._average()
        for module in self._modules:
            module.reshard()
        self._averaging = self._fetching = None
        self.ready = False


def _has_gradient(parameter: Any) -> bool:
    return parameter.unsharded_accumulated_grad is not None or parameter.unsharded_param.grad is not None


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to `module` or a submodule."""
    return any(hasattr(each, "unshard") and hasattr(each, "_get_fsdp_state") for each in module.modules())


def is_mixed(module: nn.Module) -> bool:
    """Whether `fully_shard` casts what goes into `module`: then it must be called as a whole."""
    policy = module._get_fsdp_state()._mp_policy if hasattr(module, "_get_fsdp_state") else None  # type: ignore[operator]
    return policy is not None and policy.param_dtype is not None


def begin(stages: list[StageCopies]) -> None:
    """Before a step: tell each of a rank's stages which comes into use after it, and fetch the first one's parameters."""
    for stage, after in pairwise([*stages, StageCopies()]):
        stage.begin()
        stage.next = after
    for stage in stages[:1]:
        stage.gather()
