"""From what the user gives to what each rank has: the table, this rank's stages, and what all ranks must agree on."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock import partition, torch_private
from penstock.engine.clock import machine
from penstock.errors import MismatchError
from penstock.mesh import data_parallel, tensor_parallel
from penstock.mesh.position import MeshPosition
from penstock.partition.balance import Balance
from penstock.partition.graph_stage import on, skips_of
from penstock.partition.materialise import Init, is_meta, materialise
from penstock.schedule import Schedule, Skip, build, from_rows
from penstock.schedule.table import Cell
from penstock.stage import tied
from penstock.stage.copies import StageCopies
from penstock.stage.keywords import takes
from penstock.stage.neighbours import neighbours_of, skips_of_tied
from penstock.stage.stage import Stage

Description = Mapping[str, Any]  # what one rank says of itself when the pipeline is built


@dataclass(frozen=True)
class Cut:
    """The stages of this rank."""

    modules: dict[int, nn.Module]  # stage -> module
    numbers: dict[int, list[int] | None]  # stage -> numbers of its layers in the uncut model
    tied: list[list[tied.Name]]  # parameters that several stages share
    skips: frozenset[Skip] = frozenset()  # between which stages values, or gradients of shared parameters, go past others
    parallel: dict[int, StageCopies] = field(default_factory=dict)  # stage -> what other processes have of it
    whole: nn.Module | None = None  # the uncut model, if that is what was cut
    balance: Balance | None = None  # how even the cut is, on the rank that chose it


Rule = Callable[[int, int, int], Iterable[Cell | str]]  # rank, P, M -> the cells of the rank's row


def table(schedule: str | Schedule | Rule, ranks: int, microbatches: int, options: dict[str, Any]) -> Schedule:
    """The table that `schedule` stands for: a name, the path of a CSV file, a rule, or itself."""
    if isinstance(schedule, str) and schedule.endswith(".csv"):
        schedule = Schedule.from_csv(schedule, **options)
    elif not isinstance(schedule, str | Schedule):
        name = getattr(schedule, "__name__", "a rule")
        schedule = from_rows(name, [list(schedule(rank, ranks, microbatches)) for rank in range(ranks)], **options)
    elif isinstance(schedule, str):
        schedule = build(schedule, ranks=ranks, microbatches=microbatches, **options)
    if schedule.ranks != ranks:
        raise MismatchError(f"schedule {schedule.name} is for {schedule.ranks} ranks, but {ranks} are running")
    return schedule


def cut(
    model: nn.Module | Sequence[nn.Module], whole: partition.Whole | None, starts: Sequence[str], table: Schedule, rank: int
) -> Cut:
    """This rank's share of `model`, or of the `whole` one cut at `starts`.

    Raises MismatchError if it does not have the table's number of stages.
    """
    mine = table.stages_of(rank)
    if whole is not None:
        model = whole.cut(starts)
    if isinstance(model, nn.Module):
        if table.stages != table.ranks:
            has = f"{table.name} has {table.stages} stages on {table.ranks} ranks"
            raise MismatchError(f"{has}: give an nn.Sequential, or a list with one module for each stage, or cuts")
        given = {mine[0]: model}
        return Cut(_bare(given), {mine[0]: None}, [], parallel=_parallel(given))
    if len(model) != table.stages:
        raise MismatchError(f"{table.name} has {table.stages} stages, but the list has {len(model)} modules")
    given = dict(enumerate(model))
    modules = _bare(given)
    numbers, shared = _layer_numbers(list(modules.values())), tied.find(list(modules.values()))
    return Cut(
        {stage: modules[stage] for stage in mine},
        {stage: numbers[stage] for stage in mine},
        shared,
        skips_of(model) | skips_of_tied(shared),
        _parallel({stage: given[stage] for stage in mine}),
        None if whole is None else whole.model,
        None if whole is None else whole.balance,
    )


def _bare(modules: Mapping[int, nn.Module]) -> dict[int, nn.Module]:
    """The stages inside what DistributedDataParallel has made of them."""
    return {stage: each.module if isinstance(each, DistributedDataParallel) else each for stage, each in modules.items()}


def _parallel(modules: Mapping[int, nn.Module]) -> dict[int, StageCopies]:
    return {stage: data_parallel.kind_of(bare, modules[stage]) for stage, bare in _bare(modules).items()}


def _layer_numbers(stages: Sequence[nn.Module]) -> list[list[int] | None]:
    """For every stage that is a Sequential, the numbers of its layers, counted over all stages."""
    numbers: list[list[int] | None] = []
    first = 0
    for module in stages:
        count = len(module) if isinstance(module, nn.Sequential) else 1
        numbers.append(list(range(first, first + count)) if isinstance(module, nn.Sequential) else None)
        first += count
    return numbers


def describe(
    table: Schedule,
    cut: Cut,
    seed: int | None,
    position: MeshPosition,
    plan: tensor_parallel.Plan | None,
    way: str | data_parallel.ApplyDataParallel,
) -> Description:
    """What the other ranks must know of this one, or agree with."""
    styles = {name: type(style).__name__ for name, style in (plan or {}).items()}
    return {
        "schedule": f"{table.name} with {table.microbatches} microbatches and {table.stages} stages",
        "table": f"another table of that name ({table.digest()[:12]})",
        "names": {stage: partition.plain(module) for stage, module in cut.modules.items()},
        "machine": machine(),
        "takes": {stage: takes(module) for stage, module in cut.modules.items()},
        "skips": f"values that skip stages {sorted(cut.skips)}",
        "uncut": "stages" if cut.whole is None else f"a model of {len(cut.whole.state_dict())} names",
        "tied": f"tied parameters {cut.tied}",
        "seed": f"seed {seed}",
        "backend": f"backend {position.world.backend}",
        "mesh": f"a mesh with the pipelines {position.pipelines}",
        "way": f"data_parallel={way if isinstance(way, str) else getattr(way, '__name__', type(way).__name__)}",
        "plan": f"tensor_parallel={styles}",
        "tensors": {stage: _tensors(module) for stage, module in cut.modules.items()},
    }


def _tensors(module: nn.Module) -> dict[str, str]:
    """The state of a stage: names, and what all who have a copy of it must have alike."""
    tensors = {name: each for name, each in module.state_dict(keep_vars=True).items() if isinstance(each, Tensor)}
    return {name: f"{tuple(each.shape)} {each.dtype} {each.requires_grad}" for name, each in tensors.items()}


def check(everyone: Sequence[Description]) -> None:
    """Raises MismatchError unless all ranks build the same pipeline."""
    for key in ("mesh", "schedule", "table", "seed", "backend", "tied", "skips", "uncut", "way", "plan"):
        for rank, each in enumerate(everyone):
            if each[key] != everyone[0][key]:
                told = f"rank 0 has {everyone[0][key]}, rank {rank} has {each[key]}"
                raise MismatchError(f"the ranks do not build the same pipeline: {told}")
    copies: dict[int, tuple[int, dict[str, str]]] = {}  # stage -> the first rank that has it, and its tensors
    for rank, each in enumerate(everyone):
        for stage, tensors in each["tensors"].items():
            first, expected = copies.setdefault(stage, (rank, tensors))
            for name in {**expected, **tensors}:
                if expected.get(name) != tensors.get(name):
                    told = f"{name} is {expected.get(name)} on rank {first}, but {tensors.get(name)} on rank {rank}"
                    raise MismatchError(
                        f"stage {stage} is not the same on all ranks that have it: {told} (shape, dtype, trained)"
                    )


def names(everyone: Sequence[Description], cut: Cut) -> list[dict[str, str]]:
    """For every stage of the model, its own name of each entry -> the name in the uncut model."""
    return partition.names_of(_by_stage(everyone, "names"), whole=cut.whole is not None)


def taken_later(everyone: Sequence[Description]) -> list[frozenset[str]]:
    """For every stage, the keywords that stages after it take."""
    taken = _by_stage(everyone, "takes")
    return [frozenset().union(*taken[stage + 1 :]) for stage in range(len(taken))]


def placed(
    cut: Cut, names: Sequence[Mapping[str, str]], device: torch.device, seed: int | None, init: Init | None
) -> dict[int, nn.Module]:
    """This rank's stages on `device`; what of them is on the meta device is given memory and initialised."""
    for index, module in cut.modules.items():
        if is_meta(module) and cut.whole is not None:
            materialise(cut.whole, None, device, seed, init, only=names[index].values())
        elif is_meta(module):
            materialise(module, names[index], device, seed, init)
    return {index: on(module, device) for index, module in cut.modules.items()}


