"""Which network interface leads to the other ranks.

Gloo has to be told: by itself it takes the address that this machine's own name stands for, which is often a loopback
(Debian: 127.0.1.1), where no other machine finds it.
"""

import socket
import struct
import sys
from contextlib import suppress

from penstock.errors import PenstockError

ANYWHERE = "192.0.2.1"  # an address that no machine has (RFC 5737): the way there is the default route
NAME, ADDRESS = struct.Struct("256s"), slice(20, 24)  # of a request, and of the answer to it
SIOCGIFADDR = 0x8915  # Linux: the address of an interface


def interface_to(host: str, elsewhere: bool) -> str | None:
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
