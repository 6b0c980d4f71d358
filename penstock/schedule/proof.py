"""The proof that a table is complete and that its program runs to the end with nothing buffered, or the exact error.

The proof runs the program on an abstract machine (docs/explanation/proof.md says why one execution decides for all).
Each end of a channel is a queue of what its rank has posted; a transfer happens when it is first in both queues.
Compute goes on meanwhile: it waits for receives and never for a send. There are two kinds of channels:

* *directed*, as Penstock has them: a channel for each direction between two ranks, receives posted ahead. With NCCL each is
  a communicator and a stream of its own; operations run in the order they were posted, and each blocks only that stream
  until its partner has been posted too. That is the machine above, so a proved program cannot hang there, as long as all
  of a rank's channels have room to be resident on the GPU at once (a few blocks each).
* *shared*: one queue for both directions between two ranks, each receive posted when it is needed. PyTorch makes this of
  plain `isend` and `irecv` on NCCL: one communicator and one stream for each pair of ranks. Two ranks that both have a
  send first in this queue are deadlocked.

Two overlapping actions start together, once the inputs of both have arrived. An engine that runs the pair one after the
other posts the same transfers in the same order and only waits less, so the proof holds for it too.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise

from penstock.errors import ScheduleError, format_count
from penstock.schedule.memory import format_in_flight, peaks_in_flight, waiting_outputs
from penstock.schedule.program import RECEIVES_AHEAD, Compute, Instruction, Program, Script, Transfer, check_skips, lower
from penstock.schedule.table import (
    Action,
    Cell,
    Kind,
    Skip,
    Table,
    actions_of,
    cell_text,
    check_is_table,
    dependencies,
    pause_garbage_collection,
    receiving_stages,
    sending_stages,
)

SEND_MODES = ("async", "blocking")
CHANNEL_MODES = ("directed", "shared")


@dataclass(frozen=True)
class Proof:
    """The result of `verify`: the proved program, and what was counted in it."""

    name: str
    ranks: int
    num_stages: int
    microbatches: int
    actions: int
    transfers: int
    peak_in_flight: tuple[float, ...]  # per rank, in activations of a stage: a slice counts as its share
    peak_waiting_outputs: int  # of a teacher, on the rank of the loss
    sends: str
    channels: str
    program: Program = field(repr=False, compare=False)  # what was proved

    def __str__(self) -> str:
        num_trained = self.num_stages - len(self.program.schedule.chains.forward_only)
        waiting = format_count(self.peak_waiting_outputs, "output")
        how = f"{self.sends} sends" + (", shared channels" if self.channels == "shared" else "")
        return (
            f"proved: {self.name} over {format_count(self.ranks, 'rank')}, {format_count(self.num_stages, 'stage')}, "
            f"{format_count(self.microbatches, 'microbatch', 'es')}"
            f"{f' in {self.program.schedule.slices} slices' if self.program.schedule.slices > 1 else ''}: "
            f"{format_count(self.actions, 'action')} complete, "
            f"{format_count(self.transfers, 'transfer')} without a cycle ({how}), "
            f"in flight {format_in_flight(self.peak_in_flight, num_trained / self.ranks)}"
            f"{f', up to {waiting} of the teacher waiting' if self.peak_waiting_outputs else ''}"
        )


@pause_garbage_collection()
def verify(
    schedule: Table,
    max_in_flight: float | Sequence[float] | None = None,
    sends: str = "async",
    channels: str = "directed",
    skips: Collection[Skip] = (),
) -> Proof:
    """Prove that `schedule` is complete, keeps its memory bound and cannot deadlock.

    `max_in_flight`: the most (stage, microbatch) activations that a rank may hold, one number or one for each rank; each of K
    slices counts 1/K.
    `sends`: `async` (compute goes on while a send waits for its receive), or `blocking` (a rank waits for each send before
    its next action).
    `channels`: `directed` (one for each direction between two ranks), or `shared` (one for both).
    With async sends and directed channels receives are posted ahead, as Penstock does. Otherwise each is posted when it is
    needed, after those that come before it in its channel.
    `skips`: the model's skip connections, as (stage, later stage): the first one's output goes straight to the second.

    Raises ScheduleError with the reason: the missing action, the rank that holds too much, or the cycle in which ranks wait.

        verify(build("1f1b", 2, 2)).peak_in_flight  # (2, 1)
        verify(build("1f1b", 2, 2), sends="blocking")  # raises: rank 0 waits for rank 1 to receive ..; rank 1 waits for ..
    """
    check_is_table(schedule)
    for name, value, choices in (("sends", sends, SEND_MODES), ("channels", channels, CHANNEL_MODES)):
        if value not in choices:
            raise ScheduleError(f"{name}={value!r}: use {' or '.join(map(repr, choices))}")
    check_table(schedule)
    rows = map(schedule.cells, range(schedule.ranks))
    peaks = peaks_in_flight(rows, schedule.slices, schedule.chains.forward_only)
    _check_memory(schedule, peaks, max_in_flight)
    check_skips(skips, schedule.num_stages)
    program = lower(schedule, RECEIVES_AHEAD if (sends, channels) == ("async", "directed") else 0, skips)
    prove(program, blocking=sends == "blocking", shared=channels == "shared")
    size = schedule.ranks, schedule.num_stages, schedule.microbatches
    actions = sum(map(len, schedule.actions))
    counts = _count_transfers(schedule, skips), peaks, _peak_waiting_outputs(schedule)
    return Proof(schedule.name, *size, actions, *counts, sends, channels, program)


def _count_transfers(schedule: Table, skips: Collection[Skip]) -> int:
    """Return the transfers between ranks of a complete table: an output and a gradient for each microbatch and slice."""
    home = schedule.placement
    receivers = receiving_stages(schedule.chains, skips)
    ends = [(home[stage], home[to]) for kind in (Kind.F, Kind.B) for stage in range(len(home)) for to in receivers[kind][stage]]
    return sum(source != destination for source, destination in ends) * schedule.microbatches * schedule.slices


def _peak_waiting_outputs(schedule: Table) -> int:
    if schedule.teacher is None:
        return 0
    return max(waiting_outputs(schedule.actions[schedule.placement[-1]], schedule.chains))


def _check_memory(schedule: Table, peaks: Sequence[float], bound: float | Sequence[float] | None) -> None:
    if bound is None:
        return
    bounds = [bound] * schedule.ranks if isinstance(bound, int | float) else list(bound)
    if len(bounds) != schedule.ranks:
        raise ScheduleError(f"max_in_flight has {len(bounds)} numbers for {schedule.ranks} ranks")
    for rank, (peak, allowance) in enumerate(zip(peaks, bounds, strict=True)):
        if peak > allowance:
            raise ScheduleError(f"rank {rank} holds {peak:g} activations in flight, max_in_flight allows {allowance:g}")


@pause_garbage_collection()
def prove(program: Program | Script, blocking: bool = False, shared: bool = False) -> None:
    """Run `program` on the abstract machine. Raises ScheduleError with the cycle of waits if it deadlocks.

    `blocking`: ranks wait for each send. `shared`: one channel for both directions between two ranks.

    With neither, a `Program` ends if its table does with nothing but its data dependencies (`runs_to_end`, which is quick): no
    rank waits for a send, and both ends post a channel's transfers in one order, the receiver always up to the one that it
    waits for. So a transfer happens as soon as it has been sent, and only a missing input can stop a rank.
    """
    if isinstance(program, Program) and not (blocking or shared) and runs_to_end(program.schedule, program.skips):
        return
    _check_local_order(program.schedule)
    rows = [program.instructions(rank) for rank in range(program.schedule.ranks)]
    if blocking:
        rows = [_with_waits_after_sends(row, rank) for rank, row in enumerate(rows)]
    execution = _ProofExecution(program.schedule.name, rows, shared)
    execution.run()
    if cycle := execution.deadlock_cycle():
        raise ScheduleError(f"{program.schedule.name} deadlocks: {'; '.join(cycle)}")


def runs_to_end(table: Table, skips: Collection[Skip]) -> bool:
    """Run every rank's cells in order, each once its inputs are made. Return whether all ranks reach their end.

    A result is a number: `offset of its stage and direction + microbatch x K + slice`. B and I make the same one.
    """
    slices, parts = table.slices, table.microbatches * table.slices
    inputs, outputs = _result_offsets(table, skips)
    made = bytearray(2 * table.num_stages * parts)
    rows = [table.cells(rank) for rank in range(table.ranks)]
    waiting: dict[int, list[tuple[int, Cell]]] = defaultdict(list)  # result -> ranks that wait for it, each with its next cell
    runnable: deque[tuple[int, Iterable[Cell]]] = deque(enumerate(rows))

    while runnable:
        rank, cells = runnable.popleft()
        for cell in cells:
            actions = actions_of(cell)
            missing = -1
            for kind, stage, microbatch, slice_ in actions:
                part = microbatch * slices + slice_
                for offset in inputs[kind][stage]:
                    if not made[offset + part]:
                        missing = offset + part
                if slices > 1 and kind is not Kind.W and slice_ != (0 if kind is Kind.F else slices - 1):
                    neighbour = outputs[kind][stage] + part + (-1 if kind is Kind.F else 1)  # the slice that it attends to
                    missing = missing if made[neighbour] else neighbour
            if missing >= 0:
                waiting[missing].append((rank, cell))
                break

            for kind, stage, microbatch, slice_ in actions:
                if kind is not Kind.W:
                    result = outputs[kind][stage] + microbatch * slices + slice_
                    made[result] = 1
                    if result in waiting:
                        runnable.extend(
                            (waiter, chain((next_cell,), rows[waiter])) for waiter, next_cell in waiting.pop(result)
                        )
    return not waiting


def _result_offsets(table: Table, skips: Collection[Skip]) -> tuple[dict[Kind, list[list[int]]], dict[Kind, list[int]]]:
    """Return, for each kind and stage, the offsets of the results that an action needs, and the offset of what it makes."""
    parts, stages = table.microbatches * table.slices, range(table.num_stages)
    senders = sending_stages(table.chains, skips)
    forward, backward = ([(first + stage) * parts for stage in stages] for first in (0, table.num_stages))
    of_backward = [[forward[stage], *(backward[later] for later in senders[Kind.B][stage])] for stage in stages]
    inputs = {
        Kind.F: [[forward[earlier] for earlier in senders[Kind.F][stage]] for stage in stages],
        Kind.B: of_backward,
        Kind.I: of_backward,
        Kind.W: [[backward[stage]] for stage in stages],
    }
    return inputs, {Kind.F: forward, Kind.B: backward, Kind.I: backward}


def _check_local_order(table: Table) -> None:
    """Raise ScheduleError if an input from an action's own rank comes after it, or in the same pair."""
    for rank, row in enumerate(table.actions):
        stages, done = set(table.stages_of(rank)), set[Action]()
        for cell in table.cells(rank):
            members = actions_of(cell)
            for action in members:
                for options in dependencies(action, table.chains, slices=table.slices):
                    if done.isdisjoint(options) and options[0].stage in stages:
                        maker = next((option for option in options if option in row), options[0])
                        problem = f"{action} before {maker}, which it needs"
                        if maker in members:
                            problem = f"{cell_text(cell)} as a pair, but {action} needs {maker}"
                        raise ScheduleError(f"{table.name} deadlocks: rank {rank} has {problem}")
            done.update(members)


