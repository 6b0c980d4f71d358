"""What F, B, I and W do in one step, and what they leave: losses, auxiliary losses, outputs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.comms.control_group import WaitError
from penstock.comms.process_groups import is_transport_error
from penstock.engine.agreement import Agreed
from penstock.engine.batch import Batch
from penstock.engine.report import Losses
from penstock.errors import PenstockError, StageError
from penstock.schedule.table import Action, Kind
from penstock.stage.microbatch import check_output_rows, scalars_to_floats
from penstock.stage.stage import Stage
from penstock.trees import map_tensors

Acts = Mapping[Kind, Callable[[Action, Sequence[Any]], Sequence[Any]]]  # (action, values) -> what it makes, for each taker


class Ahead(NamedTuple):
    """A forward of the first stage that ran before the ranks had agreed."""

    microbatch: int
    made: list[Sequence[Any]]  # what it made, until that is sent
    auxiliary: list[Tensor]


class Actions:
    """The actions of one step on this rank's `stages`; `last` is the model's last one."""

    def __init__(self, stages: Mapping[int, Stage], last: int, batch: Batch, agreed: Agreed, ahead: Ahead | None) -> None:
        self.stages, self.last, self.batch, self.agreed = stages, last, batch, agreed
        self.program, self.weights, self.skipped = agreed.program, agreed.weights, agreed.without_backward
        self.losses: dict[int, Tensor] = {}  # by microbatch
        self.outputs: dict[int, Any] = {}  # by microbatch, if they are wanted
        self.auxiliary: list[tuple[int, Tensor]] = []  # microbatch, loss
        for stage in stages.values():
            stage.replication.backwards_match = agreed.alike
        if ahead is not None and ahead.microbatch in self.skipped:
            stages[0].in_flight.pop(ahead.microbatch, None)
        elif ahead is not None:
            self.auxiliary += [(ahead.microbatch, value) for value in ahead.auxiliary]

    @property
    def acts(self) -> Acts:
        """What is done for an action of each kind."""
        return {Kind.F: self.forward, Kind.B: self.backward, Kind.I: self.backward, Kind.W: self.backward_weight}

    def forward(self, action: Action, values: Sequence[Any]) -> Sequence[Any]:
        """What the stage makes for each of its takers; nothing on the last stage, whose output becomes the loss."""
        _, index, microbatch = action
        stage, batch = self.stages[index], self.batch
        keep = batch.training and microbatch not in self.skipped
        split = (index, microbatch) in self.program.split
        output = stage.forward(microbatch, batch.given(action, values), batch.seed, keep, split)
        if stage.auxiliary_losses and microbatch not in self.skipped:
            self.auxiliary += [(microbatch, value) for value in stage.auxiliary_losses]
        if index < self.last:
            return messages(stage, output)
        if batch.call.wants_outputs:
            check_output_rows(output, self.agreed.rows[microbatch], batch.call.rows_dim)
            self.outputs[microbatch] = map_tensors(Tensor.detach, output)
        if batch.targets and microbatch not in self.skipped:
            self.losses[microbatch] = stage.loss(microbatch, output, batch.targets[microbatch], keep)
            if batch.call.by_rows is not None and microbatch == 0:  # none has more rows
                batch.call.by_rows.look(output, batch.targets[microbatch])
        return ()

    def backward(self, action: Action, values: Sequence[Any]) -> Sequence[Any]:
        """The gradients of what each source gave to the stage. Those of the weights are added too, unless it is split."""
        _, index, microbatch = action
        stage, weight = self.stages[index], self.weights[microbatch] * self.batch.scale
        if index == self.last:
            seed = torch.full_like(self.losses[microbatch], weight)
            gradients: Sequence[Tensor | None] = [
                seed for _ in stage.in_flight[microbatch].edges
            ]  # none if everything is frozen
        else:
            gradients = unpacked(values)
        return [
            each[0] if len(each) == 1 and each[0] is not None else each  # the common case travels bare, see `unpacked`
            for each in stage.backward(microbatch, gradients, action in self.program.last, weight)
        ]

    def backward_weight(self, action: Action, values: Sequence[Any]) -> Sequence[Any]:
        """The weights' gradients of one microbatch, or of several that were put off together; none if a later W adds them."""
        if microbatches := self.program.weights[action]:
            self.stages[action.stage].backward_weight(microbatches, action in self.program.last)
        return ()

    def told(self) -> Losses:
        """What the others are told of the losses when the step ends; each microbatch's own only if a rank wants it."""
        own = (
            dict(zip(self.losses, scalars_to_floats([*self.losses.values()]), strict=True)) if self.agreed.wants_losses else {}
        )
        auxiliary = self.auxiliary if self.weights else []
        values = scalars_to_floats([loss for _, loss in auxiliary])
        return Losses(own, [(each, value, self.weights[each]) for (each, _), value in zip(auxiliary, values, strict=True)])


def unpacked(values: Sequence[Any]) -> Sequence[Tensor | None]:
    """The gradients in several messages, one after the other; a bare one, the common case, takes a short way."""
    if len(values) == 1 and isinstance(values[0], Tensor):
        return values
    return [each for value in values for each in ((value,) if isinstance(value, Tensor) else value)]


def messages(stage: Stage, output: Any) -> Sequence[Any]:
    """One for each taker."""
    return output if len(stage.neighbours.takers) > 1 else (output,)


def explained(error: Exception, rank: int, action: Action) -> PenstockError:
    """`error` with the place where it happened, on one line; a WaitFailed if it came from ranks beside this one."""
    if is_transport_error(error):
        return WaitError(f"in {action} for the ranks beside it", None, error)
    family = type(error) if isinstance(error, PenstockError) else StageError
    text = " ".join(str(error).split())
    told = text if isinstance(error, PenstockError) else f"{type(error).__name__}: {text}"
    return family(f"rank {rank}, stage {action.stage}, action {action}, microbatch {action.microbatch}: {told}")
