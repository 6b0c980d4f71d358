"""Data parallel: replicate stages along `dp` and `cp` by DistributedDataParallel or `fully_shard`."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from penstock import torch_private
from penstock.errors import MismatchError
from penstock.mesh.ddp import DDPHooks
from penstock.mesh.fsdp import FrozenFSDPHooks, FSDPHooks, fsdp_modules
from penstock.mesh.position import MeshPosition
from penstock.stage.dtensor import local_shard
from penstock.stage.hooks import DataParallelHooks, NoDataParallelHooks

BROADCAST_BUCKET_BYTES = 1 << 25
ApplyDataParallel = Callable[[nn.Module, DeviceMesh], nn.Module]  # (stage, axis of the mesh) -> the stage, replicated along it


def apply_ddp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return `module` wrapped in DistributedDataParallel."""
    return DistributedDataParallel(module, process_group=mesh.get_group(), gradient_as_bucket_view=True, init_sync=False)


def apply_fsdp(module: nn.Module, mesh: DeviceMesh) -> Any:
    """Apply `fully_shard` to `module`, and return it."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=mesh)


APPLY_BY_NAME: dict[str, ApplyDataParallel] = {"ddp": apply_ddp, "fsdp": apply_fsdp}


def make_data_parallel(
    module: nn.Module, position: MeshPosition, apply: ApplyDataParallel, ignored_names: Sequence[str]
) -> DataParallelHooks:
    """Broadcast the first replica's values of `module` along `dp` and `cp`, apply `apply`, and return the stage's hooks.

    `ignored_names`: of parameters whose gradients go to another stage. Raises MismatchError if `apply` replicates nothing.
    """
    mesh = position.dp_cp_mesh
    assert mesh is not None
    group = mesh.get_group()
    broadcast_from_first((*module.parameters(), *module.buffers()), group)
    if not any(True for _ in module.parameters()):
        return NoDataParallelHooks()
    torch_private.ignore_in_ddp(module, ignored_names)
    if apply is apply_ddp and position.tp is not None:
        apply = torch_private.replicate_with_fsdp  # DistributedDataParallel does not accept DTensors
    wrap = partial(apply, module, mesh)
    if apply is apply_ddp and not any(
        parameter.requires_grad and name not in ignored_names for name, parameter in module.named_parameters()
    ):
        return DDPHooks(module, None, group, wrap)
    wrapped = wrap()
    hooks = data_parallel_hooks_of(module, wrapped, group, wrap)
    if isinstance(hooks, NoDataParallelHooks):
        problem = f"data_parallel={getattr(apply, '__name__', repr(apply))} gave {type(wrapped).__name__}"
        raise MismatchError(f"{problem}, no DistributedDataParallel and not sharded: return what it makes")
    return hooks


def share_out_frozen(module: nn.Module, mesh: DeviceMesh, apply: ApplyDataParallel | None) -> DataParallelHooks:
    """Broadcast the first replica's values of a module without gradients along `mesh`; shard it by `apply`, if given."""
    broadcast_from_first((*module.parameters(), *module.buffers()), mesh.get_group())
    if apply is None or not any(True for _ in module.parameters()):
        return NoDataParallelHooks()
    return FrozenFSDPHooks(apply(module, mesh))


def data_parallel_hooks_of(
    module: nn.Module, wrapped: Any, group: dist.ProcessGroup | None = None, wrap: Callable[[], Any] | None = None
) -> DataParallelHooks:
    """Return the hooks for `wrapped`: DDP's or FSDP's, or none if neither was applied to `module`.

    `group`: the replicas. `wrap`: returns `module` wrapped anew. Both are None for replicas that are separate pipelines.
    """
    if isinstance(wrapped, DistributedDataParallel):
        return DDPHooks(module, wrapped, group, wrap)
    return FSDPHooks(wrapped, group) if isinstance(wrapped, nn.Module) and fsdp_modules(wrapped) else NoDataParallelHooks()


def broadcast_buffers(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Set the persistent buffers (BatchNorm's statistics for instance) to replica 0's, after a step."""
    state = module.state_dict(keep_vars=True)
    broadcast_from_first([named_buffer for name, named_buffer in module.named_buffers() if name in state], group)


def broadcast_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Set `tensors` on all ranks of `group` to the values of its first rank."""
    local_shards = [local_shard(tensor.detach()) for tensor in tensors]
    if local_shards:
        torch_private.broadcast_coalesced(group, local_shards, BROADCAST_BUCKET_BYTES)
