"""What all ranks know of a step before data flows: in every step a row of numbers, in the first of its kind a description.

    every step         kind_hash, list_hash, step, scale; numbers of observers  one latency, sent before the first forward
    first of its kind  modes, autocast, frozen parameters, microbatches         with the row, if it fits there

A new number that ranks compare in every step is an observer's: `engine/observers.py`. What they must know besides is a field of
`Description`.

A rank sends a description once, and all keep it by its hashes. If one does not fit into its row, all ranks send theirs in an
exchange of its own: they have read the same rows. With `loss_weight=` every step has an exchange more.

`kind_hash` is of all that memory and the checks of a first step depend on, `list_hash` of what differs from list to list:
shapes and order. From the descriptions each rank derives the same `Agreed`, and keeps it by the hashes of all ranks. Errors are
made from the values of descriptions.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, Literal, NamedTuple

from penstock.batch.pieces import Piece, Shape, loss_shares, rows_dim_hint, token_lengths
from penstock.comms.control_group import MAX_ROW_BYTES, ControlGroup
from penstock.comms.encoding import compress, decompress, encode
from penstock.digest import hash_values
from penstock.errors import MismatchError, format_count, require_equal
from penstock.mesh.position import MeshPosition
from penstock.recent import RecentDict
from penstock.schedule.rank_program import RankProgram, RankPrograms, TeacherForwards
from penstock.schedule.table import Chains

Reduction = Literal["mean", "sum"]  # what a loss returns of a microbatch's rows
MAX_KINDS = 64  # of steps, whose descriptions and memory are remembered
NUM_STEP_NUMBERS = 4  # kind_hash, list_hash, step, scale: a row begins with them, those of observers follow
Hashes = tuple[float, float]  # of a step's kind on one rank, and of its list
SAME_BATCH = "Give all of them the same (pipe.sampler(dataset), one seed for all loaders), or None where they are not read"


class Description(NamedTuple):
    """What one rank is about to run. What a rank does not read is None, or empty."""

    call: str  # `step()`
    is_training: bool
    is_list: bool
    mode: str  # of the model: `training mode`
    autocast: str  # `no autocast`
    frozen: str  # a hash of which of its parameters are trained
    wants_losses: bool  # the loss of each microbatch
    has_loss_weights: bool
    num_seeds: int  # how many seeds its replica's microbatches take
    order_option: object  # of a list, as it was given; and the limit
    limit_option: object
    inputs: Sequence[Shape] | None
    order: Sequence[int]  # position in the step -> index in the list; empty: as given
    target_rows: Sequence[int | None] | None
    token_counts: Sequence[Sequence[int]]  # if tokens are cut: those of each microbatch's rows, of inputs and of target
    has_next_batch: bool = False  # whether a teacher runs for a next batch
    has_teacher_batch: bool = False  # whether it has run for this one
    next_inputs: Sequence[Shape] = ()  # of the next batch
    next_token_counts: Sequence[int] = ()  # as `token_counts`, of the next batch


class BatchArguments(NamedTuple):
    """The batch or list that a rank's call was given, read or not: for the error that inputs and target do not fit."""

    input_rows: Sequence[int]
    target_rows: Sequence[int]
    input_shapes: Sequence[str]  # in words, of what it reads
    target_shapes: Sequence[str]


class LocalDescription(NamedTuple):
    """This rank's part in an agreement; `describe` and `describe_arguments` are called when they are needed."""

    kind_hash: float
    list_hash: float
    describe: Callable[[], Description]
    describe_arguments: Callable[[], BatchArguments]
    loss_weights: Sequence[float]  # of each piece, on the rank that reads the target

    @property
    def hashes(self) -> Hashes:
        """The two hashes."""
        return self.kind_hash, self.list_hash


class Agreed(NamedTuple):
    """The settings of one step, the same on every rank but for what is of this rank or its replica."""

    program: RankProgram
    pieces: Sequence[Piece]  # by number: microbatches in the order that runs, of each its slices
    in_batch_order: Sequence[int]  # the numbers of the pieces, in the order of the user's batch or list
    signatures: Sequence[str]  # of each microbatch: all that its messages depend on
    has_loss: bool
    has_loss_weights: bool
    wants_losses: bool  # whether a rank wants the loss of each microbatch
    forward_only: frozenset[int]  # microbatches of share 0
    has_backward: bool  # whether any microbatch of any replica has another share
    same_on_replicas: bool  # whether all replicas have as many microbatches, and the same ones of share 0
    first_microbatch: int  # of this replica, among those of all: for random numbers
    num_microbatches: int
    step_kind: tuple[Sequence[float], Sequence[frozenset[int]]]  # of all ranks, and the microbatches of share 0 of all replicas
    is_new_kind: bool  # whether the ranks together run such a step for the first time: memory is measured
    next_pieces: Sequence[Piece] = ()  # of the batch for which a teacher runs ahead

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """The elements of the largest input of each microbatch, in the order that runs."""
        return tuple([piece.elements for piece in self.pieces if piece.slice == 0])

    @property
    def chains(self) -> Chains:
        """Of the stages that run."""
        return self.program.chains


