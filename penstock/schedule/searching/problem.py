"""The pipeline as a search sees it: numbers for actions, and flat lists of what each costs, sends and holds.

The action of stage s for microbatch m has the number `code * M + m`, where the code is s for F, S + s for I and 2S + s for W.
Microbatches are alike, so no other order of them is needed than 0, 1, 2, ..: the n-th action of a code is microbatch n.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from penstock.schedule.schedule import Schedule, from_rows
from penstock.schedule.table import Action, Kind, Table, receiving_stages
from penstock.schedule.timing.simulate import Costs

Rows = list[list[int]]  # rank -> the numbers of its actions, in order
After = tuple[float, float, float, int, int]  # what an action leaves on its rank: time, memory, least end, W and I done
Slots = list[float]  # when what is needed is there; -1: not yet; -2 - r: not yet, and rank r waits for it
INFINITE = float("inf")
TOLERANCE = 1e-9  # relative: memories that differ by less are the same


class Send(NamedTuple):
    """Which slot says when something is there, and what its way costs: nothing, and no channel, within a rank."""

    slot: int
    channel: tuple[int, int] | None
    transmission: float
    latency: float


class SearchProblem:
    """What the actions of a pipeline cost, send and hold, in flat lists by their numbers.

    When what an action needs is there stands in the slot of its number; what else a model with skips needs has further slots.
    """

    def __init__(
        self, costs: Costs, placement: Sequence[int], microbatches: int, limits: Sequence[float], whole: bool = False
    ) -> None:
        """`limits`: of every rank, on its memory. `whole`: backwards are not split: I stands for B, and there is no W."""
        self.costs, self.placement, self.microbatches, self.whole = costs, tuple(placement), microbatches, whole
        self.limits = [limit * (1 + TOLERANCE) for limit in limits]
        self.num_stages, self.ranks = len(placement), len(limits)
        self.stages_of = [[stage for stage, home in enumerate(placement) if home == rank] for rank in range(self.ranks)]
        self.kinds = (Kind.F, Kind.B) if whole else (Kind.F, Kind.I, Kind.W)
        self.first_back, self.first_weight = self.num_stages * microbatches, 2 * self.num_stages * microbatches
        times, self.sizes = costs.action_costs(self.num_stages), costs.activation_sizes(self.num_stages)
        self.times = [times[kind][stage] for kind in self.kinds for stage in range(self.num_stages)]  # by codes
        self.typical = sum(self.times) / len(self.times)
        self.cost = self._of_actions(self.times)
        self.change = self._of_actions([size.memory_change(kind) for kind in self.kinds for size in self.sizes])
        signs = (1, -1, 0)[: len(self.kinds)]  # of F, of I and of W, if every W that can run is done
        self.net = self._of_actions([sign * size.act for sign in signs for size in self.sizes])
        self.work = [
            microbatches * sum(self.times[code] for code in range(len(self.times)) if placement[code % self.num_stages] == rank)
            for rank in range(self.ranks)
        ]
        self.later = [sum(self.sizes[t].act for t in self.stages_of[home] if t > s) for s, home in enumerate(placement)]
        self._connect()

    def _of_actions(self, of_codes: Sequence[float]) -> list[float]:
        return [value for value in of_codes for _ in range(self.microbatches)]

    def _connect(self) -> None:
        """Who sends what where. A chain has one taker for each action: `slot` and `latency` say it; `sends` says it for any."""
        count, stages = len(self.cost), self.num_stages
        self.sends: list[list[Send]] = [[] for _ in range(count)]
        self.also_needs: list[list[int]] = [[] for _ in range(count)]
        self.source = dict[int, int]()  # slot -> the action that fills it
        self.taker = dict[int, int]()  # slot -> the action that needs it
        slots, taken = count + 1, set[int]()
        for source, taker, send in self._edges():
            for m in range(self.microbatches):
                action, slot = taker * self.microbatches + m, taker * self.microbatches + m
                if slot in taken:
                    slot, slots = slots, slots + 1
                    self.also_needs[action].append(slot)
                taken.add(slot)
                self.taker[slot] = action
                self.sends[source * self.microbatches + m].append(send._replace(slot=slot))
                self.source[slot] = source * self.microbatches + m
        nothing = Send(count, None, 0.0, 0.0)
        first = [(each or [nothing])[0] for each in self.sends]
        self.slot, self.latency = [send.slot for send in first], [send.latency for send in first]
        self.there = [-1.0 if slot in taken else 0.0 for slot in range(count)] + [-1.0] * (slots - count)
        self.plain = slots == count + 1 and all(send.transmission == 0 for each in self.sends for send in each)
        self.waits = self.plain and min(self.times[: 2 * stages]) > 0

    def _edges(self) -> Iterator[tuple[int, int, Send]]:
        """Of every code those that need it, in the order in which a rank sends, and what the way there costs."""
        stages, home = self.num_stages, self.placement
        borders = dict(
            zip(pairwise(range(stages)), self.costs.message_costs(stages), strict=True)
        ) | self.costs.skip_connection_costs(stages)
        goes = receiving_stages(stages, list(self.costs.skips))
        for base, kind in ((0, Kind.F), (stages, Kind.I)):
            for stage in range(stages):
                for taker in goes[kind][stage]:
                    border = borders[min(stage, taker), max(stage, taker)]
                    there = home[stage], home[taker]
                    own = there[0] == there[1]
                    yield base + stage, base + taker, Send(0, None, 0.0, 0.0) if own else Send(0, there, *border)
        yield stages - 1, 2 * stages - 1, Send(0, None, 0.0, 0.0)

    def order(self) -> list[int]:
        """The codes, each behind those that it needs."""
        stages = self.num_stages
        return [*range(stages), *reversed(range(stages, 2 * stages)), *range(2 * stages, len(self.times))]

    @cached_property
    def tails(self) -> list[float]:
        """How long it takes at least from the end of every action to the end of the step."""
        tails, count = [0.0] * len(self.cost), self.microbatches
        for code in reversed(self.order()):
            follows = 0.0
            for action in reversed(range(code * count, (code + 1) * count)):
                ways = [follows]
                for send in self.sends[action]:
                    taker = self.taker[send.slot]
                    ways.append(send.transmission + send.latency + self.cost[taker] + tails[taker])
                weight = action + self.first_back
                if action >= self.first_back and weight < len(self.cost):
                    ways.append(self.cost[weight] + tails[weight])
                tails[action] = max(ways)
                follows = tails[action] + self.cost[action]
        return tails

    def without_weights(self, rows: Rows) -> Rows:
        """`rows` without their W."""
        return [[action for action in row if action < self.first_weight] for row in rows]

    def rows_from_table(self, table: Table) -> Rows:
        """The rows of `table` in numbers, each backward whole or in halves as here, microbatches in order."""
        kinds = (
            {Kind.F: (0,), Kind.B: (1,), Kind.I: (1,), Kind.W: ()}
            if self.whole
            else {Kind.F: (0,), Kind.I: (1,), Kind.W: (2,), Kind.B: (1, 2)}
        )
        return [
            in_order((code * self.num_stages + stage for kind, stage, _ in row for code in kinds[kind]), self.microbatches)
            for row in table.actions
        ]

    def schedule_from_rows(self, rows: Rows, name: str = "searched") -> Schedule:
        """The table of `rows`."""

        def action(number: int) -> Action:
            code, microbatch = divmod(number, self.microbatches)
            return Action(self.kinds[code // self.num_stages], code % self.num_stages, microbatch)

        return from_rows(name, [list(map(action, row)) for row in rows], self.placement)


def in_order(codes: Iterable[int], microbatches: int) -> list[int]:
    """The numbers of actions of these codes: the n-th of a code is for microbatch n."""
    done: dict[int, int] = defaultdict(int)
    row = []
    for code in codes:
        row.append(code * microbatches + done[code])
        done[code] += 1
    return row
