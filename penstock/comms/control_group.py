"""All ranks make the same calls, and an error on one rank is raised on all.

All pipelines share one control group. Ranks exchange rows of numbers there. Each row begins with the name of its call. So if a
rank saves while others step, or steps another pipeline, the next row shows it.

    | name of the call, 48 bytes | up to 16 numbers | up to 1 KB: a value, compressed |

Rows have one length, since their receives are posted before they are sent. A value that fits into a row takes one exchange. A
larger one takes a second: the first tells its size.

When rank 2 fails:

    rank 2             writes its status into the store, `raised` (status.py), and closes its groups
    rank 1, 3          their waits for rank 2 end: they write `waited`, and close their groups
    rank 0             its wait for rank 1 ends: it does the same
    rank 0, 1, 3       read statuses until one is `raised`, and raise that error

A rank that others wait for, and that writes no status, is lost.
"""

import itertools
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from penstock import torch_private
from penstock.comms.abort import abort_group
from penstock.comms.encoding import all_gather_encoded, compress, decompress, encode, tensor_bytes, tensor_of_bytes
from penstock.comms.process_groups import ProcessGroups, call_unprofiled
from penstock.comms.status import explain_failure, publish, status_of_error
from penstock.comms.system import explain_error
from penstock.comms.topology import Topology
from penstock.comms.wait_errors import WaitError, convert_errors, is_transport_error
from penstock.errors import LostRankError, MismatchError, NonFiniteError, PenstockError, ResourceError

ROW_TAG, TRANSFER_TAG = 1, 2
MAX_ROW_NUMBERS = 16
MAX_ROW_BYTES = 1024  # of a compressed value in a row
CALL_NAME = struct.Struct("6d")  # the name of a call, 48 bytes, as the first numbers of a row
NOT_INSIDE = "one call at a time, and none from a forward, a loss or a hook"
OF_PIPELINE = " of pipeline "  # in the name of a call: between the method and the pipeline's number


class PendingTransfer(NamedTuple):
    """A tensor on its way to or from another rank."""

    work: dist.Work
    tensor: torch.Tensor  # must stay, unchanged, until `work` is done
    peer: int
    purpose: str

    def wait(self) -> None:
        """Wait until the tensor has arrived. Raises WaitError."""
        with convert_errors(f"for rank {self.peer} {self.purpose}", self.peer):
            self.work.wait()


Rows = tuple[torch.Tensor, list[dist.Work | RuntimeError]]  # of an exchange, by rank; their receives, or why there is none
_NO_ROWS: Rows = torch.empty(0, device="cpu"), []
_groups_count = itertools.count()  # numbers the shared control groups of this process, the same on every rank


def shared_control_group(topology: Topology) -> "ControlGroup":
    """Return the control group of all ranks, for all pipelines; a new one for another topology, and after a rank was lost."""
    if not isinstance(topology, Topology):
        raise MismatchError(f"topology= takes what ps.comms.init_distributed() returns, got {topology!r}")
    if topology.world_size == 1:
        return ControlGroup(topology, "alone")

    shared = topology.context.control_group
    if not isinstance(shared, ControlGroup) or shared.rank_was_lost or not shared.has_topology(topology):
        topology.context.control_group = shared = ControlGroup(topology, f"penstock/{next(_groups_count)}")
    return shared


