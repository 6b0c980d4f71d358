"""The face: a model cut over the ranks that trains like the whole one."""

import itertools
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from penstock import comms, microbatch, partition, tied
from penstock.agreement import Agreement, Vote
from penstock.channels import Channels
from penstock.clock import clock_for
from penstock.comms import Topology
from penstock.control import Control
from penstock.engine import Engine, Work
from penstock.errors import MismatchError
from penstock.randomness import mix
from penstock.schedule import Event, Kind, Schedule, Timeline, build, lower, verify
from penstock.stage import Stage

LossFn = Callable[[Any, Any], Tensor]
_count = itertools.count()  # of pipelines in this process, the same on every rank
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class StepReport(NamedTuple):
    """What a step took, the same on every rank."""

    makespan: float  # seconds, first action to last over all ranks
    busy: tuple[float, ...]  # seconds each rank spent in actions
    peak_memory: tuple[float, ...]  # bytes, the most each rank's process has held so far (on a GPU: its tensors)

    @property
    def bubble(self) -> float:
        """The idle share: (makespan - the busiest rank's work) / makespan."""
        return (self.makespan - max(self.busy)) / self.makespan if self.makespan else 0.0


@dataclass
class _Cut:
    """The stages of this rank, and what all ranks know of the whole."""

    modules: dict[int, nn.Module]  # stage -> module, this rank's
    layers: dict[int, list[int] | None]  # stage -> numbers of its layers in the uncut model
    tied: list[list[tied.Name]]


