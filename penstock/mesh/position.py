"""Position: where this rank stands along the axes of the mesh, and which ranks share its rows, tokens or products.

A `DeviceMesh` has up to four axes. Along `pp` lie the ranks of one pipeline. Along `dp` lie its replicas, each with rows of
its own; gradients are averaged over them once a step. Along `tp` lie ranks that share the products inside every stage. Along
`cp` lie ranks that have tokens of their own of the same rows; their gradients are averaged together with those along `dp`.

The ranks of `init_mesh(pp=2, dp=2, tp=2)`, those of a pipeline in a row:

    dp 0   tp 0   0 --- 4
           tp 1   1 --- 5
    dp 1   tp 0   2 --- 6
           tp 1   3 --- 7

Ranks 0 to 3 have stage 0: 0 and 1 share its products, and so do 2 and 3; 0 and 2 average gradients, and so do 1 and 3.
All pipelines run the same table, so actions that wait for each other along `tp` or `cp` stand in the same place of every row:
side by side they are one action, and a table that is proved for one pipeline is proved for all of them.
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
    """Where this rank stands."""

    world: Topology  # all ranks of the mesh
    pipeline: Topology  # those of this rank's pipeline
    pipelines: tuple[tuple[tuple[int, ...], ...], ...]  # by replica, and by `cp` and `tp`: the ranks of a pipeline
    replica: int = 0  # this rank's place along `dp`
    shard: int = 0  # along `cp` and `tp` as one, `tp` the faster
    mesh: DeviceMesh | None = None
    cp_size: int = 1

    @property
    def replicas(self) -> int:
        """The size of `dp`."""
        return len(self.pipelines)

    def replica_prefix(self, replica: int) -> str:
        """Return what an error about a replica begins with, if there are several."""
        return f"replica {replica}: " if self.replicas > 1 else ""

    @cached_property
    def replica_pipelines(self) -> list[tuple[int, ...]]:
        """Of each replica, the ranks of one pipeline: those beside it along `cp` and `tp` have the same batch."""
        return [shards[0] for shards in self.pipelines]

    @property
    def cp_index(self) -> int:
        """This rank's place along `cp`."""
        return self.shard // self._tp_size

    @property
    def batch_part_index(self) -> int:
        """Which part of the batch this rank has: rows by its place along `dp`, of these the tokens by that along `cp`."""
        return self.replica * self.cp_size + self.cp_index

    @cached_property
    def batch_part_pipelines(self) -> list[tuple[int, ...]]:
        """Of each part of the batch, the ranks of one pipeline: those beside it along `tp` say the same."""
        return [pipeline for shards in self.pipelines for pipeline in shards[:: self._tp_size]]

    @property
    def _tp_size(self) -> int:
        return len(self.pipelines[0]) // self.cp_size

    @property
    def num_ranks_per_stage(self) -> int:
        """How many ranks have a stage of this rank's."""
        return self.replicas * len(self.pipelines[0])

    @property
    def stage_rank_index(self) -> int:
        """Which of them this rank is."""
        return self.replica * len(self.pipelines[0]) + self.shard

    @cached_property
    def dp_cp_mesh(self) -> DeviceMesh | None:
        """The axes `dp` and `cp` as one, along which gradients are averaged, if it has more than one rank."""
        if self.mesh is None or len(self.batch_part_pipelines) == 1:
            return None
        return flatten_mesh(self.mesh["dp", "cp"]) if self.cp_size > 1 else self.mesh["dp"]

    @cached_property
    def cp_group(self) -> dist.ProcessGroup | None:
        """A group of the ranks along `cp`, if there are several. The axis' own may be the one that averages gradients."""
        if self.cp_size == 1:
            return None
        ranks = [
            shards[self.pipeline.rank] for shards in self.pipelines[self.replica][self.shard % self._tp_size :: self._tp_size]
        ]
        group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
        return group

    @cached_property
    def tp(self) -> DeviceMesh | None:
        """The axis, if it has more than one rank."""
        return self.mesh["tp"] if self.mesh is not None and self._tp_size > 1 else None

    @cached_property
    def stage_ranks(self) -> list[tuple[int, ...]]:
        """For each place in a pipeline, the ranks that stand there: they have the same stages."""
        return list(zip(*[ranks for shards in self.pipelines for ranks in shards], strict=True))

    @property
    def peer_groups(self) -> list[Any]:
        """The process groups that this rank's pipeline shares with those beside it."""
        groups = [mesh.get_group() for mesh in (self.dp_cp_mesh, self.tp) if mesh is not None]
        return [*groups, self.cp_group] if self.cp_group is not None else groups


def mesh_position(mesh: DeviceMesh | None, topology: Topology) -> MeshPosition:
    """Where this rank stands in `mesh`; without one, all ranks are one pipeline.

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
