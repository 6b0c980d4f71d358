"""Several machines on this one: hosts with a network, a name, a clock, processes and shared memory of their own.

Each host is a set of Linux namespaces that lives as long as one process. Nothing has a name outside, so all of it (hosts,
cables, whatever still runs there) is gone when that process is, and that process ends with this one. Host 0 is the switch as
well: a cable joins each other host to a bridge there, and so two hosts are joined by one cable.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

NETWORK = "10.77.0"
APART = 1000  # seconds by which the clock of each host is ahead of the one before
BURST = 3000  # bytes that pass a limited cable at once: two packets, so that it is slow for short messages too
QUEUE = "200ms"  # of traffic that waits before a limited cable; what is more is lost
# Makes a host of the namespaces it is in: another kernel's boot, a shared memory of its own, names, a loopback. Reno is there
# in every kernel and keeps a slow link busy; BBR, the default here and there, halts it now and then to measure it.
HOST = """
cd "$1" && cat /proc/sys/kernel/random/uuid > boot_id && mount --bind boot_id /proc/sys/kernel/random/boot_id
mount -t tmpfs tmpfs /dev/shm && mount --bind hosts /etc/hosts && mount --bind resolv.conf /etc/resolv.conf && hostname "$2"
echo reno > /proc/sys/net/ipv4/tcp_congestion_control && ip link set lo up && echo ready && exec sleep infinity
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


class HostsError(Exception):
    """A host cannot be made, or what ran there did not end as it should."""


@dataclass(frozen=True)
class Ended:
    """What a command came to."""

    code: int
    output: str  # standard output and standard error
    seconds: float


@dataclass(frozen=True)
class Host:
    """One host. `process` is its first process, as this machine counts."""

    number: int
    process: int

    @property
    def name(self) -> str:
        """What `hostname` says there."""
        return f"host-{self.number}"

    @property
    def address(self) -> str:
        """Where the other hosts reach it."""
        return f"{NETWORK}.{self.number + 1}"

    def within(self, *command: str) -> list[str]:
        """The command line that runs `command` on this host."""
        return ["nsenter", "--target", str(self.process), "--all", f"--wd={os.getcwd()}", *command]

    def wire(self, *command: str) -> None:
        """Run `ip` or `tc` on this host's network."""
        done = subprocess.run(["nsenter", "--target", str(self.process), "--net", *command], capture_output=True, text=True)
        if done.returncode:
            raise HostsError(f"`{' '.join(command)}` on {self.name}: {done.stderr.strip() or done.stdout.strip()}")

    def sent(self) -> int:
        """Bytes that left this host over its cables."""
        lines = Path(f"/proc/{self.process}/net/dev").read_text().splitlines()[2:]
        counts = {name.strip(): numbers.split() for name, numbers in (line.split(":") for line in lines)}
        return sum(int(numbers[8]) for name, numbers in counts.items() if name.startswith("cable"))

    def unplug(self) -> None:
        """Take this host off the network, as when a cable is pulled: nobody is told. Not for host 0."""
        self.wire("ip", "link", "set", "cable", "down")


@contextmanager
def hosts(count: int, rate: str | None = None) -> Iterator[list[Host]]:
    """`count` hosts on one network, each cable limited to `rate` in each direction: as `tc` writes it, `100mbit`.

    Whatever runs there ends with the block. Raises HostsError where hosts cannot be made: see `why_not`.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-hosts-") as folder:
        keepers: list[subprocess.Popen[str]] = []
        try:
            made = [_host(number, count, folder, keepers) for number in range(count)]
            _connect(made, rate)
            yield made
        finally:
            for keeper in keepers:
                keeper.kill()
                keeper.communicate()


@cache
def why_not() -> str | None:
    """Why hosts cannot be made here, None if they can."""
    missing = [tool for tool in ("setpriv", "unshare", "nsenter", "ip", "tc") if shutil.which(tool) is None]
    if missing or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return f"hosts need root, and {', '.join(missing) or 'Linux'}"
    try:
        with hosts(2, "100mbit"):
            return None
    except HostsError as error:
        return f"no hosts can be made here: {error}"


def torchrun(on: Sequence[Host], ranks: int, *script: str, port: int = 29500, **more: str) -> list[list[str]]:
    """For each host, the command line of a torchrun agent that starts `script` with `ranks` ranks there."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in more.items()]
    where = [f"--master-addr={on[0].address}", f"--master-port={port}", f"--nproc-per-node={ranks}", *options]
    return [[*TORCHRUN, f"--nnodes={len(on)}", f"--node-rank={host.number}", *where, *script] for host in on]


