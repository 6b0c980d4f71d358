"""When each action of a step ran on this rank, on a clock that all ranks share.

Processes of one machine share its monotonic clock. Between machines the difference is estimated by ping-pong with rank 0,
as in NTP (Mills 1991): of many messages there and back, the fastest of each direction, which waited the least.
"""

import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from penstock.comms.control import Control

ROUNDS = 32  # messages there and back


class Skew(NamedTuple):
    """How this rank's clock differs from rank 0's."""

    offset: float = 0.0  # seconds to add to this rank's times
    error: float = 0.0  # seconds by which that may be wrong: half of the fastest way there and back


def machine() -> str:
    """The same for processes that share a monotonic clock: this boot of the kernel, else the machine's name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else platform.node()


def skew(control: Control, machines: Sequence[str]) -> Skew:
    """This rank's skew; `machines` is what every rank's `machine()` says. All ranks call it; on one machine it is 0."""
    rank = control.topology.rank
    for peer in [peer for peer, other in enumerate(machines) if other != machines[0]]:
        if rank == 0:
            _answer(control, peer)
        elif rank == peer:
            return _ask(control)
    return Skew()


def _answer(control: Control, peer: int) -> None:
    for _ in range(ROUNDS):
        control.send(time.perf_counter(), peer)
        control.receive(peer)
        control.send(time.perf_counter(), peer)


def _ask(control: Control) -> Skew:
    there, back = [], []
    for _ in range(ROUNDS):
        sent = control.receive(0)
        received = time.perf_counter()
        control.send(received, 0)
        there.append(received - sent)  # the way there, and what this clock is ahead
        back.append(control.receive(0) - received)  # the way back, less that
    return Skew((min(back) - min(there)) / 2, (min(back) + min(there)) / 2)


Interval = tuple[float, float, float]  # start and end of an action, and when what it made was sent


class Clock:
    """Start and end of every action, and when what it made was sent, in seconds of this machine's monotonic clock."""

    ahead = 0  # actions that ran before the ranks had agreed to send: how long sending them took is not known

    def __init__(self, offset: float = 0.0) -> None:
        self.offset = offset  # seconds that are added to every time told
        self._marks: list[Any] = []

    def start(self) -> None:
        """An action starts."""
        self._marks.append(time.perf_counter())

    stop = sent = start

    def intervals(self) -> list[Interval]:
        """(start, end, sent) of every action so far, in order."""
        times = [time + self.offset for time in self._times()]
        ends = times[1::3]
        return list(zip(times[::3], ends, ends[: self.ahead] + times[2::3][self.ahead :], strict=True))

    def summary(self) -> tuple[float, float, float]:
        """First start, last end, and the time spent in actions."""
        intervals = self.intervals()
        if not intervals:
            return 0.0, 0.0, 0.0
        return intervals[0][0], intervals[-1][1], sum(end - start for start, end, _ in intervals)

    def _times(self) -> list[float]:
        return self._marks


class CudaClock(Clock):
    """The same on a GPU: events in its stream, read when the step is over, so that timing never waits for the device."""

    def __init__(self, offset: float = 0.0) -> None:
        super().__init__(offset)
        torch.cuda.synchronize()
        self._zero, self._zero_time = self._mark(), time.perf_counter()

    def start(self) -> None:
        """An action starts."""
        self._marks.append(self._mark())

    stop = sent = start

    def _times(self) -> list[float]:
        torch.cuda.synchronize()
        return [self._zero_time + self._zero.elapsed_time(event) / 1e3 for event in self._marks]

    @staticmethod
    def _mark() -> "torch.cuda.Event":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def clock_for(device: torch.device, offset: float = 0.0) -> Clock:
    """The clock for stages on `device`; `offset` is added to every time it tells."""
    return (CudaClock if device.type == "cuda" else Clock)(offset)
