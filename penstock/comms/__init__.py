"""The glue: ranks, tensors between them, and how they agree and fail as one.

topology        which rank this is, among how many, on which device: joined, and left
rendezvous      what ranks write in the store that they meet at: the name of a start, who has left
devices         a GPU of its own or not, and the network interface
heartbeat       a thread of each rank that beats, and watches another rank
process         what a rank's process does, and how it is, as others of its machine see it
reports         what ranks tell each other when a step fails, and who is to blame
control         all ranks as one: they make the same calls, agree, and fail together
groups          process groups that can be closed while somebody waits on them
breaking        how everybody is woken who waits in a process group
encoding        values as bytes and back, without pickle
point_to_point  a tensor from one rank to another
device_mesh     the mesh of all ranks
preemption      signals that ask the program to save and leave
system          what a rank's own system tells it, or refuses it
launch/         ranks started on this machine, and begun again when one has failed
lines/          what passes between stages
"""

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.comms.device_mesh import init_mesh
    from penstock.comms.point_to_point import recv_tensor, send_tensor
    from penstock.comms.preemption import catch_preemption
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
    "preemption": ("catch_preemption",),
    "point_to_point": ("recv_tensor", "send_tensor"),
}

__getattr__, __dir__ = lazy_exports(__name__, {name: home for home, names in _HOMES.items() for name in names})
