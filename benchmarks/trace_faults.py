"""Ten faults put into runs of torch.distributed.pipelining, and what the verdict on their traces says first.

python benchmarks/trace_faults.py --ranks 2 4 --folder traces/

Stages are emulated devices, which sleep. Each fault is a run of torch's runtime of schedules on Gloo, under its profiler; only
the traces are read. The table has a row for each fault: whether the verdict names it first or second, and its first sentences.
"""

import argparse
import gc
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from subjects import Emulated
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

import penstock as ps
from penstock.integrations.torch_trace import read_record
from penstock.learn.devices import EmulatedDevice
from penstock.schedule import Kind, Schedule, build, from_rows

SECONDS = 0.020  # of a forward; a backward takes twice as long
LATE_SECONDS = 0.060  # of a message over the slow link, the data loader, a pause
ROWS, WIDTH = 16, 64
LARGE_WIDTH = 10**6  # floats in each of 16 rows: 64 MB
WARMUP, STEPS = 1, 5
SLOW = 1  # the rank with the fault, where it is one rank's

EXPECTED = {  # fault -> words, one of which the first or second sentence of the verdict has; none: no fault is named
    "none": (),
    "slow rank": (f"rank {SLOW} is slow",),
    "uneven cut": ("another cut",),
    "slow link": ("messages from rank 0 to rank 1",),
    "late data loader": ("data loader",),
    "receive posted too early": ("blocked",),
    "unfused optimizer": ("optimizer",),
    "garbage collection": ("garbage collection",),
    "wrong order of microbatches": ("out of order",),
    "too few microbatches": ("microbatches",),
    "message of 64 MB": ("64 MB",),
}
FAULT_KINDS = {"straggler", "cut", "message", "order", "between steps", "pause", "blocked"}


def main() -> None:
    """Run every fault, read its traces, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--faults", nargs="*", default=list(EXPECTED), choices=list(EXPECTED))
    parser.add_argument("--folder", type=Path, help="where the traces go; by default they are not kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = options.folder or Path(temporary)
        for ranks in options.ranks:
            ps.launch(run_faults, ranks, options.faults, root / str(ranks))
            for fault in options.faults:
                print(row(fault, ranks, root / str(ranks) / fault.replace(" ", "-")), flush=True)


def row(fault: str, ranks: int, folder: Path) -> str:
    """Return a line of the table: what the verdict on the traces in `folder` says of `fault`."""
    record, _ = read_record(folder)
    explanation = record.explanation
    first = explanation.verdict[:2] if explanation else ()
    texts = [finding.text for finding in first]
    place = next((place for place, text in enumerate(texts, 1) if any(words in text for words in EXPECTED[fault])), 0)
    if not EXPECTED[fault]:
        named = "no fault named" if not any(finding.kind in FAULT_KINDS for finding in first) else "A FAULT IS NAMED"
    else:
        named = ("NOT NAMED", "first", "second")[place]
    return f"| {fault} | {ranks} | {named} | {'; '.join(texts)} |"


# ---- the runs


def run_faults(faults: list[str], folder: Path) -> None:
    """Run every fault on this rank, each into a folder of traces."""
    topology = ps.comms.init_distributed(backend="gloo")
    torch.set_num_threads(1)
    for fault in faults:
        path = folder / fault.replace(" ", "-")
        path.mkdir(parents=True, exist_ok=True)
        run_fault(fault, topology.rank, topology.world_size, path / f"rank{topology.rank}.json")


def run_fault(fault: str, rank: int, ranks: int, path: Path) -> None:
    """Profile steps of 1f1b with this fault in it, and write the trace of this rank."""
    microbatches = ranks if fault == "too few microbatches" else 4 * ranks
    width = LARGE_WIDTH if fault == "message of 64 MB" else WIDTH
    slower = {"slow rank": 1.3 if rank == SLOW else 1.0, "uneven cut": 1.0 + 0.5 * (rank == ranks - 1)}.get(fault, 1.0)
    device: nn.Module = EmulatedDevice(slower * SECONDS, slower * SECONDS, slower * SECONDS)
    if fault == "receive posted too early" and rank == 0:
        device = nn.Sequential(AllToAll(), device)
    if fault == "garbage collection" and rank == SLOW:
        device.register_forward_pre_hook(Collector())
    stage = PipelineStage(device, rank, ranks, torch.device("cpu"))
    runtime = load_table(stage, microbatches, changed_table(fault, ranks, microbatches))
    batch_p2p = schedules._batch_p2p
    if fault == "receive posted too early" and rank == 0:
        post_early(runtime)
    if fault == "slow link":
        schedules._batch_p2p = partial(send_late, batch_p2p, DelayedLink(), rank)
    parameters = [nn.Parameter(torch.ones(8)) for _ in range(400 if fault == "unfused optimizer" else 1)]
    for parameter in parameters:
        parameter.grad = torch.ones(8)
    optimizer = torch.optim.Adam(parameters, foreach=False)
    batches = iter(
        torch.utils.data.DataLoader(Batches(ROWS * microbatches, width, fault == "late data loader"), batch_size=None)
    )

    def step() -> None:
        inputs = (next(batches),) if rank == 0 else ()
        target = {"target": torch.zeros(ROWS * microbatches)} if rank == ranks - 1 else {}
        runtime.step(*inputs, **target, return_outputs=False)
        optimizer.step()

    profile_steps(step, path)
    schedules._batch_p2p = batch_p2p


def changed_table(fault: str, ranks: int, microbatches: int) -> Schedule:
    """Return the table of 1f1b; with the fault in it the first rank takes every pair of forwards in reverse."""
    table = build("1f1b", ranks, microbatches)
    if fault != "wrong order of microbatches":
        return table
    first = [
        action._replace(microbatch=action.microbatch ^ 1) if action.kind is Kind.F else action for action in table.actions[0]
    ]
    return from_rows("wrong order", [first, *table.actions[1:]])


def load_table(stage: PipelineStage, microbatches: int, table: Schedule) -> Any:
    """Return torch's runtime of schedules with this table."""
    runtime = schedules._PipelineScheduleRuntime([stage], microbatches, loss_fn=first_column, scale_grads=False)
    with tempfile.NamedTemporaryFile(suffix=".csv") as file:
        table.to_csv(file.name)
        runtime._load_csv(file.name)
    return runtime


