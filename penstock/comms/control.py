"""The ranks of a pipeline as one: they agree before data flows, and a failure on one ends the step on all.

The failure protocol: a rank that cannot go on writes a report to the store and closes its groups. That wakes every rank
that waits on it, which does the same, and so on; then each reads the reports (health/reports.py) and raises the same error.
A rank that is blamed by another and leaves no report is lost.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch

from penstock import torch_private
from penstock.comms.breaking import break_off
from penstock.comms.encoding import encoded, exchanged
from penstock.comms.groups import Groups, is_of_transport
from penstock.comms.health import reports
from penstock.comms.health.reports import Report
from penstock.comms.system import named, reason
from penstock.comms.topology import Topology, lost_or_silent
from penstock.errors import LostRankError, MismatchError, PenstockError, ResourceError

EXCHANGE_TAG, TRANSFER_TAG = 1, 2
WIDEST = 12  # numbers of a row


class WaitFailed(PenstockError):
    """A wait for another rank ended badly. Never leaves Penstock: it becomes what the reports say happened."""

    def __init__(self, what: str, peer: int | None, cause: BaseException) -> None:
        super().__init__(what)
        self.what, self.peer, self.cause = what, peer, cause


class Pending(NamedTuple):
    """A tensor on its way to or from another rank."""

    work: Any
    tensor: torch.Tensor  # which must stay, unchanged, until that is done
    peer: int
    what: str  # this rank is to do when it waits

    def wait(self) -> None:
        """Wait until it has arrived."""
        with failing(f"for rank {self.peer} {self.what}", self.peer):
            self.work.wait()


class failing:
    """Around operations of the control group: one that ends badly becomes a WaitFailed; `what` and `peer` as there."""

    def __init__(self, what: str, peer: int | None = None) -> None:
        self._what, self._peer = what, peer

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, RuntimeError):
            raise WaitFailed(self._what, self._peer, error) from error


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Around collectives of others, whose own errors stay what they are: the same for one that ends because a rank is lost."""
    try:
        yield
    except RuntimeError as error:
        if not is_of_transport(error):
            raise
        raise WaitFailed(what, None, error) from error


