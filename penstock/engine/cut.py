"""The stages of this rank, cut from the model or given by the user."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import index
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock import partition
from penstock.comms.control_group import ControlGroup
from penstock.errors import MismatchError, is_whole_number
from penstock.mesh import data_parallel
from penstock.mesh.position import MeshPosition
from penstock.partition.balance import Balance
from penstock.partition.graph_stage import skip_routes
from penstock.schedule import Schedule, Skip
from penstock.stage import tied_parameters
from penstock.stage.neighbours import StageParameter, tied_parameter_skips
from penstock.stage.replication import Replication
from penstock.torch_private import strip_compiled_prefix, unwrap_compiled


class Origin(NamedTuple):
    """What an uncut model was beside its weights: transformers keep this with them."""

    kind: type[nn.Module]
    config: Any
    generation_config: Any


class Cut(NamedTuple):
    """The stages of this rank, as modules, and how they hang together with the others."""

    modules: dict[int, nn.Module]  # stage -> module, bare of DistributedDataParallel
    replications: dict[int, Replication]  # stage -> what the user's own data parallelism has made of it
    every: Mapping[int, nn.Module]  # stage -> module, bare: of all stages that this rank was given
    numbers: Mapping[int, range] = {}  # stage -> numbers of its layers in the uncut model, where it is a Sequential
    tied: Sequence[Sequence[StageParameter]] = ()  # parameters that several stages share
    skips: frozenset[Skip] = frozenset()  # between which stages values, or gradients of shared parameters, go past others
    whole: nn.Module | None = None  # the uncut model, if that is what was cut
    balance: Balance | None = None  # how even the cut is, on the rank that chose it

    @property
    def order(self) -> list[str] | None:
        """All names in the uncut model, in its order, if that is what was cut."""
        return None if self.whole is None else [strip_compiled_prefix(name) for name in self.whole.state_dict()]

    def aliases(self, names: Sequence[Mapping[str, str]]) -> dict[str, str]:
        """Further names, in the uncut model, of a tensor that has several -> the first; `names` as in `Parameters`.

        The first is the one by which `named_parameters()` of the uncut model has it. Of stages that this rank was not given,
        nothing is known.
        """
        if self.whole is None:
            states = [(names[stage], module.state_dict(keep_vars=True)) for stage, module in self.every.items()]
            named = [(known[own], value) for known, state in states for own, value in state.items()]
        else:
            named = [(strip_compiled_prefix(name), value) for name, value in self.whole.state_dict(keep_vars=True).items()]
        tensors = [(name, value) for name, value in named if isinstance(value, Tensor)]
        first = {id(tensor): name for name, tensor in reversed(tensors)}
        return {name: first[id(tensor)] for name, tensor in tensors if first[id(tensor)] != name}

    def elsewhere(self, names: Sequence[Mapping[str, str]]) -> list[tuple[str, nn.Parameter]]:
        """Parameters that no stage of this rank has, by name in the uncut model; `names` as in `Parameters`."""
        mine = {id(each) for module in self.modules.values() for each in module.parameters()}
        if self.whole is None:
            stages = [(names[stage], module) for stage, module in self.every.items()]
            given = [(known.get(name, name), each) for known, module in stages for name, each in module.named_parameters()]
        else:
            given = list(self.whole.named_parameters())
        return [(name, each) for name, each in given if id(each) not in mine]

    @property
    def origin(self) -> Origin | None:
        """What the uncut model was, if it had a configuration."""
        settings = [getattr(self.whole, name, None) for name in ("config", "generation_config")]
        return None if self.whole is None or settings[0] is None else Origin(type(self.whole), *settings)


def agreed_cut(
    control: ControlGroup,
    position: MeshPosition,
    table: Schedule,
    model: partition.CuttableModel | nn.Module | Sequence[nn.Module] | Mapping[int, nn.Module],
    planned: Sequence[str],
) -> Cut:
    """This rank's share of `model`; where the cut depends on measured times, rank 0 chooses for all.

    Raises MismatchError if there are not the stages that the table has, or other layers than a plan is made for (`planned`).
    """
    whole = model if isinstance(model, partition.CuttableModel) else None
    own = _by_number(model, table) if isinstance(model, Mapping) else None
    listed = _all_stages(model, table) if whole is None and own is None else ()
    starts: list[str] = []
    if whole is not None:
        _check_planned(planned, whole.unit_order)
        starts = (
            []
            if whole.depends_on_measurement and position.world.rank
            else whole.choose_starts(table.stages, position.pipeline.device)
        )
    given = GivenModel(_form(model), starts, None if own is None else _structure(own))
    everyone = control.all_gather_object(given, "to agree on the cut")
    _check_forms(everyone)

    if own is not None:
        parts = [rank.own for rank in everyone if rank.own is not None]
        _check_own_stages(parts, position, table)
        stages, structure = own, _merged(parts)
    else:
        stages = dict(enumerate(listed if whole is None else whole.cut(everyone[0].starts)))
        structure = _structure(stages)

    bare = {stage: _bare(module) for stage, module in stages.items()}
    mine = table.stages_of(position.pipeline.rank)
    cut = Cut(
        modules={stage: bare[stage] for stage in mine},
        replications={stage: data_parallel.replication_of(bare[stage], stages[stage]) for stage in mine},
        every=bare,
        numbers=_layer_numbers(bare, structure.layers),
        tied=structure.tied,
        skips=frozenset(structure.skips) | tied_parameter_skips(structure.tied),
    )
    return cut if whole is None else cut._replace(whole=whole.model, balance=whole.balance)


class Structure(NamedTuple):
    """How stages hang together, as far as a rank knows them."""

    layers: Mapping[int, int]  # stage -> how many it has; 1 where it is no Sequential
    tied: Sequence[Sequence[StageParameter]]
    skips: Sequence[Skip]
    shared: Sequence[tuple[int, str, list[int]]] = ()  # stage, parameter, its stages, as `split` made them


class GivenModel(NamedTuple):
    """What a rank tells the others of the model it was given."""

    form: str
    starts: Sequence[str]  # of the stages of a whole model
    own: Structure | None  # of the rank's own stages


def _form(model: Any) -> str:
    if isinstance(model, Mapping):
        return "stages of its own, {stage: module}"
    return "a model to be cut" if isinstance(model, partition.CuttableModel) else "a list of all stages"


def _by_number(model: Mapping[Any, nn.Module], table: Schedule) -> dict[int, nn.Module]:
    for key in model:
        if not is_whole_number(key):
            numbers = f"whole numbers from 0 to {table.stages - 1}, not of class {type(key).__name__}"
            raise MismatchError(f"the keys of {{stage: module}} are the stages' numbers in {table.name}, {numbers}")
    return {index(key): module for key, module in model.items()}


def is_bare(model: Any) -> bool:
    """Whether it is one module, in no list or dict."""
    return isinstance(model, nn.Module) and type(model) is not nn.ModuleList


def check_bare(model: Any, table: Schedule, *cutting: Any) -> None:
    """Raises MismatchError for a bare module that is no nn.Sequential, nor to be cut by what is given for that, if there are
    several stages: whether it is the model or a stage of it is for its author to say.
    """
    wraps = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) or unwrap_compiled(model) is not model
    if table.stages > 1 and wraps:
        told = f"{type(model).__name__} is a wrapper of a model: give Pipeline the model itself"
        raise MismatchError(f"{told}; to compile it, stage.compile() for each stage of pipe.stages.values()")
    if not is_bare(model) or isinstance(model, nn.Sequential) or table.stages == 1 or any(each is not None for each in cutting):
        return
    begin = f"{table.stages - 1} submodule{'s' * (table.stages > 2)} that stages begin with"
    raise MismatchError(
        f"{table.name} has {table.stages} stages, and {type(model).__name__} is no nn.Sequential, cut between its layers: "
        f"give cuts=[..], the names of {begin}; or example_args=(..), a microbatch to trace and measure it with; or "
        "{stage: module}, if it is a stage of this rank's own"
    )


def _all_stages(model: Any, table: Schedule) -> Sequence[nn.Module]:
    """Those of a list. A module that is not to be cut is all there are if there is one."""
    stages = [model] if is_bare(model) else model
    if len(stages) != table.stages:
        raise MismatchError(f"{table.name} has {table.stages} stages, but the list has {len(stages)} modules")
    return stages


def _structure(stages: Mapping[Any, nn.Module]) -> Structure:
    bare = {stage: _bare(module) for stage, module in stages.items()}
    layers = {stage: len(module) if isinstance(module, nn.Sequential) else 1 for stage, module in bare.items()}
    shared = [(stage, name, owners) for stage in bare for name, owners in partition.shared_parameters(bare[stage]).items()]
    return Structure(layers, tied_parameters.find_tied_groups(bare), sorted(skip_routes(bare)), shared)


def _merged(parts: Sequence[Structure]) -> Structure:
    """Of all ranks' stages; replicas have the same."""
    layers = {stage: count for part in parts for stage, count in part.layers.items()}
    shared = dict.fromkeys(tuple(group) for part in parts for group in part.tied)
    return Structure(layers, sorted(shared), sorted({skip for part in parts for skip in part.skips}))