class ControlGroup:
    """Exchanges small values between all ranks, and raises an error of one rank on all.

    Pipelines of a mesh also wait in torch's process groups. A failure in one of their calls aborts these groups too. They
    cannot be created again, so the pipeline has ended then.
    """

    def __init__(self, topology: Topology, name: str) -> None:
        self.topology, self.name = topology, name
        self.is_single = topology.world_size == 1
        self._peers = [rank for rank in range(topology.world_size) if rank != topology.rank]

        self.groups: ProcessGroups | None = None  # None while they are closed
        self.times_closed = 0  # how often a failure has closed them
        self.rank_was_lost = False
        self._lost_reason = ""  # the text of the error by which it was lost

        self._mesh_groups: dict[int, Sequence[Any]] = {}  # pipeline -> torch's process groups of its mesh
        self._active_mesh_groups: dict[int, Sequence[Any]] = {}  # the same for pipelines that ranks are in a call of
        self._aborted_mesh_groups: dict[int, Sequence[Any]] = {}  # pipeline -> its mesh's groups, once aborted
        self.ended_pipelines: dict[int, str] = {}  # pipeline whose mesh groups are aborted -> the error's text

        self._call, self._call_lock = "", threading.RLock()
        self._runs_actions = False  # of a step or an evaluation
        self._call_has_begun = False  # a row of this call has arrived from every rank

        self._group: Any = None  # the Gloo group of all ranks
        self._pending_sends: list[tuple[dist.Work, torch.Tensor]] = []  # the sends of the last row
        self._row: list[float] = []  # this rank's numbers in the current exchange
        self._row_value = b""  # and its value
        self._arriving = _NO_ROWS  # its rows by rank, the works of its receives
        self._posted = _NO_ROWS  # the same for the next exchange

    def has_topology(self, topology: Topology) -> bool:
        """Return whether this group has been opened with `topology`, and its store."""
        return self.topology == topology and self.topology.store is topology.store

    @contextmanager
    def collective_call(
        self, name: str, pipeline: int | None = None, announces: bool = True, runs_actions: bool = False
    ) -> Iterator["ControlGroup"]:
        """Run the block as one call of all ranks: if a rank makes another call, or the block raises, all raise the same error.

        `name`: of the call, as `step()`. `pipeline`: the pipeline's number, if the call is a method of one.
        `announces`: exchange a row first, to check that all ranks make this call. False if the block itself begins with an
        exchange. `runs_actions`: ranks do different things in the block. No other call may be made in it.

        Yields this group. Raises PenstockError for a call in such a block, and in another call of the same pipeline.
        """
        if not self._call_lock.acquire(blocking=False):
            raise PenstockError("these ranks are in a call of another thread: make one call at a time")
        running, _, number = self._call.partition(OF_PIPELINE)
        is_same_pipeline = number == str(pipeline)
        if self._runs_actions or is_same_pipeline:  # other ranks are in other actions of it, and would not come to this call
            self._call_lock.release()
            which = "this" if is_same_pipeline else "another"
            raise PenstockError(f"{name} was called while {running} of {which} pipeline runs: {NOT_INSIDE}")
        outer_call, self._call = self._call, name if pipeline is None else f"{name}{OF_PIPELINE}{pipeline}"
        self._runs_actions = runs_actions
        self._call_has_begun = bool(outer_call)
        outer_mesh_groups = dict(self._active_mesh_groups)
        self._include_mesh_groups_in_abort([pipeline])

        try:
            if announces:
                self.all_gather_row((), f"to call {name}")
            yield self
        except NonFiniteError:  # raised by all ranks already, at the end of the step
            raise
        except BaseException as error:
            self.raise_error_on_all_ranks(error)
        finally:
            self._call, self._runs_actions = outer_call, False
            self._active_mesh_groups.clear()
            self._active_mesh_groups.update(outer_mesh_groups)
            self._call_lock.release()

    def add_mesh_groups(self, pipeline: int, groups: Sequence[Any]) -> None:
        """Register torch process groups in which ranks may wait during calls of `pipeline`, this one included.

        Raises MismatchError for groups of a mesh that a failed call has aborted.
        """
        for ended_pipeline, ended_groups in self._aborted_mesh_groups.items():
            if any(group is ended for group in groups for ended in ended_groups):
                raise MismatchError(
                    f"this mesh ended when {self.ended_pipelines[ended_pipeline]}: make another, mesh = ps.comms.init_mesh(..)"
                )
        if groups:
            self._mesh_groups[pipeline] = groups
            self._include_mesh_groups_in_abort([pipeline])

    def _include_mesh_groups_in_abort(self, pipelines: Iterable[int | None]) -> None:
        for pipeline in pipelines:
            if pipeline in self._mesh_groups:
                self._active_mesh_groups[pipeline] = self._mesh_groups[pipeline]

    def open_groups(self) -> ProcessGroups | None:
        """Open the process groups unless they are open, and return them; None in a world of one.

        Raises LostRankError once a rank was lost, ResourceError if a rank cannot open them.
        """
        if self.rank_was_lost:
            raise LostRankError(f"this pipeline ended when {self._lost_reason}: start the ranks again")
        if self.groups is None and not self.is_single:
            purpose = "connect to the other ranks"
            self.groups = ProcessGroups(self.topology, f"{self.name}/{self.times_closed}", self._active_mesh_groups)
            try:
                with convert_errors(f"to {purpose}", failure=f"rank {self.topology.rank} could not {purpose}"):
                    self._group = self.groups.world_group
                    call_unprofiled(self._post_receives)
            except (ResourceError, WaitError) as error:
                self.raise_error_on_all_ranks(error)
        return self.groups

    def all_gather_row(self, row: Sequence[float], purpose: str) -> list[list[float]]:
        """Return every rank's `row` of at most MAX_ROW_NUMBERS numbers, by rank.

        `purpose`: what this rank waits for the others to do, as text for an error: `to end the step`.
        """
        self.begin_all_gather_row(row, purpose)
        return self.finish_all_gather_row(purpose)

    def begin_all_gather_row(self, row: Sequence[float], purpose: str, value: bytes = b"") -> None:
        """Send this rank's `row` to every other rank, without waiting. `value`: of at most MAX_ROW_BYTES, from `compress`.

        Each peer gets one message, and its receive was posted in the last exchange. So an exchange takes one latency, whatever
        the number of ranks; Gloo's all-gather takes several, as it goes around in a ring.

            this exchange:   send the row to all; `finish_all_gather_row` waits for receives posted in the last exchange
            the next one:    its receives are posted now, before any rank can send for them
        """
        self.open_groups()
        self._row, self._row_value = list(map(float, row)), value
        if self.is_single:
            return
        self._row = [*_call_name_as_numbers(self._call), *self._row]

        # A longer message would end the process that receives it.
        assert len(row) <= MAX_ROW_NUMBERS
        assert len(value) <= MAX_ROW_BYTES
        message = tensor_of_bytes(_row_format(len(row)).pack(*self._row, value)).view(torch.float64)
        call_unprofiled(self._begin_exchange, message, purpose)

    def _begin_exchange(self, message: torch.Tensor, purpose: str) -> None:
        """Send `message` to all peers, and post the receives of the next exchange."""
        last_sent, self._pending_sends = self._pending_sends, []
        for number, peer in enumerate(self._peers):
            try:
                self._pending_sends.append((self._group.send([message], peer, ROW_TAG), message))
                if last_sent:
                    last_sent[number][0].wait()  # returns at once: the peer had posted its receive one exchange before
            except RuntimeError:
                with convert_errors(f"for rank {peer} {purpose}", peer):
                    raise

        self._arriving, self._posted = self._posted, _NO_ROWS
        self._post_receives()

    def finish_all_gather_row(self, purpose: str) -> list[list[float]]:
        """Wait for the other ranks' rows, and return all of them. Raises MismatchError if a row belongs to another call."""
        if self.is_single:
            return [self._row]

        rows, receives = self._arriving
        try:
            for peer, work in zip(self._peers, receives, strict=True):
                if self.groups is not None and not self._call_has_begun:
                    self.groups.awaited = peer, purpose
                try:
                    if isinstance(work, RuntimeError):
                        raise work
                    work.wait()
                except RuntimeError:
                    with convert_errors(f"for rank {peer} {purpose}", peer):
                        raise
            self._call_has_begun = True
        except WaitError:
            self._include_mesh_groups_in_abort(map(_pipeline_number, rows.tolist()))  # of the rows that have arrived
            raise
        finally:
            if self.groups is not None:
                self.groups.awaited = None

        all_rows = rows[:, : len(self._row)].tolist()
        all_rows[self.topology.rank] = self._row  # not written into `rows`, which may be an inference tensor
        if any(row[:CALL_NAME_NUMBERS] != self._row[:CALL_NAME_NUMBERS] for row in all_rows):
            self._include_mesh_groups_in_abort(map(_pipeline_number, all_rows))
            raise MismatchError(describe_different_calls(list(map(_call_name, all_rows))))
        return [row[CALL_NAME_NUMBERS:] for row in all_rows]

    def value_in_row(self, rank: int) -> bytes:
        """Return the value that came with the last row of `rank`, for `decompress`; empty if none did."""
        if rank == self.topology.rank:
            return self._row_value
        data = tensor_bytes(self._arriving[0][rank])[-MAX_ROW_BYTES:]
        return data if data[0] else b""  # no compressed value begins with 0

    def _post_receives(self) -> None:
        """Post the receives of the next exchange. An error is raised only by that exchange: a peer may have finished."""
        rows = torch.zeros(self.topology.world_size, ROW_LENGTH, dtype=torch.float64, device="cpu")
        self._posted = rows, [self._post_receive(rows, peer) for peer in self._peers]

    def _post_receive(self, rows: torch.Tensor, peer: int) -> dist.Work | RuntimeError:
        """Post a receive into the row of `peer`; return its work, or the RuntimeError that it raised."""
        try:
            return self._group.recv([rows[peer]], peer, ROW_TAG)
        except RuntimeError as error:
            return error

    def all_gather_value(self, value: Any, purpose: str) -> list[Any]:
        """Return every rank's `value`, by rank. `purpose` as in `all_gather_row`."""
        if self.is_single:
            return [value]
        encoded = encode(value)
        self.begin_all_gather_row([len(encoded)], purpose, compress(encoded, MAX_ROW_BYTES))
        sizes = [int(size) for (size,) in self.finish_all_gather_row(purpose)]
        values = [self.value_in_row(rank) for rank in range(len(sizes))]
        if all(values):
            return list(map(decompress, values))

        tensor = tensor_of_bytes(encoded)
        with convert_errors(f"for the other ranks {purpose}"):
            return all_gather_encoded(tensor, sizes, lambda rows, row: self._group.allgather([rows], [row]).wait())

    def send(self, tensor: torch.Tensor, peer: int, purpose: str) -> PendingTransfer:
        """Begin to send a CPU tensor to `peer`, which receives one of the same size in bytes."""
        return self._transfer("send", tensor, peer, purpose)

    def receive(self, tensor: torch.Tensor, peer: int, purpose: str) -> torch.Tensor:
        """Fill `tensor` with what `peer` sends, and return it."""
        self._transfer("recv", tensor, peer, purpose).wait()
        return tensor

    def _transfer(self, operation: str, tensor: torch.Tensor, peer: int, purpose: str) -> PendingTransfer:
        self.open_groups()
        with convert_errors(f"for rank {peer} {purpose}", peer):
            return PendingTransfer(getattr(self._group, operation)([tensor], peer, TRANSFER_TAG), tensor, peer, purpose)

    def raise_error_on_all_ranks(self, error: BaseException) -> NoReturn:
        """End the call on every rank because of `error` on this one, and raise the same error on all: see the module's text."""
        if device_error := _find_device_error(error):
            text = f"rank {self.topology.rank} has lost its GPU: {explain_error(device_error)}"
            error = LostRankError(text, [self.topology.rank])
            self._lost_reason, self.rank_was_lost = str(error), True
        if self.is_single or self.groups is None:  # no other rank waits
            raise error
        if self.groups.aborted and isinstance(error, Exception) and not isinstance(error, WaitError):
            # An aborted receive has left its tensor unfilled: this error follows from that.
            error = WaitError("for a rank that failed meanwhile", None, error)

        if isinstance(error, WaitError):
            self.topology.context.exit_if_launcher_is_gone()
        groups, status = self.groups, status_of_error(self.topology.rank, error, self.topology.timeout, self.topology.store)
        publish(groups.store, status)
        self._close_groups()
        if not isinstance(error, WaitError):
            self._note_failure(error)
            raise error

        diagnosis = explain_failure(self.topology.store, groups.store, groups.ranks, status)
        self.rank_was_lost = self.rank_was_lost or isinstance(diagnosis, LostRankError)
        self._note_failure(diagnosis)
        raise diagnosis from (None if is_transport_error(error.cause) else error.cause)  # whose text helps no user

    def _note_failure(self, error: BaseException) -> None:
        """Keep the text of `error` if a rank was lost, and for the pipelines whose mesh groups were aborted."""
        self._lost_reason = self._lost_reason or (str(error) if self.rank_was_lost else "")
        self.ended_pipelines.update({pipeline: str(error) for pipeline, why in self.ended_pipelines.items() if not why})

    def _close_groups(self) -> None:
        """Close the groups, and abort the mesh groups in which ranks may wait. The next `open_groups` opens new groups."""
        if self.groups is not None:
            self.groups.close()
        self.groups = self._group = None
        self.times_closed += 1
        self._pending_sends = []

        for pipeline, groups in self._active_mesh_groups.items():
            for group in groups:
                abort_group(group)
            self.ended_pipelines[pipeline], self._aborted_mesh_groups[pipeline] = "", groups
            self._mesh_groups.pop(pipeline, None)
        if self._active_mesh_groups:
            torch_private.clear_dtensor_caches()  # they may have these groups, for tensors of later meshes