def _with_waits_after_sends(row: Iterator[Instruction], rank: int) -> Iterator[Instruction]:
    """Return `row` of `rank` with a wait after every send."""
    reversed_row: list[Instruction] = []
    following: Cell | None = None
    for instruction in reversed(list(row)):
        if isinstance(instruction, Compute):
            following = instruction.cell
        elif instruction.source == rank:
            reversed_row.append(Compute(following, (instruction,)))
        reversed_row.append(instruction)
    return reversed(reversed_row)


class _ProofExecution:
    """An execution of all rows. Each end of a channel is a queue of the transfers posted there that have not happened."""

    def __init__(self, name: str, rows: Sequence[Iterator[Instruction]], shared: bool) -> None:
        self.name, self.rows, self.shared = name, rows, shared
        self.blocked: dict[int, Compute] = {}  # rank -> what it cannot run yet
        self.channels: dict[tuple[int, int], dict[int, deque[Transfer]]] = defaultdict(lambda: defaultdict(deque))
        self.completed: set[Transfer] = set()
        self.runnable = deque(range(len(rows)))

    def run(self) -> None:
        """Run every rank until it has finished or is blocked."""
        while self.runnable:
            rank = self.runnable.popleft()
            for instruction in self.rows[rank]:
                if not isinstance(instruction, Compute):
                    self._post(rank, instruction)
                elif not self.completed.issuperset(instruction.needs):
                    self.blocked[rank] = instruction
                    break

    def _post(self, rank: int, transfer: Transfer) -> None:
        """Append `transfer` to the queue at the end of `rank`; complete transfers while both ends have the same in front."""
        own_queue, peer_queue, peer = self._queues_of(rank, transfer)
        own_queue.append(transfer)
        while own_queue and peer_queue and own_queue[0] == peer_queue[0]:
            self.completed.add(own_queue.popleft())
            peer_queue.popleft()
            if peer in self.blocked and self.completed.issuperset(self.blocked[peer].needs):
                del self.blocked[peer]
                self.runnable.append(peer)
        if own_queue and peer_queue and own_queue[0].source == peer_queue[0].source:
            sends, receives = (own_queue, peer_queue) if own_queue[0].source == rank else (peer_queue, own_queue)
            _, source, destination, _ = own_queue[0]
            problem = f"rank {source} sends the {sends[0]} where rank {destination} receives the {receives[0]}"
            raise ScheduleError(f"{self.name} mixes up what it sends: {problem}")

    def _queues_of(self, rank: int, transfer: Transfer) -> tuple[deque[Transfer], deque[Transfer], int]:
        """Return the channel of `transfer`: the queue at the end of `rank`, the queue at the other end, and the rank there."""
        _, source, destination, _ = transfer
        peer = destination if rank == source else source
        if self.shared and source > destination:
            source, destination = destination, source
        ends = self.channels[source, destination]
        return ends[rank], ends[peer], peer

    def deadlock_cycle(self) -> list[str]:
        """Return the cycle of waits among blocked ranks, a sentence for each rank; empty if all have finished."""
        if not self.blocked:
            return []
        wait_of_rank: dict[int, str] = {}
        rank = min(self.blocked)
        while rank not in wait_of_rank:
            own_queue, peer_queue, peer = self._queues_of(rank, self._missing_transfer(rank))
            wait_of_rank[rank] = self._describe_wait(rank, peer, own_queue[0])
            if peer_queue:  # another transfer is first there: each blocks the other
                return [wait_of_rank[rank], self._describe_wait(peer, rank, peer_queue[0])]
            rank = peer
        return list(wait_of_rank.values())[list(wait_of_rank).index(rank) :]

    def _missing_transfer(self, rank: int) -> Transfer:
        """Return the first transfer that `rank` waits for."""
        return next(transfer for transfer in self.blocked[rank].needs if transfer not in self.completed)

    def _describe_wait(self, rank: int, peer: int, front: Transfer) -> str:
        """Return what `rank` waits for as text; if both directions share a channel, also what is first in its queue."""
        post = f"the {'send' if front.source == rank else 'receive'} of the {front} in front of its queue with rank {peer}"
        awaited, cell = self._missing_transfer(rank), self.blocked[rank].cell
        following = f"before {'the end' if cell is None else cell_text(cell)}"
        if awaited.source == rank:
            waits = f"waits for rank {awaited.destination} to receive the {awaited}, {following}"
        else:
            waits = f"waits for the {awaited} from rank {awaited.source}, {following}"
        if not self.shared:
            return f"rank {rank} {waits}"
        return f"rank {rank} {waits}, with {post}" if peer in awaited[1:3] else f"rank {rank} has {post}, and {waits}"


