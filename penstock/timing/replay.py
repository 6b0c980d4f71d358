"""A measured step as it would have run with shorter actions, faster messages, or without its teacher."""

from collections.abc import Mapping
from dataclasses import replace

from penstock.schedule.table import Action, Chains
from penstock.timing.events import Event
from penstock.timing.timeline import Timeline


def replay(
    timeline: Timeline, saved_in_actions: Mapping[Action, float], saved_before_actions: Mapping[Action, float] | None = None
) -> Timeline:
    """Return `timeline` with the same order of actions on every rank, each as early as its dependencies allow.

    `saved_in_actions`: seconds by which each action is shorter.
    `saved_before_actions`: seconds by which the message that an idle rank awaited before each action is faster.
    """
    saved_before_actions = saved_before_actions or {}
    previous = {event.action: earlier for row in timeline.rows for earlier, event in zip((None, *row), row, strict=False)}
    moved: dict[Action, Event] = {}
    for event in sorted(timeline.events, key=lambda event: (event.start, event.end)):
        previous_on_rank = previous[event.action]
        needed = [need for need in timeline.remote_needs([event]) if need.action in moved]
        starts = [moved[need.action].end for need in needed]
        last_need = max(needed, key=lambda need: need.end, default=None)

        if last_need and (previous_on_rank is None or last_need.end >= previous_on_rank.end):
            saved = saved_before_actions.get(event.action, 0.0)
            starts.append(moved[last_need.action].end + max(0.0, event.start - last_need.end - saved))
            starts += [moved[previous_on_rank.action].end] if previous_on_rank else []
        elif previous_on_rank:
            starts.append(moved[previous_on_rank.action].end + max(0.0, event.start - previous_on_rank.end))
        start = max(starts, default=event.start)
        seconds = max(0.0, event.end - event.start - saved_in_actions.get(event.action, 0.0))
        moved[event.action] = event._replace(start=start, end=start + seconds, sent=None)

    rows = tuple(tuple(moved[event.action] for event in row) for row in timeline.rows)
    return replace(timeline, name=f"{timeline.name.removesuffix(', measured')}, predicted", rows=rows)


def without_teacher(timeline: Timeline) -> Timeline:
    """Return `timeline` as it would have run without the forwards of a teacher; itself if it has none."""
    teacher = timeline.stage_chains.teacher
    if teacher is None:
        return timeline

    forwards = {event.action: event.end - event.start for event in timeline.events if event.action.stage >= teacher}
    alone = replay(timeline, forwards)
    frozen = frozenset(stage for stage in timeline.stage_chains.forward_only if stage < teacher)
    return replace(
        alone,
        name=timeline.name,
        rows=tuple(tuple(event for event in row if event.action not in forwards) for row in alone.rows),
        activation_sizes=alone.activation_sizes[:teacher],
        chains=Chains(teacher, frozen) if frozen else None,
        teacher_output=0.0,
    )
