"""When each action of a step ran on this rank."""

import time

import torch


class Clock:
    """Start and end of every action, in seconds of this machine's monotonic clock, which its processes share."""

    def __init__(self, actions: int) -> None:
        self._times = [0.0] * (2 * actions)
        self._next = 0

    def start(self) -> None:
        """An action starts."""
        self._times[self._next] = time.perf_counter()
        self._next += 1

    stop = start

    def intervals(self) -> list[tuple[float, float]]:
        """(start, end) of every action so far, in order."""
        done = self._times[: self._next]
        return list(zip(done[::2], done[1::2], strict=False))

    def summary(self) -> tuple[float, float, float]:
        """First start, last end, and the time spent in actions."""
        times = self._times[: self._next]
        return (times[0], times[-1], sum(times[1::2]) - sum(times[::2])) if times else (0.0, 0.0, 0.0)


class CudaClock(Clock):
    """The same on a GPU: events in its stream, read when the step is over, so that timing never waits for the device."""

    def __init__(self, actions: int) -> None:
        super().__init__(actions)
        self._events: list[torch.cuda.Event] = []
        torch.cuda.synchronize()
        self._zero = self._mark()
        self._zero_time = time.perf_counter()

    def start(self) -> None:
        """An action starts."""
        self._events.append(self._mark())

    stop = start

    def intervals(self) -> list[tuple[float, float]]:
        """(start, end) of every action so far, in order."""
        torch.cuda.synchronize()
        times = [self._zero_time + self._zero.elapsed_time(event) / 1e3 for event in self._events]
        return list(zip(times[::2], times[1::2], strict=False))

    def summary(self) -> tuple[float, float, float]:
        """First start, last end, and the time spent in actions."""
        intervals = self.intervals()
        if not intervals:
            return 0.0, 0.0, 0.0
        return intervals[0][0], intervals[-1][1], sum(end - start for start, end in intervals)

    @staticmethod
    def _mark() -> "torch.cuda.Event":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def clock_for(device: torch.device, actions: int) -> Clock:
    """The clock for stages on `device`."""
    return CudaClock(actions) if device.type == "cuda" else Clock(actions)
