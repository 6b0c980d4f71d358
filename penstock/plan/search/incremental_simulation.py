"""The rows of a search and when their actions run, simulated again after each change of a few rows.

A search spends its time in this loop, hence a long function of plain lists. Three things make it fast:

* Only what can change is run again: what begins after the end of the last action before the change.
* It gives up as soon as the step must be too long: by a rank's idle time so far, or by the least time after an action, in
  its chain of dependencies and in the unchanged rows. For moved actions only the chain counts, so an attempt that would be
  accepted is very rarely given up.
* The rows may leave out W. Then the oldest W runs where it ends before the next F or I can start (plus the `slack` of its
  rank), where memory is full, and at the end.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from penstock.plan.search.problem import INFINITE, TOLERANCE, RankState, Rows, SearchProblem, SlotTimes

# The work of a search is counted in simulated actions. Other costs of a try count as a number of actions:
WORK_PER_TRY, WORK_PER_ROW = 25, 5  # for a try, and for each row whose memory is checked
TRY_WORK_PER_ACTION, ACCEPT_WORK_PER_ACTION = 1 / 32, 1 / 2  # for each action of the table, in a try and if it is accepted

Trace = list[RankState]  # the states before a row and after each of its actions


class RowChange(NamedTuple):
    """A new row, and the first and last place where it differs from the old one (`first`: its length if nothing moved)."""

    row: list[int]
    first: int
    last: int


class Snapshot(NamedTuple):
    """The rows and slack of a simulation, to be restored, and their makespan."""

    makespan: float
    rows: Rows
    slack: list[float] | None


class _TrialState(NamedTuple):
    """The state after tried changes, which `accept_changes` takes over."""

    rows: Rows
    deferred_weights: Rows
    slot_times: SlotTimes
    changes: Mapping[int, RowChange]  # empty: all rows are new
    begin: list[int]
    traces: list[Trace]
    ends: list[float]


class IncrementalSimulation:
    """A simulation of `rows` and their makespan. `slack`: a time for each rank if the rows leave out W, else None."""

    def __init__(self, problem: SearchProblem, rows: Rows, slack: list[float] | None = None) -> None:
        self.problem, self.work = problem, 0  # actions run so far
        self.restore_and_simulate(Snapshot(INFINITE, rows, slack))

    def restore_and_simulate(self, snapshot: Snapshot) -> None:
        """Restore the rows and slack of `snapshot`, and simulate them."""
        self.rows, self.slack = snapshot.rows[:], snapshot.slack and snapshot.slack[:]
        self.deferred_weights: Rows = [self._deferred_weights(row) for row in self.rows]
        memory_and_work = zip(self.problem.initial_memory, self.problem.work, strict=True)
        self.trace: list[Trace] = [[(0.0, memory, work, 0, 0)] for memory, work in memory_and_work]
        self.slot_times, self.makespan, self.tails = self.problem.initial_slot_times, INFINITE, self.problem.tails
        if self.try_changes({}, INFINITE) < INFINITE:
            self.accept_changes()

    def snapshot(self) -> Snapshot:
        """Return the rows, slack and makespan, for `restore_and_simulate`."""
        return Snapshot(self.makespan, self.rows[:], self.slack and self.slack[:])

    def try_changes(self, changes: Mapping[int, RowChange], max_makespan: float) -> float:
        """Return the makespan with new rows for some ranks; infinite if it is above `max_makespan`, or if they cannot run."""
        net = self.problem.memory_change_with_weights if self.slack else self.problem.change
        for rank, (row, _, _) in changes.items():
            self.work += WORK_PER_ROW
            memory = accumulate(map(net.__getitem__, row), initial=self.problem.initial_memory[rank])
            if max(memory) > self.problem.limits[rank]:
                return INFINITE
        traces: list[Trace] = [[] for _ in self.rows]
        end = self._simulate(changes, max_makespan, traces)
        self.work += WORK_PER_TRY + int(TRY_WORK_PER_ACTION * len(self.problem.cost)) + sum(map(len, traces))
        return end

    def accept_changes(self) -> None:
        """Make the rows and times of the last attempt the current ones."""
        self.work += int(ACCEPT_WORK_PER_ACTION * len(self.problem.cost))
        self.rows, self.deferred_weights, self.slot_times, changes, begin, traces, self.ends = self.last_attempt
        self.makespan, self.chain = max(self.ends), list[tuple[int, int]]()
        for trace, num_unchanged, new in zip(self.trace, begin, traces, strict=True):
            trace[num_unchanged:] = new
        if self.problem.has_positive_times:
            ends = [self.trace[rank][change.last + 1][0] for rank, change in changes.items()]
            self.tails = self._updated_tails(max(ends, default=INFINITE))

    def _updated_tails(self, until: float) -> list[float]:
        """Return the least time from the end of each action to the end of the step, in the current rows.

        It is unchanged for actions that end after `until`.
        """
        problem, chain_tails, tails = self.problem, self.problem.tails, self.tails[:]
        cost, slot, latency, no_action = problem.cost, problem.slot, problem.latency, len(problem.cost)
        ends = list[tuple[float, int, int]]()
        for row, trace in zip(self.rows, self.trace, strict=True):
            start = bisect_right(trace, (until, INFINITE))
            times = [state[0] for state in trace[1:start]]
            ends += zip(times, row, [*row[1:start], no_action], strict=False)
        for _, action, next_action in sorted(ends, reverse=True):
            tail, receiver = chain_tails[action], slot[action]
            if next_action != no_action and cost[next_action] + tails[next_action] > tail:
                tail = cost[next_action] + tails[next_action]
            if receiver != no_action and latency[action] + cost[receiver] + tails[receiver] > tail:
                tail = latency[action] + cost[receiver] + tails[receiver]
            tails[action] = tail
        return tails

    def critical_actions(self) -> list[tuple[int, int]]:
        """Return the critical chain as (rank, place in its row), last action first: each waited for the next of them."""
        if not self.chain:
            self.chain = list(self._walk_critical_chain())
            self.work += len(self.chain)
        return self.chain

    def _walk_critical_chain(self) -> Iterator[tuple[int, int]]:
        """Yield the critical chain from the end of the step on. Deferred W count as part of the action after them."""
        problem, cost = self.problem, self.problem.cost
        count, stages, home = problem.passes, problem.num_stages, problem.placement
        rank = max(range(problem.ranks), key=self.ends.__getitem__)
        index = len(self.rows[rank]) - 1
        while index >= 0:
            yield rank, index
            action = self.rows[rank][index]
            free, _, _, weights_before, _ = self.trace[rank][index]
            time, _, _, weights_done, _ = self.trace[rank][index + 1]
            for weight in self.deferred_weights[rank][weights_before:weights_done]:
                free += cost[weight]
            index -= 1
            if time - cost[action] > free * (1 + TOLERANCE):  # the rank was idle before it
                source = problem.source[self._latest_slot(action, self.slot_times)]
                rank = home[source // count % stages]
                index = self.rows[rank].index(source)

    def try_slack(self, rank: int, slack: float, max_makespan: float) -> bool:
        """Try another `slack` of `rank`; keep it if the makespan is at most `max_makespan`. Return whether it was kept."""
        assert self.slack
        previous_slack, self.slack[rank] = self.slack[rank], slack
        if self.try_changes({rank: RowChange(self.rows[rank], 0, 0)}, max_makespan) > max_makespan:
            self.slack[rank] = previous_slack
            return False
        self.accept_changes()
        return True

    def rows_with_weights(self) -> Rows:
        """Return the rows with every W in the place where it ran."""
        rows: Rows = []
        for row, deferred_weights, trace in zip(self.rows, self.deferred_weights, self.trace, strict=True):
            full, weights_placed = list[int](), 0
            for action, (_, _, _, weights_done, _) in zip(row, trace[1:], strict=True):
                full += [*deferred_weights[weights_placed:weights_done], action]
                weights_placed = weights_done
            rows.append(full + deferred_weights[weights_placed:])
        return rows

    def _deferred_weights(self, row: list[int]) -> list[int]:
        """Return the W that `row` leaves out, in order."""
        problem = self.problem
        apart, leaves = problem.first_back, self.slack and not problem.full_backwards
        return [action + apart for action in row if action >= apart] if leaves else []

    def _simulate(self, changes: Mapping[int, RowChange], max_makespan: float, traces: list[Trace]) -> float:
        """Run all ranks from where something changes. Return the makespan, infinite if above `max_makespan` or deadlocked.

        Every rank runs as far as it can. `slot_times[slot]` says when a message has arrived. If it has not, the rank that waits
        leaves its number there, and the sender puts that rank back into `ready`:

            time    arrived then
            -1      not sent yet
            -2 - r  not sent yet, rank r waits for it

        The results go into `traces` and `last_attempt`. One loop without calls, because a search spends its time here.
        """
        problem = self.problem
        limits, plain, cost, change = problem.limits, problem.is_simple_chain, problem.cost, problem.change
        slots, latency, also_needs = problem.slot, problem.latency, problem.also_needs
        splits = problem.first_back if self.slack and not problem.full_backwards else len(cost)
        begin, slot_times = self._resume_points(changes, traces)
        rows, deferred_weights, tails = self._rows_with_changes(changes)
        channels: dict[tuple[int, int], float] = {}
        slacks, ends = self.slack or [0.0] * problem.ranks, [0.0] * problem.ranks
        ready, unfinished = sorted(range(problem.ranks), key=changes.__contains__), set(range(problem.ranks))
        while unfinished:
            if not ready:
                return INFINITE
            r = ready.pop()
            trace, weights, limit, slack = traces[r], deferred_weights[r], limits[r], slacks[r]
            time, memory, min_end, weights_done, weights_deferred = trace[-1]
            append_state = trace.append
            for action in rows[r][begin[r] + len(trace) - 1 :]:
                last_slot = action if plain or not also_needs[action] else self._latest_slot(action, slot_times)
                when = slot_times[last_slot]

                if when < 0.0:  # not sent yet: wait, until the sender wakes this rank
                    slot_times[last_slot] = -2.0 - r
                    break

                # Before the action, run deferred W that fit into the idle time, or that must free memory.
                memory_then = memory + change[action]
                while weights_done < weights_deferred:
                    weight = weights[weights_done]
                    if time + cost[weight] > when + slack and memory_then <= limit:
                        break
                    time += cost[weight]
                    memory_then += change[weight]
                    weights_done += 1
                if memory_then > limit:
                    break

                # Start the action; give up if idle time or what follows it makes the step too long.
                memory = memory_then
                if when > time:
                    min_end += when - time
                    if min_end > max_makespan:
                        return INFINITE
                    time = when
                time += cost[action]
                if time + tails[action] > max_makespan:
                    return INFINITE

                # Record the action, send its message and wake the rank that waits for it.
                if action >= splits:
                    weights_deferred += 1
                append_state((time, memory, min_end, weights_done, weights_deferred))
                if plain:
                    # A chain: one message for each action.
                    slot = slots[action]
                    woken = slot_times[slot]
                    slot_times[slot] = time + latency[action]
                    if woken < -1.5:
                        ready.append(int(-2.0 - woken))
                else:
                    ready += self._send_messages(action, time, slot_times, channels)
            else:
                unfinished.discard(r)
                for weight in weights[weights_done:]:
                    time += cost[weight]
                ends[r] = time  # equal to `min_end`
        self.last_attempt = _TrialState(rows, deferred_weights, slot_times, changes, begin, traces, ends)
        return max(ends)

    def _resume_points(self, changes: Mapping[int, RowChange], traces: list[Trace]) -> tuple[list[int], SlotTimes]:
        """Return the place where each rank runs again, and the slot times before that; put the states there into `traces`."""
        problem = self.problem
        since = (
            min([self.trace[rank][first][0] for rank, (_, first, _) in changes.items()] or [0.0])
            if problem.has_positive_times
            else 0.0
        )
        begin, slot_times = list[int](), self.slot_times[:] if problem.is_simple_chain else problem.initial_slot_times[:]
        for rank, trace in enumerate(self.trace):
            start = bisect_left(trace, (since,), 1) - 1  # in a changed row, not after its first change
            begin.append(start)
            traces[rank].append(trace[start])
            if problem.is_simple_chain:
                for action in self.rows[rank][start:]:
                    slot_times[problem.slot[action]] = -1.0
        return begin, slot_times

    def _rows_with_changes(self, changes: Mapping[int, RowChange]) -> tuple[Rows, Rows, list[float]]:
        """Return the changed rows, the W that they leave out, and the least time after each action."""
        rows, deferred_weights, tails = self.rows[:], self.deferred_weights[:], self.tails[:]
        for rank, (row, first, last) in changes.items():
            for action in row[first : last + 1]:
                tails[action] = self.problem.tails[action]
            rows[rank], deferred_weights[rank] = row, self._deferred_weights(row)
        return rows, deferred_weights, tails

    def _latest_slot(self, action: int, slot_times: SlotTimes) -> int:
        """Return the slot of an input of `action` that has not arrived, else of the one that arrived last."""
        slots = [action, *self.problem.also_needs[action]]
        return next((slot for slot in slots if slot_times[slot] < 0.0), max(slots, key=slot_times.__getitem__))

    def _send_messages(
        self, action: int, time: float, slot_times: SlotTimes, channels: dict[tuple[int, int], float]
    ) -> Iterator[int]:
        """Send what `action` made at `time`; a channel carries one message at a time. Yield the ranks that waited for it."""
        for slot, channel, transmission, latency in self.problem.sends[action]:
            woken, slot_times[slot] = slot_times[slot], time
            if channel:
                channels[channel] = max(channels.get(channel, 0.0), time) + transmission
                slot_times[slot] = channels[channel] + latency
            if woken < -1.5:
                yield int(-2.0 - woken)
