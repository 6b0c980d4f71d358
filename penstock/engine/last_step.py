"""What a user reads of the last step: its times, what ranks waited for, what carried their messages."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

from penstock.comms.control_group import ControlGroup
from penstock.engine.clock import skew
from penstock.engine.report import StepReport
from penstock.engine.step import Engine
from penstock.errors import PenstockError
from penstock.mesh.position import MeshPosition
from penstock.schedule import Border, Event, MeasuredTimeline, Size, Timeline
from penstock.schedule.table import Skip, Table


class LastStep:
    """What the last step of `engine` came to: `pipe.last`. `collective`: the pipeline's."""

    def __init__(self, engine: Engine, collective: Callable[[str], AbstractContextManager[ControlGroup]]) -> None:
        self._engine, self._collective = engine, collective

    @property
    def report(self) -> StepReport | None:
        """What it took, the same on every rank; None before the first step."""
        return self._engine.outcome and self._engine.outcome.report

    @property
    def clock_error(self) -> float:
        """Seconds by which the times of different machines in the last `timeline()` may be off."""
        return self._engine.clock_error

    def metrics(self) -> dict[str, float]:
        """See `Pipeline.metrics`."""
        timeline, report = self._timeline("metrics()")
        return _numbers(report, timeline)

    def timeline(self) -> MeasuredTimeline:
        """See `Pipeline.timeline`."""
        return self._timeline("timeline()")[0]

    def lines(self) -> dict[str, str]:
        """See `Pipeline.lines`."""
        with self._collective("lines()"):
            return {name: line.way for name, line in self._engine.channels.lines.items()}

    def _timeline(self, call: str) -> tuple[MeasuredTimeline, StepReport]:
        """Raises PenstockError before the first step."""
        engine, position = self._engine, self._engine.position
        with self._collective(call) as control:
            last = engine.outcome
            if last is None:
                raise PenstockError("there is no timeline yet: run a step first")
            engine.skew = skew(control, engine.machines)  # clocks drift apart
            last.clock.offset = engine.skew.offset
            intervals = zip(last.actions, last.clock.intervals(), strict=True)
            mine = tuple(Event(position.pipeline.rank, action, *times) for action, times in intervals)
            everyone = control.all_gather_object((mine, engine.skew.error, last.sizes), "to tell their timelines")
            ranks = [position.pipeline.get_global_rank(rank) for rank in range(position.pipeline.world_size)]
            rows, errors, sizes = zip(*[everyone[rank] for rank in ranks], strict=True)
        engine.clock_error = max(errors)
        program = engine.programs.program
        return _measured(engine.schedule, rows, sizes, last.report, position, program.skips), last.report


def _numbers(report: StepReport, timeline: Timeline) -> dict[str, float]:
    """What a step came to: times in seconds, memory in bytes, waits as shares of (ranks x makespan), 1 if it was skipped."""
    return {
        "skipped": float(report.skipped),
        "makespan_seconds": report.makespan,
        "bubble": report.bubble,
        "idle_share": report.idle_share,
        **{f"wait/{cause}": share for cause, share in timeline.causes.items()},
        **{f"between_steps_seconds/rank{rank}": time for rank, time in enumerate(report.between)},
        **{f"averaging_seconds/rank{rank}": time for rank, time in enumerate(timeline.averaging)},
        **{f"busy_seconds/rank{rank}": busy for rank, busy in enumerate(report.busy)},
        **{f"peak_memory_bytes/rank{rank}": peak for rank, peak in enumerate(report.peak_memory)},
    }


def _measured(
    table: Table,
    rows: Sequence[tuple[Event, ...]],
    sizes: Sequence[Mapping[int, Size]],
    report: StepReport,
    position: MeshPosition,
    skips: Iterable[Skip],
) -> MeasuredTimeline:
    """The timeline of a step from what the ranks of this pipeline tell, each in one place: events, sizes of its stages."""
    ranks = [position.pipeline.get_global_rank(rank) for rank in range(len(rows))]
    by_stage = {stage: size for each in sizes for stage, size in each.items()}
    known = len(by_stage) == table.stages
    return MeasuredTimeline(
        f"{table.name}, measured",
        tuple(rows),
        sizes=tuple(by_stage[stage] for stage in range(table.stages)) if known else (),
        memory_unit="bytes" if known else "",
        between=tuple([report.between[rank] for rank in ranks]),
        averaging=tuple([report.averaging[rank] for rank in ranks]) if position.num_stage_ranks > 1 else (),
        skips=dict.fromkeys(skips, Border()),
    )
