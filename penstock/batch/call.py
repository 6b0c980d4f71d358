"""One call of `step`, `eval`, their list forms or a pass of `generate`; and this rank's share of it, cut into pieces."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.batch.agreement import BatchArguments, Description, LocalDescription
from penstock.batch.ahead import AheadBatch, TeacherState, check_can_be_passed_on
from penstock.batch.pieces import (
    Layout,
    Microbatches,
    Piece,
    Shape,
    batch_signature,
    count_elements,
    count_rows,
    count_tokens,
    cut_tokens,
    describe_shapes,
    describe_type,
    microbatch_weights,
    shape_of,
    split_rows,
    take_entries,
    token_lengths,
)
from penstock.digest import hash_values
from penstock.errors import MismatchError, warn_user
from penstock.mesh.position import MeshPosition
from penstock.partition.graph_inputs import arguments_by_parameter_name
from penstock.partition.graph_stage import GraphStage
from penstock.randomness import mix_seed
from penstock.rows import Replicated, unwrap
from penstock.schedule.table import Action, Table
from penstock.torch_private import unwrap_compiled
from penstock.trees import leaves

POSITION_IDS = "position_ids"  # the parameter of a forward that takes the tokens' positions
Arguments = tuple[Sequence[Any], Mapping[str, Any]]  # (args, kwargs)
OrderRule = Callable[[Sequence[Shape]], Sequence[int]]  # microbatches of a list -> position in the step -> index in the list


class Call(NamedTuple):
    """One call, as the user made it. Of a list, `args` has the list of inputs, and `target` is that of targets."""

    name: str  # `step()`, `eval_microbatches()`
    is_training: bool
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    target: Any = None
    steps_before: int = 0
    is_list: bool = False
    order_option: object = None  # as ranks compare it
    order_rule: OrderRule | None = None  # None: as given
    limit_option: object = None
    scaler: torch.amp.GradScaler | None = None
    scale: float = 1.0  # of the gradients, besides the scaler's
    losses: list[Tensor] | None = None  # gets each microbatch's loss
    wants_outputs: bool = False  # on the last stage's rank
    mode: str = "training mode"  # of the model that was cut, in training
    options: Sequence[str] = ()  # the keywords that were given and that the call takes as its own
    next_batch: AheadBatch | None = None  # whose teacher's forwards run in this step; without `is_training` nothing else does
    teacher_batch: AheadBatch | None = None  # this batch, if its teacher's forwards have run before

    @property
    def is_for_teacher_alone(self) -> bool:
        """Whether nothing of the trained model runs."""
        return self.next_batch is not None and not self.is_training

    @property
    def inputs(self) -> Any:
        """The one input, or (args, kwargs); of a list, the list."""
        return self.args[0] if len(self.args) == 1 and not self.kwargs else (self.args, self.kwargs)


class LocalBatch(NamedTuple):
    """This rank's share of a call. What it does not read is empty."""

    inputs: Sequence[Any]  # (args, kwargs) of each piece, in the order that was given
    targets: Sequence[Any]  # of each piece
    order: Sequence[int]  # position in the step -> number of the microbatch, on the first stage's rank
    lengths: Sequence[Sequence[int]]  # of each microbatch, the tokens of its parts; empty unless tokens are cut
    num_slices: int
    first_microbatch: int | None  # of this replica, for random numbers; None for a list on later replicas: see `Agreed`
    seed: int | None  # of this step's random numbers; None for torch's generator
    description: LocalDescription
    next_inputs: Sequence[Any] = ()  # as `inputs`, of the batch for which a teacher runs ahead

    def first_piece(self) -> Piece:
        """Return what the first stage's rank knows of its first piece by itself."""
        return Piece(self.order[0], lengths=self.lengths[self.order[0]] if self.lengths else ())

    def inputs_of(self, action: Action) -> Any:
        """Return the first stage's (args, kwargs) for a forward."""
        return self.inputs[self.order[action.microbatch] * self.num_slices + action.slice]

    def target_of(self, piece: Piece) -> Any:
        """Return the target, on the last stage's rank."""
        return self.targets[piece.microbatch * self.num_slices + piece.slice]


