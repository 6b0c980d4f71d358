"""What a slow link between two machines costs a step, against what the simulator says of it, and what overlap saves.

python benchmarks/hosts.py                          two hosts, two ranks each, 100 Mbit/s: about four minutes, as root on Linux
python benchmarks/hosts.py --rate 1gbit --kilobytes 1024 --rounds 10

The hosts are namespaces of this machine (tests/comms/hosts.py), each with a torchrun agent of its own; ranks 0 and 1 run on the
first, 2 and 3 on the second. Stages sleep. Messages within a host go through shared memory, those between hosts over a cable
that lets `rate` pass in each direction.
"""

import json
import socket
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from subjects import Emulated
from tables import Row, show
from torch import Tensor
from two_hosts import results_of, run

import penstock as ps
from penstock.commands.machine.steps_benchmark import action_costs
from penstock.comms.process_groups import DESTINATION_RANK
from penstock.comms.transport.group_transport import GroupSender, PendingSends
from penstock.schedule import Costs, Measurement, Schedule

RANKS = 4
ROWS = 16  # of a microbatch
TRIED = 24  # messages by which the link's bandwidth is measured
WARM_UP = 2  # steps
BUFFER = (
    "4096 16384 65536"  # bytes of a message, least to most, that wait in the kernel: who waits for a send waits for the link
)


@dataclass
class HostOptions:
    """Measure steps whose messages cross a slow link, beside what the simulator predicts."""

    rate: str = "100mbit"  # of the cable in each direction, as `tc` writes it
    kilobytes: tuple[int, ...] = (256, 512)  # of a message between two stages
    schedules: tuple[str, ...] = ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zb-v")
    milliseconds: float = 50.0  # that F, I and W of a microbatch take each on a rank
    microbatches: int = 8
    rounds: int = 3  # measured steps of each way to send, in turns
    results: Path | None = None  # set for the ranks: where rank 0 writes what came out


class Link(NamedTuple):
    """What crosses between hosts, as measured."""

    bandwidth: float  # bytes per second that a tensor gets, all headers deducted
    hosts: list[str]  # of every rank

    def crosses(self, table: Schedule) -> list[bool]:
        """For every border between two stages, whether it lies between two hosts."""
        homes = [self.hosts[rank] for rank in table.placement]
        return [here != there for here, there in pairwise(homes)]


class WaitingSends(PendingSends):
    """The other way to send: the rank waits until its message is gone, and computes nothing meanwhile."""

    def send(self, group: Any, data: Tensor, message: object, tag: int) -> None:
        """Send `data` through `group`, and wait."""
        group.send([data], DESTINATION_RANK, tag).wait()


# ---- on every rank


def work(options: HostOptions) -> None:
    """What every rank runs: measures the link, then every configuration. Rank 0 writes down what came out."""
    topology = ps.comms.init_distributed(timeout=60)
    hosts: list[str] = [""] * RANKS
    dist.all_gather_object(hosts, socket.gethostname())
    link = Link(_bandwidth(hosts, max(options.kilobytes)), hosts)
    rows = [_measured(options, name, size, link) for size in options.kilobytes for name in options.schedules]
    if topology.rank == 0 and options.results is not None:
        options.results.write_text(json.dumps({"bandwidth": link.bandwidth, "hosts": hosts, "rows": rows}))


def _bandwidth(hosts: list[str], kilobytes: int) -> float:
    """Bytes per second of plain messages, one after the other, from the last rank of the first host to the next rank."""
    rank, source = dist.get_rank(), hosts.count(hosts[0]) - 1
    messages = [torch.zeros(kilobytes * 256) for _ in range(TRIED)]
    arrived: list[float] = []
    for _ in range(2):  # the first time, the connection finds its pace
        dist.barrier()
        if rank == source:
            sending = [dist.isend(message, source + 1) for message in messages]
            for work in filter(None, sending):
                work.wait()
        elif rank == source + 1:
            arrived.clear()
            coming = [dist.irecv(message, source) for message in messages]
            for work in filter(None, coming):
                work.wait()
                arrived.append(time.perf_counter())
    found = torch.zeros(1, dtype=torch.float64)
    if rank == source + 1:
        found += 1024 * kilobytes * (TRIED - 1) / (arrived[-1] - arrived[0])
    dist.broadcast(found, source + 1)
    return found.item()


