"""The actions F, B, I and W of one step, and the error of one, with its rank, stage and microbatch.

A loss's gradient is scaled here: B or I of the last stage begins with its share.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.batch.agreement import Agreed
from penstock.batch.call import Call, LocalBatch
from penstock.batch.pieces import (
    Layout,
    Piece,
    check_output_rows,
    check_output_tokens,
    check_teacher_rows,
    join,
    scalars_to_floats,
)
from penstock.comms.wait_errors import WaitError, is_transport_error
from penstock.engine.loss import TargetWithTeacher
from penstock.engine.report import NO_MICROBATCH_LOSSES, MicrobatchLosses
from penstock.errors import MismatchError, NonFiniteError, PenstockError, StageError
from penstock.mesh.context_parallel import ContextParallelAttention
from penstock.randomness import mix_in
from penstock.recent import RecentDict
from penstock.schedule.program import Transfer
from penstock.schedule.table import Action, Kind
from penstock.stage.attention import attention_context
from penstock.stage.sliced_attention import SequenceSlice
from penstock.stage.stage import Stage
from penstock.torch_private import tensor_version
from penstock.trees import map_tensors, tensors

ActionFunction = Callable[..., Any]  # (action, values that arrived) -> messages
ActionFunctions = Mapping[Kind, ActionFunction]
MAX_DESCRIBED_TENSORS = 3  # of a message, in an error
MAX_SEEDS = 64  # that are kept: microbatches of unequal weights have one each
MICROBATCHES_IN_FLIGHT = (
    " In a pipeline other microbatches run between a microbatch's forward and its backward, so no forward and no hook may "
    "change a weight or a buffer that a backward needs: change weights after the step, as an optimizer does"
)


@dataclass
class FirstForward:
    """What the first forward of the first stage gave, which ran before all ranks' rows had arrived."""

    messages: Sequence[Any] | None  # None once they are sent: their memory is freed then
    auxiliary_losses: Sequence[Tensor]

    def take_messages(self) -> Sequence[Any]:
        """Return the messages, and keep them no longer."""
        messages, self.messages = self.messages, None
        assert messages is not None
        return messages


class SeedCache:
    """The gradients of losses with which backwards begin: one tensor for all losses of a weight and kind, in all steps."""

    def __init__(self) -> None:
        self._seeds = RecentDict[Any, Tensor](MAX_SEEDS)

    def find(self, loss: Tensor, weight: float) -> Tensor:
        """Return the gradient of a loss: `weight`, in its shape. A new one if a hook has changed the last in place."""
        kind = weight, type(loss), loss.dtype, loss.shape, loss.device
        seed = self._seeds.get(kind)
        if seed is None or tensor_version(seed):
            seed = self._seeds.add(kind, torch.full_like(loss, weight))
        return seed