def check_table(table: Table) -> None:
    """Raise ScheduleError unless every action and every pair is well formed and in its place, and none is missing."""
    errors = _unknown_or_misplaced_action_errors, _chain_errors, _completeness_errors, _overlap_errors
    wrong = next(chain.from_iterable(errors_of(table) for errors_of in errors), None)
    if wrong is not None:
        raise ScheduleError(wrong)


def _unknown_or_misplaced_action_errors(table: Table) -> Iterator[str]:
    """Yield an error for each action whose stage, microbatch or slice does not exist, or is not on the rank of its stage."""
    placement, ranks, stages, microbatches = table.placement, table.ranks, table.num_stages, table.microbatches
    if not ranks or not stages or microbatches < 1:
        yield f"{table.name} is empty: {ranks} ranks, {stages} stages, {microbatches} microbatches"
    for stage, home in enumerate(placement):
        if not 0 <= home < ranks:
            yield f"{table.name} places stage {stage} on rank {home}; the ranks are 0 to {ranks - 1}"
    for rank, row in enumerate(table.actions):
        if _all_are_in_place(row, set(table.stages_of(rank)), table):
            continue
        for action in row:
            _, stage, microbatch, slice_ = action
            if not 0 <= stage < stages:
                yield f"rank {rank} has {action}; the stages are 0 to {stages - 1}"
            if not 0 <= microbatch < microbatches:
                yield f"rank {rank} has {action}; the microbatches are 0 to {microbatches - 1}"
            if not 0 <= slice_ < table.slices:
                yield f"rank {rank} has {action}; the slices are 0 to {table.slices - 1}"
            if placement[stage] != rank:
                yield f"a stage is on one rank: stage {stage} is on rank {placement[stage]}, and rank {rank} has {action}"


