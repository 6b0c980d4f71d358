"""What a step came to: its loss and its times, put together from all ranks."""

import math
import resource
import sys
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.comms.control_group import ControlGroup
from penstock.engine.checks.nonfinite import Verdict
from penstock.engine.clock import Clock
from penstock.mesh.position import MeshPosition
from penstock.schedule import Size
from penstock.schedule.table import Action
from penstock.stage import microbatch

NOTHING = -1
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class StepReport(NamedTuple):
    """What a step took, the same on every rank."""

    makespan: float  # seconds, first action to last over all ranks
    busy: tuple[float, ...]  # seconds each rank spent in actions
    peak_memory: tuple[float, ...]  # bytes, the most each rank's process has held so far; on a GPU its tensors, in this step
    between: tuple[float, ...] = ()  # seconds since each rank's step before: optimizer, next batch; 0 before the first
    averaging: tuple[float, ...] = ()  # seconds after each rank's last action until its gradients were the replicas' mean
    failed_beside: tuple[float, ...] = ()  # 1 for a rank that knows that what went on beside the steps has failed, else 0
    preempted: tuple[float, ...] = ()  # 1 for a rank that was asked to save and leave (comms/preemption.py), else 0
    found: tuple[float, ...] = ()  # 1 for a rank that found something that was not finite, if the step was watched, else 0
    skipped: bool = False  # it left no trace, since something in it was not finite
    nonfinite: str = ""  # what, and where, if the step was skipped or run once more

    @property
    def bubble(self) -> float:
        """The idle share: (makespan - the busiest rank's work) / makespan."""
        return (self.makespan - max(self.busy)) / self.makespan if self.makespan else 0.0

    @property
    def idle_share(self) -> float:
        """The share of all ranks' time in which no action ran; `bubble` counts the busiest rank's alone."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 0.0


class Outcome(NamedTuple):
    """What a step came to."""

    loss: Tensor  # of the whole batch, a scalar, the same on every rank
    losses: Sequence[Tensor]  # of each microbatch of this pipeline, if a rank wants them
    outputs: Sequence[Any]  # of each microbatch, on the last stage's rank if it wants them
    report: StepReport
    actions: Sequence[Action]  # what this rank ran
    clock: Clock  # and when
    sizes: Mapping[int, Size]  # stage -> bytes that a microbatch kept there, for this rank's stages where that is known
    verdict: Verdict | None = None  # on what was not finite, if the step was watched

    def joined(self, rows_dim: int) -> Any:
        """The outputs of the whole batch, joined along its rows; None where there are none."""
        return microbatch.join(self.outputs, rows_dim) if self.outputs else None


class BackgroundSave(Protocol):
    """A checkpoint's writing beside the steps: it fails on every rank or on none, but each learns that at its own moment."""

    @property
    def has_unreported_error(self) -> bool:
        """Whether this rank knows that it has failed, and has told nobody."""

    def wait_unless_reported(self) -> None:
        """Wait until it has ended on this rank; raises what went wrong, if that has not been told."""


class Ended(NamedTuple):
    """What one rank says at the end of a step; numbers, which travel as float64."""

    loss: float  # what its microbatches add to the loss
    dtype: float  # of the loss, by its place in DTYPES; NOTHING where none ended here
    start: float  # seconds of the shared clock
    end: float  # likewise; 0: it ran no action
    busy: float
    memory: float  # bytes
    auxiliary: float  # how many auxiliary losses it has
    between: float
    averaging: float
    failed_beside: float
    preempted: float
    found: float  # 1: something that was not finite


class Losses(NamedTuple):
    """What one rank has of the microbatches' losses."""

    own: Mapping[int, float]  # microbatch -> its loss, on the last stage's rank, if a rank wants them
    auxiliary: Sequence[tuple[int, float, float]]  # microbatch, an auxiliary loss of it, its weight


def conclude(
    control: ControlGroup, position: MeshPosition, last_rank: int, mine: Ended, losses: Losses, wanted: int, what: str
) -> tuple[Tensor, list[Tensor], StepReport]:
    """The end of a step, reached by all ranks together: losses and times, the same on every rank.

    `last_rank`, of every pipeline, has the loss; of the first `wanted` microbatches each one's own is told.
    """
    everyone = [Ended(*row) for row in control.all_gather_row(mine, what)]
    ended = [everyone[ranks[last_rank]] for ranks in position.replica_pipelines]
    values, each = [one.loss for one in ended], list[float]()
    if wanted or any(one.auxiliary for one in everyone):  # summed exactly, so that it does not matter which rank has which
        told: list[Losses] = control.all_gather_object(losses, what)
        values += [
            loss * weight for ranks in position.replica_pipelines for rank in ranks for _, loss, weight in told[rank].auxiliary
        ]
        each = [_of_microbatch([told[rank] for rank in position.replica_pipelines[position.replica]], m) for m in range(wanted)]
    dtype = DTYPES[int(next((one.dtype for one in ended if one.dtype != NOTHING), 0))]  # a replica may have nothing that counts
    device = control.topology.device
    loss, *of_each = (torch.full((), value, dtype=dtype, device=device) for value in (math.fsum(values), *each))
    ran = [one for one in everyone if one.end]  # a rank may have no stage
    makespan = max(one.end for one in ran) - min(one.start for one in ran)
    return loss, of_each, StepReport._make([makespan, *zip(*map(_OF_EACH, everyone), strict=True), False, ""])


_OF_EACH = attrgetter("busy", "memory", "between", "averaging", "failed_beside", "preempted", "found")  # as in StepReport


def _of_microbatch(told: Sequence[Losses], which: int) -> float:
    """Its loss with its auxiliary ones; NaN for a microbatch that counts nothing."""
    own = next((one.own[which] for one in told if which in one.own), math.nan)
    return math.fsum([own, *(loss for one in told for number, loss, _ in one.auxiliary if number == which)])


def weighted_sum(losses: Mapping[int, Tensor], weights: Sequence[float]) -> tuple[float, int]:
    """What this rank's microbatches add to the loss, and the place of its dtype; (0, NOTHING) where none ended here."""
    terms = [losses[microbatch] * weights[microbatch] for microbatch in sorted(losses)]
    if not terms:
        return 0.0, NOTHING
    loss = sum(terms[1:], terms[0])
    return loss.item(), DTYPES.index(loss.dtype) if loss.dtype in DTYPES else NOTHING


def forget_peak(device: torch.device) -> None:
    """A step begins: on a GPU, `peak_memory` counts from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> float:
    """Bytes: the most this process has held; on a GPU, the most its tensors have since `forget_peak`."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
