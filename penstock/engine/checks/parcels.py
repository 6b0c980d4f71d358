"""A tree of tensors to one other rank, over the pipeline's own group: a checked description, then bare memory."""

from typing import Any

import torch
from torch import Tensor

from penstock.comms.control import Control, WaitFailed
from penstock.comms.encoding import checked_size
from penstock.comms.messages import wire

PARCEL_TAG = 3
CPU = torch.device("cpu")
Sending = list[tuple[Any, Tensor]]  # what to wait for, and what must stay until then


def send(control: Control, value: Any, peer: int, what: str) -> Sending:
    """Begin to send `value` to `peer`, which must not change before that is over. `what` as in `gather`."""
    leaves, tree = wire.flatten(value)
    spec = wire.describe(leaves, tree)
    data = wire.pack(spec)
    tensors = [each for each in leaves if isinstance(each, Tensor)]
    memory = [_bytes(wire.memory(each, leaf).cpu()) for each, leaf in zip(tensors, spec.tensors, strict=True)]
    parts = [torch.tensor([data.numel()]), data, *[each for each in memory if each.numel()]]
    return [(_transfer(control, "send", each, peer, what), each) for each in parts]


def receive(control: Control, peer: int, device: torch.device, what: str) -> Any:
    """What `peer` sends, with its tensors on `device`."""
    size = torch.zeros(1, dtype=torch.int64)
    _received(control, size, peer, what)
    data = torch.empty(checked_size(int(size)), dtype=torch.uint8)
    _received(control, data, peer, what)
    spec = wire.unpack(data)
    tensors = [wire.empty(leaf, CPU) for leaf in spec.tensors]
    for each, leaf in zip(tensors, spec.tensors, strict=True):
        if each.numel():
            _received(control, _bytes(wire.memory(each, leaf)), peer, what)
    return wire.rebuild(spec, [each.to(device) for each in tensors])


def sent(sending: Sending, peer: int, what: str) -> None:
    """Wait until it has arrived."""
    for work, _ in sending:
        try:
            work.wait()
        except RuntimeError as error:
            raise WaitFailed(f"for rank {peer} {what}", peer, error) from error


def _received(control: Control, tensor: Tensor, peer: int, what: str) -> None:
    sent([(_transfer(control, "recv", tensor, peer, what), tensor)], peer, what)


def _transfer(control: Control, way: str, tensor: Tensor, peer: int, what: str) -> Any:
    groups = control.connect()
    assert groups is not None
    try:
        return getattr(groups.everyone, way)([tensor], peer, PARCEL_TAG)
    except RuntimeError as error:
        raise WaitFailed(f"for rank {peer} {what}", peer, error) from error


def _bytes(memory: Tensor) -> Tensor:
    return memory.reshape(-1).view(torch.uint8)
