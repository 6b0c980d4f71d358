"""Data parallel: the stages of replicas, along the mesh's axis `dp`, held equal by DistributedDataParallel or `fully_shard`."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from penstock.replicas import Alone, Replicas
from penstock.sharded import local
from penstock.shards import Shards, is_sharded

Way = Callable[[nn.Module, DeviceMesh], nn.Module]  # a stage, the mesh's axis `dp` -> the stage, held equal along it


def ddp(module: nn.Module, mesh: DeviceMesh) -> Any:
    """`module` held equal by DistributedDataParallel; where its parameters are shared along `tp`, by torch's `replicate`."""
    if any(hasattr(each, "placements") for each in module.parameters()):
        from torch.distributed._composable.replicate_with_fsdp import replicate

        return replicate(module, mesh=mesh)
    return DistributedDataParallel(module, process_group=mesh.get_group(), gradient_as_bucket_view=True, init_sync=False)


def fsdp(module: nn.Module, mesh: DeviceMesh) -> Any:
    """`module`, its parameters spread by `fully_shard`."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=mesh)


WAYS: dict[str, Way] = {"ddp": ddp, "fsdp": fsdp}


def over(module: nn.Module, mesh: DeviceMesh, way: Way, borrowed: Sequence[str]) -> Alone:
    """`module` in a copy on every rank of `mesh`, all with the first one's values, and from now on held equal by `way`.

    `borrowed`: names of parameters whose gradients go to another stage.
    """
    share((*module.parameters(), *module.buffers()), mesh.get_group())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(borrowed))
    if way is ddp and not any(each.requires_grad and name not in borrowed for name, each in module.named_parameters()):
        return Replicas(module, None, partial(ddp, module, mesh))
    return kind_of(module, way(module, mesh), partial(way, module, mesh))


def kind_of(module: nn.Module, parallel: nn.Module, wrap: Callable[[], Any] | None = None) -> Alone:
    """What runs `module`, of which DistributedDataParallel or `fully_shard` has made `parallel`; perhaps nobody has."""
    if isinstance(parallel, DistributedDataParallel):
        return Replicas(module, parallel, wrap)
    return Shards(parallel) if is_sharded(parallel) else Alone()


class Buffers:
    """The buffers of a stage, BatchNorm's statistics for instance: those that are state, or that a step changes.

    They become replica 0's, as with DistributedDataParallel.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._module, self._group = module, group

    def begin(self) -> None:
        """Before a step."""
        self._versions = [buffer._version for buffer in self._module.buffers()]

    def end(self) -> None:
        """After it."""
        state = self._module.state_dict(keep_vars=True)
        buffers = zip(self._module.named_buffers(), self._versions, strict=True)
        share((each for (name, each), version in buffers if name in state or each._version != version), self._group)


def share(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Give all of `group` the values that its first rank has."""
    with torch.no_grad():
        for tensor in tensors:
            mine = local(tensor)
            values = mine.contiguous()
            dist.broadcast(values, group=group, group_src=0)
            if values is not mine:
                mine.copy_(values)
