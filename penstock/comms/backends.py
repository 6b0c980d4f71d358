"""Choose the backend (NCCL or Gloo) that sends tensors between ranks, and its network interface.

Gloo must be given the interface that leads to the other ranks. By default it takes the address of this machine's own name. That
is often a loopback (Debian: 127.0.1.1), which other machines cannot reach.
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

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
NO_GPU = "none"
NCCL_DEFAULTS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}  # Penstock aborts waits itself; torch's watchdog would end the process

UNREACHABLE_ADDRESS = "192.0.2.1"  # no machine has it (RFC 5737): the way there is the default route
SIOCGIFADDR = 0x8915  # Linux's ioctl for the address of an interface
INTERFACE_REQUEST, ADDRESS_IN_ANSWER = struct.Struct("256s"), slice(20, 24)


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU, unique over all machines; NO_GPU for a device that NCCL does not support."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return NO_GPU
    return str(torch.cuda.get_device_properties(device).uuid)


def choose_backend(uuids: Sequence[str]) -> str:
    """Return "nccl" if the ranks' `gpu_uuid`s are different GPUs, else "gloo": NCCL refuses two ranks on one GPU."""
    return "nccl" if NO_GPU not in uuids and len(set(uuids)) == len(uuids) else "gloo"


def agree_on_backend(device: torch.device, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return "nccl" or "gloo". All ranks call it, each with its own `device`. Raises RuntimeError after `timeout`."""
    keys, uuid = [f"gpu-{peer}" for peer in range(world_size)], gpu_uuid(device)
    store.set(keys[rank], uuid)
    if uuid == NO_GPU:  # then it is Gloo, whatever the others have
        return choose_backend([uuid])
    store.wait(keys, timeout)
    return choose_backend([store.get(key).decode() for key in keys])


def set_nccl_defaults() -> None:
    """Set NCCL's environment variables that the user has not set."""
    for name, value in NCCL_DEFAULTS.items():
        os.environ.setdefault(name, value)


def find_interface(host: str, several_machines: bool) -> str | None:
    """Return the name of the network interface that leads to `host`; None if none does over IPv4, or not on Linux.

    `several_machines`: use the interface of the default route instead of a loopback, as `host` may be this machine's own name.
    """
    address = _own_address_towards(host)
    if address is not None and address.startswith("127.") and several_machines:
        address = _own_address_towards(UNREACHABLE_ADDRESS)
    return None if address is None or sys.platform != "linux" else _interface_with_address(address)


def check_interfaces(names: str) -> None:
    """Raise PenstockError unless this machine has all network interfaces in `names`, a list with commas."""
    existing = [name for _, name in socket.if_nameindex()]
    for name in names.split(","):
        if name.partition(":")[0] not in existing:  # `eth0:1` is an address of eth0
            problem = f"GLOO_SOCKET_IFNAME is {names}, and the networks of this machine are {', '.join(existing)}"
            raise PenstockError(f"{problem}: set it to one of these, or leave it unset")


def create_gloo_device() -> Any:
    """Return a new Gloo device (a network interface and an event loop thread), which Gloo's groups connect through."""
    with batch_thread_policy():
        if os.environ.get("MASTER_ADDR") in LOOPBACK_HOSTS:
            return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
            return dist.ProcessGroupGloo.create_device(interface=interface.split(",")[0])
        return dist.ProcessGroupGloo.create_default_device()


def _own_address_towards(host: str) -> str | None:
    """Return the address from which this machine would send to `host`."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram_socket:
        datagram_socket.connect((host, 9))  # sends nothing
        return str(datagram_socket.getsockname()[0])
    return None


def _interface_with_address(address: str) -> str | None:
    from fcntl import ioctl  # Windows has none

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                answer = ioctl(datagram_socket, SIOCGIFADDR, INTERFACE_REQUEST.pack(name.encode()))
                if socket.inet_ntoa(answer[ADDRESS_IN_ANSWER]) == address:
                    return name
    return None
