"""When replicas have averaged their gradients: what a table hides of it, and what remains."""

from collections import defaultdict

from penstock.errors import ScheduleError
from penstock.schedule.table import Kind
from penstock.schedule.timing.events import Border, Channel
from penstock.schedule.timing.simulate import Cost, Costs
from penstock.schedule.timing.timeline import Timeline


def averaged(timeline: Timeline, seconds: Cost, *, overlapped: bool = True, shared: bool = False) -> float:
    """When the gradients of all stages are averaged, in the unit and on the clock of `timeline`, a planned or measured step.

    The gradients of a stage leave after its last backward, those of a rank's stages one after the other. `seconds` is what
    that takes alone, a number for all stages or one for each: over n replicas and a link of so many bytes a second,
    2 (n - 1) / n times the bytes of its gradients / bandwidth. `shared`: all ranks' gradients take one link, as where replicas
    are machines. Not `overlapped`: nothing leaves before the step has ended on all ranks.

    Raises ScheduleError as `Costs.table` does, and for a timeline without backwards.
    """
    ready: dict[int, tuple[int, float]] = {}  # stage -> its rank, and when its gradients are complete
    for event in timeline.events:
        if event.action.kind in (Kind.B, Kind.W):
            stage = event.action.stage
            ready[stage] = event.rank, max(event.end, ready.get(stage, (0, event.end))[1])
    if not ready:
        raise ScheduleError(f"{timeline.name} has no backward: there are no gradients to average")
    takes = Costs(backward_weight=seconds).table(max(ready) + 1)[Kind.W]
    end = max(event.end for event in timeline.events)
    leaving = sorted((when if overlapped else end, takes[stage], rank) for stage, (rank, when) in ready.items())
    links: dict[int, Channel] = defaultdict(Channel)
    return max(end, *(links[0 if shared else rank].carry(when, Border(lasts)) for when, lasts, rank in leaving))
