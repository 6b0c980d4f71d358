r"""One step of one rank, from the user's call to the loss. Read this first: it is the story, top to bottom.

    rank 0   split  send header  0F0  handshake         0F1             0B0            0B1  average  conclude
                             \/                \           \           /              /
    rank 1   split  send header       handshake   1F0  1B0 -\---------'   1F1  1B1 --'      average  conclude

A step of 1F1B with two microbatches on two ranks. Time goes to the right; slanted lines are messages: headers, the outputs of
0F0 and 0F1, the gradients of 1B0 and 1B1. The numbers are those of the comments in `Engine._run_once`.

    1  split       the call becomes this rank's share of the batch          engine/batch.py
    2  header      every rank sends all others what it is about to run     engine/batch.py
    3  gather      parameters that replicas share out are fetched           mesh/fsdp.py
    4  0F0         the first forward waits for nobody: it runs meanwhile    engine/actions.py
    5  handshake   all headers are read: the step is the same everywhere    engine/handshake.py
    6  measure     in the first step of a kind: what a microbatch keeps     engine/activation_memory.py
    7  1F0 ..      actions, in the order of the rank's program              engine/actions.py, stage/stage.py
                   the order: which receives are posted, which awaited      schedule/program.py, schedule/rank_program.py
       \  /        messages between stages, sent without waiting            comms/transport/channels.py
    8  average     gradients become those of the whole batch                mesh/parallelize.py
    9  conclude    loss and times, values that are not finite               engine/report.py, guards/nonfinite.py
       rollback    after a failure, or a value that is not finite           engine/rollback.py

When anything raises on one rank, all ranks raise the same error: `Pipeline` sees to that, by comms/control_group.py.
"""

import warnings
from collections.abc import Sequence
from typing import Any

from penstock.comms.control_group import ControlGroup, WaitError, convert_transport_errors
from penstock.comms.preemption import preempted
from penstock.comms.transport.channels import Channels
from penstock.engine.actions import ActionFunctions, EarlyForward, StepActions, error_with_location, messages_of
from penstock.engine.activation_memory import MemoryMeasurement
from penstock.engine.batch import LocalBatch, StepCall, requires_grad_flags, split_batch
from penstock.engine.clock import ActionClock, make_clock, measure_own_clock_skew
from penstock.engine.handshake import StepHandshake
from penstock.engine.profiling import action_ranges, message_ranges
from penstock.engine.report import (
    BackgroundSave,
    RankSummary,
    StepResult,
    gather_step_report,
    local_loss_and_dtype,
    peak_process_memory,
    reset_peak_memory,
)
from penstock.engine.rollback import StepRollback
from penstock.engine.sequence import first_stage_signature
from penstock.errors import NonFiniteError, ResourceError
from penstock.guards.digest import check_tied_copies, is_tied_comparison_due
from penstock.guards.gradient_factor import GradientFactorCheck
from penstock.guards.nonfinite import (
    CAUSE_TEXTS,
    DATA,
    STATE,
    NonFiniteMonitor,
    NonFiniteOrigin,
    OnNonfinite,
    find_origin,
)
from penstock.guards.outdated_weights import TensorsSharedBetweenPipelines
from penstock.guards.token_mixing import TokenMixingCheck
from penstock.guards.unregistered_uses import GradientRecord, RemoteParameterUseCheck
from penstock.mesh.context_parallel import ContextParallelAttention
from penstock.mesh.fsdp import begin_step_and_prefetch
from penstock.mesh.parallelize import finish_gradient_averaging
from penstock.mesh.position import MeshPosition
from penstock.partition.attributes import AttributeSnapshot
from penstock.plan.microbatch_costs import MicrobatchCosts, MicrobatchSamples
from penstock.schedule.program import ProgramLine, Transfer
from penstock.schedule.rank_program import RankPrograms
from penstock.schedule.table import Action, Kind
from penstock.stage.attention import attention_context
from penstock.stage.backward.autograd_edges import detach_for_next_stage
from penstock.stage.microbatch import join
from penstock.stage.rank_parameters import RankParameters
from penstock.stage.stage import Stage
from penstock.stage.tied_parameters import TiedParameters
from penstock.torch_private import profiler_is_active


