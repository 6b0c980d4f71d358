"""The actions F, B, I and W of one step. A microbatch's gradient is scaled here: B of the last stage begins with its share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.comms.control_group import WaitError
from penstock.comms.process_groups import is_transport_error
from penstock.engine.batch import LocalBatch
from penstock.engine.handshake import HandshakeResult
from penstock.engine.report import MicrobatchLosses
from penstock.errors import MismatchError, PenstockError, StageError
from penstock.schedule.table import Action, Kind
from penstock.stage.microbatch import check_output_rows, check_output_tokens, scalars_to_floats
from penstock.stage.stage import Stage
from penstock.trees import map_tensors

ActionFunctions = Mapping[Kind, Callable[[Action, Sequence[Any]], Sequence[Any]]]  # (action, received values) -> messages


class EarlyForward(NamedTuple):
    """A forward of the first stage that ran before the handshake."""

    number: int  # of the microbatch, or of its slice
    messages: list[Sequence[Any]]  # one entry, until it is sent
    auxiliary_losses: list[Tensor]


class StepActions:
    """The actions of one step on this rank's `stages`. The model's last stage is `last_stage`."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        last_stage: int,
        batch: LocalBatch,
        handshake_result: HandshakeResult,
        early_forward: EarlyForward | None,
    ) -> None:
        self.stages, self.last_stage, self.batch, self.handshake_result = stages, last_stage, batch, handshake_result
        self.program, self.loss_shares = handshake_result.program, handshake_result.loss_shares
        self.forward_only_microbatches = handshake_result.forward_only_microbatches
        # By microbatch; if tokens are cut, by the number of a slice among those of all microbatches.
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Any] = {}  # if the call wants them
        self.auxiliary_losses: list[tuple[int, Tensor]] = []  # microbatch, loss

        for stage in stages.values():
            stage.replication.backwards_match = handshake_result.same_on_replicas

        if early_forward is not None and early_forward.number // batch.num_slices in self.forward_only_microbatches:
            stages[0].in_flight.pop(early_forward.number, None)
        elif early_forward is not None:
            self.auxiliary_losses += [(early_forward.number, loss) for loss in early_forward.auxiliary_losses]

    @property
    def functions(self) -> ActionFunctions:
        """The function that runs an action, by its kind."""
        return {Kind.F: self.forward, Kind.B: self.backward, Kind.I: self.backward, Kind.W: self.backward_weight}

    def forward(self, action: Action, values: Sequence[Any]) -> Sequence[Any]:
        """Run a forward. Return a message for each receiver; none on the last stage, whose output becomes the loss."""
        _, index, microbatch, _ = action
        stage, batch = self.stages[index], self.batch
        number = action.index_among_slices(batch.num_slices)
        has_backward = batch.training and microbatch not in self.forward_only_microbatches
        is_split = action[1:] in self.program.split_backwards

        inputs, seed = batch.forward_inputs(action, values), batch.microbatch_seed(number)
        output = stage.forward(number, inputs, seed, has_backward, is_split, batch.sequence_slice(action))
        if stage.auxiliary_losses and (self.handshake_result.sequence_lengths or batch.slice_lengths):
            raise MismatchError(
                "an auxiliary loss of a part of the tokens is not one of all: use a mesh without cp and slices=1, or add it to "
                "the loss"
            )
        if stage.auxiliary_losses and microbatch not in self.forward_only_microbatches:
            self.auxiliary_losses += [(microbatch, loss) for loss in stage.auxiliary_losses]
        if index < self.last_stage:
            return messages_of(stage, output)

        if batch.call.wants_outputs:
            check_output_rows(output, self.handshake_result.microbatch_rows[microbatch], batch.call.rows_dim)
            if batch.slice_lengths:
                check_output_tokens(output, batch.slice_lengths[action.slice], batch.call.sequence_dim)
            self.outputs[number] = map_tensors(Tensor.detach, output)

        if batch.targets and microbatch not in self.forward_only_microbatches:
            counts = self.loss_shares[number] > 0  # if not, other tokens of its rows do
            self.losses[number] = stage.loss(number, output, batch.targets[number], has_backward, counts)
            if counts and batch.call.rowwise_check is not None and microbatch == 0:  # no microbatch has more rows
                batch.call.rowwise_check.probe(output, batch.targets[number])
        return ()

    def backward(self, action: Action, values: Sequence[Any]) -> Sequence[Any]:
        """Run a full backward, or one to the inputs only. Return the gradients for each source of the stage's inputs."""
        number = action.index_among_slices(self.batch.num_slices)
        stage, weight = self.stages[action.stage], self.loss_shares[number] * self.batch.grad_scale

        if action.stage == self.last_stage:  # the only place where gradients are scaled
            seed = torch.full_like(self.losses[number], weight)
            gradients: Sequence[Tensor | None] = [seed for _ in stage.in_flight[number].edges]  # none if everything is frozen
        else:
            gradients = flatten_gradients(values)

        return [
            # One gradient, the common case, is sent without a list around it: see `flatten_gradients`.
            message[0] if len(message) == 1 and message[0] is not None else message
            for message in stage.backward(number, gradients, action in self.program.last_backwards, weight)
        ]

    def backward_weight(self, action: Action, values: Sequence[Any]) -> Sequence[Any]:
        """Add the weights' gradients that the microbatch's I has left."""
        number = action.index_among_slices(self.batch.num_slices)
        self.stages[action.stage].backward_weight(number, action in self.program.last_backwards)
        return ()

    def microbatch_losses(self) -> MicrobatchLosses:
        """Return the losses as numbers, for the other ranks; each microbatch's own, over its slices, only if a rank wants them.

        Microbatches of a list have the numbers that they have there.
        """
        order = self.batch.order or range(len(self.handshake_result.microbatch_rows))
        own_losses: dict[int, float] = {}
        if self.handshake_result.wants_losses:
            values = scalars_to_floats([*self.losses.values()])
            for number, value in zip(self.losses, values, strict=True):
                index, term = order[number // self.batch.num_slices], value * self.handshake_result.token_shares[number]
                own_losses[index] = own_losses[index] + term if index in own_losses else term

        auxiliary = self.auxiliary_losses if self.loss_shares else []
        values = scalars_to_floats([loss for _, loss in auxiliary])
        rows = zip(auxiliary, values, strict=True)
        return MicrobatchLosses(own_losses, [(order[number], value, self.loss_shares[number]) for (number, _), value in rows])


def flatten_gradients(messages: Sequence[Any]) -> Sequence[Tensor | None]:
    """Return the gradients of several messages in one list. A message is a tensor, or a sequence of tensors and None."""
    if len(messages) == 1 and isinstance(messages[0], Tensor):
        return messages
    return [gradient for message in messages for gradient in ((message,) if isinstance(message, Tensor) else message)]


def messages_of(stage: Stage, output: Any) -> Sequence[Any]:
    """Return a stage's output as one message for each destination."""
    return output if len(stage.connections.destinations) > 1 else (output,)


def error_with_location(error: Exception, rank: int, action: Action) -> PenstockError:
    """Return `error` with rank, stage, action and microbatch, in one line; a WaitError if a peer's line broke inside."""
    if is_transport_error(error):
        return WaitError(f"in {action} for the ranks beside it", None, error)
    error_class = type(error) if isinstance(error, PenstockError) else StageError
    text = " ".join(str(error).split())
    message = text if isinstance(error, PenstockError) else f"{type(error).__name__}: {text}"
    return error_class(f"rank {rank}, stage {action.stage}, action {action}, microbatch {action.microbatch}: {message}")
