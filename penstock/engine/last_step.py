"""The last step, as a user reads it: when its actions ran, and its numbers by name."""

from penstock.comms.control_group import ControlGroup
from penstock.engine.activation_memory import MemoryObserver
from penstock.engine.clock import measure_own_clock_skew
from penstock.engine.pipeline_calls import PipelineCalls
from penstock.engine.report import StepReport
from penstock.engine.step import Engine
from penstock.errors import PenstockError
from penstock.explain.explain import MeasuredTimeline
from penstock.schedule.memory import ActivationSize
from penstock.timing.events import Event, MessageCost

NO_ACTIVATION = ActivationSize(0, 0)  # of a stage that has forwards only


class LastStep(PipelineCalls):
    """A base of Pipeline: what it tells of its last step."""

    _engine: Engine
    _memory: MemoryObserver
    _recut_call: str  # that cuts the model anew, if it was cut

    @property
    def report(self) -> StepReport | None:
        """Times and memory of the last step, the same on every rank; None before the first."""
        return self._engine.last_result and self._engine.last_result.report

    @property
    def preempted(self) -> bool:
        """Whether any rank was asked to save and leave (`ps.comms.catch_preemption`); after each step the same on all ranks."""
        return self.report is not None and any(self.report.preempted)

    def metrics(self) -> dict[str, float]:
        """Return the numbers of the last step by name, for any logger (`wandb.log(pipe.metrics())`). All ranks call it.

        Times are in seconds, memory in bytes. `wait/..`: the share of this pipeline's time that each cause of idle time took.
        `between_steps_seconds/..`: from the step before to this one, for the optimizer and the next batch.
        `averaging_seconds/..`: from a replica's last action until gradients were averaged.
        """
        timeline = self._gather_timeline("metrics()")
        assert self.report is not None
        return metrics_by_name(timeline, self.report)

    def timeline(self) -> MeasuredTimeline:
        """Return when every action of the last step ran, in seconds of rank 0's clock. All ranks call it.

        Each replica gets its own timeline. Memory is in bytes (`engine/activation_memory.py`) unless a stage is
        compiled. Ranks on other machines compare their clocks first; `clock_error` says how far apart they may still be, in
        seconds.
        """
        return self._gather_timeline("timeline()")

    def _gather_timeline(self, call: str) -> MeasuredTimeline:
        with self.collective(call) as control:
            return gather_timeline(self._engine, control, self._memory, self._recut_call)

    @property
    def clock_error(self) -> float:
        """Seconds by which the times of different machines in the last `timeline()` may be off."""
        return self._engine.clock_error

    def lines(self) -> dict[str, str]:
        """Return what carries this rank's messages: `{"0-1": "memory that both processes see"}`. All ranks call it."""
        with self.collective("lines()"):
            return {name: transport.medium for name, transport in self._engine.open_channels().transports.items()}


def gather_timeline(engine: Engine, control: ControlGroup, memory: MemoryObserver, recut_call: str) -> MeasuredTimeline:
    """Gather the events of all ranks in the engine's last step, on rank 0's clock. All ranks call it.

    `recut_call`: the call that cuts the model anew, if it was cut. Raises PenstockError before the first step.
    """
    result, position = engine.last_result, engine.position
    if result is None:
        raise PenstockError("there is no timeline yet: run a step first")

    # 1. This rank's events, at times of rank 0's clock.
    engine.clock_skew = measure_own_clock_skew(control, engine.clock_ids)  # anew: clocks drift apart
    result.clock.offset = engine.clock_skew.offset
    intervals = zip(result.agreed.program.actions, result.clock.intervals(), strict=True)
    events = tuple(Event(position.pipeline.rank, action, *times) for action, times in intervals)

    # 2. Those of all ranks of this pipeline.
    kind = result.agreed.step_kind
    message = events, engine.clock_skew.error, memory.sizes_of(kind), memory.teacher_output_bytes_of(kind)
    messages = control.all_gather_value(message, "to tell their timelines")
    ranks = [position.pipeline.get_global_rank(rank) for rank in range(position.pipeline.world_size)]
    rows, errors, sizes, teacher_outputs = zip(*[messages[rank] for rank in ranks], strict=True)
    engine.clock_error = max(errors)

    table, report, chains = engine.schedule, result.report, result.agreed.chains
    size_of_stage = {stage: size for rank_sizes in sizes for stage, size in rank_sizes.items()}
    all_measured = len(size_of_stage) == table.stages
    return MeasuredTimeline(
        f"{table.name}, measured",
        rows,
        activation_sizes=tuple(size_of_stage.get(stage, NO_ACTIVATION) for stage in range(chains.num_stages))
        if all_measured
        else (),
        chains=chains if chains.forward_only else None,
        memory_unit="bytes" if all_measured else "",
        between_steps=tuple([report.between[rank] for rank in ranks]),
        averaging=tuple([report.averaging[rank] for rank in ranks]) if position.num_ranks_per_stage > 1 else (),
        microbatch_sizes=result.agreed.microbatch_sizes,
        skips=dict.fromkeys(engine.programs.program.skips, MessageCost()),
        teacher_output=float(max(teacher_outputs)) if all_measured else 0.0,
        recut_call=recut_call,
    )


def metrics_by_name(timeline: MeasuredTimeline, report: StepReport) -> dict[str, float]:
    """Return the numbers of a step for a logger. Waits are shares of (ranks x makespan); `skipped` is 1 if the step was."""
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
