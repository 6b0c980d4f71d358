"""The result of a step: its loss, and a report of its times and memory, put together from all ranks."""

import math
import resource
import sys
from array import array
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import attrgetter, mul
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.batch.agreement import Agreed
from penstock.batch.pieces import Piece, join, scalars_to_floats
from penstock.comms.control_group import ControlGroup
from penstock.engine.clock import ActionClock
from penstock.mesh.position import MeshPosition
from penstock.torch_private import foreach_multiply

NO_LOSS = -1  # in place of a dtype
LOSS_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class StepReport(NamedTuple):
    """Times, memory and events of a step, the same on every rank. Tuples have an entry for each rank."""

    makespan: float  # seconds, first action to last over all ranks
    busy: tuple[float, ...]  # seconds spent in actions
    peak_memory: tuple[float, ...]  # bytes, the most the process has held so far; on a GPU its tensors, in this step
    between: tuple[float, ...] = ()  # seconds since the step before: optimizer, next batch; 0 before the first
    averaging: tuple[float, ...] = ()  # seconds from the last action until gradients were the replicas' mean
    background_save_failed: tuple[float, ...] = ()  # 1 if the rank knows that a checkpoint in the background failed, else 0
    preempted: tuple[float, ...] = ()  # 1 if the rank was asked to save and leave (comms/preemption.py), else 0
    skipped: bool = False  # left no trace, since a value was not finite
    nonfinite: str = ""  # what was not finite, and where, if the step was skipped

    @property
    def bubble(self) -> float:
        """The idle share of the busiest rank: (makespan - its work) / makespan."""
        return (self.makespan - max(self.busy)) / self.makespan if self.makespan else 0.0

    @property
    def idle_share(self) -> float:
        """The share of all ranks' time in which no action ran."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 0.0


class BackgroundSave(Protocol):
    """A checkpoint that is written in the background. It fails on all ranks or none, though ranks notice at different times."""

    @property
    def has_unreported_error(self) -> bool:
        """Whether this rank knows that it has failed, and has not raised the error yet."""

    def wait_unless_reported(self) -> None:
        """Wait until it has ended on this rank. Raise its error, unless raised before."""


class RankSummary(NamedTuple):
    """A rank's message to all others at the end of a step: numbers, as float64."""

    loss: float  # what its microbatches add to the loss
    loss_dtype: float  # index in LOSS_DTYPES; NO_LOSS if no microbatch ended here
    start: float  # this and the next four: see ClockTotals
    end: float
    busy: float
    between: float
    averaging: float
    memory: float  # bytes
    num_auxiliary_losses: float
    background_save_failed: float
    preempted: float


# Fields of a RankSummary, in the order of StepReport.
_REPORT_FIELDS = attrgetter("busy", "memory", "between", "averaging", "background_save_failed", "preempted")


class StepResult(NamedTuple):
    """The result of a step for the pipeline."""

    loss: Tensor  # of the whole batch, a scalar, the same on every rank
    losses: Sequence[Tensor]  # of each microbatch of this pipeline, if a rank wants them
    outputs: Sequence[Any]  # of each microbatch, on the last stage's rank if it wants them
    agreed: Agreed  # what this rank ran
    clock: ActionClock  # and when
    summaries: Sequence[RankSummary]  # of all ranks
    nonfinite: str = ""  # what was not finite, and where, if the step was skipped

    def joined_outputs(self, rows_dim: int) -> Any:
        """Return the outputs of the whole batch, joined along its rows; None if there are none."""
        return join(self.outputs, rows_dim) if self.outputs else None

    @property
    def background_save_failed(self) -> bool:
        """Whether a rank knows that a checkpoint in the background failed."""
        return any(summary.background_save_failed for summary in self.summaries)

    @property
    def report(self) -> StepReport:
        """The step's times and memory, made when it is read. A rank without a stage has run nothing."""
        active = [summary for summary in self.summaries if summary.end]
        makespan = max(summary.end for summary in active) - min(summary.start for summary in active)
        columns = zip(*map(_REPORT_FIELDS, self.summaries), strict=True)
        return StepReport._make([makespan, *columns, bool(self.nonfinite), self.nonfinite])


class MicrobatchLosses(NamedTuple):
    """The losses that one rank has of single microbatches."""

    main: Mapping[int, float]  # microbatch -> what this rank's tokens add to its loss, on the last stage's rank, if wanted
    auxiliary: Sequence[tuple[int, float, float]]  # microbatch, one of its auxiliary losses, the microbatch's share


NO_MICROBATCH_LOSSES = MicrobatchLosses({}, ())


