"""A table from a priority: ranks are simulated, and a free rank runs the first of its ready actions.

Each rank may run, of every stage and kind, only the next microbatch, so that gradients are summed in the microbatches' order.
A limit on activations cannot stop the ranks for ever: a forward runs only if afterwards the microbatches in flight can still
end one after the other, the oldest first, within the limit (the banker's algorithm: microbatches are its customers). The
oldest has run at least the forwards of any later one, so no other order could succeed where this one fails.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

from penstock.errors import ScheduleError, is_whole_number
from penstock.schedule.catalog import MAX_CELLS
from penstock.schedule.schedule import Placement, Schedule, from_rows
from penstock.schedule.table import Action, Kind, named_placement, pause_garbage_collection, receiving_stages
from penstock.timing.costs import Costs
from penstock.timing.events import Channel

STAGES_PER_RANK = {"loop": 1, "V": 2}  # if `stages_per_rank` is not given


class RankProgress(NamedTuple):
    """What a rank has run when it chooses its next action."""

    rank: int
    time: float  # in the unit of the costs
    in_flight: int  # activations of a stage and a microbatch: forward run, backward (B or W) not yet
    last_action: Action | None  # None: it has run nothing


Priority = Callable[[Action, RankProgress], Any]


@pause_garbage_collection()
def list_schedule(
    placement: Placement,
    priority: Priority,
    *,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None = None,
    limit: int | Sequence[int] | None = None,
    costs: Costs | None = None,
    split_backwards: bool = False,
    name: str | None = None,
) -> Schedule:
    """Return the table in which every free rank runs, of its actions that are ready, the one with the smallest `priority`.

    An action is ready when its inputs have arrived, at the times of `simulate`, and it is the next microbatch of its kind on
    its stage. A rank with a ready action never waits for a better one.

    `placement`: `loop` (stage s on rank s mod P), `V` (down the ranks and back up, repeatedly), or the rank of every stage.
    `priority(action, progress)`: called for each ready action (`action.kind`, `.stage`, `.microbatch`) with the progress of
    its rank (`.rank`, `.time`, `.in_flight`, `.last_action`). Returns a number, or a tuple of them; the smallest goes first.
    Of equal ones the lowest microbatch goes first, then the lowest stage.
    `ranks`, `microbatches`: P and M.
    `stages_per_rank`: V, of `loop` (1 if not given) or `V` (2).
    `limit`: the most activations, of a stage and a microbatch, in flight on a rank: a number, or one for each rank. It never
    causes a deadlock: a forward runs only if all that is in flight can still end. It must be at least the number of stages on
    the rank, since one microbatch holds an activation of each.
    `costs`: of actions and messages; by default F = I = W = 1, and messages take no time.
    `split_backwards`: actions are F, I and W instead of F and B.
    `name`: of the table; by default that of `priority`.

    Raises ScheduleError for a limit that is too small, with the smallest that works; for priorities that cannot be ordered;
    for a rank without a stage; and for costs as `simulate`.

        def backward_first(action, progress):
            return action.kind is Kind.F

        list_schedule("loop", backward_first, ranks=4, microbatches=8, limit=[4, 3, 2, 1]).actions
        # those of build("1f1b", ranks=4, microbatches=8)
    """
    for count_name, count in {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": stages_per_rank}.items():
        if count is not None and not is_whole_number(count, 1):
            raise ScheduleError(f"{count_name}={count!r} of a list schedule: use a whole number of 1 or more")
    if name is None:
        rule_name = getattr(priority, "__name__", "<lambda>")
        name = "list-schedule" if rule_name == "<lambda>" else rule_name
    homes = _ranks_of_stages(placement, ranks, stages_per_rank)
    if len(homes) * microbatches > MAX_CELLS:
        raise ScheduleError(f"{name} has {len(homes)} stages x {microbatches} microbatches: give {MAX_CELLS:,} at most")
    limits = _limits_by_rank(limit, homes, ranks)
    scheduler = _ListScheduler(name, homes, ranks, microbatches, priority, limits, costs or Costs(), split_backwards)
    scheduler.run()
    return from_rows(name, scheduler.rows, homes)


def _ranks_of_stages(placement: Placement, ranks: int, stages_per_rank: int | None) -> tuple[int, ...]:
    """Return stage -> rank. Raises ScheduleError for a placement that no pipeline of these ranks can have."""
    if isinstance(placement, str):
        return named_placement(placement, ranks * (stages_per_rank or STAGES_PER_RANK.get(placement, 1)), ranks)
    homes = tuple(placement or ())
    if stages_per_rank is not None and homes:
        raise ScheduleError("the placement has the rank of every stage: leave out stages_per_rank")
    for rank in range(ranks):
        if rank not in homes:
            raise ScheduleError(f"the placement {list(homes)} has no stage on rank {rank} of {ranks}: give each rank a stage")
    for stage, rank in enumerate(homes):
        if rank not in range(ranks):
            raise ScheduleError(f"the placement has stage {stage} on rank {rank!r}: use ranks from 0 to {ranks - 1}")
    return homes


def _limits_by_rank(limit: int | Sequence[int] | None, homes: Sequence[int], ranks: int) -> list[int] | None:
    """Return the limit of each rank. Raises ScheduleError if one is below the number of stages on its rank."""
    if limit is None:
        return None
    limits = list(limit) if isinstance(limit, Sequence) else [limit] * ranks
    if len(limits) != ranks:
        raise ScheduleError(f"limit has {len(limits)} numbers for {ranks} ranks: give one number, or one for each rank")
    for rank, max_in_flight in enumerate(limits):
        stages = homes.count(rank)
        if not is_whole_number(max_in_flight, stages):
            holds = f"one microbatch holds {stages} activation{'s' * (stages > 1)} on rank {rank}"
            raise ScheduleError(f"limit={max_in_flight!r} is too small on rank {rank}, since {holds}: use {stages} or more")
    return [int(max_in_flight) for max_in_flight in limits]


class _ListScheduler:
    """All ranks over time: the actions that each has run, and the inputs that have arrived."""

    def __init__(
        self,
        name: str,
        homes: tuple[int, ...],
        ranks: int,
        microbatches: int,
        priority: Priority,
        limits: list[int] | None,
        costs: Costs,
        split_backwards: bool,
    ) -> None:
        self.name, self.homes, self.priority, self.microbatches = name, homes, priority, microbatches
        self.backward = Kind.I if split_backwards else Kind.B
        self.receivers = receiving_stages(len(homes), costs.skips)
        self.times = costs.action_costs_by_microbatch(len(homes), microbatches)
        self.message_factors = costs.factors_by_microbatch(microbatches)
        self.message_costs, self.channels = costs.message_costs(len(homes)), defaultdict[tuple[int, int], Channel](Channel)
        self.activations = None if limits is None else _Activations(homes, limits)

        kinds = (Kind.F, Kind.I, Kind.W) if split_backwards else (Kind.F, Kind.B)
        self.next_actions = [  # rank -> (stage, kind) -> its next microbatch
            {(stage, kind): 0 for stage, home in enumerate(homes) if home == rank for kind in kinds} for rank in range(ranks)
        ]
        self.num_inputs = {  # of an action: kind -> stage -> number of results that it waits for
            Kind.F: [len(senders) for senders in self.receivers[Kind.B]],
            self.backward: [1 + len(senders) for senders in self.receivers[Kind.F]],
            Kind.W: [1] * len(homes),
        }
        self.arrivals: dict[Action, list[float]] = defaultdict(list)
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.in_flight, self.free_times = [0] * ranks, [0.0] * ranks
        self.event_times = [0.0]  # when a rank becomes free or an input arrives, as a heap

    def run(self) -> None:
        """Run all actions of all ranks."""
        while self.event_times:
            now = heappop(self.event_times)
            while self.event_times and self.event_times[0] <= now:
                heappop(self.event_times)
            while sum(self._run_next(rank, now) for rank, free in enumerate(self.free_times) if free <= now):
                pass  # a backward that has begun may make room for a forward of another rank

    def _run_next(self, rank: int, now: float) -> bool:
        """Run the first ready action of `rank`; return whether there was one."""
        ready = sorted(self._ready_actions(rank, now), key=lambda action: (action.microbatch, action.stage))
        if not ready:
            return False
        progress = RankProgress(rank, now, self.in_flight[rank], self.rows[rank][-1] if self.rows[rank] else None)
        keys = [self.priority(action, progress) for action in ready]
        try:
            first = keys.index(min(keys))
        except TypeError as error:
            pairs = ", ".join(f"{key!r} for {action}" for key, action in zip(keys, ready, strict=True))
            problem = f"{self.name}: the priorities {pairs} have no order"
            raise ScheduleError(f"{problem}: return numbers, or tuples of them") from error
        self._run(ready[first], rank, now)
        return True

    def _ready_actions(self, rank: int, now: float) -> Iterator[Action]:
        for (stage, kind), microbatch in self.next_actions[rank].items():
            if microbatch < self.microbatches:
                action = Action(kind, stage, microbatch)
                arrived = self.arrivals.get(action, ())
                if len(arrived) < self.num_inputs[kind][stage] or max(arrived, default=now) > now:
                    continue
                if kind is not Kind.F or self.activations is None or self.activations.can_end_after(action):
                    yield action

    def _run(self, action: Action, rank: int, now: float) -> None:
        """Run `action` on `rank` from `now` on: its results arrive where they are needed."""
        kind, stage, microbatch, _ = action
        end = now + self.times[kind][stage][microbatch]
        self.rows[rank].append(action)
        self.next_actions[rank][stage, kind] += 1
        self.free_times[rank] = end
        heappush(self.event_times, end)
        self.in_flight[rank] += 1 if kind is Kind.F else -1 if kind in (Kind.B, Kind.W) else 0
        if self.activations is not None:
            self.activations.count(action)

        if kind is Kind.F:
            self.arrivals[Action(self.backward, stage, microbatch)].append(end)
        elif kind is Kind.I:
            self.arrivals[Action(Kind.W, stage, microbatch)].append(end)
        for receiver in self.receivers[kind][stage]:
            self.arrivals[Action(kind, receiver, microbatch)].append(self._arrival_time(action, receiver, end))

    def _arrival_time(self, action: Action, receiver: int, end: float) -> float:
        """Return when the result of `action`, which ends at `end`, arrives at the stage `receiver`."""
        ends = self.homes[action.stage], self.homes[receiver]
        if ends[0] == ends[1]:
            return end
        border = self.message_costs[min(action.stage, receiver), max(action.stage, receiver)]
        arrival = self.channels[ends].transmit(end, border, self.message_factors[action.microbatch])
        heappush(self.event_times, arrival)
        return arrival


class _Activations:
    """The activations in flight, by microbatch and rank, and those that each microbatch in flight will still need."""

    def __init__(self, homes: tuple[int, ...], limits: list[int]) -> None:
        self.homes, self.room = homes, list(limits)
        self.num_stages = [homes.count(rank) for rank in range(len(limits))]
        self.held: dict[int, list[int]] = {}  # microbatch in flight -> rank -> activations; the oldest first
        self.needed: dict[int, list[int]] = {}  # microbatch in flight -> rank -> forwards to come

    def can_end_after(self, forward: Action) -> bool:
        """Return whether, once `forward` has run, the microbatches in flight can end one after the other, the oldest first."""
        home, room = self.homes[forward.stage], list(self.room)
        room[home] -= 1
        if room[home] < 0:
            return False
        entered = {} if forward.microbatch in self.held else {forward.microbatch: [0] * len(room)}
        for microbatch, held in (self.held | entered).items():
            needed = self.needed.get(microbatch, self.num_stages)
            for rank, (activations, to_come) in enumerate(zip(held, needed, strict=True)):
                is_forward = microbatch == forward.microbatch and rank == home
                if to_come - is_forward > room[rank]:
                    return False
                room[rank] += activations + is_forward
        return True

    def count(self, action: Action) -> None:
        """Count `action`: a forward takes room, B or W gives it back."""
        kind, stage, microbatch, _ = action
        home = self.homes[stage]
        if kind is Kind.F:
            held = self.held.setdefault(microbatch, [0] * len(self.room))
            needed = self.needed.setdefault(microbatch, list(self.num_stages))
            held[home], needed[home], self.room[home] = held[home] + 1, needed[home] - 1, self.room[home] - 1
        elif kind in (Kind.B, Kind.W):
            self.held[microbatch][home] -= 1
            self.room[home] += 1
            if not any(self.held[microbatch]) and not any(self.needed[microbatch]):
                del self.held[microbatch], self.needed[microbatch]