class Pipeline:
    """A model cut into stages over the ranks of `topology`, trained step by step as one.

    `model`: an `nn.Sequential`, cut here; a list with one module for each stage; or this rank's own stage module (in a
    world of one: the whole model). A stage whose forward has several parameters gets a tuple spread over them and a dict
    by name; every other one gets what the stage before returned. Any tree of tensors, numbers and None may pass.
    `loss_fn(output, target)`: a scalar, the mean over its microbatch; it runs on the last stage's rank.
    `schedule`: a name (with `microbatches` and the schedule's `options`), a `Schedule`, or the path of a CSV table.
    `loss_weight(target)`: what a microbatch counts in the mean, from its target alone; by default its rows.
    `seed`: of the random numbers layers draw in training (dropout), which depend on it, the step, the microbatch and the
    layer only; None leaves them to torch's generator, and so to the schedule.

    Every rank makes the same call. Raises ScheduleError if the table cannot be proved, MismatchError where the ranks,
    the schedule and the model do not fit together.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        loss_fn: LossFn | None = None,
        schedule: str | Schedule = "1f1b",
        microbatches: int = 8,
        loss_weight: Callable[[Any], Any] | None = None,
        topology: Topology | None = None,
        *,
        seed: int | None = 0,
        cuts: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        self.topology = topology or comms.init_distributed()
        self.loss_fn, self.loss_weight, self.seed = loss_fn, loss_weight, seed
        self.step_count = 0  # steps done; dropout depends on it, so set it when training is resumed
        self.report: StepReport | None = None  # of the last step
        self._control = Control(self.topology, f"penstock/{next(_count)}")
        self._control.connect()
        with self._together():
            self.schedule = _table(schedule, self.topology.world_size, microbatches, options)
            verify(self.schedule)
            cut = _cut(model, self.schedule, self.topology, cuts)
            everyone = self._control.gather_objects(self._description(cut), "for the other ranks to build the pipeline")
            _check_agreement(everyone)
            self._build(cut, {stage: names for each in everyone for stage, names in each["names"].items()})

    def _description(self, cut: _Cut) -> dict[str, Any]:
        """What the other ranks must know, or agree with."""
        table = self.schedule
        return {
            "schedule": f"{table.name} with {table.microbatches} microbatches and {table.stages} stages",
            "digest": table.digest(),
            "names": {stage: list(module.state_dict()) for stage, module in cut.modules.items()},
            "tied": cut.tied,
            "seed": f"seed {self.seed}",
            "device": f"backend {self.topology.backend}",
        }

    def _build(self, cut: _Cut, names: dict[int, list[str]]) -> None:
        table, topology = self.schedule, self.topology
        last = table.stages - 1
        self.first_rank, self.last_rank = table.placement[0], table.placement[last]
        self._names = partition.names_of([names[stage] for stage in range(table.stages)])
        self._stages = {
            index: Stage(
                index, module.to(topology.device), topology.device, cut.layers[index], self.loss_fn if index == last else None
            )
            for index, module in cut.modules.items()
        }
        modules = {index: stage.module for index, stage in self._stages.items()}
        self._tied = tied.owned(cut.tied, table.placement, modules, topology)
        self._counted_elsewhere = {self._names[stage][name] for group in cut.tied for stage, name in group[1:]}
        for each in self._tied:
            each.share_value()
        self._programs: dict[Any, Any] = {}
        self._agreement = Agreement(self._control, table.microbatches)
        self._engine: Engine | None = None
        self._connected_at = 0  # the control's generation the engine's channels belong to
        self._events: tuple[Event, ...] = ()

    # -- training and evaluation ------------------------------------------------------------------------------------

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """Forward and backward of one batch; gradients are added to the parameters' `.grad`. Returns the loss, everywhere.

        `args` and `kwargs` are the first stage's input, any tree of tensors with the same number of rows; `target` is the
        loss's, likewise. Only the first stage's rank reads the inputs and only the last one's the target. The loss is the
        mean over the whole batch, a scalar in the loss's dtype. A batch of fewer rows than microbatches runs as many
        microbatches as it has rows.

        Raises, on every rank: MismatchError for a batch that does not fit; StageError when the model or the loss raises;
        LostRankError when a rank dies or is silent. After the first two the next step works; the gradients of the failed
        one are incomplete.
        """
        return self._run(args, kwargs, target, training=True)[1]

    def eval(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """Forward only, modules in evaluation mode; touches no gradient and no buffer.

        Returns the outputs of the whole batch on the last stage's rank, None on the others; with a `target`, (outputs, loss),
        the loss on every rank. Raises as `step` does.
        """
        with _evaluating([stage.module for stage in self._stages.values()]):
            outputs, loss = self._run(args, kwargs, target, training=False)
        return outputs if target is None else (outputs, loss)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, training: bool) -> tuple[Any, Tensor]:
        what = f"for the other ranks to begin {'step()' if training else 'eval()'}"
        with self._together():
            engine = self._connected()
            work, vote = self._prepare(args, kwargs, target, training)
            agreed = self._agreement.reach(vote, what)
            work.without_backward = agreed.without_backward
            work.weights = work.weights or [0.0] * agreed.pieces
            steps = self._steps(training, agreed.pieces, agreed.without_backward)
            engine.channels.begin(agreed.specs, agreed.known)
            clock = clock_for(self.topology.device, len(steps))
            for each in self._tied if training else ():
                each.begin()
            try:
                engine.run(steps, work, clock)
                for each in self._tied if training else ():
                    each.sum()
            finally:
                for each in self._tied if training else ():
                    each.restore()
            loss = self._finish(work, [step.action for step in steps], clock)
            self._agreement.keep(agreed)
            self.step_count += training
        outputs = [work.outputs[piece] for piece in sorted(work.outputs)]
        return (microbatch.join(outputs) if outputs else None), loss

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, training: bool) -> tuple[Work, Vote]:
        """This rank's share of the batch, and what it has to say about it. Raises MismatchError if it does not fit."""
        rank, pieces = self.topology.rank, self.schedule.microbatches
        seed = mix(self.seed, self.step_count) if training and self.seed is not None else None
        work, vote = Work(training, seed), Vote(training, self.step_count)
        if rank == self.first_rank:
            sizes = _sizes((args, kwargs), "the batch", pieces)
            work.inputs = microbatch.split((args, kwargs), sizes, self.topology.device)
            vote.rows, vote.signature = sum(sizes), _signature((args, kwargs))
        if rank == self.last_rank and (training or target is not None):
            if target is None or self.loss_fn is None:
                lacking = (
                    "target=, which the last stage's rank needs for the loss" if target is None else "a Pipeline with loss_fn="
                )
                raise MismatchError(f"rank {rank}: step() needs {lacking}")
            sizes = _sizes(target, "target", pieces)
            work.targets = microbatch.split(target, sizes, self.topology.device)
            work.weights = microbatch.weights(work.targets, sizes, self.loss_weight)
            vote.target_rows = sum(sizes)
            vote.without_backward = frozenset(piece for piece, weight in enumerate(work.weights) if not weight)
        vote.local = hash((self._modes(), torch.is_autocast_enabled(self.topology.device.type)))
        return work, vote

    def _modes(self) -> tuple[bool, ...]:
        """What decides, besides the batch, which tensors between stages require a gradient."""
        return tuple(parameter.requires_grad for parameter in self.parameters())

    def _steps(self, training: bool, pieces: int, without_backward: frozenset[int]) -> Any:
        """This rank's program: the whole table, or what of it this batch and this call need."""
        key = training, pieces, without_backward if training else None
        if key not in self._programs:
            table = self.schedule
            if not training:
                table = table.keep(lambda action: action.kind is Kind.F)
            if pieces < table.microbatches:
                table = table.keep(lambda action: action.microbatch < pieces)
            if training and without_backward:
                table = table.keep(lambda action: action.kind is Kind.F or action.microbatch not in without_backward)
            self._programs[key] = lower(table).steps[self.topology.rank]
        return self._programs[key]

    def _connected(self) -> Engine:
        """The engine, its channels open: at the first step, and again after a failure."""
        groups = self._control.connect()
        if self._engine is None or self._connected_at != self._control.generation:
            self._connected_at = self._control.generation
            channels = Channels(lower(self.schedule), self.topology, groups)
            last = self.schedule.stages - 1
            self._engine = Engine(self.topology.rank, self.topology.device, self._stages, last, channels)
        return self._engine

    def _finish(self, work: Work, actions: Sequence[Any], clock: Any) -> Tensor:
        """The end of the step, reached by all ranks together: the loss and the times."""
        terms = [work.losses[piece] * work.weights[piece] for piece in sorted(work.losses)]
        loss = sum(terms[1:], terms[0]) if terms else torch.zeros(())
        rank, intervals = self.topology.rank, clock.intervals()
        self._events = tuple(Event(rank, action, *times) for action, times in zip(actions, intervals, strict=True))
        start, end = (intervals[0][0], intervals[-1][1]) if intervals else (0.0, 0.0)
        busy = sum(end - start for start, end in intervals)
        dtype = _DTYPES.index(loss.dtype) if loss.dtype in _DTYPES else 0
        row = [loss.item(), dtype, start, end, busy, _peak_memory(self.topology.device)]
        everyone = self._control.gather(row, "for the other ranks to end the step")
        ran = [each for each in everyone if each[3]]
        makespan = max((each[3] for each in ran), default=0.0) - min((each[2] for each in ran), default=0.0)
        self.report = StepReport(makespan, tuple(each[4] for each in everyone), tuple(each[5] for each in everyone))
        value, kind = everyone[self.last_rank][:2]
        return torch.tensor(value, dtype=_DTYPES[int(kind)], device=self.topology.device)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """If this rank fails inside, so do all, with the same error."""
        try:
            yield
        except BaseException as error:
            self._control.fail(error)

    # -- parameters -------------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, by their names in the uncut model."""
        for index, stage in self._stages.items():
            for name, parameter in stage.module.named_parameters():
                yield self._names[index][name], parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for its optimizer; one that several of its stages share comes once."""
        seen: set[int] = set()
        for stage in self._stages.values():
            for parameter in stage.module.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the uncut model's state, under the uncut model's names; all ranks' parts make the whole."""
        return {
            self._names[index][name]: value
            for index, stage in self._stages.items()
            for name, value in stage.module.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's part out of `state`, which may be the whole model's.

        Raises MismatchError, before anything is loaded, for a name this rank lacks in `state`, for one that no stage has
        (both unless `strict` is False), and for a shape that differs.
        """
        known = {name for names in self._names for name in names.values()}
        mine = self.state_dict()
        missing = [name for name in mine if name not in state] if strict else []
        unknown = [name for name in state if name not in known] if strict else []
        other = [
            name for name in mine if name in state and getattr(mine[name], "shape", None) != getattr(state[name], "shape", None)
        ]
        told = [
            f"{len(names)} {what} ({', '.join(names[:3])}{', ..' if len(names) > 3 else ''})"
            for what, names in (("missing", missing), ("unknown", unknown), ("of another shape", other))
            if names
        ]
        if told:
            raise MismatchError(f"the state does not fit this model: {'; '.join(told)}")
        for index, stage in self._stages.items():
            part = {own: state[name] for own, name in self._names[index].items() if name in state}
            stage.module.load_state_dict(part, strict=strict)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all ranks' gradients so that their norm, taken together, is at most `max_norm`; returns the norm before.

        The norm is taken over the parameters in the uncut model's order, so it has the bits of the uncut model's. A tied
        parameter counts once. All ranks call it.
        """
        gradients = {
            name: parameter.grad
            for name, parameter in self.named_parameters()
            if parameter.grad is not None and name not in self._counted_elsewhere
        }
        norms = {name: torch.linalg.vector_norm(gradient, norm_type).cpu() for name, gradient in gradients.items()}
        with self._together():
            everyone = self._control.gather_objects(norms, "for the other ranks to clip their gradients")
        merged = {name: norm for each in everyone for name, norm in each.items()}
        ordered = [merged[name] for names in self._names for name in names.values() if name in merged]
        total = torch.linalg.vector_norm(torch.stack(ordered), norm_type) if ordered else torch.zeros(())
        total = total.to(self.topology.device)
        nn.utils.clip_grads_with_norm_(list(self.parameters()), max_norm, total)
        return total

    def inventory(self) -> list[tuple[str, int, tuple[int, ...], torch.dtype]]:
        """Every tensor of the whole model's state, in the uncut order: name, rank, shape, dtype. All ranks call it."""
        mine = {name: (self.topology.rank, tuple(value.shape), value.dtype) for name, value in self.state_dict().items()}
        with self._together():
            everyone = self._control.gather_objects(mine, "for the other ranks' parameters")
        merged = {name: described for each in everyone for name, described in each.items()}
        return [(name, *merged[name]) for names in self._names for name in names.values()]

    def timeline(self) -> Timeline:
        """When every action of the last step ran, measured, in seconds. All ranks call it."""
        with self._together():
            rows = self._control.gather_objects(self._events, "for the other ranks' timelines")
        return Timeline(f"{self.schedule.name}, measured", tuple(rows))


@contextmanager
def _evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """All of `modules` in evaluation mode, each submodule back in its own afterwards."""
    training = [(submodule, submodule.training) for module in modules for submodule in module.modules()]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for submodule, mode in training:
            submodule.training = mode


def _peak_memory(device: torch.device) -> float:
    """Bytes: the most this process has held; on a GPU, the most its tensors have."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def _table(schedule: str | Schedule, ranks: int, microbatches: int, options: dict[str, Any]) -> Schedule:
    if isinstance(schedule, str) and schedule.endswith(".csv"):
        schedule = Schedule.from_csv(schedule, **options)
    elif isinstance(schedule, str):
        schedule = build(schedule, ranks=ranks, microbatches=microbatches, **options)
    if schedule.ranks != ranks:
        raise MismatchError(f"schedule {schedule.name} is for {schedule.ranks} ranks, but {ranks} are running")
    return schedule


def _cut(model: nn.Module | Sequence[nn.Module], table: Schedule, topology: Topology, cuts: Sequence[str] | None) -> _Cut:
    mine = table.stages_of(topology.rank)
    if isinstance(model, nn.Sequential):
        model = partition.split(model, table.stages, cuts)
    if isinstance(model, nn.Module):
        if table.stages != table.ranks:
            raise MismatchError(
                f"{table.name} has {table.stages} stages on {table.ranks} ranks: give a list with one module for each stage"
            )
        return _Cut({mine[0]: model}, {mine[0]: None}, [])
    if len(model) != table.stages:
        raise MismatchError(f"{table.name} has {table.stages} stages, but the list has {len(model)} modules")
    layers, first = {}, 0
    for stage, module in enumerate(model):
        count = len(module) if isinstance(module, nn.Sequential) else 1
        layers[stage] = list(range(first, first + count)) if isinstance(module, nn.Sequential) else None
        first += count
    return _Cut(
        {stage: model[stage] for stage in mine}, {stage: layers[stage] for stage in mine}, tied.find(model, table.placement)
    )


def _check_agreement(everyone: Sequence[dict[str, Any]]) -> None:
    """Raises MismatchError unless all ranks build the same pipeline."""
    for key in ("digest", "schedule", "seed", "device", "tied"):
        for rank, each in enumerate(everyone):
            if each[key] != everyone[0][key]:
                told = "schedule" if key == "digest" else key
                raise MismatchError(
                    f"the ranks do not build the same pipeline: rank 0 has {everyone[0][told]}, rank {rank} has {each[told]}"
                )


def _sizes(batch: Any, what: str, pieces: int) -> list[int]:
    """Rows of each microbatch; no empty ones."""
    rows = microbatch.rows(batch, what)
    if not rows:
        raise MismatchError(f"{what} has no tensor with rows to split into microbatches")
    return microbatch.sizes(rows, min(rows, pieces))


def _signature(batch: Any) -> int:
    """A number for the structure, shapes and dtypes of `batch`."""
    leaves, tree = tree_flatten(batch)
    described = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]
    return hash((str(described), str(tree)))
