"""The stages of this rank, cut from the model or given by the user."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock import partition
from penstock.comms.control import Control
from penstock.errors import MismatchError
from penstock.mesh import data_parallel
from penstock.mesh.position import MeshPosition
from penstock.partition.balance import Balance
from penstock.partition.graph_stage import skips_of
from penstock.schedule import Schedule, Skip
from penstock.stage import tied
from penstock.stage.copies import StageCopies
from penstock.stage.exchange.neighbours import Name, skips_of_tied
from penstock.torch_private import uncompiled_name


class Origin(NamedTuple):
    """What an uncut model was beside its weights: transformers keep this with them."""

    kind: type[nn.Module]
    config: Any
    generation_config: Any


class Cut(NamedTuple):
    """The stages of this rank, as modules, and how they hang together with the others."""

    modules: dict[int, nn.Module]  # stage -> module, bare of DistributedDataParallel
    copies: dict[int, StageCopies]  # stage -> what the user's own data parallelism has made of it
    every: Mapping[int, nn.Module]  # stage -> module, bare: of all stages that this rank was given
    numbers: Mapping[int, range] = {}  # stage -> numbers of its layers in the uncut model, where it is a Sequential
    tied: Sequence[Sequence[Name]] = ()  # parameters that several stages share
    skips: frozenset[Skip] = frozenset()  # between which stages values, or gradients of shared parameters, go past others
    whole: nn.Module | None = None  # the uncut model, if that is what was cut
    balance: Balance | None = None  # how even the cut is, on the rank that chose it

    @property
    def order(self) -> list[str] | None:
        """All names in the uncut model, in its order, if that is what was cut."""
        return None if self.whole is None else [uncompiled_name(name) for name in self.whole.state_dict()]

    def aliases(self, names: Sequence[Mapping[str, str]]) -> dict[str, str]:
        """Further names, in the uncut model, of a tensor that has several -> the first; `names` as in `Parameters`.

        The first is the one by which `named_parameters()` of the uncut model has it. Of stages that this rank was not given,
        nothing is known.
        """
        if self.whole is None:
            states = [(names[stage], module.state_dict(keep_vars=True)) for stage, module in self.every.items()]
            named = [(known[own], value) for known, state in states for own, value in state.items()]
        else:
            named = [(uncompiled_name(name), value) for name, value in self.whole.state_dict(keep_vars=True).items()]
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
    control: Control,
    position: MeshPosition,
    table: Schedule,
    model: partition.Whole | nn.Module | Sequence[nn.Module],
    planned: Sequence[str],
) -> Cut:
    """This rank's share of `model`; where the cut depends on measured times, rank 0 chooses for all.

    Raises MismatchError if there are not as many stages as the table has, or other layers than a plan is made for (`planned`).
    """
    whole = model if isinstance(model, partition.Whole) else None
    starts: list[str] = []
    if whole is not None:
        _check_planned(planned, whole.order)
        starts = [] if whole.measures and position.world.rank else whole.starts(table.stages, position.pipeline.device)
    starts = control.gather_objects(starts, "to agree on the cut")[0]
    given = model.cut(starts) if isinstance(model, partition.Whole) else model
    mine = table.stages_of(position.pipeline.rank)
    if isinstance(given, nn.Module) and type(given) is not nn.ModuleList:  # this rank's stage
        if table.stages != table.ranks:
            has = f"{table.name} has {table.stages} stages on {table.ranks} ranks"
            raise MismatchError(f"{has}: give an nn.Sequential, or a list with one module for each stage, or cuts")
        if past := skips_of({mine[0]: given}):
            told = f"stage {mine[0]} gives values to stage {max(past)[1]}, past others"
            raise MismatchError(f"{told}: give every rank all stages that split() made, as a list")
        return _bare(mine, {mine[0]: given})
    if len(given) != table.stages:
        raise MismatchError(f"{table.name} has {table.stages} stages, but the list has {len(given)} modules")
    cut = _bare(mine, dict(enumerate(given)))
    every = [*cut.every.values()]
    shared = tied.find(every)
    cut = cut._replace(numbers=_layer_numbers(every), tied=shared, skips=skips_of(cut.every) | skips_of_tied(shared))
    return cut if whole is None else cut._replace(whole=whole.model, balance=whole.balance)


def _check_planned(planned: Sequence[str], here: Sequence[str]) -> None:
    """The same layers, if their names are known, though a cut inside of one may have made several of it."""
    for names, others, where in ((here, planned, "the plan"), (planned, here, "the model")) if planned else ():
        for name in names:
            if not any(f"{name}.".startswith(f"{other}.") or other.startswith(f"{name}.") for other in others):
                raise MismatchError(
                    f"the plan is for a model of {len(planned)} layers, {planned[0]} to {planned[-1]}, and this one has "
                    f"{len(here)}: {name} is not in {where}. Make a plan for this model: penstock plan, or ps.plan.plan"
                )


def _bare(mine: Sequence[int], given: Mapping[int, nn.Module]) -> Cut:
    """The stages inside what DistributedDataParallel has made of them, and what that is."""
    bare = {stage: each.module if isinstance(each, DistributedDataParallel) else each for stage, each in given.items()}
    copies = {stage: data_parallel.kind_of(bare[stage], given[stage]) for stage in mine}
    return Cut({stage: bare[stage] for stage in mine}, copies, bare)


def _layer_numbers(stages: Sequence[nn.Module]) -> dict[int, range]:
    """For every stage that is a Sequential, the numbers of its layers, counted over all stages."""
    counts = [len(each) if isinstance(each, nn.Sequential) else 1 for each in stages]
    ends = list(accumulate(counts))
    return {s: range(ends[s] - counts[s], ends[s]) for s, each in enumerate(stages) if isinstance(each, nn.Sequential)}