class Control:
    """The control group of one pipeline, or of several side by side.

    `beside` are process groups that others have made for these ranks. A failure breaks them off too, so that nobody waits
    there; they cannot be made again, and so it is the end.
    """

    def __init__(self, topology: Topology, name: str, beside: Sequence[Any] = ()) -> None:
        self.topology, self.name, self.beside = topology, name, beside
        self.alone = topology.world_size == 1
        self.generation = 0  # one more each time the groups had to be opened again
        self.groups: Groups | None = None
        self._group: Any = None
        self._peers = [rank for rank in range(topology.world_size) if rank != topology.rank]
        self._sending: list[Any] = []
        self._receiving: list[Any] = []
        self._lost: str | None = None

    def connect(self) -> Groups | None:
        """Open the groups if they are not open; None in a world of one.

        Raises LostRankError once a rank was lost, ResourceError if a rank cannot open them.
        """
        if self._lost:
            raise LostRankError(f"this pipeline ended when {self._lost}: start the ranks again")
        if self.groups is None and not self.alone:
            self.generation, what = self.generation + 1, "connect to the other ranks"
            self.groups = Groups(self.topology, f"{self.name}/{self.generation}", beside=self.beside)
            try:
                with failing(f"to {what}"), named(f"rank {self.topology.rank} could not {what}"):
                    self._group = self.groups.everyone
                    self._post_receives()
            except (ResourceError, WaitFailed) as error:
                self.fail(error)
        return self.groups

    def gather(self, row: Sequence[float], what: str) -> list[list[float]]:
        """Every rank's `row` of numbers, by rank. `what` says what the others are to do, should it fail: `to end the step`."""
        self.tell(row, what)
        return self.hear(what)

    def tell(self, row: Sequence[float], what: str) -> None:
        """The first half of `gather`: send this rank's `row`, at most WIDEST numbers, to every other, without waiting.

        A message to each and receives posted one exchange ahead make it one latency, whatever the number of ranks; Gloo's
        own all-gather goes around in a ring.
        """
        self.connect()
        self._told = [float(each) for each in row]
        if self.alone:
            return
        mine = torch.tensor([*self._told, *[0.0] * (WIDEST - len(row))], dtype=torch.float64, device="cpu")
        sent, self._sending = self._sending, []
        for number, peer in enumerate(self._peers):
            with failing(f"for rank {peer} {what}", peer):
                self._sending.append((self._group.send([mine], peer, EXCHANGE_TAG), mine))
                if sent:
                    sent[number][0].wait()  # long received
        self._heard, self._receiving = (self._rows, self._receiving), []
        self._post_receives()

    def hear(self, what: str) -> list[list[float]]:
        """The second half: wait for the others' rows."""
        if self.alone:
            return [self._told]
        rows, receiving = self._heard
        for peer, work in zip(self._peers, receiving, strict=True):
            with failing(f"for rank {peer} {what}", peer):
                if isinstance(work, RuntimeError):
                    raise work
                work.wait()
        heard = rows[:, : len(self._told)].tolist()
        heard[self.topology.rank] = self._told  # not into `rows`: it may be of an inference mode before
        return heard

    def _post_receives(self) -> None:
        """Post the receives of the next exchange; a peer that has ended meanwhile matters only if there is one."""
        self._rows = torch.zeros(self.topology.world_size, WIDEST, dtype=torch.float64, device="cpu")
        self._receiving = [self._post_receive(peer) for peer in self._peers]

    def _post_receive(self, peer: int) -> Any:
        try:
            return self._group.recv([self._rows[peer]], peer, EXCHANGE_TAG)
        except RuntimeError as error:
            return error

    def gather_objects(self, value: Any, what: str) -> list[Any]:
        """Every rank's `value`, by rank. Raises MismatchError where the first two words of `what` differ between ranks."""
        if self.alone:
            return [value]
        mine = encoded((what, value))
        sizes = [int(size) for (size,) in self.gather([mine.numel()], what)]
        with failing(f"for the other ranks {what}"):
            told = exchanged(mine, sizes, lambda rows, row: self._group.allgather([rows], [row]).wait())
        for rank, (other, _) in enumerate(told):
            if other.split()[:2] != told[0][0].split()[:2]:
                raise MismatchError(f"the ranks do different things: rank 0 is about {told[0][0]}, rank {rank} {other}")
        return [each for _, each in told]

    def send(self, tensor: torch.Tensor, peer: int, what: str) -> Pending:
        """Begin to send a tensor on the CPU to `peer`, which receives one of as many bytes; `what` as in `gather`."""
        return self._transfer("send", tensor, peer, what)

    def receive(self, tensor: torch.Tensor, peer: int, what: str) -> torch.Tensor:
        """`tensor`, filled with what `peer` sends."""
        self._transfer("recv", tensor, peer, what).wait()
        return tensor

    def _transfer(self, way: str, tensor: torch.Tensor, peer: int, what: str) -> Pending:
        self.connect()
        with failing(f"for rank {peer} {what}", peer):
            return Pending(getattr(self._group, way)([tensor], peer, TRANSFER_TAG), tensor, peer, what)

    def fail(self, error: BaseException) -> NoReturn:
        """End the step on every rank because of `error`; raises what happened, the same on every rank."""
        if broken := _of_device(error):
            self._lost = f"rank {self.topology.rank} has lost its GPU: {reason(broken)}"
            error = LostRankError(self._lost, [self.topology.rank])
        if self.alone or self.groups is None:  # there is nobody, or nobody any more, to tell
            raise error
        if self.groups.woken and isinstance(error, Exception) and not isinstance(error, WaitFailed):
            error = WaitFailed("for a rank that failed meanwhile", None, error)  # it computed on what never came
        groups, mine = self.groups, self._report(error)
        reports.publish(groups, mine)
        self.close()
        for group in self.beside:
            break_off(group)
        if self.beside:
            torch_private.forget_meshes()  # other meshes' tensors would wait in these groups
        if not isinstance(error, WaitFailed):
            self._lost = str(error) if self.beside else self._lost
            raise error
        verdict = reports.verdict(groups, *reports.read(groups, mine))
        if self.beside or isinstance(verdict, LostRankError):
            self._lost = str(verdict)
        raise verdict from (None if is_of_transport(error.cause) else error.cause)  # the transport's words help nobody

    def close(self) -> None:
        """Close the groups; the next `connect` opens new ones."""
        if self.groups is not None:
            self.groups.close()
        self.groups = self._group = None
        self._sending = []

    def _report(self, error: BaseException) -> Report:
        if not isinstance(error, WaitFailed):
            return reports.own_report(self.topology.rank, error)
        end = lost_or_silent(error.cause, self.topology.timeout)
        return Report(self.topology.rank, time.time(), None, error.what, error.peer, end)


def _of_device(error: BaseException | None) -> torch.AcceleratorError | None:
    """The error of the GPU that `error` began with (an assert in a kernel, an illegal address): it does no more then."""
    return error if error is None or isinstance(error, torch.AcceleratorError) else _of_device(error.__cause__)