def _measured(options: HostOptions, name: str, kilobytes: int, link: Link) -> Row:
    """One configuration: its steps both ways, in turns, and what the simulator says of both."""
    table = ps.schedule.build(name, ranks=RANKS, microbatches=options.microbatches)
    part = RANKS / table.num_stages
    subject = Emulated(kilobytes * 1024 // (4 * ROWS), part * options.milliseconds / 1e3, ROWS)
    batch, target = subject.batch(table.microbatches)
    overlapped, waiting = (_pipeline(subject, table, batch, target) for _ in range(2))
    _wait_for_sends(waiting)
    took: dict[str, list[float]] = {"overlapped": [], "waiting": []}
    fed = []
    for _ in range(options.rounds):
        for way, pipe in (("overlapped", overlapped), ("waiting", waiting)):
            dist.barrier()
            begin = time.perf_counter()
            pipe.step(batch, target=target)
            took[way].append(time.perf_counter() - begin)
            if way == "overlapped":
                timeline = pipe.timeline()
                fed.append(took[way][-1] / _predicted(table, subject, link, Measurement.from_timelines(timeline)))
    row: Row = {"KB": kilobytes, "schedule": name, "on a link": _busiest(table, subject, link), "fed/": median(fed)}
    row |= took | {"no link": _predicted(table, subject, link._replace(bandwidth=float("inf")))}
    return row | {"predicted": _predicted(table, subject, link), "predicted waiting": _predicted_waiting(table, subject, link)}


def _pipeline(subject: Emulated, table: Schedule, batch: Tensor, target: Tensor) -> ps.Pipeline:
    pipe = ps.Pipeline(subject.stages(table.num_stages), subject.loss, table, seed=None)
    for _ in range(WARM_UP):
        pipe.step(batch, target=target)
    return pipe


def _wait_for_sends(pipe: ps.Pipeline) -> None:
    """From now on the ranks of `pipe` wait for what they send to another host. (Its receives are posted ahead since the first
    step, in which both sides would wait for ever.)"""
    assert pipe._engine is not None
    for channel in pipe._engine.open_channels().outgoing.values():
        if isinstance(channel.transport, GroupSender):
            channel.transport.pending = WaitingSends(channel.transport.pending.failure)


# ---- what the simulator says


def _predicted(table: Schedule, subject: Emulated, link: Link, measured: Measurement | None = None) -> float:
    """Seconds of a step whose messages travel beside the compute: every pair of ranks on two hosts has a link of its own.

    Actions take what they should, or what was `measured`.
    """
    bandwidth = [link.bandwidth if crosses else float("inf") for crosses in link.crosses(table)]
    if measured is None:
        costs = Costs(*subject.nominal, size=subject.message, bandwidth=bandwidth)
    else:
        costs, table = action_costs(measured, size=subject.message, bandwidth=bandwidth), measured.schedule  # what ran
    return ps.schedule.simulate(table, costs).makespan


def _predicted_waiting(table: Schedule, subject: Emulated, link: Link) -> float:
    """Seconds of a step whose ranks wait for each message to another host: as if an action took that much longer.

    (A receive is posted before, so none waits for its receiver.)
    """
    forward, inputs, weights = subject.nominal
    message = subject.message / link.bandwidth
    crosses = link.crosses(table)
    forwards = [forward + message * cross for cross in [*crosses, False]]
    backwards = [inputs + message * value for value in [False, *crosses]]
    return ps.schedule.simulate(table, Costs(forwards, backwards, weights)).makespan


def _busiest(table: Schedule, subject: Emulated, link: Link) -> float:
    """Seconds that the messages of a step take which cross in the same direction, whichever ranks they are between.

    Over each border between stages an output goes one way and a gradient the other, so it is the same in both directions.
    """
    return sum(link.crosses(table)) * table.microbatches * subject.message / link.bandwidth


# ---- on this machine


def main(options: HostOptions) -> None:
    """Make two hosts, run the ranks there, print what came out."""
    limited = f"echo {BUFFER} > /proc/sys/net/ipv4/tcp_wmem"
    _print(options, *results_of(__file__, RANKS // 2, options.rate, limited))


def _print(options: HostOptions, told: dict[str, Any], crossed: int) -> None:
    megabytes = told["bandwidth"] / 1e6
    print(f"ranks on {', '.join(told['hosts'])}; {crossed / 1e6:.0f} MB left {told['hosts'][0]} over the cable")
    print(f"the cable lets {options.rate} pass; tensors get {megabytes:.2f} MB/s ({8 * megabytes:.1f} Mbit/s)")
    print(f"F, I, W {options.milliseconds:g} ms each on a rank, {options.microbatches} microbatches; times of a step in ms")
    rows = told["rows"]
    print("\nSends beside the compute. no link: predicted without one; link: what the messages of a step take on it each way;")
    print("fed/: a step over what is predicted from the times that its own actions took, instead of those they should take")
    link = [{"no link": 1e3 * row["no link"], "link": 1e3 * row["on a link"]} for row in rows]
    beside = [row | more | _compared(row, "overlapped", "predicted") for row, more in zip(rows, link, strict=True)]
    show(beside, "KB", "schedule", "no link", "link", *COMPARED, "fed/")
    print("\nRanks that wait for what they send to the other host. told, measured: how many times longer a step then takes")
    ratios = [
        {"told": row["predicted waiting"] / row["predicted"], "measured": median(row["waiting"]) / median(row["overlapped"])}
        for row in rows
    ]
    waiting = [row | more | _compared(row, "waiting", "predicted waiting") for row, more in zip(rows, ratios, strict=True)]
    show(waiting, "KB", "schedule", *COMPARED, "told", "measured")


COMPARED = ("predicted", "median", "median/", "fastest", "fastest/")


def _compared(row: Row, way: str, said: str) -> Row:
    """The steps of one way to send beside what was said of them: times in ms, and ratios, above 1 if they took longer."""
    predicted, middle, least = row[said], median(row[way]), min(row[way])
    times = {"predicted": 1e3 * predicted, "median": 1e3 * middle, "fastest": 1e3 * least}
    return times | {"median/": middle / predicted, "fastest/": least / predicted}


if __name__ == "__main__":
    run(HostOptions, work, main)
