"""What a rank has to reach the others by: a GPU of its own or not, and the network interface.

Gloo has to be told which interface leads to the other ranks: by itself it takes the address that this machine's own name stands
for, which is often a loopback (Debian: 127.0.1.1), where no other machine finds it.
"""

import os
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock.comms.system import batch_thread_policy
from penstock.errors import PenstockError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
NO_GPU = "none"
NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}  # Penstock ends waits in vain: torch's watchdog ends the process


def gpu_uuid(device: torch.device) -> str:
    """What tells a GPU from all others, those of other machines too; NO_GPU for what NCCL does not reach."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return NO_GPU
    return str(torch.cuda.get_device_properties(device).uuid)


def choose_backend(gpus: Sequence[str]) -> str:
    """What carries tensors between ranks on these `gpus`: NCCL, which refuses two ranks on one, else Gloo."""
    return "nccl" if NO_GPU not in gpus and len(set(gpus)) == len(gpus) else "gloo"


def agree_on_backend(device: torch.device, store: Any, rank: int, ranks: int, timeout: timedelta) -> str:
    """What carries tensors between all ranks, of which this one is on `device`. All call it; RuntimeError if they do not."""
    keys, gpu = [f"gpu-{each}" for each in range(ranks)], gpu_uuid(device)
    store.set(keys[rank], gpu)
    if gpu == NO_GPU:
        return choose_backend([gpu])  # which decides it
    store.wait(keys, timeout)
    return choose_backend([store.get(key).decode() for key in keys])


def set_nccl_defaults() -> None:
    """How NCCL is to behave where the user's environment does not say it."""
    for name, value in NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)


ANYWHERE = "192.0.2.1"  # an address that no machine has (RFC 5737): the way there is the default route
NAME, ADDRESS = struct.Struct("256s"), slice(20, 24)  # of a request, and of the answer to it
SIOCGIFADDR = 0x8915  # Linux: the address of an interface


def find_interface(host: str, elsewhere: bool) -> str | None:
    """The name of the interface by which this machine reaches `host`; None if it does not, over IPv4, or is no Linux.

    `elsewhere`: there are ranks on other machines. Then a loopback will not do, which is what a machine's own name may stand
    for, and the default route's interface is taken instead.
    """
    own = _own_address(host)
    if own is not None and own.startswith("127.") and elsewhere:
        own = _own_address(ANYWHERE)
    return None if own is None or sys.platform != "linux" else _interface_of(own)


def check_interfaces(given: str) -> None:
    """Raises PenstockError unless this machine has the interface that is `given`, or the several, with commas between them."""
    there = [name for _, name in socket.if_nameindex()]
    for name in given.split(","):
        if name.partition(":")[0] not in there:  # behind a colon: one of its addresses
            told = f"GLOO_SOCKET_IFNAME is {given}, and the networks of this machine are {', '.join(there)}"
            raise PenstockError(f"{told}: set it to one of these, or leave it unset")


def create_gloo_device() -> Any:
    """What Gloo's groups connect through: a network interface, and an event loop thread."""
    with batch_thread_policy():
        if os.environ.get("MASTER_ADDR") in LOOPBACK:
            return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
            return dist.ProcessGroupGloo.create_device(interface=interface.split(",")[0])
        return dist.ProcessGroupGloo.create_default_device()


def _own_address(target: str) -> str | None:
    """The address from which this machine would send to `target`."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((target, 9))  # sends nothing
        return str(way.getsockname()[0])
    return None


def _interface_of(address: str) -> str | None:
    from fcntl import ioctl  # there is none on Windows

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                answer = ioctl(asked, SIOCGIFADDR, NAME.pack(name.encode()))
                if socket.inet_ntoa(answer[ADDRESS]) == address:
                    return name
    return None
