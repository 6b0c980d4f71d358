"""The time saved by averaging gradients while the table runs, compared with its prediction.

python benchmarks/gradients.py                      two hosts, a replica of two ranks on each, 100 Mbit/s: about two minutes
python benchmarks/gradients.py --rate 1gbit --kilobytes 8192

The hosts are namespaces of this machine (tests/comms/hosts.py) with a torchrun agent each; run it as root. Stages sleep, and
have a parameter of so many kilobytes. With overlap a stage's gradients leave after its last backward; without, all leave when
the step is over. Both take turns. Predicted: `schedule.averaging_end_time` on the simulated table, with the bandwidth
that all-reduces of that size have there.
"""

import json
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tables import Row, show
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from two_hosts import results_of, run

import penstock as ps
from penstock.learn.devices import EmulatedDevice
from penstock.mesh.position import MeshPosition, mesh_position
from penstock.schedule import Costs, Schedule, averaging_end_time, simulate

PIPELINE = 2  # ranks of a replica
WARM_UP = 2  # steps
TRIED = 8  # all-reduces by which the bandwidth is measured


@dataclass
class GradientOptions:
    """Measure steps of two replicas with a slow link between them, beside what is predicted."""

    rate: str = "100mbit"  # of the cable in each direction, as `tc` writes it
    kilobytes: int = 256  # of the parameters of a stage of four; fewer stages have larger ones
    schedules: tuple[str, ...] = ("1f1b", "gpipe", "interleaved-1f1b", "looped-bfs")
    milliseconds: float = 20.0  # that F of a microbatch takes on a rank; B takes twice as long
    microbatches: int = 4
    rounds: int = 9  # measured steps of each kind, in turns
    results: Path | None = None  # set for the ranks: where rank 0 writes what came out


# ---- on every rank


def work(options: GradientOptions) -> None:
    """What every rank runs: measures the link, then every configuration. Rank 0 writes down what came out."""
    topology = ps.comms.init_distributed(timeout=60)
    mesh = init_device_mesh("cpu", (2, PIPELINE), mesh_dim_names=("dp", "pp"))  # a replica on each host
    position = mesh_position(mesh, topology)
    bandwidth = _bandwidth(mesh, options.kilobytes)
    rows = [_measured(options, name, mesh, position, bandwidth) for name in options.schedules]
    if topology.rank == 0 and options.results is not None:
        options.results.write_text(json.dumps({"bandwidth": bandwidth, "rows": rows}))


def _bandwidth(mesh: DeviceMesh, kilobytes: int) -> float:
    """Bytes of gradients per second that all ranks' all-reduces between the hosts come to together."""
    took = []
    for _ in range(TRIED):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(torch.zeros(256 * kilobytes), group=mesh["dp"].get_group())
        dist.barrier()
        took.append(time.perf_counter() - begin)
    found = torch.tensor(PIPELINE * 1024 * kilobytes / median(took[1:]), dtype=torch.float64)
    dist.broadcast(found, 0)
    return found.item()


def _measured(options: GradientOptions, name: str, mesh: DeviceMesh, position: MeshPosition, bandwidth: float) -> Row:
    """One configuration: its steps both ways, in turns, and what is predicted of both."""
    table = ps.schedule.build(name, ranks=PIPELINE, microbatches=options.microbatches)
    share, floats = PIPELINE / table.stages, 256 * options.kilobytes * 4 // table.stages
    seconds = share * options.milliseconds / 1e3
    stages = partial(_stages, table, seconds, floats)
    alone = replace(position.pipeline, store=dist.PrefixStore(f"replica {position.replica}", position.world.store))
    settings: dict[str, Any] = {"loss_fn": _loss, "schedule": table, "seed": None}
    beside = ps.Pipeline(stages(), mesh=mesh, **settings)
    after = ps.Pipeline(stages(), topology=alone, **settings)
    took: dict[str, list[float]] = {"overlapped": [], "after": []}
    for turn in range(WARM_UP + options.rounds):
        for kind, pipe in (("overlapped", beside), ("after", after)):
            seconds_of_step = _step(pipe, mesh if kind == "after" else None)
            if turn >= WARM_UP:
                took[kind].append(seconds_of_step)
            for parameter in pipe.parameters():
                parameter.grad = None
    planned = simulate(table, Costs(seconds, 2 * seconds, 0))
    value = 4 * floats / bandwidth
    told = {kind: averaging_end_time(planned, value, overlapped=kind == "overlapped", shared=True) for kind in took}
    return {"schedule": name, "link": table.stages * value, "table": planned.makespan, "told": told, **took}


def _stages(table: Schedule, seconds: float, floats: int) -> list[nn.Module]:
    return [EmulatedDevice(seconds, 2 * seconds, parameters=floats) for _ in range(table.stages)]


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _step(pipe: ps.Pipeline, mesh: DeviceMesh | None) -> float:
    """Seconds of a step, from all ranks' start to all ranks' end; with a `mesh`, gradients are averaged when it is over."""
    batch = torch.zeros(pipe.schedule.microbatches, 4)
    dist.barrier()
    begin = time.perf_counter()
    pipe.step(batch, target=batch)
    if mesh is not None:
        dist.barrier()
        for parameter in pipe.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad.div_(2), group=mesh["dp"].get_group())
    dist.barrier()
    return time.perf_counter() - begin


# ---- on this machine


def main(options: GradientOptions) -> None:
    """Make two hosts, run the ranks there, print what came out."""
    told, _ = results_of(__file__, PIPELINE, options.rate)
    _print(options, told)


def _print(options: GradientOptions, told: dict[str, Any]) -> None:
    print(f"two replicas of {PIPELINE} ranks, a host each; the cable lets {options.rate} pass in each direction")
    print(f"all-reduces of {options.kilobytes} KB, two at once, come to {told['bandwidth'] / 1e6:.2f} MB/s of gradients")
    print(f"F {options.milliseconds:g} ms and B {2 * options.milliseconds:g} ms on a rank, {options.microbatches} microbatches")
    print("\nA step in ms. table: without averaging; link: what averaging takes alone; saved: by overlap, told and measured")
    rows = []
    for row in told["rows"]:
        columns: Row = {"schedule": row["schedule"], "table": 1e3 * row["table"], "link": 1e3 * row["link"]}
        for kind in ("after", "overlapped"):
            columns |= {f"{kind}: told": 1e3 * row["told"][kind], f"{kind}: median": 1e3 * median(row[kind])}
        columns["saved: told"] = columns["after: told"] - columns["overlapped: told"]
        columns["saved: median"] = columns["after: median"] - columns["overlapped: median"]
        pairs = [1e3 * (a - b) for a, b in zip(row["after"], row["overlapped"], strict=True)]
        rows.append(columns | {"least": min(pairs), "most": max(pairs)})
    show(rows, *rows[0])


if __name__ == "__main__":
    run(GradientOptions, work, main)
