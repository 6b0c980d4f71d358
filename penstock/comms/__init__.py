"""Communication of ranks: send tensors, make the same calls on all, raise the same error when one fails.

topology          this process's rank, the number of ranks, this rank's device
rendezvous        how ranks meet: the id of a run, a wait for all
backends          choose NCCL or Gloo, and the network interface
heartbeat         a thread of each rank that sends heartbeats, and monitors other ranks
process           a rank's process, and its last heartbeat, with what it is doing
process_groups    process groups that can be closed while ranks wait in them
abort             end all waits in a process group
wait_errors       errors of waits and of the system, as Penstock's
status            how each rank has ended, and the one error that all raise
control_group     all ranks make the same calls, exchange small values, and raise the same error
encoding          encode values as bytes, without pickle
point_to_point    send a tensor from one rank to another
device_mesh       the device mesh of all ranks
preemption        signals that ask the program to save and exit
system            limits and settings of the operating system, messages for the user
time_limits       all times of this room
transport/        messages between stages
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

__all__ = [
    "Topology",
    "catch_preemption",
    "current_topology",
    "get_next_rank",
    "get_prev_rank",
    "init_distributed",
    "init_mesh",
    "recv_tensor",
    "send_tensor",
    "shutdown",
]

_OTHER_MODULES = {
    "catch_preemption": "preemption",
    "init_mesh": "device_mesh",
    "recv_tensor": "point_to_point",
    "send_tensor": "point_to_point",
}

__getattr__, __dir__ = lazy_exports(__name__, {name: _OTHER_MODULES.get(name, "topology") for name in __all__})