class Agreement:
    """The agreement of all ranks of the job. `token_parts`: K slices, their lengths, or the number of ranks along cp."""

    def __init__(
        self,
        control: ControlGroup,
        position: MeshPosition,
        programs: RankPrograms,
        reduction: Reduction,
        token_parts: int | Sequence[int],
        rows_dim: int,
    ) -> None:
        self.control, self.position, self.programs = control, position, programs
        self.reduction, self.token_parts, self.rows_dim = reduction, token_parts, rows_dim
        self._descriptions = [RecentDict[Hashes, Description](MAX_KINDS) for _ in range(control.topology.world_size)]
        self._conclusions = RecentDict[Sequence[Hashes], Agreed](MAX_KINDS)
        self._kinds = RecentDict[Hashable, float](MAX_KINDS)  # of steps that have ended -> this rank's number of it
        self._last_hashes: Sequence[Hashes] = ()
        self._last_kind: Hashable = None  # of step, that has ended

    def begin(self, local: LocalDescription, step: int, scale: float, numbers: Sequence[float], purpose: str) -> None:
        """Send this rank's numbers to all others, without waiting; and its description, unless they have it."""
        row, value = [local.kind_hash, local.list_hash, step, scale, *numbers], b""
        if not self.control.is_single and local.hashes not in self._descriptions[self.position.world.rank]:
            value = compress(encode(local.describe()), MAX_ROW_BYTES)
        self.control.begin_all_gather_row(row, purpose, value)

    def has_run(self, kind_hash: float) -> bool:
        """Whether this rank has run such a step; together with what the others run, it may still be the first of its kind."""
        return kind_hash in self._kinds.values()

    def finish(self, local: LocalDescription, purpose: str) -> tuple[Agreed, Sequence[Sequence[float]]]:
        """Read all ranks' rows. Return what follows, and what each rank's observers tell.

        Raises MismatchError, the same on every rank, if the ranks are not about to run the same step.
        """
        rows = self.control.finish_all_gather_row(purpose)
        require_equal([row[2] for row in rows], "are at different steps", "is at step {:.0f}")
        require_equal([row[3] for row in rows], "do not scale their gradients alike", "has scale={!r}")
        hashes = tuple([(row[0], row[1]) for row in rows])

        agreed = self._conclusions.get(hashes)
        if agreed is None or agreed.has_loss_weights:  # which differ from step to step
            descriptions = self._descriptions_of_ranks(local, hashes, purpose)
            if agreed is None:
                self._check(descriptions, local.describe_arguments, purpose)
            has_weights = any(description.has_loss_weights for description in descriptions)
            loss_weights = self.control.all_gather_value(local.loss_weights, purpose) if has_weights else None
            agreed = self._conclude(descriptions, hashes, loss_weights)
        if hashes != self._last_hashes:  # if not, they are the newest already
            for known, key in zip(self._descriptions, hashes, strict=True):
                known.add(key, known[key])  # is not forgotten before what follows from it
            self._conclusions.add(hashes, agreed)
            self._last_hashes = hashes

        if agreed.step_kind not in self._kinds:
            agreed = agreed._replace(is_new_kind=True)
        return agreed, [row[NUM_STEP_NUMBERS:] for row in rows]

    def _descriptions_of_ranks(self, local: LocalDescription, hashes: Sequence[Hashes], purpose: str) -> list[Description]:
        """Return every rank's description: those that came with the rows, and those that are known."""
        known = list(zip(self._descriptions, hashes, strict=True))
        found: list[Any] = [descriptions.get(key) for descriptions, key in known]
        for rank, description in enumerate(found):
            if description is None and (value := self.control.value_in_row(rank)):
                found[rank] = local.describe() if rank == self.position.world.rank else decompress(value)
        if None in found:  # it did not fit into its row
            found = self.control.all_gather_value(local.describe(), purpose)
        return [descriptions.add(key, description) for (descriptions, key), description in zip(known, found, strict=True)]

    def remember(self, agreed: Agreed) -> None:
        """Remember the kind of a step that has ended. All ranks forget the same kinds, the oldest first."""
        if agreed.step_kind is not self._last_kind:  # if it is, it is the newest already
            self._kinds.add(agreed.step_kind, agreed.step_kind[0][self.position.world.rank])
            self._last_kind = agreed.step_kind

    def forget(self) -> None:
        """Forget all: after a failed step some ranks may know what others do not."""
        for descriptions in self._descriptions:
            descriptions.clear()
        self._conclusions.clear()
        self._kinds.clear()
        self._last_hashes, self._last_kind = (), None

    # -- what follows from all descriptions ----------------------------------------------------------------------------

    def _conclude(
        self,
        descriptions: Sequence[Description],
        hashes: Sequence[Hashes],
        loss_weights: Sequence[Sequence[float]] | None,
    ) -> Agreed:
        position, slices = self.position, self.programs.program.schedule.slices
        replicas = [_Replica.merge([descriptions[rank] for rank in ranks]) for ranks in position.replica_pipelines]
        lengths = [replica.token_lengths(self.token_parts) for replica in replicas]
        has_loss = any(description.target_rows is not None for description in descriptions)

        # 1. The share of each piece in the loss, for every part of the batch.
        shares = self._loss_shares(replicas, lengths, loss_weights) if has_loss else [[] for _ in position.batch_parts]

        # 2. All pieces of a microbatch have a backward, or none: ranks along cp wait for each other, and an earlier slice gets
        #    gradients from later ones.
        by_replica = [
            _shares_by_microbatch(shares[first : first + position.cp_size], slices)
            for first in range(0, len(shares), position.cp_size)
        ]
        skipped = [frozenset(number for number, parts in enumerate(rows) if not any(parts)) for rows in by_replica]
        shapes = {(len(replica.order), numbers) for replica, numbers in zip(replicas, skipped, strict=True)}

        # 3. This rank's pieces, and those of the batch for which a teacher runs ahead.
        index = position.replica
        own, own_lengths, num_pieces = replicas[index], lengths[index], slices * len(replicas[index].order)
        own_shares, token_shares = [0.0] * num_pieces, [1.0] * num_pieces  # without a loss
        if has_loss:
            own_shares = list(shares[position.batch_part_index])
            sums = [sum(parts) if self.reduction == "mean" else 0.0 for parts in by_replica[index]]
            token_shares = [share / (sums[number // slices] or share or 1.0) for number, share in enumerate(own_shares)]
        pieces = own.pieces(own_lengths, slices, own_shares, token_shares)
        next_pieces = own.next_pieces(self.token_parts)

        # 4. What messages depend on. A teacher's also depend on the next batch.
        modes = [(rank.call, rank.mode, rank.autocast, rank.frozen, rank.has_teacher_batch) for rank in descriptions]
        settings = hash_values(tuple(modes))
        signatures = [
            f"{settings} {own.inputs[microbatch].signature} {own_lengths[microbatch]} {number in skipped[index]}"
            for number, microbatch in enumerate(own.order)
        ]
        if next_pieces:
            pairs = zip_longest(signatures, [shape.signature for shape in own.next_inputs])
            signatures = [f"{settings} {signature} before {next_signature}" for signature, next_signature in pairs]

        teacher = self._teacher_forwards(has_loss and not own.has_teacher_outputs, len(own.order), len(next_pieces))
        return Agreed(
            program=self.programs.select(descriptions[0].is_training, len(own.order), skipped[index], teacher=teacher),
            pieces=pieces,
            in_batch_order=sorted(range(len(pieces)), key=lambda number: pieces[number][:2]),
            signatures=signatures,
            has_loss=has_loss,
            has_loss_weights=loss_weights is not None,
            wants_losses=any(rank.wants_losses for rank in descriptions),
            forward_only=skipped[index],
            has_backward=any(map(any, shares)),
            same_on_replicas=len(shapes) == 1,
            first_microbatch=sum(replica.num_seeds for replica in replicas[:index]),
            num_microbatches=len(own.order),
            step_kind=(tuple([kind for kind, _ in hashes]), tuple(skipped)),
            is_new_kind=False,
            next_pieces=next_pieces,
        )

    def _teacher_forwards(self, loss_waits: bool, num_microbatches: int, num_next: int) -> TeacherForwards | None:
        """Return which forwards of the pipeline's teacher run in the step. `loss_waits`: the loss has no outputs yet."""
        if not self.programs.has_teacher or not (loss_waits or num_next):
            return None
        return TeacherForwards(False, num_microbatches) if loss_waits else TeacherForwards(True, num_next)

    def _loss_shares(
        self,
        replicas: "Sequence[_Replica]",
        lengths: Sequence[Sequence[Sequence[int]]],
        loss_weights: Sequence[Sequence[float]] | None,
    ) -> list[Sequence[float]]:
        """Return, for every part of the batch, each piece's share: by `loss_weight`, else by rows and tokens. 1 for a sum."""
        weights = []
        for part, ranks in enumerate(self.position.batch_parts):
            replica, cp_index = divmod(part, self.position.cp_size)
            own = [_own_lengths(tokens, self.position.cp_size, cp_index) for tokens in lengths[replica]]
            given = next((loss_weights[rank] for rank in ranks if loss_weights[rank]), None) if loss_weights else None
            by_size = [[rows * length for length in own[index]] for index, rows in enumerate(replicas[replica].rows)]
            by_microbatch = by_size if given is None else _in_groups(given, len(own[0]))
            weights.append(list(chain.from_iterable(by_microbatch[index] for index in replicas[replica].order)))

        if self.reduction == "sum":
            return [[1.0] * len(row) for row in weights]
        total = sum(map(sum, weights))
        return [loss_shares(row, total) for row in weights]

    # -- what must be equal --------------------------------------------------------------------------------------------

    def _check(
        self, descriptions: Sequence[Description], describe_arguments: Callable[[], BatchArguments], purpose: str
    ) -> None:
        """Raise MismatchError if the ranks are not about to run the same step, or were given batches that do not fit."""
        announced = ["a" if rank.has_next_batch else "no" for rank in descriptions]
        problem = "do not all get next_args= or next_kwargs=, in which the values may be None"
        require_equal(announced, problem, "gets {} next batch")
        modes = "have models in different modes (call model.train() or model.eval() on all ranks)"
        require_equal([rank.mode for rank in descriptions], modes, "is in {}")
        require_equal([rank.autocast for rank in descriptions], "are not all in the same torch.autocast", "has {}")

        for replica, pipelines in enumerate(self.position.pipelines):
            prefix, ranks = self.position.replica_prefix(replica), list(chain.from_iterable(pipelines))
            _check_arguments({rank: descriptions[rank] for rank in ranks}, prefix)
            first = _Replica.merge([descriptions[rank] for rank in pipelines[0]])
            if not first.target_fits():
                given: list[BatchArguments] = self.control.all_gather_value(describe_arguments(), purpose)
                is_list = descriptions[0].is_list
                _check_same_rows({rank: given[rank] for rank in ranks}, prefix, is_list)
                raise self._target_error(first, [given[rank] for rank in pipelines[0]], prefix, descriptions[0])
            for pipeline in pipelines[1:]:
                first_ranks = pipelines[0][0], pipeline[0]
                _check_same_batch(first, _Replica.merge([descriptions[rank] for rank in pipeline]), prefix, first_ranks)

        for peers in self.position.stage_ranks:
            if len({descriptions[rank].frozen for rank in peers}) > 1:
                names = ", ".join(map(str, peers))
                raise MismatchError(
                    f"ranks {names} have the same stages, but not the same parameters frozen: they must be alike"
                )
        by_replica = [[descriptions[rank] for rank in ranks] for ranks in self.position.replica_pipelines]
        if len({any(rank.has_loss_weights for rank in ranks) for ranks in by_replica}) > 1:
            raise MismatchError("some replicas have a loss_weight= and others have none: give all of them the same")
        if len({any(rank.target_rows is not None for rank in ranks) for ranks in by_replica}) > 1:
            raise MismatchError("some replicas have a target and others have none: give each of them one, or none of them")

    def _target_error(
        self, replica: "_Replica", given: Sequence[BatchArguments], prefix: str, description: Description
    ) -> MismatchError:
        """Return the error, with all shapes, for inputs and a target that differ in microbatches, rows or tokens."""
        target_rows = replica.target_rows or ()
        counts = next((pair for pair in zip(*replica.token_counts, strict=False) if len({*pair}) > 1), None)
        if counts is not None:
            numbers = " and ".join(map(str, sorted(counts)))
            return MismatchError(f"{prefix}inputs and target have {numbers} tokens a row: give as many")
        if not description.is_list:
            num_rows, num_target_rows = (sum(filter(None, counts)) for counts in (replica.input_rows, target_rows))
            return MismatchError(
                f"{prefix}the batch has {num_rows} rows but the target has {num_target_rows} ({_shapes_text(given)}); "
                f"{rows_dim_hint(self.rows_dim)}"
            )
        if len(target_rows) != len(replica.inputs):
            return MismatchError(
                f"{prefix}{description.call} was given {len(replica.inputs)} inputs but {len(target_rows)} targets: give one "
                "target for each"
            )
        index = next(i for i, pair in enumerate(zip(replica.input_rows, target_rows, strict=True)) if not _rows_fit(*pair))
        rows, other_rows = replica.input_rows[index], target_rows[index]
        if rows is None and other_rows is None:
            hint = rows_dim_hint(self.rows_dim)
            return MismatchError(f"{prefix}microbatch {index} has tensors that differ in rows, and so has its target: {hint}")
        shapes = next((rank.target_shapes[index] for rank in given if rank.target_shapes), "")
        return MismatchError(f"{prefix}microbatch {index} has {rows} rows but its target has {other_rows} ({shapes})")


class _Replica(NamedTuple):
    """What the ranks of one pipeline say together: the first stage's rank has the inputs, the last stage's the target."""

    inputs: Sequence[Shape]
    input_rows: Sequence[int | None]
    order: Sequence[int]
    target_rows: Sequence[int | None] | None
    token_counts: Sequence[Sequence[int]]  # the tokens of each microbatch; several if inputs and target differ
    num_seeds: int
    next_inputs: Sequence[Shape]
    next_token_counts: Sequence[int]
    has_teacher_outputs: bool

    @classmethod
    def merge(cls, ranks: Sequence[Description]) -> "_Replica":
        """Return what is said by `ranks`."""
        inputs: Sequence[Shape] = next((rank.inputs for rank in ranks if rank.inputs is not None), ())
        target_rows = next((rank.target_rows for rank in ranks if rank.target_rows is not None), None)
        order = next((rank.order for rank in ranks if rank.order), range(len(inputs)))
        tokens = [*dict.fromkeys(tuple(counts) for rank in ranks for counts in rank.token_counts)]
        input_rows = [shape.rows for shape in inputs]
        next_inputs: Sequence[Shape] = next((rank.next_inputs for rank in ranks if rank.next_inputs), ())
        num_seeds, has_outputs = max(rank.num_seeds for rank in ranks), all(rank.has_teacher_batch for rank in ranks)
        next_tokens = next((rank.next_token_counts for rank in ranks if rank.next_token_counts), ())
        return cls(inputs, input_rows, order, target_rows, tokens, num_seeds, next_inputs, next_tokens, has_outputs)

    @property
    def rows(self) -> Sequence[int]:
        """The rows of each microbatch: its inputs', or its target's where those have none. 0 if there is no target either."""
        target_rows = self.target_rows if self.target_rows is not None else [None] * len(self.inputs)
        return [rows or other or 0 for rows, other in zip(self.input_rows, target_rows, strict=True)]

    def target_fits(self) -> bool:
        """Whether the target has the microbatches, rows and tokens of the inputs."""
        if self.target_rows is None:
            return True
        if len(self.target_rows) != len(self.inputs) or len(self.token_counts) > 1:
            return False
        return all(map(_rows_fit, self.input_rows, self.target_rows))

    def token_lengths(self, token_parts: int | Sequence[int]) -> list[Sequence[int]]:
        """Return the tokens of each part of each microbatch; nothing unless they are cut."""
        if not self.token_counts:
            return [()] * len(self.inputs)
        return [token_lengths(token_parts, count) for count in self.token_counts[0]]

    def pieces(
        self, lengths: Sequence[Sequence[int]], slices: int, shares: Sequence[float], token_shares: Sequence[float]
    ) -> list[Piece]:
        """Return the pieces in the order that runs: of each microbatch its slices. `lengths`: from `token_lengths`."""
        rows, numbered = self.rows, [(microbatch, slice_) for microbatch in self.order for slice_ in range(slices)]
        return [
            Piece(microbatch, slice_, lengths[microbatch], rows[microbatch], self.inputs[microbatch].elements, *rating)
            for (microbatch, slice_), *rating in zip(numbered, shares, token_shares, strict=True)
        ]

    def next_pieces(self, token_parts: int | Sequence[int]) -> list[Piece]:
        """Return the pieces of the batch for which a teacher runs ahead: whole microbatches."""
        lengths: Sequence[Sequence[int]] = [token_lengths(token_parts, count) for count in self.next_token_counts]
        shapes = zip(self.next_inputs, lengths or [()] * len(self.next_inputs), strict=True)
        return [Piece(number, 0, tokens, shape.rows or 0, shape.elements) for number, (shape, tokens) in enumerate(shapes)]


def _rows_fit(rows: int | None, target_rows: int | None) -> bool:
    return (rows or target_rows) == (target_rows or rows) is not None


def _own_lengths(lengths: Sequence[int], cp_size: int, cp_index: int) -> Sequence[int]:
    """Return the tokens of the pieces that one rank has of a microbatch; 1 if tokens are not cut."""
    return lengths[cp_index : cp_index + 1] if cp_size > 1 else (lengths or (1,))


def _in_groups(values: Sequence[float], size: int) -> list[Sequence[float]]:
    return [values[first : first + size] for first in range(0, len(values), size)]


def _shares_by_microbatch(parts: Sequence[Sequence[float]], slices: int) -> list[list[float]]:
    """Return the shares of each microbatch's pieces: its slices, on all ranks along cp."""
    return [list(chain.from_iterable(groups)) for groups in zip(*[_in_groups(row, slices) for row in parts], strict=True)]


def _check_arguments(descriptions: Mapping[int, Description], prefix: str) -> None:
    """Raise MismatchError unless all ranks of a replica were given the same order and limit."""
    first_rank, expected = next(iter(descriptions.items()))
    for rank, description in descriptions.items():
        for name in ("order", "limit"):
            values = getattr(description, f"{name}_option"), getattr(expected, f"{name}_option")
            value, first_value = (list(item) if isinstance(item, tuple) else item for item in values)
            if value != first_value:
                raise MismatchError(
                    f"{prefix}the ranks were given different {name}s: {name}={first_value!r} on rank {first_rank}, "
                    f"{name}={value!r} on rank {rank}. Give all of them the same"
                )


def _check_same_rows(given: Mapping[int, BatchArguments], prefix: str, is_list: bool) -> None:
    """Raise MismatchError, with who has what, if ranks of a replica were given batches of other rows."""
    for name, field in (("input", "input_rows"), ("target", "target_rows")):
        by_rank = {rank: getattr(batch, field) for rank, batch in given.items() if getattr(batch, field)}
        for rank, rows in by_rank.items():
            first_rank, expected = next(iter(by_rank.items()))
            if rows == expected:
                continue
            if len(rows) != len(expected):
                difference = f"{len(expected)} {name}s on rank {first_rank}, {len(rows)} on rank {rank}"
            else:
                entry = next(number for number, pair in enumerate(zip(rows, expected, strict=True)) if pair[0] != pair[1])
                what = f"{name} {entry} has" if is_list else "inputs have" if name == "input" else "the target has"
                difference = f"{what} {expected[entry]} rows on rank {first_rank}, {rows[entry]} on rank {rank}"
            batches = "lists" if is_list else "batches"
            raise MismatchError(f"{prefix}the ranks were given different {batches}: {difference}. {SAME_BATCH}")


def _check_same_batch(first: _Replica, other: _Replica, prefix: str, ranks: tuple[int, int]) -> None:
    """Raise MismatchError if two pipelines of one replica, which lie along tp and cp, have different batches.

    `ranks`: of their first stages.
    """
    sizes = [format_count(sum(filter(None, batch.input_rows)), "row") for batch in (first, other)]
    if len(first.inputs) != len(other.inputs):
        sizes = [format_count(len(batch.inputs), "microbatch", "es") for batch in (first, other)]
    alike = f"{prefix}ranks along tp and cp are given one batch"
    if sizes[0] != sizes[1]:
        raise MismatchError(f"{alike}, but it has {sizes[0]} on rank {ranks[0]}, {sizes[1]} on rank {ranks[1]}")
    if first != other:
        ranks_text = f"ranks {ranks[0]} and {ranks[1]}"
        raise MismatchError(f"{alike}, but its tensors or targets differ in rows, shape or dtype on {ranks_text}")


def _shapes_text(given: Sequence[BatchArguments]) -> str:
    return ", ".join(text for rank in given for text in (*rank.input_shapes, *rank.target_shapes))
