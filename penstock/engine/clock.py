"""When each action of a step ran on this rank, on a clock that all ranks share.

Processes of one machine share its monotonic clock. Between machines the difference is estimated by ping-pong with rank 0,
as in NTP (Mills 1991): of many messages there and back, the fastest of each direction, which waited the least.
"""

import platform
import time
from collections.abc import Callable, Sequence
from operator import sub
from pathlib import Path
from typing import Any, NamedTuple

import torch

from penstock.comms.control_group import ControlGroup

ROUNDS = 32  # messages there and back
WHAT = "to compare their clocks"


class Skew(NamedTuple):
    """How this rank's clock differs from rank 0's."""

    offset: float = 0.0  # seconds to add to this rank's times
    error: float = 0.0  # seconds by which that may be wrong: half of the fastest way there and back


def machine() -> str:
    """The same for processes that share a monotonic clock: this boot of the kernel, else the machine's name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else platform.node()


def skew(control: ControlGroup, machines: Sequence[str]) -> Skew:
    """This rank's skew; `machines` is what every rank's `machine()` says. All ranks call it; on one machine it is 0."""
    rank = control.topology.rank
    for peer in [peer for peer, other in enumerate(machines) if other != machines[0]]:
        if rank == 0:
            _answer(control, peer)
        elif rank == peer:
            return _ask(control)
    return Skew()


def _answer(control: ControlGroup, peer: int) -> None:
    for _ in range(ROUNDS):
        _tell(control, time.perf_counter(), peer)
        _hear(control, peer)
        _tell(control, time.perf_counter(), peer)


def _ask(control: ControlGroup) -> Skew:
    there, back = [], []
    for _ in range(ROUNDS):
        sent = _hear(control, 0)
        received = time.perf_counter()
        _tell(control, received, 0)
        there.append(received - sent)  # the way there, and what this clock is ahead
        back.append(_hear(control, 0) - received)  # the way back, less that
    return Skew((min(back) - min(there)) / 2, (min(back) + min(there)) / 2)


def _tell(control: ControlGroup, number: float, peer: int) -> None:
    control.send(torch.tensor([number], dtype=torch.float64, device="cpu"), peer, WHAT).wait()


def _hear(control: ControlGroup, peer: int) -> float:
    return control.receive(torch.zeros(1, dtype=torch.float64, device="cpu"), peer, WHAT).item()


Interval = tuple[float, float, float]  # start and end of an action, and when what it made was sent


class Clock:
    """Start and end of every action, and when what it made was sent, in seconds of this machine's monotonic clock."""

    ahead = 0  # actions that ran before the ranks had agreed to send: how long sending them took is not known

    def __init__(self, offset: float = 0.0, ended: Any = None) -> None:
        self.offset = offset  # seconds that are added to every time told
        self.ended = ended  # when the last step was over, as its clock's `end` told it
        self._marks: list[Any] = []
        self._began = self._mark()

    def start(self) -> None:
        """An action starts."""
        self._marks.append(self._mark())

    stop = sent = start

    def averaged(self) -> None:
        """All actions are done, and gradients are those of the whole batch."""
        self._averaged = self._mark()

    def end(self) -> Any:
        """The step is over: this moment, for the next step's clock."""
        return self._mark()

    def intervals(self) -> list[Interval]:
        """(start, end, sent) of every action so far, in order."""
        times = [time + self.offset for time in self._times(self._marks)]
        ends = times[1::3]
        return list(zip(times[::3], ends, ends[: self.ahead] + times[2::3][self.ahead :], strict=True))

    def summary(self) -> tuple[float, float, float]:
        """First start, last end, and the time spent in actions."""
        times = self._times(self._marks)
        if not times:
            return 0.0, 0.0, 0.0
        starts, ends = times[::3], times[1::3]
        return starts[0] + self.offset, ends[-1] + self.offset, sum(map(sub, ends, starts))

    def around(self) -> tuple[float, float]:
        """Seconds between the step before and this one, 0 if there was none, and those from the last action to `averaged`."""
        acted = self._marks[-1] if self._marks else self._began
        *ended, began, acted, averaged = self._times([*filter(None, [self.ended]), self._began, acted, self._averaged])
        return began - (ended or [began])[0], averaged - acted

    _mark: Callable[..., Any] = staticmethod(time.perf_counter)

    def _times(self, marks: Sequence[Any]) -> Sequence[float]:
        return marks


class Moment(NamedTuple):
    """An event of a GPU that this process has waited for, and so knows when it was."""

    event: Any
    time: float  # of this machine's monotonic clock


class DeviceClock(Clock):
    """The same on a GPU: events in the stream that computes, read when the step is over.

    They are counted from a moment that both clocks know: the end of the step before, when the stream has nothing to do. Only
    before the first step it is waited for.
    """

    def __init__(self, device: torch.device, offset: float = 0.0, ended: Moment | None = None) -> None:
        self._device = torch.get_device_module(device)
        self._zero = ended or self.end()
        super().__init__(offset, ended)

    def end(self) -> Moment:
        """The step is over: this moment, for the next step's clock. Waits for the stream, which has nothing to do then."""
        before, event = time.perf_counter(), self._mark()
        event.synchronize()
        return Moment(event, (before + time.perf_counter()) / 2)

    def _mark(self) -> Any:
        event = self._device.Event(enable_timing=True)
        event.record()
        return event

    def _times(self, marks: Sequence[Any]) -> Sequence[float]:
        for mark in marks[-1:]:
            mark.synchronize()
        events = [mark.event if isinstance(mark, Moment) else mark for mark in marks]
        return [self._zero.time + self._zero.event.elapsed_time(event) / 1e3 for event in events]


def clock_for(device: torch.device, offset: float = 0.0, ended: Any = None) -> Clock:
    """The clock of a step for stages on `device`; `offset` is added to every time it tells, `ended` as in `Clock`."""
    return DeviceClock(device, offset, ended) if device.type == "cuda" else Clock(offset, ended)