def _all_are_in_place(row: Sequence[Action], stages: set[int], table: Table) -> bool:
    """Return whether all actions of a rank exist and are of its `stages`: quickly, since a table may have millions of them."""
    if not row:
        return True
    _, of_stages, microbatches, slices = zip(*row, strict=True)
    return (
        stages.issuperset(of_stages)
        and 0 <= min(microbatches) <= max(microbatches) < table.microbatches
        and 0 <= min(slices) <= max(slices) < table.slices
    )


def _chain_errors(table: Table) -> Iterator[str]:
    """Yield an error for a teacher that does not end where the loss is, and for a frozen stage that a gradient passes."""
    placement, trained, name = table.placement, table.num_trained_stages, table.name
    if not 0 < trained <= table.num_stages or (table.teacher is not None and trained == table.num_stages):
        yield f"{name} has a teacher from stage {table.teacher} on, and stages 0 to {table.num_stages - 1}, the model's first"
    elif placement[-1] != placement[trained - 1]:
        yield (
            f"the teacher's last stage {table.num_stages - 1} is on rank {placement[-1]}, but the loss, which takes its "
            f"output, is on rank {placement[trained - 1]}, with stage {trained - 1}: place both on one rank"
        )
    if table.teacher is not None and table.slices > 1:
        yield f"{name} has {table.slices} slices and a teacher, whose tokens are not cut: use slices=1"
    for stage in sorted(table.forward_only):
        if not 0 <= stage < trained - 1:
            yield f"{name} has stage {stage} as a frozen one: only stages before the last, {trained - 1}, can be frozen"
        elif stage and stage - 1 not in table.forward_only:
            yield (
                f"stage {stage} of {name} owes no backward, but stage {stage - 1} needs a gradient from it: only the first "
                "stages can be frozen"
            )
    for rank, row in enumerate(table.actions if table.chains.forward_only else ()):
        for action in row:
            if action.kind is not Kind.F and action.stage in table.chains.forward_only:
                yield f"rank {rank} has {action}, but stage {action.stage} is frozen: it has F only"


