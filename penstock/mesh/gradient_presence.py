"""Which gradients there are on any replica: asked over the host where the group can, so that no device is waited for."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from penstock.torch_private import group_device_types


class GradientPresence:
    """One call for all of `group`: of each parameter, whether this replica has a gradient. It travels until it is `heard`."""

    def __init__(self, mine: Sequence[bool], group: dist.ProcessGroup, device: torch.device) -> None:
        where = "cpu" if "cpu" in group_device_types(group) else device
        self._votes = torch.tensor(mine, dtype=torch.uint8, device=where)
        self._work: Any = dist.all_reduce(self._votes, dist.ReduceOp.MAX, group=group, async_op=True)

    def on_any_replica(self) -> list[bool]:
        """Whether any replica has one, for each."""
        self._work.wait()
        return [bool(vote) for vote in self._votes.tolist()]
