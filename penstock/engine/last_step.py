"""The last step, as a user reads it: its times, why ranks waited, which transports carried messages."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from penstock.comms.control_group import ControlGroup
from penstock.engine.activation_memory import MemoryObserver
from penstock.engine.clock import measure_own_clock_skew
from penstock.engine.report import StepReport
from penstock.engine.step import Engine
from penstock.errors import PenstockError
from penstock.explain.explain import MeasuredTimeline
from penstock.schedule.memory import ActivationSize
from penstock.timing.events import Event, MessageCost

NO_ACTIVATION = ActivationSize(0, 0)  # of a stage that has forwards only


class LastStep:
    """Report, metrics and timeline of the engine's last step: `pipe.last`.

    `collective`: the pipeline's. `recut_call`: the call that cuts its model anew, if it has one.
    """

    def __init__(
        self,
        engine: Engine,
        memory: MemoryObserver,
        collective: Callable[[str], AbstractContextManager[ControlGroup]],
        recut_call: str = "",
    ) -> None:
        self._engine, self._memory, self._collective, self._recut_call = engine, memory, collective, recut_call

    @property
    def report(self) -> StepReport | None:
        """Times and memory of the step, the same on every rank; None before the first step."""
        return self._engine.last_result and self._engine.last_result.report

    @property
    def clock_error(self) -> float:
        """Seconds by which the times of different machines in the last `timeline()` may be off."""
        return self._engine.clock_error

    def metrics(self) -> dict[str, float]:
        """See `Pipeline.metrics`. Waits are shares of (ranks x makespan); `skipped` is 1 if the step was."""
        timeline, report = self._gather_timeline_and_report("metrics()")
        return {
            "skipped": float(report.skipped),
            "makespan_seconds": report.makespan,
            "bubble": report.bubble,
            "idle_share": report.idle_share,
            **{f"wait/{cause}": share for cause, share in timeline.causes.items()},
            **{f"between_steps_seconds/rank{rank}": seconds for rank, seconds in enumerate(report.between)},
            **{f"averaging_seconds/rank{rank}": seconds for rank, seconds in enumerate(timeline.averaging)},
            **{f"busy_seconds/rank{rank}": seconds for rank, seconds in enumerate(report.busy)},
            **{f"peak_memory_bytes/rank{rank}": peak for rank, peak in enumerate(report.peak_memory)},
        }

    def timeline(self) -> MeasuredTimeline:
        """See `Pipeline.timeline`."""
        return self._gather_timeline_and_report("timeline()")[0]

    def lines(self) -> dict[str, str]:
        """See `Pipeline.lines`."""
        with self._collective("lines()"):
            return {name: transport.medium for name, transport in self._engine.open_channels().transports.items()}

    def _gather_timeline_and_report(self, call: str) -> tuple[MeasuredTimeline, StepReport]:
        """Gather the events of all ranks, on rank 0's clock. Raise PenstockError before the first step."""
        engine, position = self._engine, self._engine.position
        with self._collective(call) as control:
            result = engine.last_result
            if result is None:
                raise PenstockError("there is no timeline yet: run a step first")
            engine.clock_skew = measure_own_clock_skew(control, engine.clock_ids)  # anew: clocks drift apart
            result.clock.offset = engine.clock_skew.offset

            intervals = zip(result.actions, result.clock.intervals(), strict=True)
            events = tuple(Event(position.pipeline.rank, action, *times) for action, times in intervals)
            message = events, engine.clock_skew.error, self._memory.sizes_of(result.step_kind)
            messages = control.all_gather_value(message, "to tell their timelines")

        ranks = [position.pipeline.get_global_rank(rank) for rank in range(position.pipeline.world_size)]
        rows, errors, sizes = zip(*[messages[rank] for rank in ranks], strict=True)
        engine.clock_error = max(errors)

        table, report, chains = engine.schedule, result.report, result.chains
        size_of_stage = {stage: size for rank_sizes in sizes for stage, size in rank_sizes.items()}
        all_measured = len(size_of_stage) == table.stages
        timeline = MeasuredTimeline(
            f"{table.name}, measured",
            rows,
            activation_sizes=tuple(size_of_stage.get(stage, NO_ACTIVATION) for stage in range(chains.num_stages))
            if all_measured
            else (),
            chains=chains if chains.forward_only else None,
            memory_unit="bytes" if all_measured else "",
            between_steps=tuple([report.between[rank] for rank in ranks]),
            averaging=tuple([report.averaging[rank] for rank in ranks]) if position.num_ranks_per_stage > 1 else (),
            microbatch_sizes=result.microbatch_sizes,
            skips=dict.fromkeys(engine.programs.program.skips, MessageCost()),
            recut_call=self._recut_call,
        )
        return timeline, report
