"""The same table and the same model on two engines, and on none: one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from subjects import Subject
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import penstock as ps
from penstock.schedule import Action, Kind, Schedule

PEER_SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@dataclass(frozen=True)
class Case:
    """One configuration to compare."""

    subject: Subject
    schedule: str
    ranks: int
    microbatches: int

    def table(self) -> Schedule:
        """The table both engines run."""
        return ps.schedule.build(self.schedule, ranks=self.ranks, microbatches=self.microbatches)


class Engine(Protocol):
    """Something that trains the model of a case, step by step."""

    modules: list[nn.Module]  # this rank's

    def step(self) -> Tensor | None:
        """One step; the batch's loss where the engine has it."""


class Penstock:
    """`penstock.Pipeline`, as a user would build it."""

    def __init__(self, case: Case, rank: int) -> None:
        stages = case.subject.stages(case.ranks)
        self.pipe = ps.Pipeline(stages, case.subject.loss, schedule=case.table())
        self.modules = [stages[rank]]
        self.input, self.target = case.subject.batch(case.microbatches)

    def step(self) -> Tensor | None:
        """One step; every rank has the loss."""
        return self.pipe.step(self.input, target=self.target)


class Peer:
    """`torch.distributed.pipelining`, as its documentation sets it up; it is not asked for the outputs."""

    def __init__(self, case: Case, rank: int) -> None:
        self.modules = [case.subject.stages(case.ranks)[rank]]
        self.stage = PipelineStage(self.modules[0], rank, case.ranks, torch.device("cpu"))
        self.schedule = PEER_SCHEDULES[case.schedule](self.stage, case.microbatches, loss_fn=case.subject.loss)
        self.input, self.target = case.subject.batch(case.microbatches)

    def step(self) -> Tensor | None:
        """One step; the last rank has the loss."""
        inputs = (self.input,) if self.stage.is_first else ()
        target = self.target if self.stage.is_last else None
        losses: list[Tensor] = []
        self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).detach().mean() if losses else None

    @contextmanager
    def recorded(self) -> Iterator[list[Action]]:
        """The actions this rank runs meanwhile. (What its schedules print is not always what they run.)"""
        ran: list[Action] = []
        stage: Any = self.stage
        for kind, name in ((Kind.F, "forward_one_chunk"), (Kind.B, "backward_one_chunk")):
            setattr(stage, name, _recording(ran, kind, stage.stage_index, getattr(stage, name)))
        yield ran
        del stage.forward_one_chunk, stage.backward_one_chunk  # the methods of its class are back


def _recording(ran: list[Action], kind: Kind, stage: int, function: Any) -> Any:
    def recorded(microbatch: int, *args: Any, **kwargs: Any) -> Any:
        ran.append(Action(kind, stage, microbatch))
        return function(microbatch, *args, **kwargs)

    return recorded


class OneProcess:
    """The whole model on rank 0, gradients accumulated over pieces of the batch; the other ranks do nothing."""

    def __init__(self, case: Case, rank: int, pieces: int) -> None:
        self.modules: list[nn.Module] = case.subject.stages(case.ranks) if rank == 0 else []
        self.loss, self.pieces = case.subject.loss, pieces
        self.input, self.target = case.subject.batch(case.microbatches)

    def step(self) -> Tensor | None:
        """One step of plain gradient accumulation."""
        if not self.modules:
            return None
        pieces = zip(self.input.chunk(self.pieces), self.target.chunk(self.pieces), strict=True)
        return torch.stack([self._piece(*piece) for piece in pieces]).sum()

    def _piece(self, hidden: Tensor, target: Tensor) -> Tensor:
        for module in self.modules:
            hidden = module(hidden)
        loss = self.loss(hidden, target) / self.pieces
        loss.backward()
        return loss.detach()


def forget_gradients(engine: Engine) -> None:
    """What an optimizer's `zero_grad` does."""
    for module in engine.modules:
        module.zero_grad()


def check_same(ours: Penstock, peer: Peer, case: Case, rank: int) -> None:
    """Both engines run the table and make the same loss and gradients. Raises AssertionError if not."""
    forget_gradients(ours)
    forget_gradients(peer)
    our_loss = ours.step()
    with peer.recorded() as ran:
        peer_loss = peer.step()
    assert tuple(ran) == case.table().actions[rank], f"rank {rank} of the peer ran {ran}"
    if peer_loss is not None:
        torch.testing.assert_close(our_loss, peer_loss)
    for mine, other in zip(ours.modules[0].parameters(), peer.modules[0].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
