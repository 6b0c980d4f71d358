"""The proof: a table is complete, and its program runs to the end with nothing buffered - or what exactly is wrong.

The proof is an execution of the program on an abstract machine. Nothing is buffered: a transfer happens when its send
and its receive are both posted and every earlier transfer of its channel has happened. Whether the machine stops does not
depend on the order in which ranks are looked at (a step that can run stays able to run until it does), so one execution
decides for all. When it stops, every rank that is not done waits for exactly one other, and following them leads into the
circle that is reported.

Why this is enough for NCCL: each channel is a communicator and a stream of its own, on which operations run in the order
they were posted, each blocking that stream - and only that stream - until its partner has been posted too. That is the
machine above: the compute stream waits for receives it needs (`needs`) and never for a send. So a proved program cannot
hang there, as long as all of a rank's channels have room to be resident on the GPU at once (a few blocks each).
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import ScheduleError
from penstock.schedule.actions import Action, Kind, Schedule, dependencies
from penstock.schedule.events import peaks_in_flight
from penstock.schedule.program import Program, Step, Transfer, lower

SENDS = ("async", "blocking")


@dataclass(frozen=True)
class Proof:
    """That a table was proved, and what was counted on the way."""

    name: str
    ranks: int
    stages: int
    microbatches: int
    actions: int
    transfers: int
    peak_in_flight: tuple[int, ...]  # per rank
    sends: str

    def __str__(self) -> str:
        return (
            f"proved: {self.name} over {self.ranks} ranks, {self.stages} stages, {self.microbatches} microbatches: "
            f"{self.actions} actions complete, {self.transfers} transfers without a circle ({self.sends} sends), "
            f"in flight {'/'.join(map(str, self.peak_in_flight))}"
        )


def verify(schedule: Schedule, max_in_flight: int | Sequence[int] | None = None, sends: str = "async") -> Proof:
    """Prove that `schedule` is complete, keeps its memory bound and cannot stop; raises ScheduleError with the reason.

    `max_in_flight`: the most (stage, microbatch) activations a rank may hold, one number or one for each rank.
    `sends`: `async` (compute goes on while a send waits for its receive, receives are posted ahead), or `blocking`
    (a rank waits for each send before its next action, and posts a receive, and those of its channel that come before it,
    when it needs it).
    """
    if sends not in SENDS:
        raise ScheduleError(f"sends={sends!r}: use 'async' or 'blocking'")
    _check_places(schedule)
    _check_complete(schedule)
    peaks = peaks_in_flight(schedule.actions)
    _check_memory(schedule, peaks, max_in_flight)
    program = lower(schedule, ahead=0) if sends == "blocking" else lower(schedule)
    prove(program, blocking=sends == "blocking")
    return Proof(
        name=schedule.name,
        ranks=schedule.ranks,
        stages=schedule.stages,
        microbatches=schedule.microbatches,
        actions=sum(map(len, schedule.actions)),
        transfers=sum(map(len, program.channels.values())),
        peak_in_flight=peaks,
        sends=sends,
    )


def _check_places(schedule: Schedule) -> None:
    """Every action names a stage and a microbatch that exist, on the rank where the stage lives."""
    if not schedule.ranks or not schedule.stages or schedule.microbatches < 1:
        raise ScheduleError(
            f"{schedule.name} is empty: {schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} microbatches"
        )
    for stage, home in enumerate(schedule.placement):
        if not 0 <= home < schedule.ranks:
            raise ScheduleError(f"{schedule.name} places stage {stage} on rank {home}; the ranks are 0 to {schedule.ranks - 1}")
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if not 0 <= action.stage < schedule.stages:
                raise ScheduleError(f"rank {rank} has {action}; the stages are 0 to {schedule.stages - 1}")
            if not 0 <= action.microbatch < schedule.microbatches:
                raise ScheduleError(f"rank {rank} has {action}; the microbatches are 0 to {schedule.microbatches - 1}")
            if schedule.placement[action.stage] != rank:
                home = schedule.placement[action.stage]
                raise ScheduleError(f"rank {rank} has {action}, but stage {action.stage} lives on rank {home}")


def _check_complete(schedule: Schedule) -> None:
    """Every (stage, microbatch) has its F once, and its B once or its I and W once."""
    count = Counter(action for row in schedule.actions for action in row)
    for action, times in count.items():
        if times > 1:
            rank = schedule.placement[action.stage]
            raise ScheduleError(f"rank {rank} has {action} {times} times; each action stands once")
    missing = []
    for stage, rank in enumerate(schedule.placement):
        for microbatch in range(schedule.microbatches):
            forward, full, inputs, weights = (Action(kind, stage, microbatch) in count for kind in Kind)
            if full and (inputs or weights):
                half = Action(Kind.I if inputs else Kind.W, stage, microbatch)
                raise ScheduleError(
                    f"rank {rank} has {Action(Kind.B, stage, microbatch)} and {half}: a full B is I and W at once"
                )
            wanted = [(forward, Kind.F)]
            wanted += [(inputs, Kind.I), (weights, Kind.W)] if inputs or weights else [(full, Kind.B)]
            missing += [f"rank {rank} lacks {Action(kind, stage, microbatch)}" for there, kind in wanted if not there]
            if len(missing) > 4:
                break
    if missing:
        more = " and more" if len(missing) > 4 else ""
        raise ScheduleError(f"{schedule.name} is not complete: {', '.join(missing[:4])}{more}")


def _check_memory(schedule: Schedule, peaks: Sequence[int], bound: int | Sequence[int] | None) -> None:
    if bound is None:
        return
    bounds = [bound] * schedule.ranks if isinstance(bound, int) else list(bound)
    if len(bounds) != schedule.ranks:
        raise ScheduleError(f"max_in_flight has {len(bounds)} numbers for {schedule.ranks} ranks")
    for rank, (peak, most) in enumerate(zip(peaks, bounds, strict=True)):
        if peak > most:
            raise ScheduleError(f"rank {rank} holds {peak} activations in flight, max_in_flight allows {most}")


def prove(program: Program, blocking: bool = False) -> None:
    """Run `program` on the abstract machine. Raises ScheduleError with the circle if it stops."""
    machine = _Machine(program, blocking)
    machine.run()
    stopped = [rank for rank, steps in enumerate(program.steps) if machine.at[rank] < len(steps)]
    if stopped:
        raise ScheduleError(f"{program.schedule.name} deadlocks: " + "; ".join(machine.circle(stopped[0])))


class _Machine:
    """Ranks that run their steps in order, and channels whose transfers happen in order when both ends are posted."""

    def __init__(self, program: Program, blocking: bool) -> None:
        self.program, self.blocking, self.stages = program, blocking, program.schedule.stages
        self.at = [0] * len(program.steps)  # rank -> index of the step it is at
        self.asked = [-1] * len(program.steps)  # rank -> the last step whose receives it has posted
        self.sending: list[Transfer | None] = [None] * len(program.steps)  # rank -> the send it blocks on
        self.done: set[Action] = set()
        self.posted: tuple[set[Transfer], set[Transfer]] = (set(), set())  # sends, receives
        self.arrived: set[Transfer] = set()
        self.front = dict.fromkeys(program.channels, 0)  # channel -> its next transfer
        self.ready = deque(range(len(program.steps)))

    def run(self) -> None:
        """Let every rank go on until none can."""
        while self.ready:
            rank = self.ready.popleft()
            while self.at[rank] < len(self.program.steps[rank]) and self._advance(rank):
                pass

    def _advance(self, rank: int) -> bool:
        """Run the step `rank` is at, if it can run now."""
        step = self.program.steps[rank][self.at[rank]]
        if self.sending[rank] in self.arrived:
            self.sending[rank] = None
        if self.sending[rank] is not None:
            return False
        if self.asked[rank] < self.at[rank]:
            self.asked[rank] = self.at[rank]
            for transfer in step.receives:
                self._post(1, transfer)
        if self._blocker(step, rank) is not None:
            return False
        self.done.add(step.action)
        self.at[rank] += 1
        if step.sends is not None:
            self.sending[rank] = step.sends if self.blocking else None
            self._post(0, step.sends)
        return True

    def _post(self, end: int, transfer: Transfer) -> None:
        self.posted[end].add(transfer)
        ends = transfer.source, transfer.destination
        queue = self.program.channels[ends]
        sends, receives = self.posted
        while (front := self.front[ends]) < len(queue) and queue[front] in sends and queue[front] in receives:
            self.arrived.add(queue[front])
            self.front[ends] += 1
            self.ready.extend(ends)

    def _blocker(self, step: Step, rank: int) -> Action | Transfer | None:
        """The first thing `step` waits for: a transfer, or an action of its own rank."""
        if step.needs is not None and step.needs not in self.arrived:
            return step.needs
        for alternatives in dependencies(step.action, self.stages):
            home = self.program.schedule.placement[alternatives[0].stage]
            if home == rank and self.done.isdisjoint(alternatives):
                return next(action for action in self.program.schedule.actions[rank] if action in alternatives)
        return None

    def circle(self, rank: int) -> list[str]:
        """The circle that `rank` is in or runs into, told rank by rank."""
        seen: dict[int, str] = {}
        while rank not in seen:
            seen[rank], rank = self._wait_of(rank)
        told = list(seen)
        return [seen[each] for each in told[told.index(rank) :]]

    def _wait_of(self, rank: int) -> tuple[str, int]:
        """Why `rank` does not go on, in words, and the rank it waits for."""
        step = self.program.steps[rank][self.at[rank]]
        if (transfer := self.sending[rank]) is not None:
            peer = transfer.destination
            return f"rank {rank} waits for rank {peer} to receive the {transfer}, before {step.action}", peer
        blocker = self._blocker(step, rank)
        if isinstance(blocker, Transfer):
            return f"rank {rank} waits for the {blocker} from rank {blocker.source}, before {step.action}", blocker.source
        return f"rank {rank} has {step.action} before {blocker}, which it needs", rank
