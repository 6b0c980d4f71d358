r"""One step of one rank, from the user's call to the loss, or to the error of all ranks. Read this first: it is the story.

    rank 0   cut  send row  0F0  agree         0F1             0B0 ..           0B1  average  report
                         \/          \           \            /                /
    rank 1   cut  send row       agree   1F0  1B0 -\---------'    1F1  1B1 ---'      average  report

A step of 1F1B with two microbatches on two ranks. Time goes to the right; slanted lines are messages: rows of numbers, the
outputs of 0F0 and 0F1, the gradients of 1B0 and 1B1. The numbers are those of the comments in `Engine._run`.

    1  cut         the call becomes this rank's pieces                      batch/call.py, batch/pieces.py
    2  send row    every rank sends all others what it is about to run     batch/agreement.py
    3  gather      sharded parameters are all-gathered                      mesh/parallelize.py
    4  0F0         the first forward waits for nobody: it runs meanwhile    engine/actions.py
    5  agree       all rows are read: the step is the same everywhere       batch/agreement.py
    6  1F0 ..      actions, in the order of the rank's program              engine/actions.py, stage/stage.py
                   the order: which receives are posted, which awaited      schedule/program.py, schedule/rank_program.py
       \  /        messages between stages, sent without waiting            comms/transport/channels.py
    7  average     gradients become those of the whole batch                mesh/parallelize.py
    8  report      loss and times of all ranks                              engine/report.py
       observers   look on: before 2, at 5, around 4 and 6, inside 8        engine/observers.py, guards/

When an action raises, here 1B0 on rank 1, all ranks raise the same error:

    rank 1     `run_program` adds rank, stage, action and microbatch to it; `StepRollback` restores this rank's gradients
    rank 1     `ControlGroup.collective_call`, around the whole step, writes its status into the store, and closes the groups
    rank 0     its wait for rank 1 ends with a WaitError; it restores its gradients, and leaves the step through the same call
    rank 0     reads the statuses: rank 1's is `raised`, with the error, which it raises; a rank without a status is lost
    next step  `open_channels` opens new groups and channels; descriptions are sent again

docs/explanation/failures.md tells more: of lost ranks, and of a mesh, whose groups cannot be opened again.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.batch.agreement import Agreement, Reduction
from penstock.batch.call import Call, CallReader
from penstock.comms.control_group import ControlGroup
from penstock.comms.preemption import preempted
from penstock.comms.transport.channels import Channels
from penstock.comms.wait_errors import WaitError
from penstock.engine.actions import FirstForward, SeedCache, StepActions, describe_location, error_with_location
from penstock.engine.clock import ActionClock, make_clock, measure_own_clock_skew
from penstock.engine.observers import ObservedStep, Observer, Observers, StepFunctions
from penstock.engine.optimizers import read_grad_scale
from penstock.engine.report import (
    BackgroundSave,
    RankSummary,
    StepResult,
    gather_summaries,
    local_loss_and_dtype,
    peak_process_memory,
    reset_peak_memory,
)
from penstock.engine.rollback import StepRollback
from penstock.errors import ResourceError
from penstock.mesh.context_parallel import ContextParallelAttention
from penstock.mesh.parallelize import begin_gathering_parameters, finish_gradient_averaging, match_backwards
from penstock.mesh.position import MeshPosition
from penstock.schedule.program import ProgramLine, Transfer
from penstock.schedule.rank_program import RankPrograms
from penstock.schedule.table import Action, Kind
from penstock.stage.backward.autograd_edges import detach_for_next_stage
from penstock.stage.hooks import NoDataParallelHooks
from penstock.stage.rank_parameters import RankParameters
from penstock.stage.stage import Stage
from penstock.stage.tied_parameters import TiedParameters


class Engine:
    """Runs the steps of one rank. All ranks call `step` with the same kind of call."""

    def __init__(
        self,
        control: ControlGroup,
        position: MeshPosition,
        programs: RankPrograms,
        reader: CallReader,
        stages: dict[int, Stage],
        parameters: RankParameters,
        tied: TiedParameters,
        reduction: Reduction,
        clock_ids: Sequence[str],
    ) -> None:
        self.control, self.position, self.device = control, position, position.pipeline.device
        self.activity = control.topology.context.activity

        self.programs, self.schedule = programs, programs.program.schedule
        self.last_stage = self.schedule.num_stages - 1
        self._full_program = programs.select(training=True)
        self.reader, self.layout = reader, reader.layout
        self.agreement = Agreement(control, position, programs, reduction, reader.token_parts, self.layout.rows_dim)

        self.stages, self.parameters, self.tied = stages, parameters, tied
        has_hooks = any(not isinstance(stage.data_parallel, NoDataParallelHooks) for stage in stages.values())
        self._has_replicas = has_hooks or position.mesh is not None
        cp_group = position.cp_group
        self.attention = None if cp_group is None else ContextParallelAttention(cp_group, position.cp_index)
        self._seeds, self.observers = SeedCache(), Observers([])

        self.clock_ids = clock_ids  # of every rank
        self.clock_skew = measure_own_clock_skew(control, clock_ids)  # of this rank
        self.clock_error = 0.0  # seconds, the largest of all ranks

        self._opened_channels: tuple[int, Channels] | None = None  # the control group's `times_closed` then
        self._previous_end: Any = None  # when the last step ended, as its clock gives it
        self.last_result: StepResult | None = None
        self.background_save: BackgroundSave | None = None  # the same on every rank

    def observe(self, observers: Sequence[Observer]) -> None:
        """Have these look on at all steps."""
        self.observers = Observers(observers)

    def step(self, call: Call) -> StepResult:
        """Run one training step or evaluation on all ranks; if it fails, gradients are restored.

        Raises MismatchError for a batch that does not fit, StageError when the model or the loss raises,
        WaitError when a peer is lost or silent, and what observers raise.
        """
        channels = self.open_channels()  # first: only then do the other ranks learn of an error on this one
        self.discard_step_state()
        if not call.is_training:
            return self._run(call, channels)
        with StepRollback(self.stages.values()):
            return self._run(call, channels)

    def _run(self, call: Call, channels: Channels) -> StepResult:
        """Run the numbered steps of the table at the top of this file."""
        clock = make_clock(self.device, self.clock_skew.offset, self._previous_end)
        reset_peak_memory(self.device)

        # 1. Cut the call into pieces.
        batch = self.reader.read(call, requires_grad_flags(self.stages))
        num_parts = len(self.position.batch_parts)  # gradients are averaged over them afterwards
        scaler_scale = 1.0 if call.scaler is None else read_grad_scale(call.scaler, self.position.world)
        grad_scale = scaler_scale * call.scale * num_parts
        actions = StepActions(self.stages, self.last_stage, self.layout, call, batch, grad_scale, self.attention, self._seeds)
        is_new_on_rank = call.is_training and not self.agreement.has_run(batch.description.kind_hash)
        step = ObservedStep(call, batch, is_new_on_rank, clock, actions)

        # 2. Send this rank's row before any wait: a rank in another call must not wait for this one.
        wait_reason = f"to begin {call.name}, before {self._full_program.first_action_text}"
        self.agreement.begin(batch.description, call.steps_before, call.scale, self.observers.start(step), wait_reason)

        # 3. Begin to gather sharded parameters.
        if self._has_replicas:
            begin_gathering_parameters([self.stages[index] for index in self._full_program.stages])

        # 4. Run the first forward while rows travel.
        first_forward = self._run_first_forward_early(step)

        # 5. Read all rows.
        step.agreed, rows = self.agreement.finish(batch.description, wait_reason)
        actions.begin(step.agreed, first_forward)
        if self._has_replicas:
            match_backwards([self.stages[index] for index in sorted(step.agreed.program.stages)], step.agreed.same_on_replicas)
        self.observers.compare(step, rows)

        # 6. Run the program.
        channels.begin_step(step.agreed.signatures)
        functions = self.observers.wrap(step, StepFunctions(actions.functions, channels.receive, channels.send))
        self.run_program(step.agreed.program.lines, functions, channels, clock, first_forward)

        # 7. Average gradients over replicas.
        if self._has_replicas:
            finish_gradient_averaging(list(self.stages.values()), self.parameters, self.position, call.is_training)
        clock.mark_averaged()

        # 8. Report. Gradients of tied parameters are copied last: no rank can fail any more.
        result = self._exchange_results(step)
        if self.tied.copies and step.agreed.has_backward and call.is_training:
            self.tied.broadcast_gradients()
        channels.end_step()
        self.agreement.remember(step.agreed)
        self._previous_end = clock.mark_end()
        return result

    def _run_first_forward_early(self, step: ObservedStep) -> FirstForward | None:
        """Run this rank's first action before the rows are read, if it is a forward of the first stage: it waits for nobody."""
        batch, num_microbatches = step.batch, len(step.batch.order)
        if self.last_stage == 0 or self.programs.has_teacher:  # whose forward may be the first action
            return None
        if self.position.tp is not None or self.position.cp_size > 1:  # the forward waits for other ranks
            return None
        if not num_microbatches or batch.first_microbatch is None:  # seeds of a list depend on the lists of earlier replicas
            return None
        program = self.programs.select(step.call.is_training, num_microbatches)
        action = program.lines[0].action if program.lines else None
        if action is None or action.stage or action.microbatch:
            return None

        stage = self.stages[0]
        forward = step.actions.first_forward_function(action[1:] in program.split_backwards)
        try:
            stage.wait_parameters()
            activity, step_name = self.activity, self.activity.now[0]
            activity.now = step_name, action, True  # which heartbeats report
            start = step.clock.now()
            functions = self.observers.wrap(step, StepFunctions({Kind.F: forward}, _no_message, _no_message))
            messages = functions.actions[Kind.F](action, ())
            step.clock.marks += start, step.clock.now()
            activity.now = step_name, action, False
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            self._add_location(error, action)
            raise
        step.clock.num_before_rows = 1
        return FirstForward(messages, stage.auxiliary_losses)

    def run_program(
        self,
        lines: Sequence[ProgramLine],
        functions: StepFunctions,
        channels: Channels,
        clock: ActionClock,
        first_forward: FirstForward | None = None,
    ) -> None:
        """Run the lines of a program: for each, post its receives, wait for its inputs, run its action, send what it made."""
        (actions, receive, send), incoming = functions, channels.incoming
        mark, now, activity, step_name = clock.marks.append, clock.now, self.activity, self.activity.now[0]
        local_values: dict[Transfer, Any] = {}  # between two stages of this rank
        waits_for_parameters = self._has_replicas  # each stage asks its own
        messages: Any = first_forward.take_messages() if first_forward else None  # of the first line, which has run
        values: list[Any] = []  # the inputs of a line
        try:
            for action, receives, inputs, outputs in lines:
                for transfer in receives:
                    incoming[transfer.source].post_receive(transfer)

                if messages is None:
                    for transfer in inputs:
                        is_remote = transfer.source != transfer.destination
                        values.append(receive(transfer) if is_remote else local_values.pop(transfer))
                    if waits_for_parameters:
                        self.stages[action.stage].wait_parameters()
                    activity.now = step_name, action, True  # which heartbeats report
                    mark(now())
                    messages = actions[action.kind](action, values)
                    mark(now())
                    activity.now = step_name, action, False
                    values = []

                for transfer, value in zip(outputs, messages, strict=True) if outputs else ():
                    if transfer.source != transfer.destination:
                        send(transfer, value)
                    else:
                        local_values[transfer] = detach_for_next_stage(value)
                mark(now())
                messages = value = None  # frees their memory
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            self._add_location(error, action, zip(inputs, values, strict=False))
            raise

    def _add_location(
        self, error: Exception | KeyboardInterrupt | SystemExit, action: Action, inputs: Iterable[tuple[Transfer, Any]] = ()
    ) -> None:
        """Raise an action's error with its place, or note the place on what ends the program. A lost rank's error has none."""
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            error.add_note(f"in {describe_location(action)}")
        elif not isinstance(error, (WaitError, ResourceError)):
            raise error_with_location(error, self.position.world.rank, action, inputs) from error

    def _exchange_results(self, step: ObservedStep) -> StepResult:
        """Exchange losses, times and what observers tell. The host waits for its GPU here, with NCCL for the first time."""
        agreed, actions, clock = step.agreed, step.actions, step.clock

        # 1. This rank's summary. Observers may look at gradients: they are complete now.
        losses = actions.microbatch_losses()
        loss_and_dtype = local_loss_and_dtype(actions.losses, agreed.pieces, agreed.in_batch_order)
        save_failed = self.background_save is not None and self.background_save.has_unreported_error
        memory, num_auxiliary = peak_process_memory(self.device), len(losses.auxiliary)
        summary = RankSummary(*loss_and_dtype, *clock.totals(), memory, num_auxiliary, save_failed, preempted())

        # 2. All ranks' summaries.
        loss, loss_list, summaries, rows = gather_summaries(
            self.control,
            self.position,
            self.schedule.placement[-1],
            summary,
            self.observers.end(step),
            losses,
            agreed.num_microbatches if agreed.wants_losses and agreed.has_loss else 0,
            f"to end the step, after {agreed.program.last_action_text}",
        )
        self.observers.after(step, rows)
        return StepResult(loss, loss_list, actions.joined_outputs(), agreed, clock, summaries)

    # -- between steps -------------------------------------------------------------------------------------------------

    def open_channels(self) -> Channels:
        """Return the channels to the neighbours; open them at the first step and after a failure. All ranks call it."""
        groups = self.control.open_groups()
        if self._opened_channels is None or self._opened_channels[0] != self.control.times_closed:
            self.control.all_gather_row((), "to open their lines")  # raises if a rank is in another call
            self._opened_channels = self.control.times_closed, Channels(self.programs.links, self.position.pipeline, groups)
            self.agreement.forget()
        return self._opened_channels[1]

    def discard_step_state(self) -> None:
        """Drop what a failed step has left in the stages, and list their parameters anew. Called before a step."""
        for stage in self.stages.values():
            stage.begin_step()

    def finish_background_save(self) -> None:
        """Wait until the checkpoint in the background is written on this rank. Raise its error, unless raised before."""
        if self.background_save is not None:
            self.background_save.wait_unless_reported()
            self.background_save = None


def requires_grad_flags(stages: dict[int, Stage]) -> bytes:
    """Return a byte for each parameter of `stages`: whether it is trained. They decide what stages send."""
    return bytes([parameter.requires_grad for stage in stages.values() for parameter in stage.parameters])


def _no_message(transfer: Transfer, value: Any = None) -> None:
    """Stand in for receive and send: the early forward has no messages."""
