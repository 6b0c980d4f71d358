"""Data parallel: the stages of replicas, along `dp` and `cp`, held equal by DistributedDataParallel or `fully_shard`."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from penstock import torch_private
from penstock.errors import MismatchError
from penstock.mesh.ddp import DDPReplication
from penstock.mesh.fsdp import FSDPReplication, fsdp_modules
from penstock.mesh.position import MeshPosition
from penstock.stage.dtensor import local_shard
from penstock.stage.replication import NoReplication, Replication

BROADCAST_BUCKET_BYTES = 1 << 25  # of one message
ApplyDataParallel = Callable[[nn.Module, DeviceMesh], nn.Module]  # a stage, an axis -> the stage, held equal along it


def apply_ddp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """`module` held equal by DistributedDataParallel."""
    return DistributedDataParallel(module, process_group=mesh.get_group(), gradient_as_bucket_view=True, init_sync=False)


def apply_fsdp(module: nn.Module, mesh: DeviceMesh) -> Any:
    """`module`, its parameters spread by `fully_shard`."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=mesh)


APPLY_BY_NAME: dict[str, ApplyDataParallel] = {"ddp": apply_ddp, "fsdp": apply_fsdp}


def make_data_parallel(
    module: nn.Module, position: MeshPosition, apply: ApplyDataParallel, ignored_names: Sequence[str]
) -> Replication:
    """`module` in a copy on every rank along `dp` and `cp`, all with the first one's values, from now on held equal by `apply`.

    `ignored_names`: of parameters whose gradients go to another stage. Raises MismatchError if `apply` replicates nothing.
    """
    mesh = position.dp_cp_mesh
    assert mesh is not None
    group = mesh.get_group()
    broadcast_from_first((*module.parameters(), *module.buffers()), group)
    if not any(True for _ in module.parameters()):
        return NoReplication()
    torch_private.ignore_in_ddp(module, ignored_names)
    if apply is apply_ddp and position.tp is not None:
        apply = torch_private.replicate_with_fsdp  # DistributedDataParallel does not take parameters that are shared along `tp`
    wrap = partial(apply, module, mesh)
    if apply is apply_ddp and not any(
        parameter.requires_grad and name not in ignored_names for name, parameter in module.named_parameters()
    ):
        return DDPReplication(module, None, group, wrap)
    wrapped = wrap()
    replication = replication_of(module, wrapped, group, wrap)
    if isinstance(replication, NoReplication):
        problem = f"data_parallel={getattr(apply, '__name__', repr(apply))} gave {type(wrapped).__name__}"
        raise MismatchError(f"{problem}, no DistributedDataParallel and not sharded: return what it makes")
    return replication


def replication_of(
    module: nn.Module, wrapped: Any, group: dist.ProcessGroup | None = None, wrap: Callable[[], Any] | None = None
) -> Replication:
    """What `wrapped` says others have of `module`: DistributedDataParallel or `fully_shard` has made it, or perhaps nobody.

    `group` has the replicas, and `wrap` makes it again; None where they are pipelines that know nothing of each other.
    """
    if isinstance(wrapped, DistributedDataParallel):
        return DDPReplication(module, wrapped, group, wrap)
    return FSDPReplication(wrapped, group) if isinstance(wrapped, nn.Module) and fsdp_modules(wrapped) else NoReplication()


def broadcast_buffers(module: nn.Module, group: dist.ProcessGroup) -> None:
    """After a step: the buffers that are state, BatchNorm's statistics for instance, become replica 0's."""
    state = module.state_dict(keep_vars=True)
    broadcast_from_first([named_buffer for name, named_buffer in module.named_buffers() if name in state], group)


def broadcast_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Give all of `group` the values that its first rank has."""
    local_shards = [local_shard(tensor.detach()) for tensor in tensors]
    if local_shards:
        torch_private.broadcast_coalesced(group, local_shards, BROADCAST_BUCKET_BYTES)
