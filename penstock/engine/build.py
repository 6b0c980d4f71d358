"""From what the user gives to what this rank runs: the table, proved; the model, in memory; the stages made of it, connected.

All ranks build at once and compare what they build (`comparison.py`), so that whatever does not fit together is told before
data flows. `Pipeline.__init__` has the order of the steps.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from penstock import partition, torch_private
from penstock.comms.control_group import ControlGroup
from penstock.engine.checks.hidden_uses import UnregisteredParameters, check_loss_reads
from penstock.engine.checks.nonfinite import Watch, check_choice
from penstock.engine.comparison import Compared
from penstock.engine.cut import Cut, check_bare
from penstock.engine.loss import check_reduction
from penstock.engine.redistribute import PLANNED, Redistribution
from penstock.engine.step import Engine
from penstock.errors import MismatchError, is_whole_number
from penstock.mesh.parallelize import parallelize_stages
from penstock.mesh.position import MeshPosition
from penstock.partition.graph_stage import move_to
from penstock.partition.materialise import Init, has_meta_tensors, materialise
from penstock.partition.rows import resolve_rows_dim
from penstock.schedule import Program, Schedule, build, from_rows, verify
from penstock.schedule.catalog import did_you_mean, family_options
from penstock.schedule.rank_program import RankPrograms
from penstock.schedule.schedule import read
from penstock.schedule.table import Cell
from penstock.schedule.transform import with_full_backwards
from penstock.stage.module_runner import Recompute, check_recompute
from penstock.stage.neighbours import stage_neighbours
from penstock.stage.rank_parameters import RankParameters
from penstock.stage.replication import NoReplication, Replication
from penstock.stage.stage import Stage
from penstock.stage.tied_parameters import TiedParameters

Rule = Callable[[int, int, int], Iterable[Cell | str]]  # rank, P, M -> the cells of the rank's row
Modules = dict[int, nn.Module]  # by stage


class Request(NamedTuple):
    """What a pipeline was asked for, as far as one rank alone can check it."""

    given: Any  # its arguments, as attributes
    schedule: Schedule
    program: Program  # of that
    rows_dim: int
    recompute: Sequence[Recompute | None]  # of every stage
    whole: partition.CuttableModel | None  # the model, if it is to be cut
    planned: Sequence[str]  # the layers that a plan was made for

    @property
    def alike(self) -> dict[str, Any]:
        """The options that must be the same on all ranks, besides what the schedule and the model say themselves."""
        names = ("seed", "reduction", "data_parallel", "tensor_parallel", "on_nonfinite")
        return {name: getattr(self.given, name) for name in names} | {"rows_dim": self.rows_dim}


def check_request(model: Any, arguments: Mapping[str, Any], ranks: int, before: Redistribution | None) -> Request:
    """What `Pipeline` was asked for by its `arguments`, on so many ranks; `before`: in the place of another pipeline.

    Raises MismatchError for what is of another kind than `Pipeline` takes, ScheduleError for a table that cannot be proved.
    """
    given = SimpleNamespace(**arguments)
    _check_kinds(model, given)
    given.seed = None if given.seed is None else int(given.seed)  # numpy's too, which no file and no message takes
    check_reduction(given.loss_fn, given.reduction, given.loss_weight)
    if given.options:
        check_options(given.options, given.schedule, ["model", *arguments])
    check_choice(given.on_nonfinite)
    if (plan := given.plan) is not None:
        check_plan(plan, given.cuts, given.recompute, given.options)
        vars(given).update({name: getattr(plan, name) for name in PLANNED})

    schedule, program = table(given.schedule, ranks, given.microbatches, given.options)
    cutting = given.cuts, given.example_args, given.example_kwargs
    check_bare(model, schedule, *cutting)
    rows_dim = resolve_rows_dim(model, given.rows_dim)
    recompute = recompute_of_stages(given.recompute, schedule)
    whole = before.recut(given.cuts) if before else partition.as_cuttable(model, *cutting, rows_dim)
    return Request(given, schedule, program, rows_dim, recompute, whole, () if plan is None else plan.layers)


def _check_kinds(model: Any, given: Any) -> None:
    modules = list(model.values() if isinstance(model, Mapping) else model if isinstance(model, Sequence) else [model])
    for each in modules:
        if not isinstance(each, nn.Module):
            raise MismatchError(_no_module(each))
        if captured := [type(part).__name__ for part in each.modules() if torch_private.is_cuda_graphed(part)]:
            raise MismatchError(
                f"{captured[0]} was captured as a CUDA graph, whose one set of buffers cannot hold several microbatches: "
                "give the module as it was before make_graphed_callables"
            )
        if lazy := [name for name, value in each.state_dict(keep_vars=True).items() if is_lazy(value)]:
            raise MismatchError(f"{lazy[0]} has no shape yet: run one batch through the model before, `model(inputs)`")
    if not isinstance(given.schedule, str | PathLike | Schedule) and not callable(given.schedule):
        raise MismatchError(f"the schedule is a name, a Schedule, a CSV file's path or a function, not {_kind(given.schedule)}")
    for name, function in (("loss_fn", given.loss_fn), ("loss_weight", given.loss_weight)):
        if function is not None and (isinstance(function, type) or not callable(function)):
            raise MismatchError(f"{name} is a function or a module, not {_kind(function)}")
    if given.seed is not None and not is_whole_number(given.seed):
        raise MismatchError(f"seed is a whole number or None, not {_kind(given.seed)}")
    if not isinstance(given.scaler, torch.amp.GradScaler | None):
        raise MismatchError(f"scaler is a GradScaler or None, not {_kind(given.scaler)}")
    if isinstance(given.loss_fn, nn.Module):
        _check_loss(given.loss_fn, nn.ModuleList(modules))


def _no_module(value: Any) -> str:
    if hasattr(value, "submod") and hasattr(value, "stage_index"):  # torch.distributed.pipelining's
        return f"the model is nn.Modules, not {_kind(value)}s: give {{stage.stage_index: stage.submod for stage in stages}}"
    return f"the model is an nn.Module, a list with one for each stage, or {{stage: module}}, not {_kind(value)}"


def _check_loss(loss_fn: nn.Module, model: nn.Module) -> None:
    """What the loss is trained with must be in a stage, which its ranks' optimizers, norms and checkpoints know."""
    known = {id(each) for each in model.parameters()}
    if own := [name for name, each in loss_fn.named_parameters() if each.requires_grad and id(each) not in known]:
        told = f"loss_fn has {len(own)} trained parameters that the model has not ({', '.join(own[:3])})"
        raise MismatchError(f"{told}: have its last layer own them and give them to the loss, or freeze them")