def _completeness_errors(table: Table) -> Iterator[str]:
    """Yield an error unless every (stage, microbatch, slice) has its F once, and its B once or its I and W once.

    Frozen stages have F only.
    """
    parts = [{kind: set[int]() for kind in Kind} for _ in table.placement]  # stage, kind -> microbatch x K + slice
    slices = table.slices
    for row in table.actions:
        for kind, stage, microbatch, slice_ in row:
            parts[stage][kind].add(microbatch * slices + slice_)

    if sum(len(of_kind) for of_stage in parts for of_kind in of_stage.values()) < sum(map(len, table.actions)):
        action, times = Counter(chain.from_iterable(table.actions)).most_common(1)[0]
        yield f"rank {table.placement[action.stage]} has {action} {times} times; each action stands once"

    lacking = (action for stage, of_stage in enumerate(parts) for action in _missing_actions(stage, of_stage, table))
    if missing := [f"rank {table.placement[action.stage]} lacks {action}" for action in islice(lacking, 5)]:
        yield f"{table.name} is not complete: {', '.join(missing[:4])}{' and more' if missing[4:] else ''}"


def _missing_actions(stage: int, slices_by_kind: dict[Kind, set[int]], table: Table) -> Iterator[Action]:
    """Yield the actions that `stage` lacks. Raises ScheduleError for a backward that is there both in full and in halves."""
    forwards, full, inputs, weights = (slices_by_kind[kind] for kind in Kind)
    if stage in table.chains.forward_only:
        missing = set(range(table.microbatches * table.slices)) - forwards
        yield from (Action(Kind.F, stage, *divmod(part, table.slices)) for part in sorted(missing))
        return
    for part in sorted(full & (inputs | weights)):
        kinds = Kind.B, Kind.I if part in inputs else Kind.W
        full_backward, half = (Action(kind, stage, *divmod(part, table.slices)) for kind in kinds)
        raise ScheduleError(f"rank {table.placement[stage]} has {full_backward} and {half}: a full B is I and W at once")
    if inputs == weights and len(forwards) == len(full) + len(inputs) == table.microbatches * table.slices:
        return
    for part in range(table.microbatches * table.slices):
        halves = part in inputs or part in weights
        for kind in (Kind.F, Kind.I, Kind.W) if halves else (Kind.F, Kind.B):
            if part not in slices_by_kind[kind]:
                yield Action(kind, stage, *divmod(part, table.slices))


def _overlap_errors(table: Table) -> Iterator[str]:
    """Yield an error for each pair that is not adjacent or not a forward and a backward, and for an action in several pairs."""
    neighbours = {pair for row in table.actions for pair in pairwise(row)} if table.overlaps else set()
    for first, second in sorted(table.overlaps - neighbours, key=str):
        yield f"{first} and {second} are no pair: no rank has {second} right after {first}"
    for first, second in table.overlaps:
        if {first.kind, second.kind} not in ({Kind.F, Kind.B}, {Kind.F, Kind.I}):
            yield f"{first} and {second} are no pair: a pair is a forward and a backward, B or I"
    for action, times in Counter(chain.from_iterable(table.overlaps)).items():
        if times > 1:
            yield f"{action} is in {times} pairs; each action is in one at most"
