"""Lines: what a channel's messages travel over - shared memory on one machine, else a process group of two.

Messages arrive in the order in which they are sent, and sending never waits for the receiver. Tensors must be on the line's
`carrier` to be sent, and arrive there.
"""

from penstock.comms.groups import DESTINATION, SOURCE, Groups
from penstock.comms.messages.group_line import GroupReceiver, GroupSender, Outbox
from penstock.comms.messages.memory_line import MemoryReceiver, MemorySender, accept, offer
from penstock.comms.topology import CPU

SendingLine = MemorySender | GroupSender
ReceivingLine = MemoryReceiver | GroupReceiver


def sending_line(groups: Groups, name: str, outbox: Outbox) -> SendingLine:
    """The sending end of the new line `name`."""
    gloo = groups.gloo(name, SOURCE, 2)
    if groups.topology.backend == "nccl":
        return GroupSender(gloo, groups.nccl(f"{name}-nccl", SOURCE, 2), groups.topology.device, outbox)
    return offer(gloo, groups, outbox.failure) or GroupSender(gloo, gloo, CPU, outbox)


def receiving_line(groups: Groups, name: str) -> ReceivingLine:
    """The receiving end of the new line `name`."""
    gloo = groups.gloo(name, DESTINATION, 2)
    if groups.topology.backend == "nccl":
        return GroupReceiver(gloo, groups.nccl(f"{name}-nccl", DESTINATION, 2), groups.topology.device)
    return accept(gloo, groups) or GroupReceiver(gloo, gloo, CPU)