class StepActions:
    """The actions of one step on this rank's `stages`. The model's last stage is `last_stage`.

    `grad_scale`: multiplies every gradient. `attention`: of ranks along cp; None without cp. `seeds`: of earlier steps too.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        last_stage: int,
        layout: Layout,
        call: Call,
        batch: LocalBatch,
        grad_scale: float,
        attention: ContextParallelAttention | None,
        seeds: "SeedCache",
    ) -> None:
        self.stages, self.last_stage, self.layout = stages, last_stage, layout
        self.call, self.batch, self.grad_scale, self.attention, self._seeds = call, batch, grad_scale, attention, seeds
        self.agreed: Agreed  # set by `begin`
        # By number of the piece.
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Any] = {}  # if the call wants them
        self.auxiliary_losses: list[tuple[int, Tensor]] = []
        self._teacher_outputs = call.teacher_batch.outputs if call.teacher_batch else {}  # that a step before has computed

    @property
    def functions(self) -> ActionFunctions:
        """The function that runs an action, by its kind."""
        # Not an attribute: a cycle would keep the step's tensors until the next garbage collection.
        functions = {Kind.F: self.forward, Kind.B: self.backward, Kind.I: self.backward, Kind.W: self.backward_weight}
        return {kind: partial(self._run_along_cp, run) for kind, run in functions.items()} if self.attention else functions

    def _run_along_cp(self, run: ActionFunction, action: Action, values: Sequence[Any]) -> Sequence[Any]:
        """Run an action of ranks that share the tokens of its microbatch."""
        assert self.attention is not None
        self.attention.begin_action(self.piece_of(action).lengths, self.layout.sequence_dim)
        with attention_context(self.attention):
            messages: Sequence[Any] = run(action, values)
        return messages

    def first_forward_function(self, is_split: bool) -> ActionFunction:
        """Return the function that runs the first forward of the first stage, with what this rank knows by itself."""
        piece, has_backward = self.batch.first_piece(), self.call.is_training

        def forward(action: Action, values: Sequence[Any]) -> Sequence[Any]:
            return messages_of(
                self.stages[0], self._forward(action, 0, piece, self.batch.inputs_of(action), has_backward, is_split)
            )

        return forward

    def begin(self, agreed: Agreed, first_forward: FirstForward | None) -> None:
        """Take what all ranks know, and what has run before."""
        self.agreed, self._loss_waits = agreed, agreed.chains.loss_waits
        self._has_teacher = agreed.chains.teacher is not None or bool(self._teacher_outputs)
        if first_forward is not None and 0 in agreed.forward_only:
            self.stages[0].in_flight.pop(0, None)
        elif first_forward is not None:
            self.auxiliary_losses += [(0, loss) for loss in first_forward.auxiliary_losses]

    def forward(self, action: Action, values: Sequence[Any]) -> Sequence[Any]:
        """Run a forward. Return a message for each receiver; none on the last stage, whose output becomes the loss."""
        if action.stage > self.last_stage:
            return self._teacher_forward(action, values)
        agreed, number = self.agreed, action.index_among_slices(self.batch.num_slices)
        is_last_stage = action.stage == self.last_stage
        teacher_outputs = self.teacher_outputs_for(action, values) if self._has_teacher else ()
        if teacher_outputs and not self._loss_waits:
            del self._teacher_outputs[number]  # frees its memory with this microbatch's
        stage, piece, counts = self.stages[action.stage], agreed.pieces[number], action.microbatch not in agreed.forward_only
        has_backward = self.call.is_training and counts

        is_split = action[1:] in agreed.program.split_backwards
        if self._has_teacher:
            inputs = self.inputs_of(action, values)
        else:
            inputs = self.batch.inputs_of(action) if action.stage == 0 else values
        output = self._forward(action, number, piece, inputs, has_backward, is_split)
        if stage.auxiliary_losses and piece.lengths:
            raise MismatchError(
                "an auxiliary loss of a part of the tokens is not one of all: use a mesh without cp and slices=1, or add it to "
                "the loss"
            )
        if stage.auxiliary_losses and counts:
            self.auxiliary_losses += [(number, loss) for loss in stage.auxiliary_losses]
        if not is_last_stage:
            return messages_of(stage, output)

        if self.call.wants_outputs:
            self._keep_output(number, piece, output)
        if self.batch.targets and counts:
            has_weight = piece.share > 0  # if not, it runs because other pieces of its microbatch have
            target = self.batch.target_of(piece)
            if teacher_outputs:
                target = TargetWithTeacher(target, *teacher_outputs)
            self.losses[number] = stage.loss(number, output, target, has_backward, has_weight)
        return ()

    def teacher_outputs_for(self, action: Action, values: Sequence[Any]) -> Sequence[Any]:
        """Return the one output of the teacher that the loss of a forward takes; nothing if there is no such loss."""
        if action.stage != self.last_stage:
            return ()
        if self._loss_waits:
            return values[-1:]
        return (self._teacher_outputs[action.microbatch],) if self._teacher_outputs else ()

    def _teacher_forward(self, action: Action, values: Sequence[Any]) -> Sequence[Any]:
        """Run a forward of the teacher. Return its messages; the last output of one that runs ahead waits for the next step."""
        chains, number, stage = self.agreed.chains, action.microbatch, self.stages[action.stage]
        piece = self.piece_of(action)
        try:
            output = stage.forward(number, self.inputs_of(action, values), with_backward=False)
        except PenstockError:
            raise
        except Exception as error:  # in the table the teacher's stages are numbered after the model's
            raise StageError(f"stage {stage.index} of the teacher: {type(error).__name__}: {error}") from error
        if action.stage < chains.num_stages - 1:
            return messages_of(stage, output)
        if piece.rows:
            check_teacher_rows(output, piece.rows, self.layout.rows_dim)
        if chains.ahead:
            assert self.call.next_batch is not None
            self.call.next_batch.outputs[number] = output
        return () if chains.ahead else (output,)

    def piece_of(self, action: Action) -> Piece:
        """Return the piece of an action: of the next batch if a teacher runs ahead."""
        is_ahead = action.stage > self.last_stage and self.agreed.chains.ahead
        pieces = self.agreed.next_pieces if is_ahead else self.agreed.pieces
        return pieces[action.index_among_slices(self.batch.num_slices)]

    def inputs_of(self, action: Action, values: Sequence[Any]) -> Any:
        """Return the inputs of a stage's forward: (args, kwargs) of a first stage, else the `values` that arrived."""
        chains = self.agreed.chains
        if action.stage == chains.teacher and chains.ahead:
            return self.batch.next_inputs[action.microbatch]
        if action.stage in (0, chains.teacher):
            return self.batch.inputs_of(action)
        if action.stage == self.last_stage and self._loss_waits:
            return values[:-1]  # without the teacher's output
        if self.stages[action.stage].index == 0:  # another rank has passed the inputs on
            [values] = values
        return values

    def _forward(self, action: Action, number: int, piece: Piece, inputs: Any, has_backward: bool, is_split: bool) -> Any:
        is_sliced = self.batch.num_slices > 1
        slice_ = SequenceSlice(*action[2:], piece.lengths, self.layout.sequence_dim) if is_sliced else None
        return self.stages[action.stage].forward(number, inputs, self.seed_of(piece), has_backward, is_split, slice_)

    def seed_of(self, piece: Piece) -> int | None:
        """Return the seed of a microbatch's random numbers, by its number in the batch or list, whatever the order."""
        if self.batch.seed is None:
            return None
        first = self.batch.first_microbatch
        return mix_in(self.batch.seed, (self.agreed.first_microbatch if first is None else first) + piece.microbatch)

    def _keep_output(self, number: int, piece: Piece, output: Any) -> None:
        """Keep a piece's output, detached. Raise MismatchError if it cannot be joined with the others."""
        if piece.rows:
            check_output_rows(output, piece.rows, self.layout.rows_dim)
        if self.batch.num_slices > 1:
            check_output_tokens(output, piece.lengths[piece.slice], self.layout.sequence_dim)
        self.outputs[number] = map_tensors(Tensor.detach, output)

    def backward(self, action: Action, values: Sequence[Any]) -> Sequence[Any]:
        """Run a full backward, or one to the inputs only. Return the gradients for each source of the stage's inputs."""
        number = action.index_among_slices(self.batch.num_slices)
        stage, weight = self.stages[action.stage], self.agreed.pieces[number].share * self.grad_scale

        if action.stage == self.last_stage:  # the only place where gradients are scaled
            seed = self._seeds.find(self.losses[number], weight)
            gradients: Sequence[Tensor | None] = [seed] * len(stage.in_flight[number].roots)  # none if everything is frozen
        else:
            gradients = flatten_gradients(values)

        return [
            # One gradient, the common case, is sent without a list around it: see `flatten_gradients`.
            message[0] if len(message) == 1 and message[0] is not None else message
            for message in stage.backward(number, gradients, action in self.agreed.program.last_backwards, weight)
        ]

    def backward_weight(self, action: Action, values: Sequence[Any]) -> Sequence[Any]:
        """Compute the weights' gradients that the microbatch's I has deferred, and add them to `.grad`."""
        number = action.index_among_slices(self.batch.num_slices)
        self.stages[action.stage].backward_weight(number, action in self.agreed.program.last_backwards)
        return ()

    # -- after the last action -----------------------------------------------------------------------------------------

    def joined_outputs(self) -> list[Any]:
        """Return the outputs of each microbatch, in the order of the user's batch or list; slices joined along the tokens."""
        if not self.outputs:
            return []
        outputs, slices = [self.outputs[number] for number in self.agreed.in_batch_order], self.batch.num_slices
        if slices == 1:
            return outputs
        rows = [outputs[first : first + slices] for first in range(0, len(outputs), slices)]
        return [join(row, self.layout.sequence_dim) for row in rows]

    def microbatch_losses(self) -> MicrobatchLosses:
        """Return the losses as numbers, for the other ranks; each microbatch's own, over its pieces, only if a rank wants them.

        Microbatches have the numbers that they have in the user's batch or list.
        """
        if not self.agreed.wants_losses and not self.auxiliary_losses:  # the common case
            return NO_MICROBATCH_LOSSES
        pieces = self.agreed.pieces
        own_losses: dict[int, float] = {}
        if self.agreed.wants_losses:
            values = scalars_to_floats([*self.losses.values()])
            for number, value in zip(self.losses, values, strict=True):
                index, term = pieces[number].microbatch, value * pieces[number].token_share
                own_losses[index] = own_losses[index] + term if index in own_losses else term

        auxiliary = self.auxiliary_losses if self.agreed.has_loss else []
        values = scalars_to_floats([loss for _, loss in auxiliary])
        rows = [(pieces[number], value) for (number, _), value in zip(auxiliary, values, strict=True)]
        return MicrobatchLosses(own_losses, [(piece.microbatch, value, piece.share) for piece, value in rows])


