"""The glue: ranks, tensors between them, and how they agree and fail as one.

topology        which rank this is, among how many, on which device
allocator       has a process keep the memory it frees
encoding        values as bytes and back, without pickle
point_to_point  a tensor from one rank to another
system          what a rank's own system tells it, or refuses it
groups          process groups that can be closed while somebody waits on them
shared_memory   memory that processes of one machine see
breaking        how everybody is woken who waits in a process group
control         all ranks as one: they make the same calls, agree, and fail together
device_mesh     the mesh of all ranks
starting/       how ranks come to be: started, brought together at a store, begun again when one has failed
health/         what became of a rank, and how the others hear of it
messages/       what passes between stages
"""

from typing import TYPE_CHECKING

from penstock.lazy import face

if TYPE_CHECKING:
    from penstock.comms.device_mesh import init_mesh
    from penstock.comms.health.signals import catch_preemption
    from penstock.comms.point_to_point import recv_tensor, send_tensor
    from penstock.comms.topology import (
        Topology,
        current_topology,
        get_next_rank,
        get_prev_rank,
        init_distributed,
        shutdown,
    )

_HOMES = {
    "topology": ("Topology", "current_topology", "get_next_rank", "get_prev_rank", "init_distributed", "shutdown"),
    "device_mesh": ("init_mesh",),
    "health.signals": ("catch_preemption",),
    "point_to_point": ("recv_tensor", "send_tensor"),
}

__getattr__, __dir__ = face(__name__, {name: home for home, names in _HOMES.items() for name in names})
