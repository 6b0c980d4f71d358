"""Where a search stands: rows, and when everything in them runs; changed one row at a time.

This is the loop that a search spends its time in, hence a long function of plain lists. Three things make it short:

* Only what can change is run again: what begins after the end of the last action before the change.
* It gives up as soon as the step cannot end in time: by what a rank has idled, or by what waits for an action, in its chain and
  in the rows as they were. What was moved is not held to the rows; so an attempt that would do is given up very seldom.
* The rows may leave out W. Then a W, the oldest, runs where it ends before the next F or I can start (plus the `slack` of its
  rank), where memory is full, and at the end.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from penstock.schedule.searching.problem import INFINITE, TOLERANCE, After, Rows, SearchProblem, Slots

ATTEMPT, LOOK = 25, 5  # steps that count for an attempt and for a look at a row, beside the actions that run
PREPARE, ACCEPT = 1 / 32, 1 / 2  # and for each action of the table, in an attempt and if it is accepted

Trace = list[After]  # before a row and after each of its actions


class RowChange(NamedTuple):
    """A new row, and the first and the last place where it differs from the old one: behind its end if nothing could move."""

    row: list[int]
    first: int
    last: int


class Snapshot(NamedTuple):
    """What a position is made from, and its makespan."""

    makespan: float
    rows: Rows
    slack: list[float] | None


class _Tried(NamedTuple):
    """What follows from an attempt, if it is accepted."""

    rows: Rows
    put_off: Rows
    there: Slots
    changed: Mapping[int, RowChange]  # empty: all rows are new
    begin: list[int]
    traces: list[Trace]
    ends: list[float]


class IncrementalSimulation:
    """`rows`, with the makespan; `slack` of every rank is given where the rows leave out W."""

    def __init__(self, machine: SearchProblem, rows: Rows, slack: list[float] | None = None) -> None:
        self.machine, self.work = machine, 0  # actions run so far
        self.restore(Snapshot(INFINITE, rows, slack))

    def restore(self, state: Snapshot) -> None:
        """Stand where `state` is."""
        self.rows, self.slack = state.rows[:], state.slack and state.slack[:]
        self.put_off: Rows = [self._weights(row) for row in self.rows]
        self.trace: list[Trace] = [[(0.0, 0.0, work, 0, 0)] for work in self.machine.work]
        self.there, self.makespan, self.tails = self.machine.there, INFINITE, self.machine.tails
        if self.try_changes({}, INFINITE) < INFINITE:
            self.accept_changes()

    def snapshot(self) -> Snapshot:
        """Where it stands, to come back to."""
        return Snapshot(self.makespan, self.rows[:], self.slack and self.slack[:])

    def try_changes(self, changed: Mapping[int, RowChange], most: float) -> float:
        """The makespan with other rows for some ranks; infinite if that is seen to be above `most`, or cannot run."""
        net = self.machine.net if self.slack else self.machine.change
        for rank, (row, _, _) in changed.items():
            self.work += LOOK
            if max(accumulate(map(net.__getitem__, row))) > self.machine.limits[rank]:
                return INFINITE
        traces: list[Trace] = [[] for _ in self.rows]
        end = self._run(changed, most, traces)
        self.work += ATTEMPT + int(PREPARE * len(self.machine.cost)) + sum(map(len, traces))
        return end

    def accept_changes(self) -> None:
        """Go on from what was attempted last."""
        self.work += int(ACCEPT * len(self.machine.cost))
        self.rows, self.put_off, self.there, changed, begin, traces, self.ends = self.tried
        self.makespan, self.chain = max(self.ends), list[tuple[int, int]]()
        for trace, here, new in zip(self.trace, begin, traces, strict=True):
            trace[here:] = new
        if self.machine.waits:
            ends = [self.trace[rank][each.last + 1][0] for rank, each in changed.items()]
            self.tails = self._behind(max(ends, default=INFINITE))

    def _behind(self, until: float) -> list[float]:
        """How long it takes at least from the end of every action to the end of the step, with the rows as they are.

        Nothing has changed behind what ends after `until`.
        """
        machine, chain, behind = self.machine, self.machine.tails, self.tails[:]
        cost, slot, latency, nothing = machine.cost, machine.slot, machine.latency, len(machine.cost)
        ends = list[tuple[float, int, int]]()
        for row, trace in zip(self.rows, self.trace, strict=True):
            here = bisect_right(trace, (until, INFINITE))
            times = [each[0] for each in trace[1:here]]
            ends += zip(times, row, [*row[1:here], nothing], strict=False)
        for _, action, after in sorted(ends, reverse=True):
            longest, taker = chain[action], slot[action]
            if after != nothing and cost[after] + behind[after] > longest:
                longest = cost[after] + behind[after]
            if taker != nothing and latency[action] + cost[taker] + behind[taker] > longest:
                longest = latency[action] + cost[taker] + behind[taker]
            behind[action] = longest
        return behind

    def critical_actions(self) -> list[tuple[int, int]]:
        """Rank and place of the actions that make up the makespan: each begins as soon as the one before it lets it."""
        if not self.chain:
            self.chain = list(self._chain())
            self.work += len(self.chain)
        return self.chain

    def _chain(self) -> Iterator[tuple[int, int]]:
        """The same from the end of the step on. A stretch of W belongs to the action behind it."""
        machine, cost = self.machine, self.machine.cost
        count, stages, home = machine.microbatches, machine.num_stages, machine.placement
        rank = max(range(machine.ranks), key=self.ends.__getitem__)
        index = len(self.rows[rank]) - 1
        while index >= 0:
            yield rank, index
            action = self.rows[rank][index]
            free, _, _, before, _ = self.trace[rank][index]
            time, _, _, done, _ = self.trace[rank][index + 1]
            for weight in self.put_off[rank][before:done]:
                free += cost[weight]
            index -= 1
            if time - cost[action] > free * (1 + TOLERANCE):  # the rank was idle before it
                source = machine.source[self._last(action, self.there)]
                rank = home[source // count % stages]
                index = self.rows[rank].index(source)

    def try_slack(self, rank: int, slack: float, most: float) -> bool:
        """Whether the step takes at most `most` with another `slack` of `rank`; then it has that."""
        assert self.slack
        before, self.slack[rank] = self.slack[rank], slack
        if self.try_changes({rank: RowChange(self.rows[rank], 0, 0)}, most) > most:
            self.slack[rank] = before
            return False
        self.accept_changes()
        return True

    def rows_with_weights(self) -> Rows:
        """The rows with every W in its place."""
        rows: Rows = []
        for row, put_off, trace in zip(self.rows, self.put_off, self.trace, strict=True):
            full, last = list[int](), 0
            for action, (_, _, _, done, _) in zip(row, trace[1:], strict=True):
                full += [*put_off[last:done], action]
                last = done
            rows.append(full + put_off[last:])
        return rows

    def _weights(self, row: list[int]) -> list[int]:
        """The W that `row` leaves out, in order."""
        machine = self.machine
        apart, leaves = machine.first_back, self.slack and not machine.whole
        return [action + apart for action in row if action >= apart] if leaves else []

    def _run(self, changed: Mapping[int, RowChange], most: float, traces: list[Trace]) -> float:
        """One loop over all actions from where something changes: what they leave behind goes into `traces` and `tried`."""
        machine = self.machine
        limits, plain, cost, change = machine.limits, machine.plain, machine.cost, machine.change
        slots, latency, also_needs = machine.slot, machine.latency, machine.also_needs
        splits = machine.first_back if self.slack and not machine.whole else len(cost)
        begin, there = self._unrun(changed, traces)
        rows, put_off, tails = self._with(changed)
        channels: dict[tuple[int, int], float] = {}
        slacks, ends = self.slack or [0.0] * machine.ranks, [0.0] * machine.ranks
        ready, unfinished = sorted(range(machine.ranks), key=changed.__contains__), set(range(machine.ranks))
        while unfinished:
            if not ready:
                return INFINITE
            r = ready.pop()
            trace, weights, limit, slack = traces[r], put_off[r], limits[r], slacks[r]
            time, held, least, done, made = trace[-1]
            put = trace.append
            for action in rows[r][begin[r] + len(trace) - 1 :]:
                last = action if plain or not also_needs[action] else self._last(action, there)
                when = there[last]
                if when < 0.0:
                    there[last] = -2.0 - r
                    break
                held_then = held + change[action]
                while done < made:
                    weight = weights[done]
                    if time + cost[weight] > when + slack and held_then <= limit:
                        break
                    time += cost[weight]
                    held_then += change[weight]
                    done += 1
                if held_then > limit:
                    break
                held = held_then
                if when > time:
                    least += when - time
                    if least > most:
                        return INFINITE
                    time = when
                time += cost[action]
                if time + tails[action] > most:
                    return INFINITE
                if action >= splits:
                    made += 1
                put((time, held, least, done, made))
                if plain:
                    slot = slots[action]
                    woken = there[slot]
                    there[slot] = time + latency[action]
                    if woken < -1.5:
                        ready.append(int(-2.0 - woken))
                else:
                    ready += self._send(action, time, there, channels)
            else:
                unfinished.discard(r)
                for weight in weights[done:]:
                    time += cost[weight]
                ends[r] = time  # which is `least`
        self.tried = _Tried(rows, put_off, there, changed, begin, traces, ends)
        return max(ends)

    def _unrun(self, changed: Mapping[int, RowChange], traces: list[Trace]) -> tuple[list[int], Slots]:
        """Where each rank runs again, and what is there before; `traces` begin with that."""
        machine = self.machine
        since = min([self.trace[rank][first][0] for rank, (_, first, _) in changed.items()] or [0.0]) if machine.waits else 0.0
        begin, there = list[int](), self.there[:] if machine.plain else machine.there[:]
        for rank, trace in enumerate(self.trace):
            here = bisect_left(trace, (since,), 1) - 1  # of a row that changes, not behind where it does
            begin.append(here)
            traces[rank].append(trace[here])
            if machine.plain:
                for action in self.rows[rank][here:]:
                    there[machine.slot[action]] = -1.0
        return begin, there

    def _with(self, changed: Mapping[int, RowChange]) -> tuple[Rows, Rows, list[float]]:
        """Rows, the W they leave out, and how long it takes at least behind an action, with other rows for some ranks."""
        rows, put_off, tails = self.rows[:], self.put_off[:], self.tails[:]
        for rank, (row, first, last) in changed.items():
            for action in row[first : last + 1]:
                tails[action] = self.machine.tails[action]
            rows[rank], put_off[rank] = row, self._weights(row)
        return rows, put_off, tails

    def _last(self, action: int, there: Slots) -> int:
        """The slot of what `action` needs that is not yet there, or came last."""
        slots = [action, *self.machine.also_needs[action]]
        return next((slot for slot in slots if there[slot] < 0.0), max(slots, key=there.__getitem__))

    def _send(self, action: int, time: float, there: Slots, channels: dict[tuple[int, int], float]) -> Iterator[int]:
        """Send what `action` leaves at `time`, over channels that carry one message at a time. The ranks that waited for it."""
        for slot, channel, transmission, latency in self.machine.sends[action]:
            woken, there[slot] = there[slot], time
            if channel:
                channels[channel] = max(channels.get(channel, 0.0), time) + transmission
                there[slot] = channels[channel] + latency
            if woken < -1.5:
                yield int(-2.0 - woken)
