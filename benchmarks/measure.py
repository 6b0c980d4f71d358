"""What every rank runs: the engines' steps in turns, in the same processes, each timed from a common start."""

import ctypes
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from engines import EngineCase, OneProcessEngine, Peer, Penstock, TrainingEngine, check_same, forget_gradients

import penstock as ps
from penstock.schedule import Event, Timeline

WARM_UP = 2  # steps of each engine that do not count: in its first the peer infers shapes and ours describes them
SENDS = 30  # messages timed


class Lap(NamedTuple):
    """One step of one engine on one rank, in seconds."""

    start: float  # of the machine's monotonic clock, which its processes share
    end: float
    main_thread: float  # CPU time
    process: float  # CPU time of all threads


@dataclass
class RankMeasurements:
    """All that one rank measured for one case."""

    laps: dict[str, list[Lap]] = field(default_factory=dict)  # engine -> its steps
    timelines: list[Timeline] = field(default_factory=list)  # of our steps, on rank 0
    peer: tuple[Event, ...] = ()  # what the peer ran on this rank in the step that was checked
    send: float = 0.0  # seconds a bare message takes from rank 0 to rank 1, on rank 1


def run_cases(cases: list[EngineCase], repeats: int, alone: bool) -> list[RankMeasurements]:
    """What `penstock.launch` calls on every rank. `alone`: one process as well, piece by piece and the batch at once."""
    rank = ps.comms.init_distributed().rank
    if cases[0].subject.nominal is not None and hasattr(os, "sched_setaffinity"):
        _bind_to_core(rank)
    return [_run(case, rank, repeats, alone) for case in cases]


def _bind_to_core(rank: int) -> None:
    """Keep the thread that runs the steps on one core. README.md says why, under "How to read the tables"."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def _run(case: EngineCase, rank: int, repeats: int, alone: bool) -> RankMeasurements:
    ours, peer = Penstock(case, rank), Peer(case, rank)
    engines: dict[str, TrainingEngine] = {"ours": ours, "peer": peer}
    if alone:
        engines |= {"accumulated": OneProcessEngine(case, rank, case.microbatches), "whole": OneProcessEngine(case, rank, 1)}
    warm_up(engines)
    record = RankMeasurements(peer=check_same(ours, peer, case, rank), send=_send_time(case, rank))
    for name, lap in laps(engines, repeats):
        record.laps.setdefault(name, []).append(lap)
        if name == "ours":
            timeline = ours.pipe.timeline()
            record.timelines += [timeline] if rank == 0 else []
    return record


def warm_up(engines: dict[str, TrainingEngine]) -> None:
    """Steps that do not count."""
    for _ in range(WARM_UP):
        for engine in engines.values():
            engine.step()


def laps(engines: dict[str, TrainingEngine], repeats: int) -> Iterator[tuple[str, Lap]]:
    """Steps of all engines in turns, each with the name of its engine."""
    for repeat in range(repeats):
        for name in engines if repeat % 2 else reversed(engines):  # nobody always goes first
            yield name, _lap(engines[name])


def _lap(engine: TrainingEngine) -> Lap:
    """One step, begun by all ranks together."""
    forget_gradients(engine)
    dist.barrier()
    threads, process, start = time.thread_time(), time.process_time(), time.perf_counter()
    engine.step()
    end = time.perf_counter()
    return Lap(start, end, time.thread_time() - threads, time.process_time() - process)


def begin_peak() -> int:
    """Give freed memory back, let the peak of this process count from here, and return its resident bytes."""
    ctypes.CDLL(None).malloc_trim(0)  # else what comes next finds the memory that was freed before
    reset_peak()
    return peak_bytes_of_process()


def peak_bytes_of_process() -> int:
    """Return the most memory that this process has had since the peak was reset."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def reset_peak() -> None:
    """Let the peak of this process count from here."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _send_time(case: EngineCase, rank: int) -> float:
    """What the transport takes to bring a message to a receive that waits for it, no engine involved.

    Before it sends, the sender sleeps as long as a forward does where devices are emulated: after a sleep all is slower.
    """
    times = []
    for _ in range(SENDS if case.ranks > 1 else 0):
        dist.barrier()
        if rank == 0:
            times.append(_send(case))
        elif rank == 1:
            times.append(_receive(case))
    everyone = [0.0] * case.ranks
    dist.all_gather_object(everyone, times)
    return median(end - start for start, end in zip(*everyone[:2], strict=True)) if times else 0.0


def _send(case: EngineCase) -> float:
    message = torch.ones(case.subject.message // 4)
    time.sleep(case.subject.nominal[0] if case.subject.nominal else 0.002)
    start = time.perf_counter()
    dist.send(message, 1)
    return start


def _receive(case: EngineCase) -> float:
    message = torch.empty(case.subject.message // 4)
    dist.recv(message, 0)
    return time.perf_counter()
