"""Data parallel: the stages of replicas, along the mesh's axis `dp`, held equal by DistributedDataParallel or `fully_shard`."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import MismatchError
from penstock.mesh.ddp import DDPCopies
from penstock.mesh.fsdp import FSDPCopies, is_sharded
from penstock.mesh.position import MeshPosition
from penstock.stage.copies import StageCopies
from penstock.stage.dtensor import local

BROADCAST_BYTES = 1 << 25  # of one message
ApplyDataParallel = Callable[[nn.Module, DeviceMesh], nn.Module]  # a stage, the axis `dp` -> the stage, held equal along it


def ddp(module: nn.Module, mesh: DeviceMesh) -> Any:
    """`module` held equal by DistributedDataParallel."""
    return DistributedDataParallel(module, process_group=mesh.get_group(), gradient_as_bucket_view=True, init_sync=False)


def replicated(module: nn.Module, mesh: DeviceMesh) -> Any:
    """`module` held equal by torch's `replicate`, which is made for parameters that are shared along `tp` too."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(module, mesh=mesh)


def fsdp(module: nn.Module, mesh: DeviceMesh) -> Any:
    """`module`, its parameters spread by `fully_shard`."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=mesh)


WAYS: dict[str, ApplyDataParallel] = {"ddp": ddp, "fsdp": fsdp}


def over(module: nn.Module, position: MeshPosition, way: ApplyDataParallel, borrowed: Sequence[str]) -> StageCopies:
    """`module` in a copy on every rank along `dp`, all with the first one's values, and from now on held equal by `way`.

    `borrowed`: names of parameters whose gradients go to another stage. Raises MismatchError if `way` holds nothing equal.
    """
    mesh = position.dp
    assert mesh is not None
    share((*module.parameters(), *module.buffers()), mesh.get_group())
    if not any(True for _ in module.parameters()):
        return StageCopies()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(borrowed))
    way = replicated if way is ddp and position.tp is not None else way
    if way is ddp and not any(each.requires_grad and name not in borrowed for name, each in module.named_parameters()):
        return DDPCopies(module, None, mesh.get_group(), partial(ddp, module, mesh))
    made = way(module, mesh)
    parallel = (
        kind_of(module, made, mesh.get_group(), partial(way, module, mesh)) if isinstance(made, nn.Module) else StageCopies()
    )
    if type(parallel) is StageCopies:
        told = getattr(way, "__name__", repr(way))
        raise MismatchError(
            f"data_parallel={told} gave {type(made).__name__}, no DistributedDataParallel and not sharded: return what it makes"
        )
    return parallel


def kind_of(
    module: nn.Module, parallel: nn.Module, group: dist.ProcessGroup | None = None, wrap: Callable[[], Any] | None = None
) -> StageCopies:
    """What runs `module`, of which DistributedDataParallel or `fully_shard` has made `parallel`; perhaps nobody has."""
    if isinstance(parallel, DistributedDataParallel):
        return DDPCopies(module, parallel, group, wrap)
    return FSDPCopies(parallel, group) if is_sharded(parallel) else StageCopies()


def share_state(module: nn.Module, group: dist.ProcessGroup) -> None:
    """After a step: the buffers that are state, BatchNorm's statistics for instance, become replica 0's."""
    state = module.state_dict(keep_vars=True)
    share([each for name, each in module.named_buffers() if name in state], group)


def share(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Give all of `group` the values that its first rank has."""
    mine = [local(tensor.detach()) for tensor in tensors]
    if mine:
        dist._broadcast_coalesced(group, mine, BROADCAST_BYTES, 0)