def _find_device_error(error: BaseException | None) -> torch.AcceleratorError | None:
    """Return the GPU's error (an assert in a kernel, an illegal address) among `error` and its causes, or None."""
    return error if error is None or isinstance(error, torch.AcceleratorError) else _find_device_error(error.__cause__)


@lru_cache(64)
def _call_name_as_numbers(name: str) -> tuple[float, ...]:
    """Return the name of a call, cut at 48 bytes, as the first numbers of a row."""
    return CALL_NAME.unpack(name.encode()[: CALL_NAME.size].ljust(CALL_NAME.size))


CALL_NAME_NUMBERS = len(_call_name_as_numbers(""))
ROW_LENGTH = CALL_NAME_NUMBERS + MAX_ROW_NUMBERS + MAX_ROW_BYTES // 8  # of float64


@lru_cache(MAX_ROW_NUMBERS + 1)
def _row_format(num_numbers: int) -> struct.Struct:
    """Return the layout of a row with this many numbers, in the order of this machine's bytes."""
    unused = 8 * (MAX_ROW_NUMBERS - num_numbers)
    return struct.Struct(f"{CALL_NAME_NUMBERS + num_numbers}d{unused}x{MAX_ROW_BYTES}s")


def _call_name(row: Sequence[float]) -> str:
    """Return the name of the call that a row belongs to; empty if the row has not arrived."""
    return CALL_NAME.pack(*row[:CALL_NAME_NUMBERS]).decode(errors="replace").strip(" \0")


def _pipeline_number(row: Sequence[float]) -> int | None:
    number = _call_name(row).partition(OF_PIPELINE)[2]
    return int(number) if number else None


def describe_different_calls(calls: Sequence[str]) -> str:
    """Return the error's text for ranks that make different `calls` (names, by rank)."""
    parts = [call.partition(OF_PIPELINE) for call in calls]
    pipelines = {number for _, _, number in parts if number}
    ranks_of_call: dict[str, list[str]] = {}
    for rank, (call, (method, _, _)) in enumerate(zip(calls, parts, strict=True)):
        ranks_of_call.setdefault(call if len(pipelines) > 1 else method, []).append(str(rank))

    listed = ", ".join(
        f"rank{'s' * (len(ranks) > 1)} {'/'.join(ranks)} call{'s' * (len(ranks) == 1)} {call}"
        for call, ranks in ranks_of_call.items()
    )
    note = " (pipelines are numbered as they were built)" if len(pipelines) > 1 else ""
    hint = "all ranks must make the same calls in the same order, none behind `if rank == 0:`"
    return f"the ranks do different things: {listed}{note}: {hint}"
