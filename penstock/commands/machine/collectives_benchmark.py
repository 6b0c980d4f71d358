"""`penstock bench collectives`: time torch's collectives over sizes, and fit latency and bandwidth."""

import csv
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from penstock import comms
from penstock.launcher.launch import launch
from penstock.view.files import report_write_errors

WARM_UP, MIN_SAMPLES, MAX_SAMPLES = 3, 5, 400
OPERATIONS = ("broadcast", "scatter", "gather", "reduce", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
COLUMNS = ("operation", "ranks", "bytes", "samples", "median_s", "algorithm_GBps", "bus_factor", "bus_GBps")
NOTES = """
bytes      broadcast, reduce, all_reduce and send: one rank's tensor; the others: all pieces together, the larger of what a rank
           sends and receives
time       from the last rank's start to the last rank's end, the median of the samples
alg GB/s   bytes / time
bus GB/s   alg x 2(n-1)/n for all_reduce, x 1 for broadcast, reduce and send, x (n-1)/n for the others, n ranks: the load
           of a link if the work is shared evenly, counted as nccl-tests counts
fit        time = latency + bytes / bandwidth, by least squares of relative errors over the sizes"""


class Row(NamedTuple):
    """One operation at one size."""

    operation: str
    ranks: int
    bytes: int
    samples: int
    seconds: float  # the median

    @property
    def speeds(self) -> tuple[float, float, float]:
        """Return algorithm bandwidth in GB/s, the bus factor, and their product, the bus bandwidth in GB/s."""
        algorithm, factor = self.bytes / self.seconds / 1e9, bus_factor(self.operation, self.ranks)
        return algorithm, factor, algorithm * factor


def bus_factor(operation: str, ranks: int) -> float:
    """Return how often a byte crosses a link if the work is shared evenly."""
    shared = (ranks - 1) / ranks
    return {"broadcast": 1.0, "reduce": 1.0, "send": 1.0, "all_reduce": 2 * shared}.get(operation, shared)


def bench(
    operations: Sequence[str], sizes: Sequence[int], seconds: float, ranks: int, table: Path | None, plot: Path | None
) -> None:
    """Measure and print, then write the CSV `table` and draw bus bandwidths in `plot`, .svg or .png."""
    from penstock.view.figure.curves import curves
    from penstock.view.figure.png import save_png
    from penstock.view.figure.svg import svg

    rows = launch(run_on_rank, ranks, operations, sizes, seconds)[0]
    print(NOTES)
    if table is not None:
        with report_write_errors(table), table.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows([*row[:-1], f"{row.seconds:.9f}", *(f"{speed:.6g}" for speed in row.speeds)] for row in rows)
        print(f"wrote {table}")
    if plot is not None:
        series = {name: [(row.bytes, row.speeds[-1]) for row in rows if row.operation == name] for name in operations}
        ticks = {float(row.bytes): f"{row.bytes / 1024:g} KB" for row in rows[:: max(1, len(sizes) // 5)]}
        picture = curves(f"Collectives over {ranks} ranks", series, "bytes", "bus GB/s", ticks)
        with report_write_errors(plot):
            save_png(picture, plot) if plot.suffix == ".png" else plot.write_text(svg(picture), encoding="utf-8")
        print(f"wrote {plot}")


def run_on_rank(operations: Sequence[str], sizes: Sequence[int], seconds: float) -> list[Row]:
    """Measure on every rank. Rank 0 prints each row as soon as it is measured."""
    topology, barrier, rows = comms.init_distributed(), dist.new_group(backend="gloo"), list[Row]()

    def say(text: str) -> None:
        if topology.rank == 0:
            print(text, flush=True)

    say(f"{topology.world_size} ranks, {topology.backend}, {topology.device}\n")
    say(f"{'operation':<14}  {'bytes':>11}  {'time':>8}  {'alg GB/s':>8}  {'bus GB/s':>8}")
    for operation in operations:
        for size in sizes:
            rows.append(row := measure(operation, size, seconds, topology, barrier))
            algorithm, _, bus = row.speeds
            say(f"{operation:<14}  {row.bytes:>11,}  {_time(row.seconds):>8}  {algorithm:>8.3f}  {bus:>8.3f}")
        if len(sizes) > 1:
            latency, bandwidth = fit([row.bytes for row in rows[-len(sizes) :]], [row.seconds for row in rows[-len(sizes) :]])
            say(f"  fit: a latency of {_time(latency)} and {bandwidth / 1e9:.3f} GB/s")
    return rows


def measure(operation: str, size: int, seconds: float, topology: comms.Topology, barrier: dist.ProcessGroup) -> Row:
    """Time one operation at about `size` bytes for about `seconds`, on every rank."""
    ranks, rank, device = topology.world_size, topology.rank, topology.device
    tensor = torch.full(
        (max(1, round(size / 4 / ranks)) * ranks,), 0.0, device=device
    )  # written, so that its pages are allocated
    piece, result = torch.full_like(tensor[: tensor.numel() // ranks], 0.0), torch.full_like(tensor, 0.0)
    pieces = list(result.view(ranks, -1)) if rank == 0 else None
    call: Callable[[], object] = {
        "broadcast": lambda: dist.broadcast(tensor, 0),
        "scatter": lambda: dist.scatter(piece, pieces, 0),
        "gather": lambda: dist.gather(piece, pieces, 0),
        "reduce": lambda: dist.reduce(tensor, 0),
        "all_gather": lambda: dist.all_gather_single(result, piece),
        "reduce_scatter": lambda: dist.reduce_scatter_single(piece, tensor),
        "all_reduce": lambda: dist.all_reduce(tensor),
        "all_to_all": lambda: dist.all_to_all_single(result, tensor),
        "send": (lambda: dist.send(tensor, 1), lambda: dist.recv(tensor, 0), lambda: None)[min(rank, 2)],
    }[operation]

    def sample() -> tuple[float, float]:
        """Run the operation once. Return its begin and end by the clock that all processes of a machine share."""
        _synchronize(device)
        dist.barrier(barrier)  # on another group, to leave the operation's connections idle
        begin = time.perf_counter()
        call()
        _synchronize(device)
        return begin, time.perf_counter()

    begin, end = [sample() for _ in range(WARM_UP)][-1]
    count = torch.tensor([min(MAX_SAMPLES, max(MIN_SAMPLES, round(seconds / (end - begin))))])
    dist.broadcast(count, 0, group=barrier)  # the same number on every rank
    samples = torch.tensor([sample() for _ in range(int(count))], dtype=torch.float64)
    gathered = [torch.empty_like(samples) for _ in range(ranks)]
    dist.all_gather(gathered, samples, group=barrier)
    begins, ends = torch.stack(gathered[: 2 if operation == "send" else ranks]).unbind(dim=2)  # (ranks, samples)
    return Row(operation, ranks, 4 * tensor.numel(), len(samples), median((ends.amax(0) - begins.amax(0)).tolist()))


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit latency in seconds and bandwidth in bytes a second, by least squares of relative errors."""
    times, amounts = torch.tensor([seconds, sizes], dtype=torch.float64)
    columns = torch.stack([1 / times, amounts / times], dim=1)
    latency, per_byte = torch.linalg.lstsq(columns, torch.ones(len(times), 1, dtype=torch.float64)).solution.flatten().tolist()
    return max(latency, 0.0), 1 / per_byte if per_byte > 0 else float("inf")


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
