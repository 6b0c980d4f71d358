"""This rank's place along the axes of the mesh, and the ranks that share its rows, tokens or matrix products.

A `DeviceMesh` has up to four axes:

    pp   the ranks of one pipeline
    dp   replicas of the pipeline, each with other rows of the batch; gradients are averaged over them once a step
    cp   ranks with other tokens of the same rows; gradients are averaged over them together with `dp`
    tp   ranks that share the matrix products inside every stage

The ranks of `init_mesh(pp=2, dp=2, tp=2)`, each pipeline in a row:

    dp 0   tp 0   0 --- 4
           tp 1   1 --- 5
    dp 1   tp 0   2 --- 6
           tp 1   3 --- 7

Ranks 0 to 3 have stage 0. Ranks 0 and 1 share its products, and so do 2 and 3; 0 and 2 average gradients, and so do 1 and 3.
All pipelines run the same table. So actions that wait for each other along `tp` or `cp` have the same index in every rank's
row, and can be seen as one action: the proof of the table for one pipeline holds for all of them.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.comms.topology import Topology
from penstock.errors import MismatchError
from penstock.torch_private import flatten_mesh

MESH_AXES = ("dp", "cp", "tp", "pp")


@dataclass(frozen=True)
class MeshPosition:
    """The place of this rank in the mesh."""

    world: Topology  # all ranks of the mesh
    pipeline: Topology  # the ranks of this rank's pipeline
    pipelines: tuple[tuple[tuple[int, ...], ...], ...]  # pipelines[replica][shard]: the ranks of a pipeline
    replica: int = 0  # this rank's index along `dp`
    shard: int = 0  # its index along `cp` and `tp` flattened: cp_index * tp_size + tp_index
    mesh: DeviceMesh | None = None
    cp_size: int = 1

    @property
    def replicas(self) -> int:
        """The number of replicas: the size of `dp`."""
        return len(self.pipelines)

    def replica_prefix(self, replica: int) -> str:
        """Return the beginning of an error about `replica`: `replica 1: `; empty if there is only one."""
        return f"replica {replica}: " if self.replicas > 1 else ""

    @cached_property
    def replica_pipelines(self) -> list[tuple[int, ...]]:
        """The ranks of one pipeline of each replica. Its other pipelines, along `cp` and `tp`, have the same rows."""
        return [shards[0] for shards in self.pipelines]

    @property
    def cp_index(self) -> int:
        """This rank's index along `cp`."""
        return self.shard // self._tp_size

    @property
    def batch_part_index(self) -> int:
        """The index of this rank's part of the batch. Parts are numbered by rows (`dp`), then by tokens (`cp`)."""
        return self.replica * self.cp_size + self.cp_index

    @cached_property
    def batch_parts(self) -> list[tuple[int, ...]]:
        """The ranks of one pipeline for each part of the batch. The part's other pipelines, along `tp`, have equal results."""
        return [pipeline for shards in self.pipelines for pipeline in shards[:: self._tp_size]]

    @property
    def _tp_size(self) -> int:
        return len(self.pipelines[0]) // self.cp_size

    @property
    def num_ranks_per_stage(self) -> int:
        """The number of ranks that have the same stages as this rank, this one included."""
        return self.replicas * len(self.pipelines[0])

    @property
    def stage_rank_index(self) -> int:
        """The index of this rank among those with the same stages, below `num_ranks_per_stage`."""
        return self.replica * len(self.pipelines[0]) + self.shard

    @cached_property
    def dp_cp_mesh(self) -> DeviceMesh | None:
        """The axes `dp` and `cp` as one axis, along which gradients are averaged; None if it has one rank."""
        if self.mesh is None or len(self.batch_parts) == 1:
            return None
        return flatten_mesh(self.mesh["dp", "cp"]) if self.cp_size > 1 else self.mesh["dp"]

    @cached_property
    def cp_group(self) -> dist.ProcessGroup | None:
        """A new group of the ranks along `cp`; None if there is one. The mesh's own may be in use for averaging gradients."""
        if self.cp_size == 1:
            return None
        ranks = [
            shards[self.pipeline.rank] for shards in self.pipelines[self.replica][self.shard % self._tp_size :: self._tp_size]
        ]
        group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
        return group

    @cached_property
    def tp(self) -> DeviceMesh | None:
        """The axis `tp` of the mesh; None if it has one rank."""
        return self.mesh["tp"] if self.mesh is not None and self._tp_size > 1 else None

    @cached_property
    def stage_ranks(self) -> list[tuple[int, ...]]:
        """The ranks with the same stages, for each rank of a pipeline."""
        return list(zip(*[ranks for shards in self.pipelines for ranks in shards], strict=True))

    @property
    def peer_groups(self) -> list[Any]:
        """The process groups that this rank shares with ranks of other pipelines."""
        groups = [mesh.get_group() for mesh in (self.dp_cp_mesh, self.tp) if mesh is not None]
        return [*groups, self.cp_group] if self.cp_group is not None else groups


def mesh_position(mesh: DeviceMesh | None, topology: Topology) -> MeshPosition:
    """Return this rank's position in `mesh`; without a mesh, all ranks are one pipeline.

    Raises MismatchError for axes of other names, and for a mesh that is not made of all ranks.
    """
    if mesh is None:
        return MeshPosition(topology, topology, ((tuple(range(topology.world_size)),),))
    if not isinstance(mesh, DeviceMesh):
        raise MismatchError(f"mesh= takes a DeviceMesh, for instance of ps.comms.init_mesh(pp=2, dp=2), got {mesh!r}")
    names = mesh.mesh_dim_names or ()
    if not names or set(names) - set(MESH_AXES):
        raise MismatchError(f"the mesh has axes {names or 'without names'}: use any of 'pp', 'dp', 'cp' and 'tp', or init_mesh")
    if "cp" in names and "dp" not in names:
        raise MismatchError("a mesh with an axis cp needs an axis dp before it, which may have one rank: use init_mesh")
    if mesh.mesh.numel() != topology.world_size:
        raise MismatchError(f"the mesh has {mesh.mesh.numel()} ranks, but {topology.world_size} are running: use all of them")
    sizes = dict(zip(names, mesh.mesh.shape, strict=True))
    ranks = mesh.mesh.permute([names.index(axis) for axis in MESH_AXES if axis in names])
    ranks = ranks.reshape(sizes.get("dp", 1), sizes.get("cp", 1) * sizes.get("tp", 1), sizes.get("pp", 1))
    replica, shard, rank = (torch.nonzero(ranks == topology.rank)[0]).tolist()
    pipelines = tuple(tuple(tuple(row) for row in shards) for shards in ranks.tolist())
    pipeline_ranks = pipelines[replica][shard]
    pipeline = replace(topology, rank=rank, world_size=len(pipeline_ranks), global_ranks=pipeline_ranks)
    return MeshPosition(topology, pipeline, pipelines, replica, shard, mesh, sizes.get("cp", 1))