class Engine:
    """Runs the steps of one rank. All ranks call `step` with the same kind of call."""

    def __init__(
        self,
        control: ControlGroup,
        position: MeshPosition,
        programs: RankPrograms,
        stages: dict[int, Stage],
        parameters: RankParameters,
        tied: TiedParameters,
        nonfinite_monitor: NonFiniteMonitor | None,
        unregistered: RemoteParameterUseCheck,
        attributes: AttributeSnapshot | None,
        clock_ids: Sequence[str],
        on_nonfinite: OnNonfinite | None,
    ) -> None:
        self.control, self.position, self.device = control, position, position.pipeline.device
        self.activity = control.topology.context.activity

        self.programs, self.schedule = programs, programs.program.schedule
        self._full_program = programs.select(training=True)
        self.handshake = StepHandshake(control, position, programs)

        self.stages, self.parameters, self.tied = stages, parameters, tied
        cp_group = position.cp_group
        self.attention = None if cp_group is None else ContextParallelAttention(cp_group, position.cp_index)
        cuts_tokens = self.attention is not None or self.schedule.slices > 1
        self.forward_signature = first_stage_signature(stages[0].module) if cuts_tokens and 0 in stages else None
        self.attributes = attributes  # of the model, as they were when it was cut
        self.shared_state: Any  # guards/shared_state.py, set once the pipeline is built
        self.shared_tensors: TensorsSharedBetweenPipelines  # set once the pipeline is built
        self.unregistered = unregistered
        self.gradient_factor = GradientFactorCheck(parameters, position.world.world_size)
        self.nonfinite_monitor, self.on_nonfinite = nonfinite_monitor, on_nonfinite

        self.clock_ids = clock_ids  # of every rank
        self.clock_skew = measure_own_clock_skew(control, clock_ids)  # of this rank
        self.clock_error = 0.0  # seconds, the largest of all ranks

        self._opened_channels: tuple[int, Channels] | None = None  # how often the control group was closed before, the channels
        self._previous_end: Any = None  # when the last step ended, as its clock gives it
        self.last_result: StepResult | None = None
        self.microbatch_samples = MicrobatchSamples()
        self.microbatch_costs: MicrobatchCosts | None = None  # fitted to them, the same on every rank
        self.background_save: BackgroundSave | None = None  # the same on every rank

    def step(self, call: StepCall) -> StepResult:
        """Run one training step or evaluation on all ranks; if it fails, gradients are restored.

        Raises MismatchError for a batch that does not fit and as `check_model`, StageError when the model or the loss raises,
        WaitError when a peer is lost or silent, and NonFiniteError, the same on every rank, once all have ended the step.
        """
        self.open_channels()  # first: only then do the other ranks learn of an error on this one
        self.discard_step_state()
        if not call.training:
            return self._run_once(call)

        with StepRollback(self.stages.values(), self.device, include_state=self.on_nonfinite is not None) as rollback:
            result = self._run_with_nonfinite_monitor(call)
            if result.nonfinite_origin is None:
                return result
            return self._handle_nonfinite(result, result.nonfinite_origin, call, rollback)

    def _run_once(self, call: StepCall) -> StepResult:
        """Run the numbered steps of the table at the top of this file."""
        clock = make_clock(self.device, self.clock_skew.offset, self._previous_end)
        reset_peak_memory(self.device)
        channels = self.open_channels()

        # 1. Split the batch.
        self.check_model()
        if call.training:
            self.shared_tensors.check_not_trained_apart()
        flags = requires_grad_flags(self.stages.values())
        batch = split_batch(call, self.position, self.schedule, flags, self.forward_signature, self.programs.table)

        # 2. Send the header before any wait: a rank in another call must not wait for this one.
        first_action = self._full_program.lines[0].action if self._full_program.lines else "the others end it"
        wait_reason = f"to begin {call.name}, before {first_action}"
        self.control.begin_all_gather_row(batch.header, wait_reason)

        # 3. Begin to gather the parameters that replicas share out.
        with convert_transport_errors("for the replicas to begin the step"):
            begin_step_and_prefetch([self.stages[index].replication for index in self._full_program.stages])

        # 4. Run the first forward while headers travel. A batch that this rank has not seen yet is measured.
        is_new = batch.training and not self.handshake.has_learned(batch.header)
        measurement = MemoryMeasurement(self.stages, self.schedule.slices, batch.summary is not None) if is_new else None
        self.shared_state.start(batch.training, batch.inputs)
        early_forward = self._run_first_forward_early(batch, clock, measurement)

        # 5. Read all headers.
        handshake_result = self.handshake.finish_exchange(batch, wait_reason)
        if handshake_result.lists:
            batch = batch.with_targets_in_run_order(handshake_result.lists, self.position.replica)
        batch = batch._replace(slice_lengths=handshake_result.slice_lengths) if handshake_result.slice_lengths else batch
        if batch.training and self.tied.owners and is_tied_comparison_due(call.steps_before):
            check_tied_copies(self.control, self.tied, call.steps_before)

        # 6. In the first step of a kind, on any rank: measure memory, and find parameters that are not registered.
        gradient_records: list[GradientRecord] = []
        if batch.training and handshake_result.learned is None:
            gradient_records = self.unregistered.record_gradients()
            measurement = measurement or MemoryMeasurement(self.stages, self.schedule.slices, bool(handshake_result.lists))
            measurement.skip_microbatches(handshake_result.forward_only_microbatches)

        # 7. Run the program.
        channels.begin_step(handshake_result.message_signatures)
        actions = StepActions(self.stages, self.schedule.stages - 1, batch, handshake_result, early_forward)
        functions = self._wrap_with_observers(actions.functions, measurement)
        lengths = handshake_result.sequence_lengths or handshake_result.slice_lengths
        if lengths and handshake_result.learned is None:
            part = None if self.attention is None else self.attention.part
            functions = TokenMixingCheck(self.stages, self.device, batch, lengths, part).wrap_actions(functions)
        if self.attention is not None:
            self.attention.begin_step(handshake_result.sequence_lengths, call.sequence_dim)
        with attention_context(self.attention):
            self.run_program(handshake_result.program.lines, functions, channels, clock, early_forward)
        self.unregistered.check_gradients_unchanged(gradient_records)

        # 8. Average gradients over replicas.
        finish_gradient_averaging(list(self.stages.values()), self.parameters, self.position, batch.training)
        clock.mark_averaged()

        # 9. Conclude. Gradients of tied parameters are copied last: no rank can fail any more.
        result = self._exchange_results(actions, clock, measurement)
        if batch.training and handshake_result.has_backward:
            self.tied.broadcast_gradients()
        channels.end_step()

        if batch.training and handshake_result.lists and handshake_result.has_backward:
            replica_list = handshake_result.lists[self.position.replica]
            shapes = list(zip(replica_list.rows, replica_list.elements, strict=True))
            if measurement is None:
                self.microbatch_samples.add_seconds(result.actions, clock, shapes)
            else:
                self.microbatch_samples.add_bytes(measurement.sizes_by_microbatch, shapes)
        self.handshake.remember(handshake_result, result.activation_sizes)
        self.shared_tensors.steps += batch.training
        self._previous_end = clock.mark_end()
        return result

    def _run_first_forward_early(
        self, batch: LocalBatch, clock: ActionClock, measurement: MemoryMeasurement | None
    ) -> EarlyForward | None:
        """Run this rank's first action before the handshake, if it is a forward of the first stage, which waits for nobody."""
        program = self._full_program
        if batch.summary is not None and batch.inputs:
            program = self.programs.select(batch.training, len(batch.inputs))
        action = program.lines[0].action if program.lines else None
        # Along tp and cp the action waits for other ranks.
        gains_nothing = self.schedule.stages == 1 or self.position.tp is not None or self.position.cp_size > 1
        gains_nothing |= batch.summary is not None and self.position.replica > 0  # how many microbatches are before its first?
        if gains_nothing or action is None or action.stage or action.microbatch >= len(batch.inputs):
            return None

        number = action.index_among_slices(batch.num_slices)
        index, sequence_slice = action.stage, batch.sequence_slice(action)
        stage, is_split = self.stages[index], action[1:] in program.split_backwards

        def forward(action: Action, values: Sequence[Any]) -> Sequence[Any]:
            inputs = batch.forward_inputs(action, values)
            return messages_of(
                stage, stage.forward(number, inputs, batch.microbatch_seed(number), batch.training, is_split, sequence_slice)
            )

        try:
            stage.wait_parameters()
            self.activity.begin_action(action)
            clock.mark_start()
            messages = self._wrap_with_observers({Kind.F: forward}, measurement)[Kind.F](action, ())
            clock.mark_stop()
            self.activity.end_action()
        except Exception as error:
            raise error_with_location(error, self.position.world.rank, action) from error
        clock.num_early = 1
        return EarlyForward(number, [messages], stage.auxiliary_losses)

    def run_program(
        self,
        lines: Sequence[ProgramLine],
        functions: ActionFunctions,
        channels: Channels,
        clock: ActionClock,
        early_forward: EarlyForward | None = None,
    ) -> None:
        """Run the lines of a program: for each, post its receives, wait for its inputs, run its action, send what it made."""
        incoming, outgoing = channels.incoming, channels.outgoing

        def receive(transfer: Transfer) -> Any:
            return incoming[transfer.source].receive(transfer, self.device)

        def send(transfer: Transfer, value: Any) -> None:
            outgoing[transfer.destination].send(transfer, value)

        receive_message, send_message = message_ranges(receive, send) if profiler_is_active() else (receive, send)

        local_values = dict[Transfer, Any]()  # between two stages of this rank
        waits_for_parameters = not all(stage.replication.parameters_ready for stage in self.stages.values())
        messages: Any = early_forward.messages.pop() if early_forward else None  # of the first line, which has run
        try:
            for action, receives, inputs, outputs in lines:
                for transfer in receives:
                    incoming[transfer.source].post_receive(transfer)

                if messages is None:
                    values = [
                        receive_message(transfer) if transfer.is_remote else local_values.pop(transfer) for transfer in inputs
                    ]
                    if waits_for_parameters:
                        self.stages[action.stage].wait_parameters()
                    self.activity.begin_action(action)
                    clock.mark_start()
                    messages = functions[action.kind](action, values)
                    clock.mark_stop()
                    self.activity.end_action()
                    del values

                for transfer, value in zip(outputs, messages, strict=True):
                    if transfer.is_remote:
                        send_message(transfer, value)
                    else:
                        local_values[transfer] = detach_for_next_stage(value)
                clock.mark_sent()
                messages = value = None  # frees their memory
        except (WaitError, ResourceError):
            raise
        except Exception as error:
            raise error_with_location(error, self.position.world.rank, action) from error

    def _wrap_with_observers(self, functions: ActionFunctions, measurement: MemoryMeasurement | None) -> ActionFunctions:
        """Return `functions`, wrapped by what watches them: monitor of values, measurement of memory, profiler."""
        shared_state = self.shared_state if self.shared_state.is_observing else None
        for observer in (self.nonfinite_monitor, measurement, shared_state):
            functions = functions if observer is None else observer.wrap_actions(functions)
        return action_ranges(functions) if profiler_is_active() else functions

    def _exchange_results(self, actions: StepActions, clock: ActionClock, measurement: MemoryMeasurement | None) -> StepResult:
        """Exchange losses, times and flags with all ranks. The host waits for its GPU here; before, only without NCCL."""
        handshake_result = actions.handshake_result
        ran = [line.action for line in handshake_result.program.lines]
        wait_reason = f"to end the step, after {ran[-1] if ran else 'nothing'}"

        # 1. This rank's summary. The monitor looks at gradients last: they are complete now.
        losses = actions.microbatch_losses()
        loss_and_dtype = local_loss_and_dtype(actions.losses, handshake_result.loss_shares, actions.batch.order)
        save_failed = self.background_save is not None and self.background_save.has_unreported_error
        is_nonfinite = self.nonfinite_monitor is not None and self.nonfinite_monitor.check_final_gradients()
        flags = save_failed, preempted(), is_nonfinite, self.shared_state.end()
        memory, seconds = peak_process_memory(self.device), clock.seconds_between_steps_and_averaging()
        summary = RankSummary(*loss_and_dtype, *clock.span_and_busy_seconds(), memory, len(losses.auxiliary), *seconds, *flags)

        # 2. All ranks' summaries.
        num_losses = (
            len(handshake_result.microbatch_rows) if handshake_result.wants_losses and handshake_result.loss_shares else 0
        )
        last_rank = self.schedule.placement[-1]
        loss, loss_list, report = gather_step_report(
            self.control, self.position, last_rank, summary, losses, num_losses, wait_reason
        )

        # 3. Where a forward has changed what other stages use, all ranks compare what they saw.
        self.shared_state.after(self.control, report.shared_state_changed)

        # 4. Where a value was not finite, all ranks look for its origin.
        origin = None
        if self.nonfinite_monitor is not None and any(report.nonfinite_found):
            local_batch = {"inputs": actions.batch.inputs, "target": actions.batch.targets}
            origin = find_origin(self.control, self.nonfinite_monitor, self.parameters, local_batch)

        outputs = [actions.outputs[number] for number in sorted(actions.outputs)]
        if (slices := actions.batch.num_slices) > 1:
            rows = [outputs[first : first + slices] for first in range(0, len(outputs), slices)]
            outputs = [join(row, actions.batch.call.sequence_dim) for row in rows]
        sizes = handshake_result.learned or (measurement.sizes if measurement else {})
        return StepResult(loss, loss_list, outputs, report, ran, clock, sizes, origin)

    # -- values that are not finite ------------------------------------------------------------------------------------

    def _run_with_nonfinite_monitor(self, call: StepCall) -> StepResult:
        """Run the step, with the monitor on if there is one. A scaler expects gradients to overflow: they are not checked."""
        if self.nonfinite_monitor is None:
            return self._run_once(call)
        check_gradients = call.scaler is None or not call.scaler.is_enabled()
        with self.nonfinite_monitor.watch_step(check_gradients, self.clock_skew.offset):
            return self._run_once(call)

    def _handle_nonfinite(
        self, result: StepResult, origin: NonFiniteOrigin, call: StepCall, rollback: StepRollback
    ) -> StepResult:
        """Raise, skip the step, or run it once more, as `on_nonfinite` says."""
        prefix = f"step {call.steps_before}: something is not finite"

        # Running once more helps against neither parameters nor a batch that are not finite.
        is_lost = origin.cause == STATE or (self.on_nonfinite == "retry" and origin.cause == DATA)
        if self.on_nonfinite == "raise" or is_lost:
            raise NonFiniteError(f"{prefix}, {CAUSE_TEXTS[origin.cause]}: {origin.text}")

        rollback.restore()
        if self.on_nonfinite == "skip":
            self._warn_on_rank0(f"{prefix}, and the step is skipped: {origin.text}")
            return result._replace(report=result.report._replace(skipped=True, nonfinite=origin.text))

        self.discard_step_state()
        result = self._run_with_nonfinite_monitor(call)
        second_origin = result.nonfinite_origin
        if second_origin is None:
            self._warn_on_rank0(f"{prefix}, and was transient: run once more, the step is finite. {origin.text}")
            return result._replace(report=result.report._replace(nonfinite=origin.text))
        if second_origin.recurrence_key == origin.recurrence_key:
            raise NonFiniteError(f"{prefix}, and persistent: it is there again when the step is run once more: {origin.text}")
        raise NonFiniteError(
            f"{prefix}, and again, elsewhere, when the step is run once more: {origin.text}; then {second_origin.text}"
        )

    def _warn_on_rank0(self, text: str) -> None:
        if self.position.world.rank == 0:
            warnings.warn(text, RuntimeWarning, stacklevel=6)

    # -- between steps -------------------------------------------------------------------------------------------------

    def open_channels(self) -> Channels:
        """Return the channels to the neighbours; open them at the first step and after a failure. All ranks call it."""
        groups = self.control.open_groups()
        if self._opened_channels is None or self._opened_channels[0] != self.control.times_closed:
            self.control.all_gather_row((), "to open their lines")  # raises if a rank is in another call
            self._opened_channels = self.control.times_closed, Channels(self.programs.program, self.position.pipeline, groups)
            self.handshake.forget_learned()
        return self._opened_channels[1]

    def discard_step_state(self) -> None:
        """Drop what a failed step has left in the stages, and read their modules anew. Called before a step."""
        for stage in self.stages.values():
            stage.begin_step()

    def check_model(self) -> None:
        """Raise MismatchError for parameters without values, and for attributes that differ from when the model was cut."""
        self.parameters.check_initialised()
        if self.attributes is not None:
            self.attributes.check_unchanged_since_cut()

    def settle_background_save(self) -> None:
        """Wait until the checkpoint in the background is written on this rank. Raise its error, unless raised before."""
        if self.background_save is not None:
            self.background_save.wait_unless_reported()
            self.background_save = None
