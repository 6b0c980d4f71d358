"""The pipeline as a search sees it: numbered actions, and flat lists of what each costs, sends and holds.

The action of stage s for pass n has the number `code * N + n`; its code is s for F, S + s for I and 2S + s for W. A pass is a
microbatch, or one of its K slices: N = M K. Passes run in the order 0, 1, 2, .., so the n-th action of a code is pass n, of
microbatch n // K. Forwards take the slices of a microbatch from first to last, backwards from last to first; the first
backward waits for the last forward.

Stages that have F only, such as a teacher's, have codes for I and W too: these cost nothing, and no row has them.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

from penstock.schedule.memory import ActivationSize
from penstock.schedule.schedule import Schedule, from_rows
from penstock.schedule.table import Action, Chains, Kind, Table, receiving_stages
from penstock.timing.costs import Costs

Rows = list[list[int]]  # rank -> the numbers of its actions, in order
RankState = tuple[float, float, float, int, int]  # of a rank after an action: time, memory, earliest end, W and I done
SlotTimes = list[float]  # slot -> when its message has arrived; -1: not yet; -2 - r: not yet, and rank r waits
INFINITE = float("inf")
TOLERANCE = 1e-9  # relative: memories that differ by less are equal


class ActionMessage(NamedTuple):
    """A message of an action: the slot for its arrival time, and its costs. Within a rank: no channel and no cost."""

    slot: int
    channel: tuple[int, int] | None
    transmission: float
    latency: float


class SearchProblem:
    """The costs, messages and memory of a pipeline's actions, in flat lists by action number.

    A *slot* holds the time at which an input of an action arrives. The first input of an action has the slot of the action's
    number; the other inputs, in a model with skips, have further slots.
    """

    def __init__(
        self,
        costs: Costs,
        placement: Sequence[int],
        microbatches: int,
        limits: Sequence[float],
        full_backwards: bool = False,
        slices: int = 1,
        chains: Chains | None = None,
    ) -> None:
        """`limits`: every rank's memory limit. `full_backwards`: backwards are not split: I stands for B, and there is no W.

        `chains`: that the stages form; by default one, all trained.
        """
        self.costs, self.placement, self.microbatches = costs, tuple(placement), microbatches
        self.slices, self.passes = slices, microbatches * slices
        self.full_backwards = full_backwards
        self.limits = [limit * (1 + TOLERANCE) for limit in limits]
        self.num_stages, self.ranks = len(placement), len(limits)
        self.chains = chains or Chains(self.num_stages)
        self.first_of_teacher = self.num_stages if self.chains.teacher is None else self.chains.teacher
        self.stages_of = [[stage for stage, home in enumerate(placement) if home == rank] for rank in range(self.ranks)]
        self.kinds = (Kind.F, Kind.B) if full_backwards else (Kind.F, Kind.I, Kind.W)
        self.first_back, self.first_weight = self.num_stages * self.passes, 2 * self.num_stages * self.passes
        self.codes = self._codes_in_dependency_order()
        has_code = [code in self.codes for code in range(len(self.kinds) * self.num_stages)]
        times = costs.action_costs(self.num_stages)
        self.sizes = [
            ActivationSize(0, 0) if stage in self.chains.forward_only else size
            for stage, size in enumerate(costs.activation_sizes(self.num_stages))
        ]
        self.factors = [factor / slices for factor in costs.factors_by_microbatch(microbatches) for _ in range(slices)]
        slice_shares = [factor / slices for factor in costs.factors_by_slice(slices)]
        mean = fmean(costs.factors_by_microbatch(microbatches)) * fmean(slice_shares)
        times_of_codes = [times[kind][stage] for kind in self.kinds for stage in range(self.num_stages)]
        self.times = [mean * time * exists for time, exists in zip(times_of_codes, has_code, strict=True)]
        self.typical_time = sum(self.times) / len(self.codes)
        by_microbatch = costs.action_costs_by_microbatch(self.num_stages, microbatches)
        self.cost = [
            cost * share * has_code[number * self.num_stages + stage]
            for number, kind in enumerate(self.kinds)
            for stage, stage_costs in enumerate(by_microbatch[kind])
            for cost in stage_costs
            for share in (slice_shares if kind is Kind.F else reversed(slice_shares))
        ]
        self.change = self._values_per_action([size.memory_change(kind) for kind in self.kinds for size in self.sizes])
        signs = (1, -1, 0)[: len(self.kinds)]  # of F, of I and of W, if each W runs with its I
        self.memory_change_with_weights = self._values_per_action([sign * size.act for sign in signs for size in self.sizes])
        self.work = [
            self.passes * sum(self.times[code] for code in range(len(self.times)) if placement[code % self.num_stages] == rank)
            for rank in range(self.ranks)
        ]
        self.later_stages_memory = [
            max(self.factors) * sum(self.sizes[t].act for t in self.stages_of[home] if t > s)
            for s, home in enumerate(placement)
        ]
        self._count_waiting_outputs()
        self._connect_actions()

    def _count_waiting_outputs(self) -> None:
        """Add what a teacher's outputs take that wait for their losses: those of a batch at first if it runs ahead."""
        self.initial_memory = [0.0] * self.ranks
        if self.chains.teacher is None:
            return
        size, count = self.costs.teacher_output, self.passes
        if self.chains.ahead:
            self.initial_memory[self.placement[-1]] = size * count
        for values in (self.change, self.memory_change_with_weights):
            for n in range(count):
                values[(self.num_stages - 1) * count + n] += size
                values[(self.first_of_teacher - 1) * count + n] -= size

    def _values_per_action(self, of_codes: Sequence[float]) -> list[float]:
        return [value * factor for value in of_codes for factor in self.factors]

    def _connect_actions(self) -> None:
        """Fill in which action sends to which: in `slot` and `latency` for a chain (one receiver each), else in `sends`."""
        count, stages = len(self.cost), self.num_stages
        self.sends: list[list[ActionMessage]] = [[] for _ in range(count)]
        self.also_needs: list[list[int]] = [[] for _ in range(count)]
        self.source = dict[int, int]()  # slot -> the action that fills it
        self.receiver = dict[int, int]()  # slot -> the action that needs it
        slots, filled_slots = count + 1, set[int]()
        for source, receiver, send in self._dependencies_with_messages():
            joins_slices = (source, receiver) == self._codes_of_loss  # from the last forward to the first backward
            for n in range(0, self.passes, self.slices if joins_slices else 1):
                action = slot = receiver * self.passes + n
                sender = source * self.passes + n + (self.slices - 1 if joins_slices else 0)
                if slot in filled_slots:
                    slot, slots = slots, slots + 1
                    self.also_needs[action].append(slot)
                filled_slots.add(slot)
                self.receiver[slot] = action
                self.sends[sender].append(send._replace(slot=slot, transmission=send.transmission * self.factors[n]))
                self.source[slot] = sender
        no_send = ActionMessage(count, None, 0.0, 0.0)
        first_sends = [(sends or [no_send])[0] for sends in self.sends]
        self.slot, self.latency = [send.slot for send in first_sends], [send.latency for send in first_sends]
        self.initial_slot_times = [-1.0 if slot in filled_slots else 0.0 for slot in range(count)] + [-1.0] * (slots - count)
        self.is_simple_chain = slots == count + 1 and all(send.transmission == 0 for sends in self.sends for send in sends)
        costs = [self.cost[code * self.passes + n] for code in self.codes if code < 2 * stages for n in range(self.passes)]
        self.has_positive_times = self.is_simple_chain and min(costs) > 0

    def _dependencies_with_messages(self) -> Iterator[tuple[int, int, ActionMessage]]:
        """Yield (sending code, receiving code, cost of the message), in the order in which a rank sends."""
        stages, home = self.num_stages, self.placement
        borders = self.costs.message_costs(stages)
        receivers = receiving_stages(self.chains, list(self.costs.skips))
        for base, kind in ((0, Kind.F), (stages, Kind.I)):
            for stage in range(stages):
                for receiver in receivers[kind][stage]:
                    message, link = ActionMessage(0, None, 0.0, 0.0), (home[stage], home[receiver])
                    if link[0] != link[1]:
                        message = ActionMessage(0, link, *borders[min(stage, receiver), max(stage, receiver)])
                    yield base + stage, base + receiver, message
        yield *self._codes_of_loss, ActionMessage(0, None, 0.0, 0.0)

    @property
    def _codes_of_loss(self) -> tuple[int, int]:
        """The last forward of the trained model, and its first backward."""
        return self.first_of_teacher - 1, self.num_stages + self.first_of_teacher - 1

    @cached_property
    def forward_codes(self) -> list[int]:
        """The codes of the trained model's forwards, in order."""
        return list(range(self.first_of_teacher))

    @cached_property
    def teacher_codes(self) -> list[int]:
        """The codes of a teacher's forwards, in order."""
        return list(range(self.first_of_teacher, self.num_stages))

    @cached_property
    def backward_codes(self) -> list[int]:
        """The codes of I, in order."""
        stages = [stage for stage in reversed(self.forward_codes) if stage not in self.chains.forward_only]
        return [self.num_stages + stage for stage in stages]

    def _codes_in_dependency_order(self) -> list[int]:
        """Return the codes that rows may have, each after those that it needs."""
        weights = [] if self.full_backwards else [self.num_stages + code for code in sorted(self.backward_codes)]
        if self.chains.loss_waits:
            return [*self.teacher_codes, *self.forward_codes, *self.backward_codes, *weights]
        return [*self.forward_codes, *self.backward_codes, *weights, *self.teacher_codes]

    def codes_of_rank(self, rank: int) -> list[int]:
        """Return the codes of F and I that a rank has, in the order of dependencies."""
        codes = [code for code in self.codes if code < 2 * self.num_stages]
        return [code for code in codes if self.placement[code % self.num_stages] == rank]

    @cached_property
    def tails(self) -> list[float]:
        """The least time from the end of each action to the end of the step."""
        tails, count = [0.0] * len(self.cost), self.passes
        for code in reversed(self.codes):
            follows = 0.0
            for action in reversed(range(code * count, (code + 1) * count)):
                ways = [follows]
                for send in self.sends[action]:
                    receiver = self.receiver[send.slot]
                    ways.append(send.transmission + send.latency + self.cost[receiver] + tails[receiver])
                weight = action + self.first_back
                if action >= self.first_back and weight < len(self.cost):
                    ways.append(self.cost[weight] + tails[weight])
                tails[action] = max(ways)
                follows = tails[action] + self.cost[action]
        return tails

    def without_weights(self, rows: Rows) -> Rows:
        """Return `rows` without their W."""
        return [[action for action in row if action < self.first_weight] for row in rows]

    def rows_from_table(self, table: Table) -> Rows:
        """Return the rows of `table` as action numbers, with whole or split backwards as this problem has them."""
        kinds = (
            {Kind.F: (0,), Kind.B: (1,), Kind.I: (1,), Kind.W: ()}
            if self.full_backwards
            else {Kind.F: (0,), Kind.I: (1,), Kind.W: (2,), Kind.B: (1, 2)}
        )
        return [
            number_actions_in_order(
                (code * self.num_stages + stage for kind, stage, *_ in row for code in kinds[kind]), self.passes
            )
            for row in table.actions
        ]

    def schedule_from_rows(self, rows: Rows, name: str = "searched") -> Schedule:
        """Return the table of `rows`."""

        def action(number: int) -> Action:
            code, pass_number = divmod(number, self.passes)
            microbatch, place = divmod(pass_number, self.slices)
            kind = self.kinds[code // self.num_stages]
            return Action(kind, code % self.num_stages, microbatch, place if kind is Kind.F else self.slices - 1 - place)

        table = from_rows(name, [list(map(action, row)) for row in rows], self.placement)
        teacher = self.chains.teacher
        frozen = frozenset(stage for stage in self.chains.forward_only if teacher is None or stage < teacher)
        return replace(table, forward_only=frozen, teacher=teacher, ahead=self.chains.ahead)


def number_actions_in_order(codes: Iterable[int], passes: int) -> list[int]:
    """Return the numbers of actions with these codes: the n-th action of a code is pass n."""
    num_done: dict[int, int] = defaultdict(int)
    row = []
    for code in codes:
        row.append(code * passes + num_done[code])
        num_done[code] += 1
    return row
