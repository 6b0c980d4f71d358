"""Abort a process group, as a failed rank does after its report: the operations of all ranks that wait in it fail.

NCCL's communicators have `abort()`. torch's Gloo groups have no such call. But when a receive times out, Gloo fails every
operation of its group on this rank and closes the connections, so that the operations of the peers fail too, within
milliseconds. So a receive is made to time out on purpose.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock import torch_private

UNUSED_TAG = 2**20  # no message has this tag
SHORTEST_TIMEOUT = timedelta(milliseconds=1)


def abort_group(group: dist.ProcessGroup) -> None:
    """End all waits of this rank in torch's `group`, and all waits of other ranks there for this one."""
    for backend in torch_private.group_backends(group):
        abort_backend(backend)


@contextmanager
def abort_on_error(groups: Iterable[dist.ProcessGroup]) -> Iterator[None]:
    """Abort `groups` if the block raises, so that no other rank waits there for this one. They cannot be used again."""
    try:
        yield
    except BaseException:
        for group in groups:
            abort_group(group)
        raise


def abort_backend(backend: Any) -> None:
    """End all waits in one backend (ProcessGroupGloo, ProcessGroupNCCL) of a group.

    Under Gloo, a receive from a peer that has already aborted fails at once and closes nothing. So there is one from each peer.
    """
    if backend.name() != "gloo":
        with suppress(RuntimeError):
            backend.abort()
        return

    for peer in range(backend.size()):
        if peer != backend.rank():
            with suppress(RuntimeError):
                backend.recv([torch.empty(1, device="cpu")], peer, UNUSED_TAG).wait(SHORTEST_TIMEOUT)
