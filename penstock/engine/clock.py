"""When each action of a step ran on this rank, on a clock that all ranks share.

Processes of one machine share its monotonic clock. Between machines the difference is estimated by ping-pong with rank 0,
as in NTP (Mills 1991): of many messages in both directions, the fastest of each, which waited the least.
"""

import platform
import time
from collections.abc import Callable, Sequence
from operator import sub
from pathlib import Path
from typing import Any, NamedTuple

import torch

from penstock.comms.control_group import ControlGroup

PING_PONG_ROUNDS = 32
WAIT_REASON = "to compare their clocks"


class ClockSkew(NamedTuple):
    """How this rank's clock differs from rank 0's."""

    offset: float = 0.0  # seconds to add to this rank's times
    error: float = 0.0  # seconds by which the offset may be wrong: half of the fastest round trip


def clock_id() -> str:
    """Return an id that is equal for processes with the same monotonic clock: the kernel's boot id, else the machine's name."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return boot_id.read_text().strip() if boot_id.exists() else platform.node()


def measure_own_clock_skew(control: ControlGroup, clock_ids: Sequence[str]) -> ClockSkew:
    """Measure this rank's skew; 0 where the clock is rank 0's. All ranks call it. `clock_ids`: `clock_id()` of every rank."""
    rank = control.topology.rank
    for peer in [peer for peer, peer_id in enumerate(clock_ids) if peer_id != clock_ids[0]]:
        if rank == 0:
            _answer_ping_pong(control, peer)
        elif rank == peer:
            return _ping_pong_with_rank0(control)
    return ClockSkew()


def _answer_ping_pong(control: ControlGroup, peer: int) -> None:
    for _ in range(PING_PONG_ROUNDS):
        _send_number(control, time.perf_counter(), peer)
        _receive_number(control, peer)
        _send_number(control, time.perf_counter(), peer)


def _ping_pong_with_rank0(control: ControlGroup) -> ClockSkew:
    forth, back = [], []
    for _ in range(PING_PONG_ROUNDS):
        sent = _receive_number(control, 0)
        received = time.perf_counter()
        _send_number(control, received, 0)
        forth.append(received - sent)  # the latency plus what this clock is ahead
        back.append(_receive_number(control, 0) - received)  # the latency minus that
    return ClockSkew((min(back) - min(forth)) / 2, (min(back) + min(forth)) / 2)


def _send_number(control: ControlGroup, number: float, peer: int) -> None:
    control.send(torch.tensor([number], dtype=torch.float64, device="cpu"), peer, WAIT_REASON).wait()


def _receive_number(control: ControlGroup, peer: int) -> float:
    return control.receive(torch.zeros(1, dtype=torch.float64, device="cpu"), peer, WAIT_REASON).item()


Interval = tuple[float, float, float]  # start and end of an action, and when its messages were sent


class ClockTotals(NamedTuple):
    """When a step's actions ran on one rank, and what came before and after them, in seconds."""

    start: float  # of the first action, on the clock that all ranks share
    end: float  # of the last action, on that clock; 0: it ran none
    busy: float  # in actions
    between: float  # from the end of the last step to the begin of this one; 0 in the first
    averaging: float  # from the last action until gradients were averaged


class ActionClock:
    """Records the start and end of every action and the end of its sends, in seconds of this machine's monotonic clock."""

    num_before_rows = 0  # actions that ran before the rows were read: the end of their sends says nothing

    def __init__(self, offset: float = 0.0, previous_end: Any = None) -> None:
        self.offset = offset  # seconds, added to every time that is read
        self.previous_end = previous_end  # of the last step: what its clock's `mark_end` returned
        self.marks: list[Any] = []  # three moments of each action: its start, its end, the end of its sends
        self._began = self.now()

    def mark_averaged(self) -> None:
        """Record that all actions have run and gradients are those of the whole batch."""
        self._averaged = self.now()

    def mark_end(self) -> Any:
        """Return this moment, the end of the step, for the next step's clock."""
        return self.now()

    def intervals(self) -> list[Interval]:
        """Return (start, end, sent) of every action so far, in order."""
        times = [time + self.offset for time in self._times(self.marks)]
        ends = times[1::3]
        return list(zip(times[::3], ends, ends[: self.num_before_rows] + times[2::3][self.num_before_rows :], strict=True))

    def totals(self) -> ClockTotals:
        """Return the times of the whole step, once its gradients are averaged."""
        previous_end = self._began if self.previous_end is None else self.previous_end
        previous_end, began, *times, averaged = self._times([previous_end, self._began, *self.marks, self._averaged])
        between = began - previous_end
        if not times:
            return ClockTotals(0.0, 0.0, 0.0, between, averaged - began)

        starts, ends = times[::3], times[1::3]
        start, end = starts[0] + self.offset, ends[-1] + self.offset
        return ClockTotals(start, end, sum(map(sub, ends, starts)), between, averaged - times[-1])

    now: Callable[..., Any] = staticmethod(time.perf_counter)

    def _times(self, marks: Sequence[Any]) -> Sequence[float]:
        return marks


class GpuEventWithTime(NamedTuple):
    """A GPU's event whose time on the machine's monotonic clock is known, since this process has waited for it."""

    event: Any
    time: float  # seconds


class GpuActionClock(ActionClock):
    """Records events in the stream that computes, and reads them when the step is over.

    Times count from an event that both clocks know: the end of the last step, when the stream is idle. Only the first step
    waits for one.
    """

    def __init__(self, device: torch.device, offset: float, previous_end: GpuEventWithTime | None) -> None:
        self._device = torch.get_device_module(device)
        self._zero = previous_end or self.mark_end()
        super().__init__(offset, previous_end)

    def mark_end(self) -> GpuEventWithTime:
        """Return this moment, the end of the step, for the next step's clock. Waits for the stream, which is idle then."""
        begin, event = time.perf_counter(), self.now()
        event.synchronize()
        return GpuEventWithTime(event, (begin + time.perf_counter()) / 2)

    def now(self) -> Any:
        """Return this moment of the stream that computes."""
        event = self._device.Event(enable_timing=True)
        event.record()
        return event

    def _times(self, marks: Sequence[Any]) -> Sequence[float]:
        for mark in marks[-1:]:
            mark.synchronize()
        events = [mark.event if isinstance(mark, GpuEventWithTime) else mark for mark in marks]
        return [self._zero.time + self._zero.event.elapsed_time(event) / 1e3 for event in events]


def make_clock(device: torch.device, offset: float = 0.0, previous_end: Any = None) -> ActionClock:
    """Return the clock of one step for stages on `device`; arguments as in `ActionClock`."""
    return GpuActionClock(device, offset, previous_end) if device.type == "cuda" else ActionClock(offset, previous_end)
