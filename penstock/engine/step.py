r"""One step of one rank, from the user's call to the loss. Read this first: it is the story, top to bottom.

    rank 0   split  vote  0F0  agree         0F1             0B0            0B1  average  conclude
                      \/            \           \           /              /
    rank 1   split  vote       agree   1F0  1B0 -\---------'   1F1  1B1 --'      average  conclude

A step of 1F1B with two microbatches on two ranks. Time goes to the right; slanted lines are messages: votes, the outputs of 0F0
and 0F1, the gradients of 1B0 and 1B1.

    split      the call becomes this rank's share of the batch          engine/batch.py
    vote       every rank tells every other what it is about to run     engine/batch.py
    begin      parameters that replicas share out are fetched           mesh/fsdp.py
    agree      and reads from all votes what the step is like           engine/agreement.py
    0F0 ..     actions, in the order of the rank's program              engine/actions.py, stage/stage.py
               the order: which receives are posted, which awaited      schedule/program.py, schedule/rank_program.py
    \  /       messages between stages, sent without waiting            comms/transport/channels.py
    measure    in the first step of a kind: what a microbatch keeps     engine/memory.py
    average    gradients become those of the whole batch                mesh/parallelize.py
    conclude   loss and times, and what was found on watch              engine/report.py, engine/checks/
    undo       where it failed, or something was not finite: as before  engine/checks/undo.py

The first stage's first forward waits for nobody, so it runs while the votes travel; what it made is sent once the ranks have
agreed. When anything raises on one rank, all ranks raise the same error: `Pipeline` sees to that, by comms/control_group.py.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.comms.control_group import ControlGroup, WaitError, convert_transport_errors
from penstock.comms.preemption import preempted
from penstock.comms.transport.channels import Channels, ReceiveChannel, SendChannel
from penstock.engine.actions import Actions, Acts, Ahead, explained, messages
from penstock.engine.agreement import Agreement, Known
from penstock.engine.batch import Batch, Call, split, trained
from penstock.engine.checks.digest import check_copies, is_due
from penstock.engine.checks.factor import GradientFactor
from penstock.engine.checks.hidden_uses import GradientBefore, UnregisteredParameters
from penstock.engine.checks.nonfinite import CAUSES, DATA, STATE, OnNonfinite, Verdict, Watch, verdict
from penstock.engine.checks.trained_elsewhere import SharedLayers
from penstock.engine.checks.undo import Undo
from penstock.engine.clock import Clock, clock_for, skew
from penstock.engine.memory import MemoryMeasurement
from penstock.engine.profiling import ReceiveRanges, SendRanges, action_ranges, message_ranges
from penstock.engine.report import BackgroundSave, Ended, Outcome, conclude, forget_peak, peak_memory, weighted_sum
from penstock.errors import NonFiniteError, ResourceError
from penstock.mesh.fsdp import begin_step
from penstock.mesh.parallelize import finish_gradient_averaging
from penstock.mesh.position import MeshPosition
from penstock.partition.attributes import AttributeSnapshot
from penstock.schedule.program import Step, Transfer
from penstock.schedule.rank_program import RankPrograms
from penstock.schedule.table import Action, Kind
from penstock.stage.autograd_edges import detach_for_next_stage
from penstock.stage.rank_parameters import RankParameters
from penstock.stage.stage import Stage
from penstock.stage.tied_parameters import TiedParameters
from penstock.torch_private import profiler_is_active


class Engine:
    """What one rank runs its steps with; all ranks call `step` alike."""

    def __init__(
        self,
        control: ControlGroup,
        position: MeshPosition,
        programs: RankPrograms,
        stages: dict[int, Stage],
        parameters: RankParameters,
        tied: TiedParameters,
        watch: Watch | None,
        unregistered: UnregisteredParameters,
        attributes: AttributeSnapshot | None,
        machines: Sequence[str],
        on_nonfinite: OnNonfinite | None,
    ) -> None:
        self.control, self.position, self.stages = control, position, stages
        self.programs, self.schedule = programs, programs.program.schedule
        self.parameters, self.tied, self.watch, self.unregistered = parameters, tied, watch, unregistered
        self.attributes = attributes  # those that the model was cut with
        self.factor = GradientFactor(parameters, position.world.world_size)
        self.on_nonfinite = on_nonfinite
        self.shared: SharedLayers  # set when the pipeline is noted as built
        self.activity = control.topology.context.activity
        self.device, self.machines = position.pipeline.device, machines  # of every rank, as `clock.machine` says
        self.skew, self.clock_error = skew(control, machines), 0.0  # of this rank's clock; of all ranks', in seconds
        self.agreement = Agreement(control, position, programs)
        self._whole = programs.of(training=True)
        self._connected: tuple[int, Channels] | None = None  # the control's generation they belong to, the channels
        self._ended: Any = None  # when the last step did, as its clock tells it
        self.outcome: Outcome | None = None  # of the last step
        self.background_save: BackgroundSave | None = None  # a checkpoint's writing, the same on every rank

    def step(self, call: Call) -> Outcome:
        """Run one step, the same on every rank; it leaves no trace where it fails.

        Raises MismatchError for a batch that does not fit and as `check_model`, StageError when the model or the loss raises,
        WaitFailed when a peer is lost or silent, and NonFiniteError, the same on every rank, once all have ended the step.
        """
        self.channels  # noqa: B018 - open: from here on the others hear of an error on this rank
        self.forget()
        if not call.training:
            return self._step(call)
        with Undo(self.stages.values(), self.device, self.on_nonfinite is not None) as undo:
            outcome = self._watched(call)
            return outcome if outcome.verdict is None else self._after(outcome, outcome.verdict, call, undo)

    def _step(self, call: Call) -> Outcome:
        clock = clock_for(self.device, self.skew.offset, self._ended)
        forget_peak(self.device)
        channels = self.channels
        self.check_model()
        if call.training:
            self.shared.check()
        batch = split(call, self.position, self.schedule, trained(self.stages.values()))

        first = self._whole.steps[0].action if self._whole.steps else "the others end it"
        why = f"to begin {'step()' if call.training else 'eval()'}, before {first}"
        self.control.begin_all_gather_row(
            batch.vote, why
        )  # before any wait, so that a rank in another call does not wait for this one
        with convert_transport_errors("for the replicas to begin the step"):
            begin_step([self.stages[index].replication for index in self._whole.stages])
        measurement = MemoryMeasurement(self.stages) if batch.training and not self.agreement.is_known(batch.vote) else None
        ahead = self._head_start(batch, clock, measurement)
        agreed = self.agreement.reach(batch, why)
        if batch.training and self.tied.owners and is_due(call.step):
            check_copies(self.control, self.tied, call.step)
        before: list[GradientBefore] = []
        if batch.training and agreed.known is None:  # new to this rank, or to another
            before = self.unregistered.begin()
            measurement = measurement or MemoryMeasurement(self.stages)
            measurement.skip(agreed.without_backward)

        channels.begin(agreed.known.specs if agreed.known else None)
        actions = Actions(self.stages, self.schedule.stages - 1, batch, agreed, ahead)
        self.run(agreed.program.steps, self._observed(actions.acts, measurement), channels, clock, ahead)
        self.unregistered.check(before)
        finish_gradient_averaging(list(self.stages.values()), self.parameters, self.position, batch.training)
        clock.averaged()

        outcome = self._conclude(actions, clock, measurement)
        if batch.training and agreed.counts:
            self.tied.broadcast_gradients()  # now, where no rank can fail any more
        channels.end()
        self.agreement.keep(agreed, agreed.known or Known(channels.learned(), outcome.sizes))
        self.shared.steps += batch.training
        self._ended = clock.end()
        return outcome

    def settle_background_save(self) -> None:
        """Wait until it has ended on this rank; raises what went wrong, if that has not been told."""
        if self.background_save is not None:
            self.background_save.wait_unless_reported()
            self.background_save = None

    def check_model(self) -> None:
        """Raises MismatchError for parameters without values, and for an attribute that was another when the model was cut."""
        self.parameters.check_initialised()
        if self.attributes is not None:
            self.attributes.check_unchanged()

    def _head_start(self, batch: Batch, clock: Clock, measurement: MemoryMeasurement | None) -> Ahead | None:
        """Run this rank's first action while the votes travel, if it is the first stage's and so waits for nobody."""
        action = self._whole.steps[0].action if self._whole.steps else None
        alone = self.schedule.stages == 1 or self.position.tp is not None  # it waits for little, or for others in the action
        if alone or action is None or action.stage or action.microbatch >= len(batch.inputs):
            return None
        _, index, microbatch = action
        stage, splits = self.stages[index], (index, microbatch) in self._whole.split

        def act(action: Action, values: Sequence[Any]) -> Sequence[Any]:
            return messages(stage, stage.forward(microbatch, batch.given(action, values), batch.seed, batch.training, splits))

        try:
            stage.wait_parameters()
            self.activity.begin_action(action)
            clock.start()
            made = self._observed({Kind.F: act}, measurement)[Kind.F](action, ())
            clock.stop()
            self.activity.end_action()
        except Exception as error:
            raise explained(error, self.position.world.rank, action) from error
        clock.ahead = 1
        return Ahead(microbatch, [made], stage.auxiliary_losses)

    def _observed(self, acts: Acts, measurement: MemoryMeasurement | None) -> Acts:
        """What runs for each kind of action, with what looks at it around it."""
        for observer in (self.watch, measurement):
            acts = acts if observer is None else observer.around(acts)
        return action_ranges(acts) if profiler_is_active() else acts

    def run(self, steps: Sequence[Step], acts: Acts, channels: Channels, clock: Clock, ahead: Ahead | None = None) -> None:
        """The clock cycle: for each line of the program post, take, act, send."""
        incoming: Mapping[int, ReceiveChannel | ReceiveRanges] = channels.incoming
        outgoing: Mapping[int, SendChannel | SendRanges] = channels.outgoing
        if profiler_is_active():
            incoming, outgoing = message_ranges(channels.incoming, channels.outgoing)
        handed = dict[Transfer, Any]()
        # parameters that are on other ranks, before a stage's first action
        elsewhere = not all(stage.replication.parameters_ready for stage in self.stages.values())
        made: Any = ahead.made.pop() if ahead else None
        try:
            for action, receives, needs, gives in steps:
                for transfer in receives:
                    incoming[transfer.source].post(transfer)
                if made is None:
                    values = [
                        incoming[need.source].take(need, self.device) if need.travels else handed.pop(need) for need in needs
                    ]
                    if elsewhere:
                        self.stages[action.stage].wait_parameters()
                    self.activity.begin_action(action)
                    clock.start()
                    made = acts[action.kind](action, values)
                    clock.stop()
                    self.activity.end_action()
                    del values
                for transfer, value in zip(gives, made, strict=True):
                    if transfer.travels:
                        outgoing[transfer.destination].send(transfer, value)
                    else:
                        handed[transfer] = detach_for_next_stage(value)
                clock.sent()
                made = value = None  # they are on their way
        except (WaitError, ResourceError):
            raise
        except Exception as error:
            raise explained(error, self.position.world.rank, action) from error

    def _conclude(self, actions: Actions, clock: Clock, measurement: MemoryMeasurement | None) -> Outcome:
        """The loss and the times of all ranks. The host waits for this rank's GPU here, and before it only without NCCL."""
        agreed, losses = actions.agreed, actions.told()
        ran = [step.action for step in agreed.program.steps]
        total, wanted = weighted_sum(actions.losses, agreed.weights), len(agreed.weights) if agreed.wants_losses else 0
        has_failed = self.background_save is not None and self.background_save.has_unreported_error
        flags = has_failed, preempted(), self.watch is not None and self.watch.at_the_end()
        mine = Ended(*total, *clock.summary(), peak_memory(self.device), len(losses.auxiliary), *clock.around(), *flags)
        why = f"to end the step, after {ran[-1] if ran else 'nothing'}"
        loss, of_each, report = conclude(self.control, self.position, self.schedule.placement[-1], mine, losses, wanted, why)
        watch = self.watch if any(report.found) else None
        given = {"inputs": actions.batch.inputs, "target": actions.batch.targets}
        judged = verdict(self.control, watch, self.parameters, given) if watch else None
        outputs = [actions.outputs[microbatch] for microbatch in sorted(actions.outputs)]
        sizes = agreed.known.sizes if agreed.known else measurement.sizes if measurement else {}
        return Outcome(loss, of_each, outputs, report, ran, clock, sizes, judged)

    def _watched(self, call: Call) -> Outcome:
        if self.watch is None:
            return self._step(call)
        with self.watch.on(gradients=call.scaler is None or not call.scaler.is_enabled(), offset=self.skew.offset):
            return self._step(call)

    def _after(self, outcome: Outcome, found: Verdict, call: Call, undo: Undo) -> Outcome:
        """What follows where something was not finite: the step is raised, skipped, or run once more."""
        name = f"step {call.step}: something is not finite"
        if self.on_nonfinite == "raise" or found.cause == STATE or (self.on_nonfinite == "retry" and found.cause == DATA):
            raise NonFiniteError(f"{name}, {CAUSES[found.cause]}: {found.text}")
        undo.put_back()
        if self.on_nonfinite == "skip":
            self._warn(f"{name}, and the step is skipped: {found.text}")
            return outcome._replace(report=outcome.report._replace(skipped=True, nonfinite=found.text))
        self.forget()
        outcome = self._watched(call)
        if (again := outcome.verdict) is None:
            self._warn(f"{name}, and was transient: run once more, the step is finite. {found.text}")
            return outcome._replace(report=outcome.report._replace(nonfinite=found.text))
        if again.place == found.place:
            raise NonFiniteError(f"{name}, and persistent: it is there again when the step is run once more: {found.text}")
        told = f"and again, elsewhere, when the step is run once more: {found.text}; then {again.text}"
        raise NonFiniteError(f"{name}, {told}")

    def _warn(self, told: str) -> None:
        if self.position.world.rank == 0:
            warnings.warn(told, RuntimeWarning, stacklevel=6)

    @property
    def channels(self) -> Channels:
        """The channels, open: at the first step, and again after a failure."""
        groups = self.control.open_groups()
        if self._connected is None or self._connected[0] != self.control.times_closed:
            self.control.all_gather_row((), "to open their lines")  # unless one of them is in another call
            self._connected = self.control.times_closed, Channels(self.programs.program, self.position.pipeline, groups)
            self.agreement.forget()
        return self._connected[1]

    def forget(self) -> None:
        """Before a step: let go of whatever one that failed has left, and look at the modules anew."""
        for stage in self.stages.values():
            stage.begin_step()