def side_by_side(
    cut: Cut,
    modules: Mapping[int, nn.Module],
    names: Sequence[Mapping[str, str]],
    position: MeshPosition,
    plan: tensor_parallel.Plan | None,
    way: str | data_parallel.ApplyDataParallel,
) -> dict[int, StageCopies]:
    """What other pipelines of the mesh have of this rank's stages: products shared by `plan`, replicas held equal by `way`.

    Raises MismatchError for a plan without an axis `tp` or one that does not fit, and for tied parameters that would be cut.
    """
    if isinstance(way, str) and way not in data_parallel.WAYS:
        raise MismatchError(f"data_parallel={way!r}: use 'ddp', 'fsdp' or a function of (stage, mesh) that returns the stage")
    way = data_parallel.WAYS[way] if isinstance(way, str) else way
    if position.tp is None and plan is not None and position.mesh is None:
        raise MismatchError("tensor_parallel= needs a mesh with an axis 'tp': give mesh=, for instance of init_mesh(tp=2)")
    if position.tp is not None and plan is None:
        raise MismatchError(
            f"the mesh has {position.tp.size()} ranks along tp: say by tensor_parallel= which products they share"
        )
    if plan is not None:
        tensor_parallel.check(plan, names)
    if cut.tied and (position.tp is not None or (position.dp is not None and way is not data_parallel.ddp)):
        raise MismatchError(f"parameters of several stages ({_tied(cut, names)}) can be neither sharded nor split over tp")
    parallel = dict(cut.parallel)
    for stage, module in modules.items():
        if position.tp is not None and plan is not None:
            data_parallel.share((*module.parameters(), *module.buffers()), position.tp.get_group())
            tensor_parallel.apply(plan, module, names[stage], position.tp)
        if position.dp is not None:
            if type(parallel[stage]) is not StageCopies:
                raise MismatchError(f"stage {stage} is data parallel already: give it as it is, the mesh has an axis dp")
            borrowed = [name for group in cut.tied for owner, name in group if owner == stage != group[0][0]]
            parallel[stage] = data_parallel.over(module, position, way, borrowed)
    if len({type(each) for each in parallel.values() if type(each) is not StageCopies}) > 1:
        raise MismatchError(
            "data_parallel= makes DistributedDataParallel of one stage and shards another: do the same with all"
        )
    return parallel


