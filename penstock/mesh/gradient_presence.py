"""Find which gradients exist on any replica: on the CPU if the group has it, so that no rank waits for its GPU."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from penstock.torch_private import group_device_types


class GradientPresenceReduce:
    """An asynchronous all-reduce (max) over `group` of `has_gradient`: for each parameter, whether this replica has one."""

    def __init__(self, has_gradient: Sequence[bool], group: dist.ProcessGroup, device: torch.device) -> None:
        flags_device = "cpu" if "cpu" in group_device_types(group) else device
        self._flags = torch.tensor(has_gradient, dtype=torch.uint8, device=flags_device)
        self._work = dist.all_reduce(self._flags, dist.ReduceOp.MAX, group=group, async_op=True)

    def on_any_replica(self) -> list[bool]:
        """Wait for the all-reduce; return for each parameter whether any replica has a gradient."""
        self._work.wait()
        return [bool(flag) for flag in self._flags.tolist()]
