"""Where a search stands: rows, and when everything in them runs; changed one row at a time.

This is the loop that a search spends its time in, hence long functions of plain lists. Three things make it short:

* Only what can change is run again: what begins after the end of the last action before the change.
* It gives up as soon as a rank has idled so long that the step cannot end in time.
* The rows may leave out W. Then a W, the oldest, runs where it ends before the next F or I can start (plus the `slack` of its
  rank), where memory is full, and at the end.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from penstock.schedule.searching.machine import TOLERANCE, Machine, Rows
from penstock.schedule.searching.moves import Moved

INFINITE = float("inf")
ATTEMPT = 30  # steps that an attempt counts for, beside the actions that it runs

Trace = list[tuple[float, float, float, int, int]]  # after every action of a row: time, memory, least end, W and I done
_NOTHING = (0.0, 0.0, 0.0, 0, 0)
Slots = list[float]  # when what is needed is there; -1: not yet; -2 - r: not yet, and rank r waits for it


class State(NamedTuple):
    """What a position is made from, and its makespan."""

    makespan: float
    rows: Rows
    slack: list[float] | None


class _Tried(NamedTuple):
    """What follows from an attempt, if it is accepted."""

    rows: Rows
    backs: Rows  # the W that the rows leave out, in order
    there: Slots
    begin: list[int]
    traces: list[Trace]
    ends: list[float]


class Position:
    """`rows`, with the makespan; `slack` of every rank is given where the rows leave out W."""

    def __init__(self, machine: Machine, rows: Rows, slack: list[float] | None = None) -> None:
        self.machine, self.steps = machine, 0  # actions run so far

        self.go_to(State(INFINITE, rows, slack))

    def go_to(self, state: State) -> None:
        """Stand where `state` is."""
        self.rows, self.slack = state.rows[:], state.slack and state.slack[:]
        self.backs: Rows = [[] for _ in self.rows]
        self.trace: list[Trace] = [[] for _ in self.rows]
        self.there, self.makespan = self.machine.there, INFINITE
        if self.attempt({}, INFINITE) < INFINITE:
            self.accept()

    def state(self) -> State:
        """Where it stands, to come back to."""
        return State(self.makespan, self.rows[:], self.slack and self.slack[:])

    def attempt(self, changed: Mapping[int, Moved], most: float) -> float:
        """The makespan with other rows for some ranks; infinite if that is above `most`, or cannot run."""
        traces: list[Trace] = [[] for _ in self.rows]
        self.repairs = 0
        end = self._run(changed, most, traces)
        self.steps += ATTEMPT + sum(map(len, traces)) + self.repairs

        return end

    def accept(self) -> None:
        """Go on from what was attempted last."""
        self.rows, self.backs, self.there, begin, traces, self.ends = self.tried
        self.makespan, self.chain = max(self.ends), list[tuple[int, int]]()
        for trace, here, new in zip(self.trace, begin, traces, strict=True):
            trace[here:] = new

    def critical(self) -> list[tuple[int, int]]:
        """Rank and place of the actions that make up the makespan: each begins as soon as the one before it lets it."""
        if not self.chain:
            self.chain = list(self._chain())
            self.steps += len(self.chain)
        return self.chain

    def _chain(self) -> Iterator[tuple[int, int]]:
        """The same from the end of the step on. A stretch of W belongs to the action behind it."""
        machine, cost = self.machine, self.machine.cost
        count, stages, home = machine.microbatches, machine.stages, machine.placement
        rank = max(range(machine.ranks), key=self.ends.__getitem__)
        index = len(self.rows[rank]) - 1
        while index >= 0:
            yield rank, index
            action = self.rows[rank][index]
            time, _, _, done, _ = self.trace[rank][index]
            free, _, _, before, _ = self.trace[rank][index - 1] if index else _NOTHING
            for weight in self.backs[rank][before:done]:
                free += cost[weight]
            index -= 1
            if time - cost[action] > free * (1 + TOLERANCE):  # the rank was idle before it
                there = self.there
                slot = max([action, *machine.also_needs[action]], key=there.__getitem__)
                source = machine.source[slot]
                rank = home[source // count % stages]
                index = self.rows[rank].index(source)

    def loosen(self, rank: int, slack: float, most: float) -> bool:
        """Whether the step takes at most `most` with another `slack` of `rank`; then it has that."""
        assert self.slack
        before, self.slack[rank] = self.slack[rank], slack
        if self.attempt({rank: Moved(self.rows[rank], 0)}, most) > most:
            self.slack[rank] = before
            return False
        self.accept()
        return True

    def whole_rows(self) -> Rows:
        """The rows with every W in its place."""
        rows: Rows = []
        for row, back, trace in zip(self.rows, self.backs, self.trace, strict=True):
            full, last = list[int](), 0
            for action, (_, _, _, done, _) in zip(row, trace, strict=True):
                full += [*back[last:done], action]
                last = done
            rows.append(full + back[last:])
        return rows

    def _run(self, changed: Mapping[int, Moved], most: float, traces: list[Trace]) -> float:
        """One loop over all actions from `first` on: what they leave behind goes into `traces` and `tried`."""
        machine = self.machine
        ranks, work, limits, plain = range(machine.ranks), machine.work, machine.limits, machine.plain
        cost, change, slots, latency = machine.cost, machine.change, machine.slot, machine.latency
        first_weight, sends, also_needs = machine.first_weight, machine.sends, machine.also_needs
        splits = machine.first_back if self.slack and not machine.whole else len(cost)
        to_weight = first_weight - machine.first_back
        since = -1.0
        if machine.waits:
            since = min([self.trace[rank][first - 1][0] if first else -1.0 for rank, (_, first) in changed.items()] or [-1.0])
        rows, backs, there = self.rows[:], list[list[int]](), self.there[:]
        channels: dict[tuple[int, int], float] = {}
        at, states = [], []
        for r in ranks:
            trace = self.trace[r]
            here = bisect_left(trace, (since,))
            if r in changed and changed[r].first < here:
                here = changed[r].first
            at.append(here)
            states.append(trace[here - 1] if here else (0.0, 0.0, work[r], 0, 0))
            backs.append(self.backs[r][: states[r][4]])
            if plain:
                for action in rows[r][here:]:
                    there[slots[action]] = -1.0
        if not plain:
            there = machine.there[:]
        for rank, (row, _) in changed.items():
            rows[rank] = row
        slacks = self.slack or [0.0] * machine.ranks
        begin = at[:]
        ready, ends, running = list(ranks), [0.0] * machine.ranks, machine.ranks
        while running:
            if not ready:
                stuck = self._let_another_go_first(rows, backs, at, states, there)
                if stuck < 0:
                    return INFINITE
                ready.append(stuck)
            r = ready.pop()
            row, index, back, trace, limit = rows[r], at[r], backs[r], traces[r], limits[r]
            slack = slacks[r]
            time, held, bound, done, made = states[r]
            put = trace.append
            count = len(row)
            if index > count:
                continue
            while index < count:
                action = row[index]
                when = there[action]
                if when < 0.0:
                    there[action] = -2.0 - r
                    break
                if not plain and also_needs[action]:
                    missing = [slot for slot in also_needs[action] if there[slot] < 0.0]
                    if missing:
                        there[missing[0]] = -2.0 - r
                        break
                    when = max(when, max(there[slot] for slot in also_needs[action]))
                held_then = held + change[action]
                while done < made:
                    weight = back[done]
                    if time + cost[weight] > when + slack and held_then <= limit:
                        break
                    time += cost[weight]
                    held += change[weight]
                    held_then += change[weight]
                    done += 1
                if held_then > limit:
                    break
                held = held_then
                if when > time:
                    bound += when - time
                    if bound > most:
                        return INFINITE
                    time = when
                time += cost[action]
                if action >= splits:
                    back.append(action + to_weight)
                    made += 1
                put((time, held, bound, done, made))
                index += 1
                if plain:
                    slot = slots[action]
                    woken = there[slot]
                    there[slot] = time + latency[action]
                    if woken < -1.5:
                        ready.append(int(-2.0 - woken))
                else:
                    for slot, channel, transmission, way in sends[action]:
                        woken, arrives = there[slot], time
                        if channel:
                            arrives = channels[channel] = max(channels.get(channel, 0.0), time) + transmission
                            arrives += way
                        there[slot] = arrives
                        if woken < -1.5:
                            ready.append(int(-2.0 - woken))
            else:
                running -= 1
                index += 1
                while done < made:
                    time += cost[back[done]]
                    done += 1
                ends[r] = time
                if time > most:
                    return INFINITE
            at[r] = index
            states[r] = time, held, bound, done, made
        self.tried = _Tried(rows, backs, there, begin, traces, ends)
        return max(ends)

    def _let_another_go_first(
        self, rows: Rows, backs: Rows, at: list[int], states: list[tuple[float, float, float, int, int]], there: Slots
    ) -> int:
        """Where no rank can go on: the action that can begin first, of those later in a row, comes next; returns its rank.

        A rank is stuck if its next F does not fit, or if ranks wait for each other in a circle. -1: nothing can begin.
        """
        self.repairs += 20
        machine, best = self.machine, (INFINITE, False, 0, 0)
        count, change, back = machine.microbatches, machine.change, machine.first_back
        for rank, row in enumerate(rows):
            time, held, _, done, made = states[rank]
            seen = set[int]()
            for index in range(at[rank], len(row)):
                action = row[index]
                code = action // count
                if code in seen:
                    continue
                if len(seen) == len(machine.kinds) * len(machine.stages_of[rank]):
                    break
                seen.add(code)
                when = there[action]
                if when < 0.0 or any(there[slot] < 0.0 for slot in machine.also_needs[action]):
                    continue
                if action >= machine.first_weight and action - back in row[at[rank] : index]:
                    continue
                if index == at[rank]:  # it is what does not fit
                    continue
                if change[action] > 0.0:
                    freed = sum(change[each] for each in backs[rank][done:made])
                    later = machine.later[code] if action < back else 0.0
                    if held + freed + change[action] + later > machine.limits[rank]:
                        continue
                if (key := (max(when, time), action < back, rank, index)) < best:
                    best = key
        when, _, rank, index = best
        if when == INFINITE:
            return -1
        row = rows[rank] = rows[rank][:]
        if there[row[at[rank]]] < -1.5:
            there[row[at[rank]]] = -1.0
        row.insert(at[rank], row.pop(index))
        return rank
