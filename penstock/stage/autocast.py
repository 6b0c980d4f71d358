"""Autocast belongs to the forward: a backward leaves it, as that of plain PyTorch does, which the caller runs outside.

Inside one block of the caller's, autocast casts each parameter once and keeps that cast, a node of the graph, for all
microbatches. Gradients are the same as with a block for each microbatch, in less memory, but where a parameter is used three
times, cast and not: autograd sums in the order in which nodes were made. So stages with a parameter in several
places get fresh casts; where one module uses its own parameter so, the last bits may differ.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch


def outside_autocast(device: str) -> AbstractContextManager[Any]:
    """Around a backward on `device` (a type): what autocast did to the forward is in the graph, no more is done to it.

    It costs something where there is nothing to leave: whoever calls has looked whether autocast is on.
    """
    return torch.autocast(device, enabled=False)


def fresh_casts(device: str) -> None:
    """Have autocast, where it is on, cast parameters anew: before a step they may have changed."""
    if torch.is_autocast_enabled(device):
        torch.clear_autocast_cache()
