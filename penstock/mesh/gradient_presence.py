"""Which gradients exist on any replica, found over the host where the group can, so that no rank waits for its device."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from penstock.torch_private import group_device_types


class GradientPresenceReduce:
    """An asynchronous all-reduce over `group`: for each parameter, whether this replica has a gradient."""

    def __init__(self, has_gradient: Sequence[bool], group: dist.ProcessGroup, device: torch.device) -> None:
        flags_device = "cpu" if "cpu" in group_device_types(group) else device
        self._flags = torch.tensor(has_gradient, dtype=torch.uint8, device=flags_device)
        self._work: Any = dist.all_reduce(self._flags, dist.ReduceOp.MAX, group=group, async_op=True)

    def on_any_replica(self) -> list[bool]:
        """Wait for the answer; return for each parameter whether any replica has a gradient."""
        self._work.wait()
        return [bool(flag) for flag in self._flags.tolist()]