def gather_summaries(
    control: ControlGroup,
    position: MeshPosition,
    last_rank: int,
    summary: RankSummary,
    numbers: Sequence[float],
    losses: MicrobatchLosses,
    num_losses: int,
    wait_reason: str,
) -> tuple[Tensor, list[Tensor], Sequence[RankSummary], Sequence[Sequence[float]]]:
    """Exchange all ranks' summaries.

    Return the loss, the losses of the first `num_losses` microbatches, the summaries, and each rank's `numbers`.
    `last_rank`: the one of each pipeline that has the last stage. All ranks call it, and get the same.
    """
    rows = control.all_gather_row([*summary, *numbers], wait_reason)
    summaries = [RankSummary(*row[: len(summary)]) for row in rows]
    last_summaries = [summaries[ranks[last_rank]] for ranks in position.batch_parts]

    # 1. The terms of the loss. `fsum` is exact, so the result does not depend on which rank has which term.
    terms = [row.loss for row in last_summaries]
    microbatch_losses: list[float] = []
    if num_losses or any(row.num_auxiliary_losses for row in summaries):
        rank_losses: list[MicrobatchLosses] = control.all_gather_value(losses, wait_reason)
        counted_ranks = [rank for ranks in position.batch_parts for rank in ranks]
        terms += [loss * share for rank in counted_ranks for _, loss, share in rank_losses[rank].auxiliary]
        first_part = position.replica * position.cp_size
        parts = position.batch_parts[first_part : first_part + position.cp_size]
        replica_losses = [rank_losses[rank] for ranks in parts for rank in ranks]
        microbatch_losses = [_microbatch_loss(replica_losses, number) for number in range(num_losses)]

    # 2. The loss as a tensor, in the widest dtype: a part of a batch that counts nothing has its output's.
    dtypes = [LOSS_DTYPES[int(row.loss_dtype)] for row in last_summaries if row.loss_dtype != NO_LOSS] or [LOSS_DTYPES[0]]
    dtype = reduce(torch.promote_types, dtypes)
    values = math.fsum(terms), *microbatch_losses
    loss, *loss_list = [torch.full((), value, dtype=dtype, device=control.topology.device) for value in values]
    return loss, loss_list, summaries, [row[len(summary) :] for row in rows]


def _microbatch_loss(rank_losses: Sequence[MicrobatchLosses], number: int) -> float:
    """Return the loss of a microbatch with its auxiliary ones; NaN for a microbatch that counts nothing."""
    shares = [losses.main[number] for losses in rank_losses if number in losses.main] or [math.nan]
    return math.fsum([*shares, *(loss for losses in rank_losses for index, loss, _ in losses.auxiliary if index == number)])


def local_loss_and_dtype(losses: Mapping[int, Tensor], pieces: Sequence[Piece], order: Sequence[int]) -> tuple[float, int]:
    """Return what this rank's pieces add to the loss, in this `order`, and the index of its dtype; (0, NO_LOSS) without any."""
    numbers = [number for number in order if number in losses]
    if not numbers:
        return 0.0, NO_LOSS
    loss, dtype = weighted_sum([losses[number] for number in numbers], [pieces[number].share for number in numbers])
    return loss, LOSS_DTYPES.index(dtype) if dtype in LOSS_DTYPES else NO_LOSS


def weighted_sum(losses: Sequence[Tensor], shares: Sequence[float]) -> tuple[float, torch.dtype]:
    """Return the sum of losses, each times its share, and its dtype: bit for bit as tensors are multiplied and added in order.

    Python does it in a tenth of the time. A product or sum of two float32 that is computed in float64, and then rounded, has
    the bits of one that is computed in float32 (Figueroa, "When is double rounding innocuous?", 1995).
    """
    dtype, *others = {loss.dtype for loss in losses}
    if others or (code := _ARRAY_CODES.get(dtype)) is None:
        terms = foreach_multiply(list(losses), list(shares))
        loss = sum(terms[1:], terms[0])
        return loss.item(), loss.dtype

    products = array(code, map(mul, scalars_to_floats(losses), array(code, shares)))  # an array rounds what it takes
    total = array(code, (-0.0,))  # plus any number that is this number, zeros too
    for product in products:
        total[0] += product
    return total[0], dtype


_ARRAY_CODES = {torch.float32: "f", torch.float64: "d"}


def reset_peak_memory(device: torch.device) -> None:
    """Let `peak_memory` of a GPU count from here, the begin of a step."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_process_memory(device: torch.device) -> float:
    """Return the most bytes that this process has held; on a GPU, its tensors since `reset_peak_memory`."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
