"""How fast the collectives are: every operation over sizes, beside torch's own called directly, and what one is made of."""

import csv
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from rich.console import Console

from penstock import comms
from penstock.commands.bench.timing import FEWEST, Row, Variant, floats, measure, same_bits, two_halves, variants
from penstock.comms.collectives import operations as ours
from penstock.comms.collectives.call import COLLECTIVES
from penstock.comms.starting.launcher import launch
from penstock.errors import PenstockError
from penstock.view.files import writing

SIZES = tuple(4**power for power in range(5, 15))  # 1 KB to 256 MB
NAMES = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce", "all_to_all": "all-to-all"}
OPERATIONS = (*COLLECTIVES, "send")
BUFFERS = 4  # a rank's largest memory over the size measured: its tensor, the result, and copies of Gloo's
COLUMNS = (
    *("operation", "variant", "ranks", "bytes", "samples", "median_s", "p10_s", "p90_s"),
    *("algorithm_GBps", "bus_factor", "bus_GBps"),
)
NOTES = """
bytes      one rank's tensor, of broadcast, reduce, all-reduce and send; of the others all ranks' pieces together, the larger
           side of what one rank gives and gets
time       from when the last rank started to when the last was done; the median, and in brackets the middle 80 %
alg GB/s   bytes / time
bus GB/s   alg x 2(n-1)/n for all-reduce, x 1 for send, x (n-1)/n for the others, n ranks: what a link carries if the work is
           shared evenly. (nccl-tests counts broadcast and reduce as 1: divide by (n-1)/n to compare.)"""


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes
    seconds: float  # for one operation and size
    raw: bool  # torch called directly as well, and ours without the check


def plan_of(operations: Sequence[str], sizes: Sequence[str], largest: str, seconds: float, raw: bool, ranks: int) -> Plan:
    """What the options of the command line ask for. Raises PenstockError for what there is not."""
    named = {name: name for name in OPERATIONS} | {spoken: name for name, spoken in NAMES.items()}
    for each in operations:
        if each not in named:
            raise PenstockError(f"--operations {each} is not known: use {', '.join(OPERATIONS)}")
    if ranks < 2:
        raise PenstockError(f"--ranks {ranks} is too small: a collective takes 2 or more")
    if seconds <= 0:
        raise PenstockError(f"--seconds {seconds:g} is too short: use more than 0")
    most = bytes_of(largest)
    wanted = tuple(bytes_of(size) for size in sizes) or tuple(size for size in SIZES if size <= most)
    kept = fitting(wanted, ranks)
    if not kept:
        raise PenstockError("no size is left to measure: give a smaller one with --sizes")
    return Plan(tuple(named[each] for each in operations) or OPERATIONS, kept, seconds, raw)


def bench(plan: Plan, ranks: int, table: Path | None, plot: Path | None) -> None:
    """Measure and print, then write the CSV `table` and the `plot`."""
    if plot is not None and plot.suffix not in (".svg", ".png"):
        raise PenstockError(f"--plot {plot}: give it a name that ends in .svg or .png")
    for line in connections():
        _say(line)
    rows = launch(run_plan, ranks, plan)[0]
    _say(NOTES)
    for path, write in ((table, _write_table), (plot, _write_plot)):
        if path is not None:
            with writing(path):
                write(rows, path)
            _say(f"wrote {path}")


def run_plan(plan: Plan) -> list[Row]:
    """Run on every rank; rank 0 prints each row when it is there, and has them all."""
    topology = comms.init_distributed()
    lead, rows = topology.rank == 0, []
    _say_if(lead, f"{topology.world_size} ranks, {topology.backend}, {topology.device}; at least {FEWEST} samples of each\n")
    _say_if(lead, _headings(plan.raw))
    for operation in plan.operations:
        for size in plan.sizes:
            some = measure(operation, variants(operation, size, topology, plan.raw), size, plan.seconds, topology)
            rows += some
            _say_if(lead, _line(some))
    if "all_reduce" in plan.operations:
        _compose(plan, topology)
    return rows