def flatten_gradients(messages: Sequence[Any]) -> Sequence[Tensor | None]:
    """Return the gradients of several messages in one list. A message is a tensor, or a sequence of tensors and None."""
    if len(messages) == 1 and isinstance(messages[0], Tensor):
        return messages
    return [gradient for message in messages for gradient in ((message,) if isinstance(message, Tensor) else message)]


def messages_of(stage: Stage, output: Any) -> Sequence[Any]:
    """Return a stage's output as one message for each destination."""
    return output if len(stage.connections.destinations) > 1 else (output,)


def error_with_location(
    error: Exception, rank: int, action: Action, inputs: Iterable[tuple[Transfer, Any]] = ()
) -> PenstockError:
    """Return `error` with rank, stage, action and microbatch, in one line; a WaitError if a peer's line broke inside.

    `inputs`: what other stages sent. A RuntimeError of a forward is followed by their shapes: torch names no stage.
    """
    if is_transport_error(error):
        return WaitError(f"in {action} for ranks of another group (dp, cp, tp)", None, error)
    error_class = type(error) if isinstance(error, PenstockError) else StageError
    if issubclass(error_class, NonFiniteError):  # `collective_call` would take it for one that all ranks have raised
        error_class = StageError
    text = " ".join(str(error).split())
    if "modified by an inplace operation" in text:  # torch's words
        text += MICROBATCHES_IN_FLIGHT
    message = text if isinstance(error, PenstockError) else f"{type(error).__name__}: {text}"
    if isinstance(error, RuntimeError) and action.kind is Kind.F:
        message += "".join([f"; the {transfer} is {_describe_tensors(value)}" for transfer, value in inputs])
    return error_class(f"rank {rank}, {describe_location(action)}: {message}")


def describe_location(action: Action) -> str:
    """Return where an error was raised: `stage 2, action 2F3, microbatch 3`."""
    return f"stage {action.stage}, action {action}, microbatch {action.microbatch}"


def _describe_tensors(tree: Any) -> str:
    """Return the shapes and dtypes of a message's tensors."""
    described = [f"a {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} tensor" for tensor in tensors(tree)]
    more = [f"{len(described) - MAX_DESCRIBED_TENSORS} more"] if len(described) > MAX_DESCRIBED_TENSORS else []
    return " and ".join(described[:MAX_DESCRIBED_TENSORS] + more) or "no tensor"
