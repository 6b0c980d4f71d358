"""Runs one rank's program: the loop of the clock cycle, and nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.comms.control import WaitFailed, is_of_transport
from penstock.comms.messages.channels import Channels
from penstock.engine.clock import Clock
from penstock.engine.memory import Weighing
from penstock.errors import PenstockError, StageError
from penstock.schedule.program import Transfer
from penstock.schedule.rank_program import Part
from penstock.schedule.table import Action, Kind
from penstock.stage.stage import Stage
from penstock.stage.stage_input import handed_over

Acts = dict[Kind, Callable[..., Sequence[Any]]]  # what is done for an action: (action, values, work) -> what it makes


@dataclass
class Work:
    """What one step is about, for this rank: its share of the batch going in, and what comes out."""

    training: bool
    part: Part  # what of the table this rank does
    seed: int | None  # of this step's random numbers, None for whatever the generator gives
    inputs: Sequence[tuple[Any, Any]] = ()  # (args, kwargs) of each microbatch, on the first stage's rank
    targets: Sequence[Any] = ()  # of each microbatch, on the last stage's rank
    weights: Sequence[float] = ()  # what each microbatch's loss counts
    scale: float = 1.0  # of all gradients
    without_backward: frozenset[int] = frozenset()  # microbatches of weight 0
    losses: dict[int, Tensor] = field(default_factory=dict)  # by microbatch
    auxiliary: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)  # losses by stage and microbatch
    outputs: dict[int, Any] = field(default_factory=dict)


class Engine:
    """One rank's stages and channels, and the loop over its steps."""

    def __init__(self, rank: int, device: torch.device, stages: dict[int, Stage], last: int, channels: Channels) -> None:
        self.rank, self.device, self.stages, self.last, self.channels = rank, device, stages, last, channels
        self._handed: dict[Transfer, Any] = {}  # from stages of this rank to others
        self._ahead: list[Sequence[Any]] = []  # the result of the first step, if it had a head start
        self._act: Acts = {Kind.F: self._forward, Kind.B: self._backward, Kind.I: self._backward, Kind.W: self._backward_weight}

    def head_start(self, action: Action, work: Work, clock: Clock, weighing: Weighing | None = None) -> None:
        """Run `action`, a forward of the first stage, before the ranks have agreed; `run` goes on from there. Raises as it."""
        try:
            self.stages[action.stage].get_ready()
            clock.start()
            self._ahead.append(self._acts(weighing)[Kind.F](action, (), work))
            clock.stop()
            clock.ahead = 1
        except Exception as error:
            raise self._explained(error, action) from error

    def run(self, work: Work, clock: Clock, weighing: Weighing | None = None) -> None:
        """Run the steps of `work.part` in order, each timed by `clock`, and weighed if asked for.

        Raises StageError with rank, stage, action, microbatch and the original text when the model or the loss raises;
        WaitFailed when a peer is lost.
        """
        incoming, outgoing, ahead, handed = self.channels.incoming, self.channels.outgoing, self._ahead, self._handed
        acts, spread = self._acts(weighing), not all(stage.copies.ready for stage in self.stages.values())
        try:
            made: Any
            for action, receives, needs, gives in work.part.steps:
                for transfer in receives:
                    incoming[transfer.source].post(transfer)
                if ahead:
                    made = ahead.pop()
                else:
                    values = [
                        incoming[need.source].take(need, self.device) if need.travels else handed.pop(need) for need in needs
                    ]
                    if spread:
                        self.stages[action.stage].get_ready()
                    clock.start()
                    made = acts[action.kind](action, values, work)
                    clock.stop()
                    del values
                for transfer, value in zip(gives, made, strict=True):
                    if transfer.travels:
                        outgoing[transfer.destination].send(transfer, value)
                    else:
                        handed[transfer] = handed_over(value)
                clock.sent()
                made = value = None  # they are on their way
        except WaitFailed:
            raise
        except Exception as error:
            raise self._explained(error, action) from error

    def _acts(self, weighing: Weighing | None) -> Acts:
        return weighing.around(self._act) if weighing else self._act

    def _forward(self, action: Action, values: Sequence[Any], work: Work) -> Sequence[Any]:
        """What the stage makes for each of its takers; nothing on the last stage, whose output becomes the loss."""
        _, index, microbatch = action
        stage, keep = self.stages[index], work.training and microbatch not in work.without_backward
        split = (index, microbatch) in work.part.split
        if index == 0:
            args, kwargs = work.inputs[microbatch]
            output = stage.first_forward(microbatch, args, kwargs, work.seed, keep, split)
        else:
            output = stage.forward(microbatch, values, work.seed, keep, split)
        if stage.auxiliary:
            work.auxiliary[index, microbatch] = stage.auxiliary
        if index < self.last:
            return output if len(stage.neighbours.takers) > 1 else (output,)
        if not work.training:
            work.outputs[microbatch] = output
        if work.targets and microbatch not in work.without_backward:
            work.losses[microbatch] = stage.loss(microbatch, output, work.targets[microbatch], keep)
        return ()

    def _backward(self, action: Action, values: Sequence[Any], work: Work) -> Sequence[Any]:
        """The gradients of what each source gave to the stage. Those of the weights are added too, unless it is split."""
        _, index, microbatch = action
        gradients: Sequence[Tensor | None]
        weight = work.weights[microbatch] * work.scale
        if index == self.last:
            seed = torch.full_like(work.losses[microbatch], weight)
            gradients = [seed for _ in self.stages[index].kept[microbatch].edges]  # none if everything is frozen
        else:
            gradients = [each for value in values for each in ((value,) if isinstance(value, Tensor) else value)]
        return [
            each[0] if len(each) == 1 and each[0] is not None else each  # the common case travels bare
            for each in self.stages[index].backward(microbatch, gradients, action in work.part.last, weight)
        ]

    def _backward_weight(self, action: Action, _: Sequence[Any], work: Work) -> Sequence[Any]:
        """The weights' gradients of one microbatch, or of several that were put off together; none if a later W adds them."""
        if microbatches := work.part.weights[action]:
            self.stages[action.stage].backward_weight(microbatches, action in work.part.last)
        return ()

    def let_go(self, microbatches: frozenset[int]) -> None:
        """No backward will come for these: a head start may have kept one."""
        for stage in self.stages.values():
            for microbatch in microbatches:
                stage.kept.pop(microbatch, None)

    def forget(self) -> None:
        """Let go of whatever a step that failed has left."""
        self._handed.clear()
        self._ahead.clear()
        for stage in self.stages.values():
            stage.forget()

    def _explained(self, error: Exception, action: Action) -> PenstockError:
        """`error` with the place where it happened, on one line; a WaitFailed if it came from ranks beside this one."""
        if is_of_transport(error):
            return WaitFailed(f"in {action} for the ranks beside it", None, error)
        family = type(error) if isinstance(error, PenstockError) else StageError
        text = " ".join(str(error).split())
        told = text if isinstance(error, PenstockError) else f"{type(error).__name__}: {text}"
        return family(f"rank {self.rank}, stage {action.stage}, action {action}, microbatch {action.microbatch}: {told}")
