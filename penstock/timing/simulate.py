"""The simulator: from the costs of actions to the times at which they run."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product

from penstock.errors import ScheduleError
from penstock.schedule.table import (
    Action,
    Cell,
    Kind,
    Table,
    actions_of,
    check_is_table,
    dependencies,
    pause_garbage_collection,
)
from penstock.timing.costs import UNIT_COSTS, Cost, Costs
from penstock.timing.events import Channel, Event, MessageCost
from penstock.timing.timeline import Timeline


def simulate(schedule: Table, costs: Costs = UNIT_COSTS) -> Timeline:
    """Return when every action of `schedule` runs: as soon as its rank is free and its inputs have arrived.

    A pair of overlapping actions starts when that holds for both, and both end together.

    `costs`: of actions, messages and activations; by default F, I and W take 1 and a message nothing. The timeline is
    in their units and begins at 0.

    Raises ScheduleError if actions wait for each other in a cycle, for an action that is out of range or on the wrong
    rank, and for invalid costs.

        timeline = simulate(build("1f1b", ranks=4, microbatches=8), Costs(forward=1, backward_input=1, backward_weight=1))
        timeline.makespan, timeline.bubble  # 33.0, 0.27..
    """
    timeline = simulate_until_deadlock(schedule, costs)
    for rank, (row, actions) in enumerate(zip(timeline.rows, schedule.actions, strict=True)):
        if len(row) < len(actions):
            raise ScheduleError(f"{schedule.name} stops: rank {rank} waits for ever before {actions[len(row)]} (see verify)")
    return timeline


def simulate_until_deadlock(schedule: Table, costs: Costs) -> Timeline:
    """Return the timeline up to a deadlock: if actions wait for each other in a cycle, the actions that run before that.

    Raises ScheduleError as `simulate`, but not for a cycle.
    """
    check_is_table(schedule)
    _check_placement(schedule)
    simulation = _Simulation(schedule, costs)
    with pause_garbage_collection():
        simulation.run_until_blocked()
    rows, message_costs = tuple(map(tuple, simulation.rows)), costs.message_costs(schedule.num_stages)
    if any(row and not row[-1].end < float("inf") for row in rows):
        raise ScheduleError("the costs add up to more than a number can say: give smaller ones")
    return Timeline(
        schedule.name,
        rows,
        tuple(message_costs[border] for border in pairwise(range(schedule.num_stages))),
        costs.activation_sizes(schedule.num_stages),
        schedule.overlaps,
        {skip: message_costs[skip] for skip in costs.skips},
        microbatch_factors=tuple(costs.factors_by_microbatch(schedule.microbatches)) if costs.microbatch_factors else (),
        chains=schedule.chains if schedule.chains.forward_only else None,
        teacher_output=0.0 if schedule.chains.teacher is None else costs.teacher_output,
    )


def _check_placement(schedule: Table) -> None:
    for rank, row in enumerate(schedule.actions):
        stages, microbatches = set(schedule.stages_of(rank)), range(schedule.microbatches)
        for action in row:
            if action.stage not in stages or action.microbatch not in microbatches or action.slice >= schedule.slices:
                raise ScheduleError(f"{schedule.name} cannot be timed: rank {rank} has {action} (see verify)")


ReadyTimes = list[float | None]  # microbatch + M x slice -> when an input of its action has arrived; None: not yet


@dataclass(slots=True)
class _MessageRoute:
    """The route of the messages of one kind of action on one stage to another rank."""

    times: ReadyTimes
    receiver: int
    channel: Channel
    border: MessageCost


@dataclass(slots=True)
class _ActionWork:
    """The costs, inputs and outputs of one kind of action on one stage."""

    costs: list[float]  # by microbatch + M x slice
    needs: tuple[ReadyTimes, ...] = ()
    leaves: tuple[ReadyTimes, ...] = ()  # outputs for the same rank
    sends: tuple[_MessageRoute, ...] = ()


class _Simulation:
    """A simulation of all ranks: each runs its row as far as it can, and again when an input that it waits for has arrived."""

    def __init__(self, schedule: Table, costs: Costs) -> None:
        self.schedule, self.overlap = schedule, float(costs.overlap)
        self.action_works = _work_by_kind_and_stage(schedule, costs)
        shares = [factor / schedule.slices for factor in costs.factors_by_microbatch(schedule.microbatches)]
        self.message_factors = shares * schedule.slices
        self.rows: list[list[Event]] = [[] for _ in schedule.actions]
        self.awaited_times: list[ReadyTimes | None] = [None] * schedule.ranks
        self.ready_ranks = list(reversed(range(schedule.ranks)))

    def run_until_blocked(self) -> None:
        """Run all ranks until each has finished or is blocked."""
        ranks = [self._run_rank(rank) for rank in range(self.schedule.ranks)]
        while self.ready_ranks:
            rank = self.ready_ranks.pop()  # the rank just woken: its input is in the processor's cache
            self.awaited_times[rank] = next(ranks[rank], None)

    def _run_rank(self, rank: int) -> Iterator[ReadyTimes]:
        """Run the row of `rank`. Whenever it is blocked, yield the list in which the time that it waits for is missing.

        This loop runs for every action, millions of times, so it has no helper functions.
        """
        row, works, waits_for, free = self.rows[rank], self.action_works, self.awaited_times, 0.0
        microbatches, message_factors = self.schedule.microbatches, self.message_factors
        for cell in self.schedule.cells(rank) if self.schedule.slices == 1 else _cells_in_slice_order(self.schedule, rank):
            actions = (cell,) if isinstance(cell, Action) else cell
            start, cost = free, 0.0
            for kind, stage, microbatch, slice_ in actions:
                work = works[kind][stage]
                if slice_:
                    microbatch += slice_ * microbatches
                for times in work.needs:
                    while (ready_time := times[microbatch]) is None:
                        yield times
                    if ready_time > start:
                        start = ready_time
                cost += work.costs[microbatch]
            if len(actions) > 1:
                times_alone = [works[kind][stage].costs[number] for kind, stage, number, _ in actions]
                cost -= self.overlap * min(times_alone)
            free = start + cost
            for action in actions:
                row.append(Event(rank, action, start, free))
                kind, stage, microbatch, slice_ = action
                work = works[kind][stage]
                if slice_:
                    microbatch += slice_ * microbatches
                for times in work.leaves:
                    times[microbatch] = free
                for route in work.sends:
                    route.times[microbatch] = route.channel.transmit(free, route.border, message_factors[microbatch])
                    if waits_for[route.receiver] is route.times:
                        waits_for[route.receiver] = None
                        self.ready_ranks.append(route.receiver)


def _cells_in_slice_order(schedule: Table, rank: int) -> Iterator[Cell]:
    """Yield the cells of `rank` up to one whose slice needs another slice of its microbatch that has not run yet."""
    done_actions = set[Action]()
    for cell in schedule.cells(rank):
        for action in actions_of(cell):
            for options in dependencies(action, schedule.chains, slices=schedule.slices):
                if options[0].stage == action.stage and options[0].slice != action.slice and done_actions.isdisjoint(options):
                    return
        done_actions.update(actions_of(cell))
        yield cell


def _work_by_kind_and_stage(schedule: Table, costs: Costs) -> dict[Kind, list[_ActionWork]]:
    """Return kind -> the work of every stage, connected by the times that they share."""
    home, stages, message_costs = schedule.placement, schedule.num_stages, costs.message_costs(schedule.num_stages)
    channels: dict[tuple[int, int], Channel] = defaultdict(Channel)
    slice_shares = [factor / schedule.slices for factor in costs.factors_by_slice(schedule.slices)]
    works = {
        kind: [
            _ActionWork([cost * share for share in slice_shares for cost in costs_of_stage]) for costs_of_stage in stage_costs
        ]
        for kind, stage_costs in costs.action_costs_by_microbatch(stages, schedule.microbatches).items()
    }
    for kind, stage in product((Kind.F, Kind.B, Kind.W), range(stages)):  # so that a step sends in the order of the stages
        for makers in dependencies(Action(kind, stage, 0), schedule.chains, costs.skips):
            times: ReadyTimes = [None] * (schedule.microbatches * schedule.slices)
            for waiting_kind in (Kind.B, Kind.I) if kind is Kind.B else (kind,):
                works[waiting_kind][stage].needs += (times,)
            for maker, source, *_ in makers:
                ends = home[source], home[stage]
                if ends[0] == ends[1]:
                    works[maker][source].leaves += (times,)
                else:
                    border = message_costs[min(source, stage), max(source, stage)]
                    works[maker][source].sends += (_MessageRoute(times, ends[1], channels[ends], border),)
    return works


def averaging_end_time(timeline: Timeline, seconds: Cost, *, overlapped: bool = True, shared: bool = False) -> float:
    """Return when the gradients of all stages are averaged, in the unit and on the clock of `timeline`, simulated or measured.

    The gradients of a stage leave after its last backward, those of a rank's stages one after the other. `seconds`: the time
    that takes alone, a number for all stages or one for each: over n replicas and a link of `bandwidth` bytes a second,
    2 (n - 1) / n times the bytes of its gradients / bandwidth. `shared`: all ranks' gradients take one link, as if replicas
    are machines. Not `overlapped`: nothing leaves before the step has ended on all ranks.

    Raises ScheduleError as `Costs.action_costs` does, and for a timeline without backwards.
    """
    complete_gradients: dict[int, tuple[int, float]] = {}  # stage -> its rank, and when its gradients are complete
    for event in timeline.events:
        if event.action.kind in (Kind.B, Kind.W):
            stage = event.action.stage
            complete_gradients[stage] = event.rank, max(event.end, complete_gradients.get(stage, (0, event.end))[1])
    if not complete_gradients:
        raise ScheduleError(f"{timeline.name} has no backward: there are no gradients to average")
    takes = Costs(backward_weight=seconds).action_costs(max(complete_gradients) + 1)[Kind.W]
    end = max(event.end for event in timeline.events)
    leaving = sorted((when if overlapped else end, takes[stage], rank) for stage, (rank, when) in complete_gradients.items())
    links: dict[int, Channel] = defaultdict(Channel)
    return max(end, *(links[0 if shared else rank].transmit(when, MessageCost(lasts)) for when, lasts, rank in leaving))
