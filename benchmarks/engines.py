"""The same table and the same model on two engines, and on none: one process."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from subjects import Subject
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import penstock as ps
from penstock.schedule import Action, Event, Kind, Schedule
from penstock.schedule.transform import with_full_backwards

SINGLE_STAGE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}  # the peer's engines for these two alone
SHARED = (*SINGLE_STAGE, "interleaved-1f1b", "looped-bfs", "interleaved-zb", "zb-v", "dualpipe-v")  # schedules both have


@dataclass(frozen=True)
class EngineCase:
    """One configuration to compare."""

    subject: Subject
    schedule: str
    ranks: int
    microbatches: int

    def table(self) -> Schedule:
        """The table that runs: what Penstock makes of the schedule's, and the peer gets too."""
        table = ps.schedule.build(self.schedule, ranks=self.ranks, microbatches=self.microbatches)
        return with_full_backwards(table)

    def one_by_one(self) -> Schedule:
        """The table as both engines run it on a CPU: first one action of an overlapping pair, then the other."""
        return replace(self.table(), overlaps=frozenset())


class TrainingEngine(Protocol):
    """Something that trains the model of a case, step by step."""

    modules: list[nn.Module]  # this rank's

    def step(self) -> Tensor | None:
        """One step; the batch's loss where the engine has it."""


class Penstock:
    """`penstock.Pipeline`, as a user would build it."""

    def __init__(self, case: EngineCase, rank: int) -> None:
        table = case.table()
        stages = case.subject.stages(table.num_stages)
        own = {index: stages[index] for index in table.stages_of(rank)}  # the peer gets no others either
        self.pipe = ps.Pipeline(own, case.subject.loss, schedule=table)
        self.modules: list[nn.Module] = list(own.values())
        self.input, self.target = case.subject.batch(case.microbatches)

    def step(self) -> Tensor | None:
        """One step; every rank has the loss."""
        return self.pipe.step(self.input, target=self.target)


class Peer:
    """`torch.distributed.pipelining`, as its documentation sets it up; it is not asked for the outputs."""

    def __init__(self, case: EngineCase, rank: int) -> None:
        table, cpu = case.table(), torch.device("cpu")
        modules = case.subject.stages(table.num_stages)
        self.stages = [PipelineStage(modules[index], index, table.num_stages, cpu) for index in table.stages_of(rank)]
        self.modules: list[nn.Module] = [modules[index] for index in table.stages_of(rank)]
        self.schedule: Any
        if case.schedule in SINGLE_STAGE:
            self.schedule = SINGLE_STAGE[case.schedule](self.stages[0], case.microbatches, loss_fn=case.subject.loss)
        else:  # the engine of all its other schedules
            self.schedule = _PipelineScheduleRuntime(self.stages, case.microbatches, loss_fn=case.subject.loss)
            with tempfile.TemporaryDirectory() as folder:
                table.to_csv(Path(folder) / "table.csv")
                self.schedule._load_csv(Path(folder) / "table.csv")
        self.input, self.target = case.subject.batch(case.microbatches)

    def step(self) -> Tensor | None:
        """One step; the last stage's rank has the loss."""
        inputs = (self.input,) if self.stages[0].is_first else ()
        target = self.target if self.stages[-1].is_last else None
        losses: list[Tensor] = []
        self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).detach().mean() if losses else None

    @contextmanager
    def recorded(self) -> Iterator[list[Event]]:
        """The actions this rank runs meanwhile. (What its schedules print is not always what they run.)"""
        ran: list[Event] = []
        for stage in self.stages:
            for name, kind in METHODS.items():
                setattr(stage, name, _recording(ran, kind, stage, getattr(stage, name)))
        yield ran
        for stage in self.stages:
            for name in METHODS:
                delattr(stage, name)  # the method of its class is back


METHODS = {"forward_one_chunk": Kind.F, "backward_one_chunk": Kind.B, "backward_weight_one_chunk": Kind.W}


def _recording(ran: list[Event], kind: Kind, stage: PipelineStage, function: Any) -> Any:
    def recorded(microbatch: int, *args: Any, **kwargs: Any) -> Any:
        action = Action(kind if kwargs.get("full_backward", True) else Kind.I, stage.stage_index, microbatch)
        start = time.perf_counter()
        result = function(microbatch, *args, **kwargs)
        ran.append(Event(stage.group_rank, action, start, time.perf_counter()))
        return result

    return recorded


class OneProcessEngine:
    """The whole model on rank 0, gradients accumulated over microbatches; the other ranks do nothing."""

    def __init__(self, case: EngineCase, rank: int, microbatches: int) -> None:
        self.modules: list[nn.Module] = case.subject.stages(case.table().num_stages) if rank == 0 else []
        self.loss, self.microbatches = case.subject.loss, microbatches
        self.input, self.target = case.subject.batch(case.microbatches)

    def step(self) -> Tensor | None:
        """One step of plain gradient accumulation."""
        if not self.modules:
            return None
        microbatches = zip(self.input.chunk(self.microbatches), self.target.chunk(self.microbatches), strict=True)
        return torch.stack([self._backward(*microbatch) for microbatch in microbatches]).sum()

    def _backward(self, hidden: Tensor, target: Tensor) -> Tensor:
        for module in self.modules:
            hidden = module(hidden)
        loss = self.loss(hidden, target) / self.microbatches
        loss.backward()
        return loss.detach()


def forget_gradients(engine: TrainingEngine) -> None:
    """What an optimizer's `zero_grad` does."""
    for module in engine.modules:
        module.zero_grad()


def check_same(ours: Penstock, peer: Peer, case: EngineCase, rank: int) -> tuple[Event, ...]:
    """Both engines run the table and make the same loss and gradients. Raises AssertionError if not.

    Returns what the peer ran on this rank.
    """
    forget_gradients(ours)
    forget_gradients(peer)
    our_loss = ours.step()
    with peer.recorded() as ran:
        peer_loss = peer.step()
    table = case.table().actions[rank]
    assert tuple(event.action for event in ours.pipe.timeline().rows[rank]) == table
    assert tuple(event.action for event in ran) == table, f"rank {rank} of the peer ran {ran}"
    if peer_loss is not None:
        torch.testing.assert_close(our_loss, peer_loss)
    for mine, other in zip(ours.modules, peer.modules, strict=True):
        for parameter, another in zip(mine.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, another.grad)
    return tuple(ran)
