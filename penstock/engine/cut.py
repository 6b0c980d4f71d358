"""The stages of this rank, cut from the model or given by the user."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
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


class Origin(NamedTuple):
    """What an uncut model was beside its weights: transformers keep this with them."""

    kind: type[nn.Module]
    config: Any
    generation_config: Any


class Cut(NamedTuple):
    """The stages of this rank, as modules, and how they hang together with the others."""

    modules: dict[int, nn.Module]  # stage -> module, bare of DistributedDataParallel
    copies: dict[int, StageCopies]  # stage -> what the user's own data parallelism has made of it
    numbers: dict[int, list[int] | None]  # stage -> numbers of its layers in the uncut model, where it is a Sequential
    every: Mapping[int, nn.Module]  # stage -> module, bare: of all stages that this rank was given
    tied: Sequence[Sequence[Name]] = ()  # parameters that several stages share
    skips: frozenset[Skip] = frozenset()  # between which stages values, or gradients of shared parameters, go past others
    whole: nn.Module | None = None  # the uncut model, if that is what was cut
    balance: Balance | None = None  # how even the cut is, on the rank that chose it

    @property
    def order(self) -> list[str] | None:
        """All names in the uncut model, in its order, if that is what was cut."""
        return None if self.whole is None else list(self.whole.state_dict())

    @property
    def origin(self) -> Origin | None:
        """What the uncut model was, if it had a configuration."""
        settings = [getattr(self.whole, name, None) for name in ("config", "generation_config")]
        return None if self.whole is None or settings[0] is None else Origin(type(self.whole), *settings)


def agreed_cut(
    control: Control,
    position: MeshPosition,
    table: Schedule,
    model: nn.Module | Sequence[nn.Module],
    cuts: Sequence[str] | None,
    example_args: Sequence[Any] | None,
    example_kwargs: Mapping[str, Any] | None,
) -> Cut:
    """This rank's share of `model`; where the cut depends on measured times, rank 0 chooses for all.

    Raises MismatchError if there are not as many stages as the table has.
    """
    model = list(model) if type(model) is nn.ModuleList else model
    whole = partition.whole(model, cuts, example_args, example_kwargs)
    chooses = whole is not None and not (whole.measures and position.world.rank)
    starts = whole.starts(table.stages, position.pipeline.device) if whole is not None and chooses else []
    starts = control.gather_objects(starts, "to agree on the cut")[0]
    given, mine = model if whole is None else whole.cut(starts), table.stages_of(position.pipeline.rank)
    if isinstance(given, nn.Module):
        if table.stages != table.ranks:
            has = f"{table.name} has {table.stages} stages on {table.ranks} ranks"
            raise MismatchError(f"{has}: give an nn.Sequential, or a list with one module for each stage, or cuts")
        bare, copies = _bare({mine[0]: given})
        return Cut(bare, copies, {mine[0]: None}, bare)
    if len(given) != table.stages:
        raise MismatchError(f"{table.name} has {table.stages} stages, but the list has {len(given)} modules")
    modules, _ = _bare(dict(enumerate(given)))
    numbers, shared = _layer_numbers(list(modules.values())), tied.find(list(modules.values()))
    return Cut(
        *_bare({stage: given[stage] for stage in mine}),
        dict(enumerate(numbers)),
        modules,
        shared,
        skips_of(given) | skips_of_tied(shared),
        None if whole is None else whole.model,
        None if whole is None else whole.balance,
    )


def _bare(given: Mapping[int, nn.Module]) -> tuple[dict[int, nn.Module], dict[int, StageCopies]]:
    """The stages inside what DistributedDataParallel has made of them, and what that is."""
    bare = {stage: each.module if isinstance(each, DistributedDataParallel) else each for stage, each in given.items()}
    return bare, {stage: data_parallel.kind_of(module, given[stage]) for stage, module in bare.items()}


def _layer_numbers(stages: Sequence[nn.Module]) -> list[list[int] | None]:
    """For every stage that is a Sequential, the numbers of its layers, counted over all stages."""
    numbers: list[list[int] | None] = []
    first = 0
    for module in stages:
        count = len(module) if isinstance(module, nn.Sequential) else 1
        numbers.append(list(range(first, first + count)) if isinstance(module, nn.Sequential) else None)
        first += count
    return numbers