def first_column(output: Tensor, target: Tensor) -> Tensor:
    """(rows, width), (rows,) -> scalar, at next to no cost."""
    return Emulated(WIDTH, SECONDS).loss(output, target)


def profile_steps(step: Callable[[], None], path: Path) -> None:
    """Run `step` under torch.profiler and write its trace to `path`."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=WARMUP, active=STEPS),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        record_shapes=True,
    ) as profiler:
        for _ in range(WARMUP + STEPS):
            step()
            profiler.step()
    dist.barrier()


# ---- the faults


class Batches(torch.utils.data.Dataset[Tensor]):
    """Batches of zeros; `is_late`: each takes a while."""

    def __init__(self, rows: int, width: int, is_late: bool) -> None:
        self.batch, self.seconds = torch.zeros(rows, width), LATE_SECONDS if is_late else 0.0

    def __len__(self) -> int:
        return WARMUP + STEPS

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        return self.batch


class Collector:
    """A hook with a garbage collection of a large heap before every seventh forward."""

    def __init__(self) -> None:
        self.heap, self.calls = [[number] for number in range(1_000_000)], 0

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Collect before the seventh forward, and so on."""
        self.calls += 1
        if self.calls % 7 == 0:
            gc.collect()


PENDING: list[Any] = []  # receives that were posted and have not arrived


class AllToAll(nn.Module):
    """A collective in every forward, which runs after the receives that were posted before it, as on one stream of NCCL."""

    def forward(self, hidden: Tensor) -> Tensor:
        """(rows, width) -> the same."""
        with torch.profiler.record_function("nccl:all_to_all"):
            while PENDING:
                PENDING.pop().wait()
            time.sleep(SECONDS / 10)
        return hidden


def post_early(runtime: Any) -> None:
    """Post the receive for every backward of the first rank before the forward that comes first, which does not need it."""
    actions = runtime.pipeline_order_with_comms[0]
    for receive in [action for action in actions if "RECV_B" in str(action)]:
        actions.remove(receive)
        backward = next(place for place, action in enumerate(actions) if str(action) == f"0B{receive.microbatch_index}")
        before = max(place for place in range(backward) if str(actions[place])[:2] in ("0F", "0B"))
        actions.insert(before if str(actions[before]).startswith("0F") else backward, receive)
    batch_p2p: Any = schedules._batch_p2p

    def post(operations: list[dist.P2POp], desc: str | None = None) -> list[Any]:
        works = [RepeatableWork(work) for work in batch_p2p(operations, desc)]
        PENDING.extend(work for work, operation in zip(works, operations, strict=True) if operation.op is dist.irecv)
        return works

    setattr(schedules, "_batch_p2p", post)  # noqa: B010, which mypy asks for


class RepeatableWork:
    """A work that may be waited for more than once."""

    def __init__(self, work: dist.Work) -> None:
        self.work: dist.Work | None = work

    def wait(self) -> None:
        """Wait the first time."""
        work, self.work = self.work, None
        if work is not None:
            work.wait()


class DelayedLink:
    """Sends messages from a thread, each a while after it was handed over, in order."""

    def __init__(self) -> None:
        self.messages: queue.Queue[tuple[float, dist.P2POp]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            due, operation = self.messages.get()
            time.sleep(max(0.0, due - time.monotonic()))
            work = dist.isend(operation.tensor, group=operation.group, tag=operation.tag, group_dst=operation.group_peer)
            if work is not None:
                work.wait()


class Done:
    """The work of a message that a line has taken."""

    def wait(self) -> None:
        """Return at once."""


def send_late(batch_p2p: Any, line: DelayedLink, rank: int, operations: list[dist.P2POp], desc: str | None = None) -> list[Any]:
    """Post `operations` as torch does, but hand what rank 0 sends to the slow line."""
    works: list[Any] = []
    for operation in operations:
        if rank == 0 and operation.op is dist.isend:
            line.messages.put((time.monotonic() + LATE_SECONDS, operation))
            works.append(Done())
        else:
            works += batch_p2p([operation], desc)
    return works


if __name__ == "__main__":
    main()
