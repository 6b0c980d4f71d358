"""Create the device mesh of all ranks, with axes for pipeline, data, context and tensor parallel."""

from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.comms.control_group import shared_control_group
from penstock.comms.system import batch_thread_policy
from penstock.comms.topology import current_topology
from penstock.comms.wait_errors import convert_errors
from penstock.errors import MismatchError, require_equal


def init_mesh(pp: int | None = None, dp: int = 1, tp: int = 1, cp: int = 1) -> DeviceMesh:
    """Return a mesh of all ranks with the axes `pp`, `dp` and `tp`, and `cp` if it is above 1, for `Pipeline(.., mesh=mesh)`.

    Calls `init_distributed()` if that has not been called yet.

    `pp`: ranks of a pipeline; None for the number of ranks divided by the other axes.
    `dp`: replicas of the pipeline.
    `tp`: ranks that share the matrix products of each stage. They communicate the most, so their numbers are adjacent; `cp`
        comes next, then `dp`.
    `cp`: ranks that share the tokens of each sequence (docs/howto/long-contexts.md).

        mesh = ps.comms.init_mesh(pp=2, dp=2)                   # on 4 ranks: pipelines 0, 2 and 1, 3
        pipe = ps.Pipeline(model, loss_fn, mesh=mesh)

    Every rank makes the same call. Raises MismatchError if the product of the axes is not the number of ranks, or if ranks give
    different axes.
    """
    topology = current_topology()
    control = shared_control_group(topology)
    with control.collective_call("init_mesh()"):
        for axis, size in {"pp": pp, "dp": dp, "tp": tp, "cp": cp}.items():
            if (size, axis) != (None, "pp") and (type(size) is not int or size < 1):
                raise MismatchError(f"the mesh's axis {axis} cannot have {size!r} ranks: use a whole number of 1 or more")
        pp = max(1, topology.world_size // (dp * cp * tp)) if pp is None else pp
        axes = {"pp": pp, "dp": dp, **({"cp": cp} if cp > 1 else {}), "tp": tp}
        if prod(axes.values()) != topology.world_size:
            raise MismatchError(
                f"a mesh of {_format_axes(axes)} has {prod(axes.values())} ranks, but {topology.world_size} are running: "
                "start that many, or give other numbers"
            )

        axes_of_ranks = control.all_gather_value(_format_axes(axes), "to make a mesh")
        require_equal(axes_of_ranks, "do not make the same mesh", "makes one of {}")

        if not dist.is_initialized():  # a world of one
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with batch_thread_policy(), convert_errors("for the other ranks to make a mesh"):
            return init_device_mesh(
                topology.device.type,
                tuple(axes.values()),
                mesh_dim_names=tuple(axes),
                backend_override=_backends_of_whole_axes(axes, topology.world_size),
            )


def _backends_of_whole_axes(axes: dict[str, int], world_size: int) -> dict[int | str, Any]:
    """Return axis -> backend for the axis of all ranks. For it torch would take its default group, which exists only once.

    A step that fails aborts the groups of its mesh, and the next mesh needs new ones.
    """
    config = dist.get_backend_config()
    return {axis: config for axis, size in axes.items() if size == world_size > 1}


def _format_axes(axes: dict[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in axes.items())
