"""Lines: what a channel's messages travel over - shared memory on one machine, else a process group of two.

Messages arrive in the order in which they are sent, and sending never waits for the receiver. Tensors must be on the line's
`carrier` to be sent, and arrive there.
"""

from functools import partial
from typing import Any

import torch

from penstock.comms.groups import DESTINATION, SOURCE, Groups
from penstock.comms.messages.device_line import DeviceReceiver, DeviceSender
from penstock.comms.messages.group_line import GroupReceiver, GroupSender, Outbox
from penstock.comms.messages.ipc_line import IpcReceiver, IpcSender
from penstock.comms.messages.memory_line import MemoryReceiver, MemorySender
from penstock.comms.messages.opening import DEVICE, HOST, accept, offer
from penstock.comms.topology import CPU

SendingLine = MemorySender | GroupSender
ReceivingLine = MemoryReceiver | GroupReceiver


def sending_line(groups: Groups, name: str, peer: int, outbox: Outbox) -> SendingLine:
    """The sending end of the new line `name` to the rank `peer`, which opens the other end."""
    if groups.topology.backend != "nccl":
        device, failure = groups.topology.device, outbox.failure
        kinds: dict[int, Any] = {HOST: partial(MemorySender, failure=failure)}
        if device.type == "cuda":
            on_device = partial(IpcSender, device=device, failure=failure)
            kinds = {DEVICE: on_device, HOST: partial(DeviceSender, device=device, failure=failure)}
        if line := offer(groups, peer, kinds):
            return line
    return GroupSender(*_of_two(groups, name, SOURCE), outbox)


def receiving_line(groups: Groups, name: str, peer: int) -> ReceivingLine:
    """The receiving end of the new line `name` from the rank `peer`."""
    if groups.topology.backend != "nccl":
        device = groups.topology.device
        kinds: dict[int, Any] = {HOST: MemoryReceiver}
        if device.type == "cuda":
            kinds = {DEVICE: partial(IpcReceiver, device=device), HOST: partial(DeviceReceiver, device=device)}
        if line := accept(groups, peer, kinds):
            return line
    return GroupReceiver(*_of_two(groups, name, DESTINATION))


def _of_two(groups: Groups, name: str, end: int) -> tuple[Any, Any, torch.device]:
    """What carries descriptions, what carries tensors, and where they must be."""
    gloo = groups.gloo(name, end, 2)
    if groups.topology.backend != "nccl":
        return gloo, gloo, CPU
    return gloo, groups.nccl(f"{name}-nccl", end), groups.topology.carrier
