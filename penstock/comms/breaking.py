"""How everybody is woken who waits in a process group: by breaking it off.

torch's Gloo groups have no call that closes them while somebody waits on them. A receive that times out does: it fails
every operation of its group on this rank and closes the connections, so the peers' operations fail as well, within
milliseconds. That is used here, on purpose; NCCL's communicators are aborted.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock import torch_private

UNUSED_TAG = 2**20  # no message carries it
NO_TIME = timedelta(milliseconds=1)


def break_off(group: dist.ProcessGroup) -> None:
    """End all that this rank waits for in `group`, and with it what others wait for from this rank."""
    for backend in torch_private.backends_of(group):
        break_off_backend(backend)


@contextmanager
def broken_off(groups: Iterable[dist.ProcessGroup]) -> Iterator[None]:
    """If this rank fails inside, nobody waits for it in `groups` any more; that is their end."""
    try:
        yield
    except BaseException:
        for group in groups:
            break_off(group)
        raise


def break_off_backend(backend: Any) -> None:
    """The same for what carries the messages of a group.

    A receive from a rank that has broken off already fails at once and closes nothing: so one from every rank.
    """
    if backend.name() != "gloo":
        with suppress(RuntimeError):
            backend.abort()
        return
    for peer in range(backend.size()):
        if peer != backend.rank():
            with suppress(RuntimeError):
                backend.recv([torch.empty(1, device="cpu")], peer, UNUSED_TAG).wait(NO_TIME)
