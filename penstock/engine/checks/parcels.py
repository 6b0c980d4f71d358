"""A tree of tensors to one other rank, over the pipeline's own group: a checked description, then bare memory."""

from typing import Any

import torch
from torch import Tensor

from penstock.comms.control import Control, Pending
from penstock.comms.encoding import as_bytes, checked_size
from penstock.comms.messages import wire

CPU = torch.device("cpu")


def send(control: Control, value: Any, peer: int, what: str) -> list[Pending]:
    """Begin to send `value` to `peer`, which must not change before that is over. `what` as in `gather`."""
    leaves, tree = wire.flatten(value)
    spec = wire.describe(leaves, tree)
    data = wire.pack(spec)
    tensors = [each for each in leaves if isinstance(each, Tensor)]
    memory = [as_bytes(wire.memory(each, leaf).cpu()) for each, leaf in zip(tensors, spec.tensors, strict=True)]
    parts = [torch.tensor([data.numel()], device=CPU), data, *[each for each in memory if each.numel()]]
    return [control.send(each, peer, what) for each in parts]


def receive(control: Control, peer: int, device: torch.device, what: str) -> Any:
    """What `peer` sends, with its tensors on `device`."""
    size = control.receive(torch.zeros(1, dtype=torch.int64, device=CPU), peer, what)
    data = control.receive(torch.empty(checked_size(int(size)), dtype=torch.uint8, device=CPU), peer, what)
    spec = wire.unpack(data)
    tensors = [wire.empty(leaf, CPU) for leaf in spec.tensors]
    for each, leaf in zip(tensors, spec.tensors, strict=True):
        if each.numel():
            control.receive(as_bytes(wire.memory(each, leaf)), peer, what)
    return wire.rebuild(spec, [each.to(device) for each in tensors])