class Planned(Protocol):
    """What a pipeline takes from a plan: the arguments of these names."""

    @property
    def schedule(self) -> Schedule: ...  # noqa: D102
    @property
    def microbatches(self) -> int: ...  # noqa: D102
    @property
    def cuts(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def recompute(self) -> Sequence[Recompute | None]: ...  # noqa: D102
    @property
    def layers(self) -> Sequence[str]: ...  # noqa: D102


def check_plan(plan: Any, *besides: Any) -> None:
    """Raises MismatchError for what is no plan, and for cuts, recomputation or options given besides."""
    if not hasattr(plan, "schedule") or not hasattr(plan, "recompute"):
        raise MismatchError(f"plan is what ps.plan.plan found, or ps.plan.load(path) reads, not {_kind(plan)}")
    if any(besides):
        raise MismatchError("the plan has its own cuts, recomputation and stages: leave out cuts=, recompute= and options")


def check_options(options: Iterable[str], schedule: Any, arguments: Iterable[str]) -> None:
    """Raises MismatchError for an option that is neither one of the pipeline's `arguments` nor one of its schedule's."""
    is_name = isinstance(schedule, str) and not schedule.endswith(".csv")
    if isinstance(schedule, Schedule):
        taken, of = [], f"the table of {schedule.name}"
    elif is_name:
        taken, of = family_options(schedule), f"the schedule {schedule}"
    else:
        taken, of = ["placement"], "a table from rows"
    for name in options:
        if name not in taken:
            hint = did_you_mean(name, [*arguments, *taken])
            takes = f"takes {', '.join(taken)}" if taken else "takes no options"
            raise MismatchError(f"a Pipeline has no argument {name}{hint}, and {of} {takes}")


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}: make one, {value.__name__}(..)"
    return "None" if value is None else f"a {type(value).__name__}"


def table(schedule: str | Schedule | Rule, ranks: int, microbatches: int, options: dict[str, Any]) -> tuple[Schedule, Program]:
    """The table that `schedule` stands for - a name, the path of a CSV file, a rule, or itself - and its proved program."""
    schedule = str(schedule) if isinstance(schedule, PathLike) else schedule
    if isinstance(schedule, str) and schedule.endswith(".csv"):
        schedule = from_rows(schedule, read(schedule), **options)
    elif isinstance(schedule, str):
        schedule = build(schedule, ranks=ranks, microbatches=microbatches, **options)
    elif not isinstance(schedule, Schedule):
        name = getattr(schedule, "__name__", "a rule")
        schedule = from_rows(name, [list(schedule(rank, ranks, microbatches)) for rank in range(ranks)], **options)
    if schedule.ranks != ranks:
        raise MismatchError(f"schedule {schedule.name} is for {schedule.ranks} ranks, but {ranks} are running")
    return schedule, verify(schedule).program