class _CutTree(NamedTuple):
    """The inputs or the target of a call, cut into pieces; empty on a rank that does not read them."""

    pieces: Sequence[Any] = ()
    rows: Sequence[int | None] | None = None  # of each microbatch
    lengths: Sequence[Sequence[int]] = ()
    signature: str = ""  # of the whole batch
    shapes: Sequence[Shape] = ()  # of a list's entries, which are known in every step
    loss_weights: Sequence[float] = ()


_NOT_READ = _CutTree()


@dataclass(frozen=True)
class CallReader:
    """Cuts the calls of one pipeline into pieces, on one rank.

    `token_parts`: K slices, their lengths, or the number of ranks along cp. `forward`: of the model, on the first stage's rank.
    """

    position: MeshPosition
    schedule: Table
    layout: Layout
    token_parts: int | Sequence[int]
    seed: int | None
    has_loss: bool
    teacher: Sequence[nn.Module] | None  # its stages on this rank; None if the pipeline has none
    passes_inputs: bool  # whether the teacher's first stage is on another rank than the one that reads the inputs
    loss_weight: Callable[[Any], Any] | None
    forward: "ModelForward | None"

    def read(self, call: Call, requires_grad: bytes = b"") -> LocalBatch:
        """Return this rank's share of a call. `requires_grad`: a flag for each of its parameters.

        Raises MismatchError for inputs or a target that do not fit.
        """
        check_options(call)
        self._check_teacher(call)
        rank, placement = self.position.pipeline.rank, self.schedule.placement
        inputs, next_inputs, target = _NOT_READ, _NOT_READ, _NOT_READ
        order: Sequence[int] = ()
        if rank == placement[0] and call.next_batch is not None:
            call.next_batch.record_values()
            next_inputs = self._read_inputs(_call_of_batch(call, call.next_batch))
        if rank == placement[0] and not call.is_for_teacher_alone:
            if call.teacher_batch is not None:
                call.teacher_batch.check_is_batch(call.args, call.kwargs, call.name)
            inputs = self._read_inputs(call)
            order = call.order_rule(inputs.shapes) if call.order_rule is not None else range(len(inputs.rows or ()))
        if self.passes_inputs and call.teacher_batch is None and (call.is_training or call.target is not None):
            for args, kwargs in (*inputs.pieces, *next_inputs.pieces):
                check_can_be_passed_on(args, kwargs)
        if rank == placement[-1] and (call.is_training or call.target is not None):
            target = self._read_target(call)

        autocast = _describe_autocast(self.position.pipeline.device)
        frozen = hash_values(requires_grad)
        given = call.losses is not None, call.next_batch is not None, call.teacher_batch is not None
        settings = (call.name, call.mode, autocast, frozen, *given, len(target.loss_weights))
        signatures = [(tree.signature, len(tree.rows or ())) for tree in (inputs, target, next_inputs)]
        batch_hash = hash_values(settings, *signatures)
        list_hash = 0
        if call.is_list:
            arguments = call.order_option, call.limit_option, tuple(order)
            list_hash = hash_values(*arguments, tuple(inputs.shapes), tuple(target.rows or ()), _token_counts(target.lengths))

        replica, num_seeds = self.position.replica, self.schedule.microbatches
        return LocalBatch(
            inputs.pieces,
            target.pieces,
            order,
            inputs.lengths,
            self.schedule.slices if self.token_parts != 1 else 1,
            None if call.is_list and replica else replica * num_seeds,
            mix_seed(self.seed, call.steps_before) if call.is_training and self.seed is not None else None,
            LocalDescription(
                batch_hash,
                list_hash,
                partial(self._describe, call, inputs, target, next_inputs, order, autocast, str(frozen)),
                partial(self._describe_arguments, call, inputs, target),
                target.loss_weights,
            ),
            next_inputs.pieces,
        )

    def _check_teacher(self, call: Call) -> None:
        """Raise MismatchError for a next batch without teacher or tuple, and for a teacher changed since it ran ahead."""
        if call.next_batch is not None and self.teacher is None:
            raise MismatchError(
                f"{call.name} was given next_args= or next_kwargs=, for which a teacher runs ahead, but the pipeline has none: "
                "leave them out, or give Pipeline(.., teacher=model)"
            )
        if call.next_batch is not None:
            call.next_batch.check_arguments()
        if call.teacher_batch is not None:
            call.teacher_batch.check_same_teacher(self.teacher_state())

    def teacher_state(self) -> TeacherState:
        """Return the present state of the teacher's stages on this rank."""
        return TeacherState(self.teacher or (), _describe_autocast(self.position.pipeline.device))

    # -- cutting -------------------------------------------------------------------------------------------------------

    def _read_inputs(self, call: Call) -> _CutTree:
        rank, rows_dim = self.position.pipeline.rank, self.layout.rows_dim
        if call.is_list:
            check_list(call.inputs, "inputs", call.name)
            given = [self._entry_arguments(entry, f"input {index}") for index, entry in enumerate(call.inputs)]
            check_no_graph(call, given, "inputs", rank)
            entries = [self._arguments_for_cutting(*entry) if self.token_parts != 1 else entry for entry in given]
            microbatches = take_entries(entries, "microbatch", self.layout)
            shapes = [shape_of(*pair, rows_dim) for pair in zip(entries, microbatches.rows, strict=True)]
            pieces, lengths = self._cut(microbatches, "the batch")
            return _CutTree(pieces, microbatches.rows, lengths, "a list", shapes)

        check_has_inputs(call, rank)
        batch, has_one_input = call.inputs, len(call.args) == 1 and not call.kwargs
        check_no_graph(call, batch, "inputs", rank)
        if self.forward is not None and call.options:
            self.forward.check_options(call.name, call.options, len(call.args))
        if self.token_parts != 1:
            batch, has_one_input = self._arguments_for_cutting(call.args, call.kwargs), False
        microbatches = split_rows(batch, "the batch", self.schedule.microbatches, self.layout)
        pieces, lengths = self._cut(microbatches, "the batch")
        if has_one_input:
            pieces = [((piece,), {}) for piece in pieces]
        return _CutTree(pieces, microbatches.rows, lengths, batch_signature(batch))

    def _read_target(self, call: Call) -> _CutTree:
        check_target(call, self.has_loss, self.position.pipeline.rank)
        if call.is_list:
            check_list(call.target, "targets", call.name)
        check_no_graph(call, call.target, "target", self.position.pipeline.rank)

        pieces, rows, lengths = self._split_target(call, self.layout)
        loss_weights: Sequence[float] = ()
        if self.loss_weight is not None:  # computed where the target is: nothing waits for a device
            loss_weights = microbatch_weights(self._split_target(call, self.layout._replace(device=None))[0], self.loss_weight)
        return _CutTree(pieces, rows, lengths, "a list" if call.is_list else batch_signature(call.target), (), loss_weights)

    def _split_target(self, call: Call, layout: Layout) -> tuple[Sequence[Any], Sequence[int | None], Sequence[Sequence[int]]]:
        if call.is_list:
            microbatches = take_entries(call.target, "target", layout)
        else:
            microbatches = split_rows(call.target, "the target", self.schedule.microbatches, layout)
        pieces, lengths = self._cut(microbatches, "the target")
        return pieces, microbatches.rows, lengths

    def _cut(self, microbatches: Microbatches, what: str) -> tuple[Sequence[Any], Sequence[Sequence[int]]]:
        """Return the pieces of all microbatches, and the tokens of each part of each; nothing unless tokens are cut."""
        if self.token_parts == 1:
            return microbatches.values, ()
        cp_index, dim = self.position.cp_index, self.layout.sequence_dim
        along_cp = self.position.cp_size > 1
        name = "parts along cp" if along_cp else "slices"
        lengths = [token_lengths(self.token_parts, count_tokens(value, what, dim), name) for value in microbatches.values]
        indices = [[cp_index] if along_cp else range(len(row)) for row in lengths]
        cut = zip(microbatches.values, lengths, indices, strict=True)
        return [piece for value, row, taken in cut for piece in cut_tokens(value, row, taken, dim)], lengths

    def _entry_arguments(self, entry: Any, name: str) -> Arguments:
        """Return (args, kwargs) of an entry of a list: a tensor, a tuple of arguments, a dict or a NamedTuple of keywords."""
        args: tuple[Any, ...] = (entry,)
        kwargs: dict[str, Any] = {}
        if isinstance(entry, Mapping):
            args, kwargs = (), dict(entry)
        elif type(entry) is tuple:
            args = entry
        elif self.forward is not None and hasattr(entry, "_fields") and self.forward.takes(entry._fields):
            args, kwargs = (), entry._asdict()
        if self.forward is not None:
            self.forward.check_keywords(args, kwargs, name)
        return args, kwargs

    def _arguments_for_cutting(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """Return (args, kwargs) with the positions of tokens, if the forward takes them. Raises as `check_can_be_cut`."""
        assert self.forward is not None
        check_arguments_can_be_cut(self.forward.signature, args, kwargs)
        length = count_tokens((args, kwargs), "the batch", self.layout.sequence_dim)
        return args, kwargs_with_position_ids(self.forward.signature, args, kwargs, length)

    # -- describing ----------------------------------------------------------------------------------------------------

    def _describe(
        self,
        call: Call,
        inputs: _CutTree,
        target: _CutTree,
        next_inputs: _CutTree,
        order: Sequence[int],
        autocast: str,
        frozen: str,
    ) -> Description:
        shapes: Sequence[Shape] | None = inputs.shapes if inputs.rows is not None else None
        if inputs.rows is not None and not call.is_list:
            shapes = self._shapes_of_batch(call, inputs)
        next_shapes: Sequence[Shape] = ()
        if call.next_batch is not None and next_inputs.rows is not None:
            next_shapes = self._shapes_of_batch(_call_of_batch(call, call.next_batch), next_inputs)
        return Description(
            call.name,
            call.is_training,
            call.is_list,
            call.mode,
            autocast,
            frozen,
            call.losses is not None,
            bool(target.loss_weights),
            len(inputs.rows or ()) if call.is_list else self.schedule.microbatches,
            call.order_option,
            call.limit_option,
            shapes,
            list(order) if call.order_rule is not None else (),
            target.rows,
            [_token_counts(tree.lengths) for tree in (inputs, target) if tree.lengths],
            call.next_batch is not None,
            call.teacher_batch is not None,
            next_shapes,
            _token_counts(next_inputs.lengths),
        )

    def _shapes_of_batch(self, call: Call, inputs: _CutTree) -> Sequence[Shape]:
        """Return the shape of each microbatch of a batch that was split by rows."""
        rows_of = [rows for rows in inputs.rows or () if rows]
        num_rows, elements = sum(rows_of), count_elements(call.inputs, self.layout.rows_dim)
        return [Shape(rows, elements * rows // num_rows, f"{rows} of {inputs.signature}") for rows in rows_of]

    def _describe_arguments(self, call: Call, inputs: _CutTree, target: _CutTree) -> BatchArguments:
        rows_dim = self.layout.rows_dim

        def shapes(batch: Any, what: str, is_read: bool) -> Sequence[str]:
            return [describe_shapes(entry, what, rows_dim) for entry in (batch if call.is_list else [batch])] if is_read else ()

        return BatchArguments(
            count_argument_rows(call.inputs, call.is_list, rows_dim),
            count_argument_rows(call.target, call.is_list, rows_dim),
            shapes(call.inputs, "the batch", inputs.rows is not None),
            shapes(call.target, "the target", target.rows is not None),
        )


def _call_of_batch(call: Call, batch: AheadBatch) -> Call:
    """Return the call as if it were for the next batch."""
    return call._replace(args=batch.args, kwargs=batch.kwargs, is_list=False, options=())


def _token_counts(lengths: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the tokens of each microbatch: the sum over its parts."""
    return tuple(map(sum, lengths))


def count_argument_rows(batch: Any, is_list: bool, rows_dim: int) -> Sequence[int]:
    """Return the rows of a batch, or of each entry of a list, read or not; nothing where they cannot be counted."""
    try:
        return [count_rows(entry, rows_dim=rows_dim) or 0 for entry in batch] if is_list else [_rows_or_error(batch, rows_dim)]
    except (MismatchError, TypeError):
        return ()


def _rows_or_error(batch: Any, rows_dim: int) -> int:
    if not (rows := count_rows(batch, rows_dim=rows_dim)):
        raise MismatchError("no rows")
    return rows


def _describe_autocast(device: torch.device) -> str:
    """Return as text the autocast that is on for `device`."""
    if not torch.is_autocast_enabled(device.type):
        return "no autocast"
    return f"autocast of {str(torch.get_autocast_dtype(device.type)).removeprefix('torch.')}"


# -- the model's forward -----------------------------------------------------------------------------------------------


def first_stage_signature(module: nn.Module) -> inspect.Signature:
    """Return what the first stage's forward takes: the model's arguments, if the stage was cut from one."""
    return module.penstock.signature if isinstance(module, GraphStage) else inspect.signature(unwrap_compiled(module).forward)


class ModelForward:
    """What the model's forward takes, from its first stage. `later_keywords`: those that only later stages take."""

    def __init__(self, module: nn.Module, later_keywords: Iterable[str]) -> None:
        self.signature, self._later_keywords = first_stage_signature(module), frozenset(later_keywords)
        parameters = self.signature.parameters.values()
        self._takes_any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        named = [parameter for parameter in parameters if parameter.kind.name in ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")]
        self._names = [parameter.name for parameter in named]
        self._positional = [name for name in self._names if self.signature.parameters[name].kind.name.startswith("POSITIONAL")]
        self._graph_inputs = module.penstock.input_names if isinstance(module, GraphStage) else [*self._names]
        self._all_names = self._later_keywords.union(self._names)
        self._warned = set[str]()
        self._required = {parameter.name for parameter in named if parameter.default is parameter.empty}

    def takes(self, names: Iterable[str]) -> bool:
        """Whether it takes these as keywords."""
        return self._all_names.issuperset(names)

    def check_options(self, call: str, options: Iterable[str], num_args: int) -> None:
        """Raise MismatchError for an option of a call if the forward has a parameter of its name, not given by position.

        Warn, once, of `target` and of options of `generate()` that the forward can do without: scripts mean the call's.
        """
        for name in options:
            if name not in self._all_names or name in self._positional[:num_args]:
                continue
            text = f"{call} takes {name}= for itself, and the model's forward has a parameter {name} too, which does not get it"
            text = f"{text}: {self._hint_for(call.removesuffix('()'), name)}"
            if name != "target" and (call != "generate()" or name in self._required):
                raise MismatchError(text)
            if name not in self._warned:
                warn_user(text)
            self._warned.add(name)

    def _hint_for(self, method: str, name: str) -> str:
        """Return as text how the forward gets a parameter that a method of the pipeline takes for itself."""
        if method == "generate":
            return "give it a default, or make the pipeline of a module around the model that passes it on"
        cut_hint = ""
        if name not in self._graph_inputs:
            cut_hint = (
                f"the model was cut without it: cut it with example_kwargs={{.., {name!r}: value}}, a tensor if it changes; "
            )
        if name in self._positional:
            names = self._positional[: self._positional.index(name) + 1]
            return f"{cut_hint}give the model's by position, {method}({', '.join(names)}, ..)"
        return f"{cut_hint}give the model's in an entry of {method}_microbatches([{{.., {name!r}: value}}], ..)"

    def check_keywords(self, args: Sequence[Any], kwargs: Mapping[str, Any], what: str) -> None:
        """Raise MismatchError for keywords that the forward does not take, and for those that it needs and are not there."""
        if not kwargs:
            return
        taken = ", ".join([*self._names, *sorted(self._later_keywords - {*self._names})]) or "nothing"
        unknown = [name for name in kwargs if not self._takes_any_keyword and not self.takes([name])]
        if unknown:
            raise MismatchError(f"{what} has {unknown[0]}, which the model's forward does not take: it takes {taken}")
        missing = [name for name in self._names[len(args) :] if name in self._required and name not in kwargs]
        if missing:
            raise MismatchError(f"{what} lacks {missing[0]}, which the model's forward needs: it takes {taken}")


def kwargs_with_position_ids(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], length: int
) -> dict[str, Any]:
    """Return `kwargs`, with the positions of `length` tokens if the forward takes them and the call has none.

    Positions have the shape (1, time), for all rows.
    """
    if (
        POSITION_IDS not in signature.parameters
        or arguments_by_parameter_name(signature, args, kwargs).get(POSITION_IDS) is not None
    ):
        return dict(kwargs)
    positions = torch.arange(length, device="cpu")[None]
    return {**kwargs, POSITION_IDS: Replicated(positions)}


# -- checks ------------------------------------------------------------------------------------------------------------


def check_options(call: Call) -> None:
    """Raise MismatchError for options out of range."""
    if not isinstance(call.scale, int | float) or not math.isfinite(call.scale):
        raise MismatchError(
            f"{call.name} cannot scale gradients by {call.scale!r}: give a number, 1/k for the mean over k batches. "
            "An argument `scale` of the model is given by its position"
        )
    if call.losses is not None and not isinstance(call.losses, list):
        raise MismatchError(f"{call.name.removesuffix(')')}.., losses=[]) fills a list, and cannot fill {call.losses!r}")
    if call.is_training and torch.is_inference_mode_enabled():
        raise MismatchError(f"{call.name} trains, which torch.inference_mode() rules out: call it outside")


def check_list(value: Any, name: str, call: str) -> None:
    """Raise MismatchError unless `value` is a list with an entry for each microbatch."""
    if isinstance(value, Tensor | str | tuple) or not isinstance(value, Sequence):
        raise MismatchError(
            f"{call} takes {name} as a list with an entry for each microbatch, not {describe_type(value)}: "
            "give [first, second, ..], or call step(), which splits a batch itself"
        )
    if not value:
        raise MismatchError(f"{call} got an empty list as {name}: give an entry for each microbatch, one or more")


def check_has_inputs(call: Call, rank: int) -> None:
    """Raise MismatchError if the first stage's rank was given nothing."""
    if call.kwargs or [argument for argument in call.args if argument is not None]:
        return
    is_step = call.is_training or call.is_for_teacher_alone
    example = "step(inputs, target=..)" if is_step else "eval(inputs)"
    hint = "" if is_step else "; it puts the modules into evaluation mode for the batch, and back"
    raise MismatchError(f"rank {rank}: the first stage's rank was given no inputs: call pipe.{example}{hint}")


def check_target(call: Call, has_loss: bool, rank: int) -> None:
    """Raise MismatchError if there is no loss, or the last stage's rank was given no target."""
    if not has_loss:
        raise MismatchError(f"rank {rank}: a loss needs a Pipeline with loss_fn=")
    if call.target is None:
        needed = "step_microbatches() needs targets=[..]" if call.is_list else "step() needs target=.., by that name"
        raise MismatchError(f"rank {rank}: {needed}, which the last stage's rank takes for the loss")


def check_no_graph(call: Call, batch: Any, name: str, rank: int) -> None:
    """Raise MismatchError for a batch with a graph: the backward of each microbatch would run that graph again."""
    if not call.is_training or (isinstance(batch, Tensor) and not batch.requires_grad):  # the common case
        return
    for tensor in map(unwrap, leaves(batch)):
        if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
            raise MismatchError(
                f"rank {rank}: {call.name} was given {name} with a graph ({tensor.grad_fn.name()}), which the backward of each "
                "microbatch would run again: cut it, and go on by hand afterwards: leaf = x.detach().requires_grad_(); "
                f"pipe.{call.name.removesuffix(')')}..) with leaf in the place of x; x.backward(leaf.grad)"
            )


def check_arguments_can_be_cut(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise MismatchError for arguments of a call that mean another thing once the tokens are cut."""
    if not {"labels", POSITION_IDS} & signature.parameters.keys():
        return
    arguments = arguments_by_parameter_name(signature, args, kwargs)
    if arguments.get("labels") is not None:
        raise MismatchError(
            "labels= are shifted by a token inside the model, which has a part of the tokens only: give target=, shifted, and "
            "the loss as loss_fn"
        )
    positions = unwrap(arguments.get(POSITION_IDS))
    if positions is not None and arguments.get("attention_mask") is None and (positions.diff(dim=-1) != 1).any():
        raise MismatchError(
            "position_ids begin anew within a row, as for packed documents, whose borders are not known where tokens are cut: "
            "give rows of one document each"
        )