def _compose(plan: Plan, topology: comms.Topology) -> None:
    """All-reduce beside a reduce-scatter and an all-gather: the same numbers, and what each takes."""
    lead = topology.rank == 0
    _say_if(lead, "\nall-reduce is reduce-scatter, then all-gather: are all numbers the same, and what does it take?")
    _say_if(lead, f"  {'bytes':>11}  whole numbers  random floats  all-reduce      the two         the two / all-reduce")
    torch.manual_seed(topology.rank)
    for size in plan.sizes:
        count = floats(size, topology.world_size)
        same = [same_bits(torch.randint(-1000, 1000, (count,)).float(), topology), same_bits(torch.randn(count), topology)]
        whole = torch.full((count,), 0.0, device=topology.device)
        piece, result = torch.empty_like(whole[: count // topology.world_size]), torch.empty_like(whole)
        choice: dict[str, Variant] = {"one": partial(ours.all_reduce, whole), "two": partial(two_halves, whole, piece, result)}
        one, pair = measure("all_reduce", choice, size, plan.seconds, topology)
        told = [("equal" if each else "DIFFERENT").ljust(13) for each in same]
        _say_if(
            lead,
            f"  {count * 4:>11,}  {told[0]}  {told[1]}  {_time(median(one.seconds)):<14}  {_time(median(pair.seconds)):<14}  "
            f"{median(pair.seconds) / median(one.seconds):.2f} {_spread(pair, one)}",
        )


def connections() -> list[str]:
    """The GPUs of this machine and how they are connected, where there are any."""
    lines = [f"cuda:{index} {torch.cuda.get_device_name(index)}{_links(index)}" for index in range(torch.cuda.device_count())]
    if tool := shutil.which("nvidia-smi"):
        done = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=30, check=False)
        if done.returncode == 0:
            lines += [re.sub("\x1b\\[[0-9;]*m", "", done.stdout).strip(), ""]
    elif lines:
        lines.append("how they are connected is not known: nvidia-smi, which says it, is not here")
    return lines


def _links(index: int) -> str:
    """What NVML says of a GPU's links, where its Python binding (`nvidia-ml-py`) is installed."""
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return ""
    pynvml.nvmlInit()
    try:
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
        lanes = pynvml.nvmlDeviceGetCurrPcieLinkWidth(gpu)
        told = f", PCIe {pynvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu)} x{lanes}"
        return f"{told}, {sum(_is_up(pynvml, gpu, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS))} NVLinks"
    except pynvml.NVMLError as error:
        return f", of its links NVML says: {error}"
    finally:
        pynvml.nvmlShutdown()


def _is_up(nvml: Any, gpu: Any, link: int) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(gpu, link))
    except nvml.NVMLError:  # there is no such link
        return False


def _headings(raw: bool) -> str:
    compared = "  unchecked  raw             bandwidth over raw" if raw else ""
    return f"{'operation':<14}  {'bytes':>11}  {'time':<34}  {'alg GB/s':>8}  {'bus GB/s':>8}{compared}"


def _line(rows: Sequence[Row]) -> str:
    by_variant = {row.variant: row for row in rows}
    row = by_variant["penstock"]
    low, high = row.middle
    times = f"{_time(median(row.seconds))} ({_time(low)} to {_time(high)})"
    told = f"{NAMES.get(row.operation, row.operation):<14}  {row.bytes:>11,}  {times:<34}  "
    told += f"{row.bandwidth / 1e9:>8.3f}  {row.bandwidth * row.factor / 1e9:>8.3f}"
    if raw := by_variant.get("raw"):
        unchecked = f"{by_variant['unchecked'].bandwidth / raw.bandwidth:9.2f}" if "unchecked" in by_variant else " " * 9
        told += f"  {unchecked}  {_time(median(raw.seconds)):<14}  {row.bandwidth / raw.bandwidth:.2f} {_spread(raw, row)}"
    return told


def _spread(above: Row, below: Row) -> str:
    """Where the middle half of the ratios of neighbouring samples is."""
    quarters = quantiles(starmap(lambda a, b: a / b, zip(above.seconds, below.seconds, strict=True)), n=4, method="inclusive")
    return f"({quarters[0]:.2f} to {quarters[-1]:.2f})"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _say(text: str) -> None:
    Console(soft_wrap=True).print(text, highlight=False, markup=False)


def _say_if(lead: bool, text: str) -> None:
    if lead:
        _say(text)


def _write_table(rows: Sequence[Row], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for row in rows:
            times = [f"{each:.9f}" for each in (median(row.seconds), *row.middle)]
            speeds = [f"{each:.6g}" for each in (row.bandwidth / 1e9, row.factor, row.bandwidth * row.factor / 1e9)]
            table.writerow([row.operation, row.variant, row.ranks, row.bytes, len(row.seconds), *times, *speeds])


def _write_plot(rows: Sequence[Row], path: Path) -> None:
    from penstock.view.figure.curves import curves
    from penstock.view.figure.png import save_png
    from penstock.view.figure.svg import svg

    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.variant == "penstock":
            name = NAMES.get(row.operation, row.operation)
            series.setdefault(name, []).append((row.bytes, row.bandwidth * row.factor / 1e9))
    ticks = {float(row.bytes): text_of(row.bytes) for row in rows}
    picture = curves(f"Collectives over {rows[0].ranks} ranks", series, "bytes", "bus GB/s", ticks)
    if path.suffix == ".png":
        save_png(picture, path)
    else:
        path.write_text(svg(picture), encoding="utf-8")


UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def bytes_of(text: str) -> int:
    """`64K`, `1 MB`, `512` -> bytes; K is 1024. Raises PenstockError for another form."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]?)B?", text.strip().upper())
    if not match or not (size := round(float(match[1]) * UNITS[match[2]])):
        raise PenstockError(f"{text!r} is no size: write it as 512, 64K or 1MB")
    return size


def text_of(size: int) -> str:
    """Bytes -> `64 KB`."""
    unit = next((unit for unit in ("G", "M", "K") if size >= UNITS[unit] * 0.99), "")
    return f"{size / UNITS[unit]:.3g} {unit}B"


def fitting(sizes: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Those of `sizes` for which `ranks` processes have room in what memory is free, halved."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return tuple(sizes)
    kept = tuple(size for size in sizes if size * ranks * BUFFERS <= free / 2)
    if len(kept) < len(sizes):
        left = ", ".join(text_of(size) for size in sizes if size not in kept)
        _say(f"left out, for {ranks} ranks do not have the memory: {left}")
    return kept