def run(
    on: Sequence[Host], commands: Sequence[Sequence[str]], timeout: float = 1500.0, env: Mapping[str, str] | None = None
) -> list[Ended]:
    """Run a command on each host at once; what each came to. Raises HostsError if one takes longer than `timeout` seconds."""
    with tempfile.TemporaryDirectory(prefix="penstock-hosts-") as folder:
        begin, outputs, running = time.monotonic(), [], []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(env or {})}  # for what a script imports
        for host, command in zip(on, commands, strict=True):
            outputs.append(Path(folder) / host.name)
            with outputs[-1].open("w") as output:
                command = host.within(*command)
                process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
                running.append(process)
        seconds: dict[int, float] = {}
        while len(seconds) < len(running) and time.monotonic() - begin < timeout:
            time.sleep(0.01)
            seconds |= {
                index: time.monotonic() - begin
                for index, process in enumerate(running)
                if index not in seconds and process.poll() is not None
            }
        late = [host.name for index, host in enumerate(on) if index not in seconds]
        for index, process in enumerate(running):
            if index not in seconds:
                process.kill()  # what it started ends with the host
                process.wait()
        expected_message = [output.read_text(errors="replace") for output in outputs]
        if late:
            raise HostsError(f"{', '.join(late)} did not end within {timeout:g} s:\n" + "\n".join(expected_message))
        return [
            Ended(process.returncode, text, seconds[index])
            for index, (process, text) in enumerate(zip(running, expected_message, strict=True))
        ]


def _names(count: int, own: int) -> str:
    """`/etc/hosts` as Debian writes it: a machine's own name stands for its loopback."""
    others = [f"{NETWORK}.{number + 1} host-{number}" for number in range(count) if number != own]
    return "\n".join(["127.0.0.1 localhost", f"127.0.1.1 host-{own}", *others]) + "\n"


def _host(number: int, count: int, folder: str, keepers: list["subprocess.Popen[str]"]) -> Host:
    """A new host; what keeps it is added to `keepers`."""
    own = Path(folder) / f"host-{number}"
    own.mkdir()
    (own / "hosts").write_text(_names(count, number))
    (own / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # nobody, who says so at once
    spaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    clock = ["--time", "--monotonic", str(number * APART)] if number else []
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", *spaces, *clock, "sh", "-ec", HOST, "sh", str(own), own.name]
    keeper = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    keepers.append(keeper)
    assert keeper.stdout is not None
    output = keeper.stdout.readline().strip()
    if output != "ready":
        raise HostsError(output or "it ended at once")
    return Host(number, int(Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()[0]))


def _connect(on: Sequence[Host], rate: str | None) -> None:
    switch, *others = on
    switch.wire("ip", "link", "add", "eth0", "type", "bridge")
    for host in others:
        port = f"cable{host.number}"
        switch.wire("ip", "link", "add", port, "type", "veth", "peer", "name", "cable", "netns", str(host.process))
        switch.wire("ip", "link", "set", port, "master", "eth0")
        for end, device in ((switch, port), (host, "cable")):
            if rate is not None:
                end.wire(
                    "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", str(BURST), "latency", QUEUE
                )
            end.wire("ip", "link", "set", device, "up")
    for host in on:
        device = "eth0" if host is switch else "cable"
        host.wire("ip", "address", "add", f"{host.address}/24", "dev", device)
        host.wire("ip", "link", "set", device, "up")
        host.wire("ip", "route", "add", "default", "dev", device)