def placed(cut: Cut, compared: Compared, device: torch.device, seed: int | None, init: Init | None) -> tuple[Modules, set[str]]:
    """This rank's stages on `device`; what of them is on the meta device is given memory and initialised.

    Also the names in the uncut model of what nothing initialises: they are to be loaded.
    """
    unset: set[str] = set()
    for index, module in cut.modules.items():
        if has_meta_tensors(module) and cut.whole is not None:
            mine = {id(slot.tensor) for slot in torch_private.tensor_slots(module)}  # a module may have two names
            only = {slot.name for slot in torch_private.tensor_slots(cut.whole) if id(slot.tensor) in mine}
            unset |= materialise(cut.whole, None, device, seed, init, only)
        elif has_meta_tensors(module):
            unset |= materialise(module, compared.names[index], device, seed, init)
    return {index: move_to(module, device) for index, module in cut.modules.items()}, unset


def recompute_of_stages(recompute: Recompute | Sequence[Recompute | None] | None, table: Schedule) -> list[Recompute | None]:
    """What each stage of `table` computes again. Raises MismatchError unless it is known, and for so many stages."""
    one: Any = recompute
    ways = list(one) if isinstance(one, Sequence) and not isinstance(one, str) else [one] * table.stages
    if len(ways) != table.stages:
        raise MismatchError(f"recompute={ways} is for {len(ways)} stages, but {table.name} has {table.stages}")
    for way in ways:
        check_recompute(way)
    return ways


def connect(
    control: ControlGroup,
    position: MeshPosition,
    request: Request,
    cut: Cut,
    compared: Compared,
    modules: Modules,
    unset: set[str],
) -> Engine:
    """What this rank runs its steps with: its stages, in memory as `modules`, connected to those of other ranks.

    `unset`: names in the uncut model of what nothing has initialised. All ranks call it.
    """
    given, rank = request.given, position.world.rank
    names, aliases, elsewhere = compared.names, cut.aliases(compared.names), cut.elsewhere(compared.names)
    runs, program = with_full_backwards(request.schedule), request.program  # I and W right after each other are one B
    if cut.skips or runs.actions != request.schedule.actions:
        program = verify(runs, skips=cut.skips).program

    sharing = given.tensor_parallel, given.data_parallel
    replications = parallelize_stages(position, modules, cut.replications, cut.tied, names, *sharing)
    control.all_gather_object(None, "to build the pipeline")
    stages = _stages(request, cut, compared, modules, replications, runs, position)
    tied = TiedParameters(cut.tied, runs.placement, modules, names, aliases, position.pipeline)
    tied.broadcast_values()
    parameters = RankParameters(modules, names, aliases, cut.order, unset, cut.origin)

    if all(isinstance(each, NoReplication) for each in cut.replications.values()):  # the user's own may give them zeros
        elsewhere += tied.parameters_owned_elsewhere()
    if given.loss_fn is not None and cut.whole is not None and (last := runs.stages - 1) in modules:
        check_loss_reads(given.loss_fn, cut.whole, set(modules[last].modules()))
    return Engine(
        control,
        position,
        RankPrograms(program, position.pipeline.rank, given.merge_weight_gradients),
        stages,
        parameters,
        tied,
        Watch(rank, stages, names) if given.on_nonfinite else None,
        UnregisteredParameters(rank, modules, elsewhere),
        request.whole.read_attributes if request.whole else None,
        compared.machines,
        given.on_nonfinite,
    )


def _stages(
    request: Request,
    cut: Cut,
    compared: Compared,
    modules: Modules,
    replications: Mapping[int, Replication],
    table: Schedule,
    position: MeshPosition,
) -> dict[int, Stage]:
    """This rank's stages, ready to run `table`."""
    neighbours = stage_neighbours(table.stages, cut.skips, cut.tied)
    return {
        index: Stage(
            index,
            module,
            position.pipeline.device,
            request.given.loss_fn if index == table.stages - 1 else None,
            layer_numbers=cut.numbers.get(index),
            neighbours=neighbours[index],
            later_keywords=frozenset().union(*compared.takes[index + 1 :]),
            first_microbatch=position.replica * table.microbatches,
            merge_weight_gradients=request.given.merge_weight_gradients,
            recompute=request.recompute[index],
            replication=replications[index],
            in_order=table.weights_in_order(index),
        )
        for index, module in modules.items()
    }