def _check_forms(everyone: Sequence[GivenModel]) -> None:
    for rank, given in enumerate(everyone):
        if given.form != everyone[0].form:
            raise MismatchError(f"the ranks do not give the same: rank 0 {everyone[0].form}, rank {rank} {given.form}")


def _check_own_stages(parts: Sequence[Structure], position: MeshPosition, table: Schedule) -> None:
    """Each rank gives the stages that the table places on it, no more and no fewer."""
    for place, ranks in enumerate(position.stage_ranks):
        for rank in ranks:
            numbers, placed = list(parts[rank].layers), table.stages_of(place)
            if set(numbers) != set(placed):
                raise MismatchError(
                    f"{table.name} places {_words(placed)} of {table.stages} on rank {rank}, which gives {_words(numbers)}: "
                    f"give {{{', '.join(f'{stage}: module' for stage in placed)}}} there"
                )
            for stage, name, owners in parts[rank].shared:
                if missing := set(owners) - set(placed):
                    raise MismatchError(
                        f"{name} of stage {stage} is a parameter of {_words(sorted(missing))} too, and would be trained there "
                        "as another: give every rank all stages that split() made, as a list"
                    )


def _words(stages: Sequence[Any]) -> str:
    if not stages:
        return "no stage"
    return f"stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))}"


def _check_planned(planned: Sequence[str], here: Sequence[str]) -> None:
    """The same layers, if their names are known, though a cut inside of one may have made several of it."""
    for names, others, where in ((here, planned, "the plan"), (planned, here, "the model")) if planned else ():
        for name in names:
            if not any(f"{name}.".startswith(f"{other}.") or other.startswith(f"{name}.") for other in others):
                raise MismatchError(
                    f"the plan is for a model of {len(planned)} layers, {planned[0]} to {planned[-1]}, and this one has "
                    f"{len(here)}: {name} is not in {where}. Make a plan for this model: penstock plan, or ps.plan.plan"
                )


def _bare(module: nn.Module) -> nn.Module:
    """The stage inside what DistributedDataParallel has made of it."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def _layer_numbers(stages: Mapping[int, nn.Module], layers: Mapping[int, int]) -> dict[int, range]:
    """For every stage that is a Sequential, the numbers of its layers, counted over all stages."""
    ends = list(accumulate(layers[stage] for stage in sorted(layers)))
    sequential = [stage for stage, module in stages.items() if isinstance(module, nn.Sequential)]
    return {stage: range(ends[stage] - layers[stage], ends[stage]) for stage in sequential}