def _tied(cut: Cut, names: Sequence[Mapping[str, str]]) -> str:
    return ", ".join(names[stage][name] for stage, name in cut.tied[0])


def stages(
    cut: Cut,
    modules: Mapping[int, nn.Module],
    everyone: Sequence[Description],
    loss_fn: Callable[[Any, Any], Tensor] | None,
    device: torch.device,
    parallel: Mapping[int, StageCopies],
    table: Schedule,
    settings: Mapping[str, Any],
) -> dict[int, Stage]:
    """This rank's stages, ready to run `table`; `settings` are further ones of `Stage`."""
    later = taken_later(everyone)
    neighbours = neighbours_of(len(later), cut.skips, cut.tied)
    return {
        index: Stage(
            index,
            module,
            device,
            loss_fn if index == len(later) - 1 else None,
            numbers=None if torch_private.fsdp_casts(module) else cut.numbers[index],
            neighbours=neighbours[index],
            later=later[index],
            copies=parallel[index],
            in_order=table.weights_in_order(index),
            **settings,
        )
        for index, module in modules.items()
    }


def _by_stage(everyone: Sequence[Description], key: str) -> list[Any]:
    own = {stage: value for each in everyone for stage, value in each[key].items()}
    return [own[stage] for stage in sorted(own)]
