"""Ranks: how they start, send each other tensors, make the same calls, and raise the same error when one fails.

topology          which rank this process is, among how many, on which device
rendezvous        what ranks write into the store where they meet: the id of a run, which ranks have left
backends          NCCL or Gloo, and the network interface
heartbeat         a thread of each rank that beats, and monitors another rank
process           what a rank's process does, and its state, readable by other processes of its machine
process_groups    process groups that can be closed while ranks wait in them
abort             ends all waits in a process group
failure_reports   what ranks report when a step fails, and the one error that follows from it
control_group     all ranks make the same calls, exchange small values, and fail together
encoding          values as bytes and back, without pickle
point_to_point    a tensor from one rank to another
device_mesh       the device mesh of all ranks
preemption        signals that ask the program to save and leave
system            what the operating system refuses, and what it is asked for
time_limits       all times of this room
launch/           ranks of this machine: started, and started again when one has failed
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

_NAMES_OF_MODULE = {
    "topology": ("Topology", "current_topology", "get_next_rank", "get_prev_rank", "init_distributed", "shutdown"),
    "device_mesh": ("init_mesh",),
    "preemption": ("catch_preemption",),
    "point_to_point": ("recv_tensor", "send_tensor"),
}

__getattr__, __dir__ = lazy_exports(__name__, {name: module for module, names in _NAMES_OF_MODULE.items() for name in names})
