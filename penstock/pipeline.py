"""The face: a model cut over the ranks that trains like the whole one."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock import comms, partition
from penstock.comms.control import Control, waiting
from penstock.comms.messages.channels import Channels
from penstock.comms.topology import Topology
from penstock.engine import build as assembly
from penstock.engine.agreement import Agreement, Vote
from penstock.engine.clock import Clock, clock_for, skew
from penstock.engine.engine import Engine, Work
from penstock.engine.memory import Weighing
from penstock.engine.report import StepReport, concluded, measured, numbers
from penstock.engine.scaling import scale_of
from penstock.errors import MismatchError, PenstockError
from penstock.mesh import fsdp, tensor_parallel
from penstock.mesh.data_parallel import ApplyDataParallel, share_state
from penstock.mesh.position import position_in
from penstock.randomness import aside, mix
from penstock.schedule import Event, Schedule, Size, Timeline, verify
from penstock.schedule.rank_program import Parts
from penstock.schedule.transform import with_full_backwards
from penstock.stage import microbatch, tied
from penstock.stage.layers import Recompute, evaluating
from penstock.stage.parameters import Parameters

LossFn = Callable[[Any, Any], Tensor]
_count = itertools.count()  # of pipelines in this process, the same on every rank


class Pipeline:
    """A model cut into stages over the ranks of `topology`, trained step by step as one.

    `model`: an `nn.Sequential`, cut here; a list with one module for each stage; or this rank's own stage module (in a
    world of one: the whole model). A stage whose forward has several parameters gets a tuple spread over them and a dict by
    name; every other one gets what the stage before returned. Any tree of tensors, numbers and None may pass.
    `cuts`, `example_args`, `example_kwargs`: cut any other model, by the names of submodules, or by the times measured on an
    example of one microbatch: see `partition.split`.
    `loss_fn(output, target)`: a scalar, the mean over its microbatch; it runs on the last stage's rank.
    `schedule`: a name (with `microbatches` and the schedule's `options`: `stages_per_rank`, `group_size`), the path of a CSV
    table, a `Schedule`, or a function of (rank, ranks, microbatches) that gives the rank's row (`"0F0"`, `"1B0"`, ..).
    `loss_weight(target)`: what a microbatch counts in the mean, from its target alone; by default its rows.
    `seed`: of the random numbers layers draw in training (dropout), which depend on it, the step, the microbatch and the
    layer only; None leaves them to torch's generator, and so to the schedule.
    `merge_weight_gradients`: W actions of one stage that stand next to each other in the table are taken as one product over
    their joined rows. Faster, and exact to rounding only, since the order of the sums changes.
    `recompute`: keep only the input of every `stage`, or of each `block` (a layer, or a unit), and compute the rest again in
    the backward.
    `mesh`: a torch DeviceMesh of all ranks with axes `pp`, `dp`, `tp`, any of them, for instance of `ps.comms.init_mesh`. The
    pipelines along `dp` are replicas: each gets rows of its own and the loss is the mean over all their rows. Gradients are
    averaged once a step, while the last backwards of the table go on. `data_parallel` is how: by `ddp`, by `fsdp`
    (`fully_shard`), or by a function of (stage, the mesh's `dp`) that applies one of the two in its own way.
    `tensor_parallel`: names of submodules in the uncut model, with `*` for any part between two dots -> torch's styles
    (`ColwiseParallel()`, ..), by which ranks along `tp` share their products. These ranks get the same rows.
    With an axis `dp` or `tp` a step that fails is the pipeline's last.
    `scaler`: a GradScaler, whose scale the backward starts with; `ShardedGradScaler`, where there are several ranks.
    `seed` and `init` also initialise what of the model is on the meta device, where each rank gives memory to its own stages
    only: every submodule by its `reset_parameters()` and then by `init(submodule)`, the same for any cut.

    Every rank makes the same call. Raises ScheduleError if the table cannot be proved, MismatchError where the ranks,
    the schedule and the model do not fit together.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        loss_fn: LossFn | None = None,
        schedule: str | Schedule | assembly.Rule = "1f1b",
        microbatches: int = 8,
        loss_weight: Callable[[Any], Any] | None = None,
        topology: Topology | None = None,
        *,
        seed: int | None = 0,
        cuts: Sequence[str] | None = None,
        example_args: Sequence[Any] | None = None,
        example_kwargs: Mapping[str, Any] | None = None,
        merge_weight_gradients: bool = False,
        recompute: Recompute | None = None,
        scaler: torch.amp.GradScaler | None = None,
        init: Callable[[nn.Module], Any] | None = None,
        mesh: DeviceMesh | None = None,
        data_parallel: str | ApplyDataParallel = "ddp",
        tensor_parallel: tensor_parallel.Plan | None = None,
        **options: Any,
    ) -> None:
        self.position = position_in(mesh, topology or comms.init_distributed())
        self.topology = self.position.pipeline  # this rank's place in its pipeline
        self.loss_fn, self.loss_weight, self.seed, self.scaler = loss_fn, loss_weight, seed, scaler
        self.step_count = 0  # steps done; dropout depends on it, so set it when training is resumed
        self.report: StepReport | None = None  # of the last step
        self.clock_error = 0.0  # seconds by which times of different machines may be off
        self._control = Control(self.position.world, f"penstock/{next(_count)}", self.position.beside)
        self._control.connect()
        with self._together():
            self.schedule = assembly.table(schedule, self.topology.world_size, microbatches, options)
            self._program = verify(self.schedule).program
            whole = partition.whole(model, cuts, example_args, example_kwargs)
            starts = (
                [] if whole is None or (whole.measures and self.position.world.rank) else whole.starts(self.schedule.stages)
            )
            starts = self._control.gather_objects(starts, "to agree on the cut")[0]
            cut = assembly.cut(model, whole, starts, self.schedule, self.topology.rank)
            table = with_full_backwards(self.schedule)  # what runs
            if cut.skips or table is not self.schedule:
                self._program = verify(table, skips=cut.skips).program
            mine = assembly.describe(self.schedule, cut, seed, self.position, tensor_parallel, data_parallel)
            everyone = self._control.gather_objects(mine, "to build the pipeline")
            assembly.check(everyone)
            self._machines = [each["machine"] for each in everyone]
            self.skew = skew(self._control, self._machines)
            names = assembly.names(everyone, cut)
            modules = assembly.placed(cut, names, self.topology.device, seed, init)
            with waiting("for the ranks beside it to build the pipeline"):
                parallel = assembly.side_by_side(cut, modules, names, self.position, tensor_parallel, data_parallel)
            self._control.gather_objects(None, "to build the pipeline")
            first = self.position.replica * self.schedule.microbatches
            settings = {"recompute": recompute, "merge": merge_weight_gradients, "first": first}
            self._stages = assembly.stages(cut, modules, everyone, loss_fn, self.topology.device, parallel, table, settings)
            order = None if cut.whole is None else list(cut.whole.state_dict())
            self._parameters = Parameters(modules, names, tied.aliases(cut.tied, names), order)
            self._tied = tied.owned(cut.tied, self.schedule.placement, modules, self.topology)
            for each in self._tied:
                each.share_value()
        self.balance = cut.balance  # how even the cut is, on the rank that chose it
        self.first_rank, self.last_rank = self.schedule.placement[0], self.schedule.placement[-1]
        self._parts = Parts(self._program, self.topology.rank, merge_weight_gradients)
        self._agreement = Agreement(self._control, self.position, self.schedule.microbatches)
        self._engine: Engine | None = None
        self._connected_at = 0  # the control's generation the engine's channels belong to
        self._ran: tuple[Sequence[Any], Clock] | None = None  # the last step's actions, and when they ran
        self._sizes: dict[int, Size] = {}  # what a microbatch of it kept on this rank's stages, in bytes, where that is known
        self._ended = 0.0  # when the last step did

    # -- training and evaluation ------------------------------------------------------------------------------------

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """Forward and backward of one batch; gradients are added to the parameters' `.grad`. Returns the loss, everywhere.

        `args` and `kwargs` are the first stage's input, any tree of tensors with the same number of rows; `target` is the
        loss's, likewise. Only the first stage's rank reads the inputs and only the last one's the target. The loss is the
        mean over the whole batch, a scalar in the loss's dtype. A batch of fewer rows than microbatches runs as many
        microbatches as it has rows.

        Raises, on every rank: MismatchError for a batch that does not fit; StageError when the model or the loss raises;
        LostRankError when a rank dies or is silent. After the first two the next step works, unless there is an axis dp or tp;
        the gradients of the failed one are incomplete.
        """
        return self._run(args, kwargs, target, training=True)[1]

    def eval(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """Forward only, modules in evaluation mode; touches no gradient and no buffer.

        Returns the outputs of the whole batch on the last stage's rank, None on the others; with a `target`, (outputs, loss),
        the loss on every rank. Raises as `step` does.
        """
        with evaluating([stage.module for stage in self._stages.values()]):
            outputs, loss = self._run(args, kwargs, target, training=False)
        return outputs if target is None else (outputs, loss)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, training: bool) -> tuple[Any, Tensor]:
        between = time.perf_counter() - self._ended if self._ended else 0.0
        mine = self._program.schedule.actions[self.topology.rank]
        what = f"to begin {'step()' if training else 'eval()'}, before {mine[0] if mine else 'the others end it'}"
        draws = training and self.seed is not None  # layers draw from seeds of their own, the user's generator is put back
        with self._together(), aside(self.topology.device) if draws else nullcontext():
            engine = self._connected()
            engine.forget()
            work, vote = self._prepare(args, kwargs, target, training)
            self._begin(work)
            clock = clock_for(self.topology.device, len(mine))
            clock.offset = self.skew.offset
            self._agreement.vote(vote, what)
            weighing = Weighing(self._stages) if training and not self._agreement.repeated else None
            self._head_start(engine, work, clock, weighing)
            agreed = self._agreement.reach()
            work.without_backward = agreed.without_backward
            engine.let_go(agreed.without_backward)
            work.weights = agreed.weights
            work.part = self._parts.of(training, agreed.pieces, agreed.without_backward)
            engine.channels.begin(agreed.specs, agreed.known)
            for stage in self._stages.values():
                stage.copies.alike = agreed.alike
            if agreed.known or not training:
                engine.run(work, clock)
            else:  # a step of a new kind
                weighing = weighing or Weighing(self._stages)
                engine.run(work, clock, weighing)
                agreed.sizes = weighing.sizes()
            done = time.perf_counter()
            self._end(work)
            averaging = time.perf_counter() - done
            actions = [step.action for step in work.part.steps]
            self._ran, self._sizes = (actions, clock), agreed.sizes
            end = f"to end the step, after {actions[-1] if actions else 'nothing'}"
            loss, self.report = concluded(self._control, self.position, work, clock, self.last_rank, end, between, averaging)
            engine.channels.end()
            self._agreement.keep(agreed)
            self.step_count += training
        outputs = [work.outputs[piece] for piece in sorted(work.outputs)]
        self._ended = time.perf_counter()
        return (microbatch.join(outputs) if outputs else None), loss

    def _begin(self, work: Work) -> None:
        """Before the first action: what stages that others have as well need to begin with."""
        with waiting("for the replicas to begin the step"):
            fsdp.begin([self._stages[index].copies for index in work.part.stages])

    def _end(self, work: Work) -> None:
        """After the last action: the gradients become those of the whole batch, on all who have them."""
        with waiting("for the replicas to average the gradients"):
            for stage in self._stages.values():
                stage.copies.end(work.training)
            if self.position.tp is not None and work.training:
                tensor_parallel.complete(self.parameters())
            if self.position.dp is not None and work.training:
                for stage in self._stages.values():
                    share_state(stage.module, self.position.dp.get_group())
        for parameter in self._tied if work.training else ():
            parameter.share_gradient()

    def _head_start(self, engine: Engine, work: Work, clock: Clock, weighing: Weighing | None) -> None:
        """Run this rank's first action while the votes travel, if it is the first stage's and so waits for nobody."""
        mine = self._program.schedule.actions[self.topology.rank]
        if (
            self.schedule.stages > 1
            and self.position.tp is None
            and mine
            and mine[0].stage == 0
            and mine[0].microbatch < len(work.inputs)
        ):
            engine.head_start(mine[0], work, clock, weighing)

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, training: bool) -> tuple[Work, Vote]:
        """This rank's share of the batch, and what it has to say about it. Raises MismatchError if it does not fit."""
        rank, pieces = self.topology.rank, self.schedule.microbatches
        seed = mix(self.seed, self.step_count) if training and self.seed is not None else None
        work, vote = Work(training, self._parts.of(training), seed), Vote(training, self.step_count)
        if training and self.scaler is not None:
            work.scale = scale_of(self.scaler, self.position.world)
        work.scale *= self.position.replicas  # which are averaged
        if rank == self.first_rank:
            work.inputs, vote.rows = microbatch.split_inputs(args, kwargs, pieces, self.topology.device)
            vote.signature = microbatch.signature((args, kwargs))
        if rank == self.last_rank and (training or target is not None):
            if self.loss_fn is None:
                raise MismatchError(f"rank {rank}: a loss needs a Pipeline with loss_fn=")
            if target is None:
                raise MismatchError(f"rank {rank}: step() needs target=, which the last stage's rank takes for the loss")
            sizes = microbatch.sizes_of(target, "the target", pieces)
            work.targets = microbatch.split(target, sizes, self.topology.device)
            if self.loss_weight is not None:
                vote.counts = microbatch.counts(work.targets, self.loss_weight)
            vote.target_rows = sum(sizes)
        vote.local = hash((self._modes(), torch.is_autocast_enabled(self.topology.device.type)))
        return work, vote

    def _modes(self) -> tuple[bool, ...]:
        """What decides, besides the batch, which tensors between stages require a gradient."""
        return tuple(parameter.requires_grad for parameter in self.parameters())

    def _connected(self) -> Engine:
        """The engine, its channels open: at the first step, and again after a failure."""
        groups = self._control.connect()
        if self._engine is None or self._connected_at != self._control.generation:
            self._connected_at = self._control.generation
            channels = Channels(self._program, self.topology, groups)
            last = self.schedule.stages - 1
            self._engine = Engine(self.position.world.rank, self.topology.device, self._stages, last, channels)
        return self._engine

    @contextmanager
    def _together(self) -> Iterator[None]:
        """If this rank fails inside, so do all, with the same error."""
        try:
            yield
        except BaseException as error:
            self._control.fail(error)

    # -- parameters: see parameters.py ------------------------------------------------------------------------------

    @property
    def stages(self) -> dict[int, nn.Module]:
        """This rank's stages, by number."""
        return self._parameters.modules

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, by their names in the uncut model."""
        return self._parameters.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for its optimizer; one that several of its stages share comes once."""
        return self._parameters.parameters()

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the uncut model's state, under the uncut model's names; all ranks' parts make the whole.

        What `fully_shard` or `tensor_parallel` has spread over ranks comes as DTensors: `full_tensor()`, which all who have a
        piece call, is the whole of one.
        """
        return self._parameters.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's part out of `state`, which may be the whole model's.

        Raises MismatchError, before anything is loaded, for a name this rank lacks in `state`, for one that no stage has
        (both unless `strict` is False), and for a shape that differs.
        """
        self._parameters.load_state_dict(state, strict)

    def check_state(self, shapes: Mapping[str, Any]) -> None:
        """Raises MismatchError unless `load_state_dict` takes a state of these names and shapes (None: no tensor)."""
        self._parameters.check(shapes, strict=True)

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tied parameters, this rank's and those that ranks share -> the first name of each."""
        return self._parameters.aliases()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all ranks' gradients so that their norm, taken together, is at most `max_norm`; returns the norm before.

        The norm is taken over the parameters in the uncut model's order, so it has the bits of the uncut model's. A tied
        parameter counts once. All ranks call it.
        """
        with self._together():
            norms = self._parameters.gradient_norms(norm_type)
            everyone = self._control.gather_objects(norms, "to clip their gradients")
        return self._parameters.clip(self._parameters.joined(everyone, norm_type), max_norm, norm_type)

    def metrics(self) -> dict[str, float]:
        """What the last step came to, by name, for any logger (`wandb.log(pipe.metrics())`). All ranks call it.

        Times are in seconds, memory in bytes; `wait/..` are the shares of this pipeline's time that each cause of idle
        time took, `between_steps_seconds/..` what lay before the step since the one before: the optimizer, the next batch;
        `averaging_seconds/..` what replicas took after their last action until gradients were averaged.
        """
        timeline = self.timeline()
        assert self.report is not None
        return numbers(self.report, timeline)

    def timeline(self) -> Timeline:
        """When every action of the last step ran, measured, in seconds of rank 0's clock. All ranks call it.

        Of several pipelines side by side, each gets its own. Memory is in bytes, see `weighing.py`, unless a stage is compiled.
        Ranks on other machines compare their clocks first; `clock_error` says how far apart they may still be, in seconds.
        """
        with self._together():
            self.skew = skew(self._control, self._machines)  # clocks drift apart
            mine = self._events(), self.skew.error, self._sizes
            everyone = self._control.gather_objects(mine, "to tell their timelines")
            ranks = [self.topology.of_job(rank) for rank in range(self.topology.world_size)]
            rows, errors, sizes = zip(*[everyone[rank] for rank in ranks], strict=True)
        self.clock_error = max(errors)
        assert self.report is not None
        return measured(self.schedule, rows, sizes, self.report, self.position, self._program.skips)

    def _events(self) -> tuple[Event, ...]:
        """This rank's part of the timeline. Raises PenstockError before the first step."""
        if self._ran is None:
            raise PenstockError("there is no timeline yet: run a step first")
        actions, clock = self._ran
        clock.offset = self.skew.offset
        intervals = clock.intervals()
        return tuple(Event(self.topology.rank, action, *times) for action, times in zip(actions, intervals, strict=True))
