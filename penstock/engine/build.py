"""From what the user gives to what this rank runs: a table, proved; the model cut; in memory; wired; stages.

All ranks build at once and compare what they build, so that whatever does not fit together is told before data flows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from penstock import partition, torch_private
from penstock.comms.control import Control, waiting
from penstock.engine.comparison import by_stage, check, describe
from penstock.engine.cut import Cut, cut
from penstock.errors import MismatchError
from penstock.mesh.data_parallel import ApplyDataParallel
from penstock.mesh.position import MeshPosition
from penstock.mesh.side_by_side import side_by_side
from penstock.mesh.tensor_parallel import Plan
from penstock.partition.balance import Balance
from penstock.partition.graph_stage import on
from penstock.partition.materialise import Init, is_meta, materialise
from penstock.schedule import Program, Schedule, from_rows, verify
from penstock.schedule import build as built_by_name
from penstock.schedule.table import Cell
from penstock.schedule.transform import with_full_backwards
from penstock.stage import tied
from penstock.stage.layers import Recompute
from penstock.stage.neighbours import neighbours_of
from penstock.stage.parameters import Parameters
from penstock.stage.stage import Stage
from penstock.stage.tied import TiedParameter

Rule = Callable[[int, int, int], Iterable[Cell | str]]  # rank, P, M -> the cells of the rank's row
Names = Sequence[Mapping[str, str]]  # for every stage of the model, its own name of each entry -> the name in the uncut model


@dataclass(frozen=True)
class Settings:
    """What the user asked for; see `Pipeline`."""

    model: nn.Module | Sequence[nn.Module]
    loss_fn: Callable[[Any, Any], Tensor] | None
    schedule: str | Schedule | Rule
    microbatches: int
    options: Mapping[str, Any]  # of the schedule
    cuts: Sequence[str] | None
    example_args: Sequence[Any] | None
    example_kwargs: Mapping[str, Any] | None
    seed: int | None
    init: Init | None
    recompute: Recompute | None
    merge_weight_gradients: bool
    data_parallel: str | ApplyDataParallel
    tensor_parallel: Plan | None


class Built(NamedTuple):
    """What this rank runs."""

    schedule: Schedule  # the table as it was asked for
    program: Program  # of the table as it runs: I and W right after each other are one B
    stages: dict[int, Stage]  # this rank's, by number
    parameters: Parameters
    tied: Sequence[TiedParameter]  # this rank's copies of parameters that several ranks have
    machines: Sequence[str]  # of every rank: the same for those that share a clock
    balance: Balance | None  # how even the cut is, on the rank that chose it


def build(settings: Settings, position: MeshPosition, control: Control) -> Built:
    """Build this rank's part; all ranks call it. Raises ScheduleError for a table that cannot be proved, MismatchError where
    the ranks, the schedule and the model do not fit together."""
    asked = table(settings, position.pipeline.world_size)
    verify(asked)
    cut = _cut(settings, position, control, asked)
    runs = with_full_backwards(asked)
    program = verify(runs, skips=cut.skips).program

    mine = describe(asked, cut, settings.seed, position, settings.tensor_parallel, settings.data_parallel)
    everyone = control.gather_objects(mine, "to build the pipeline")
    check(everyone)
    names = partition.names_of(by_stage([each.names for each in everyone]), whole=cut.whole is not None)

    modules = _placed(settings, cut, names, position)
    with waiting("for the ranks beside it to build the pipeline"):
        plan, way = settings.tensor_parallel, settings.data_parallel
        copies = side_by_side(modules, cut.copies, cut.tied, names, position, plan, way)
    control.gather_objects(None, "to build the pipeline")

    takes = by_stage([each.takes for each in everyone])
    neighbours = neighbours_of(len(takes), cut.skips, cut.tied)
    stages = {
        index: Stage(
            index,
            module,
            position.pipeline.device,
            settings.loss_fn if index == asked.stages - 1 else None,
            numbers=None if torch_private.fsdp_casts(module) else cut.numbers[index],
            recompute=settings.recompute,
            neighbours=neighbours[index],
            later=frozenset().union(*takes[index + 1 :]),
            merge=settings.merge_weight_gradients,
            copies=copies[index],
            in_order=runs.weights_in_order(index),
            first=position.replica * asked.microbatches,
        )
        for index, module in modules.items()
    }
    order = None if cut.whole is None else list(cut.whole.state_dict())
    parameters = Parameters(modules, names, tied.aliases(cut.tied, names), order)
    owned = tied.owned(cut.tied, asked.placement, modules, position.pipeline)
    for each in owned:
        each.share_value()
    return Built(asked, program, stages, parameters, owned, [each.machine for each in everyone], cut.balance)


def table(settings: Settings, ranks: int) -> Schedule:
    """The table that `settings.schedule` stands for: a name, the path of a CSV file, a rule, or itself."""
    schedule, options = settings.schedule, settings.options
    if isinstance(schedule, str) and schedule.endswith(".csv"):
        schedule = Schedule.from_csv(schedule, **options)
    elif isinstance(schedule, str):
        schedule = built_by_name(schedule, ranks=ranks, microbatches=settings.microbatches, **options)
    elif not isinstance(schedule, Schedule):
        name = getattr(schedule, "__name__", "a rule")
        rows = [list(schedule(rank, ranks, settings.microbatches)) for rank in range(ranks)]
        schedule = from_rows(name, rows, **options)
    if schedule.ranks != ranks:
        raise MismatchError(f"schedule {schedule.name} is for {schedule.ranks} ranks, but {ranks} are running")
    return schedule


def _cut(settings: Settings, position: MeshPosition, control: Control, table: Schedule) -> Cut:
    """This rank's stages; where the cut depends on measured times, rank 0 chooses for all."""
    whole = partition.whole(settings.model, settings.cuts, settings.example_args, settings.example_kwargs)
    chooses = whole is not None and not (whole.measures and position.world.rank)
    starts = whole.starts(table.stages) if whole is not None and chooses else []
    starts = control.gather_objects(starts, "to agree on the cut")[0]
    return cut(settings.model, whole, starts, table, position.pipeline.rank)


def _placed(settings: Settings, cut: Cut, names: Names, position: MeshPosition) -> dict[int, nn.Module]:
    """This rank's stages on its device; what of them is on the meta device is given memory and initialised."""
    device, seed, init = position.pipeline.device, settings.seed, settings.init
    for index, module in cut.modules.items():
        if is_meta(module) and cut.whole is not None:
            materialise(cut.whole, None, device, seed, init, only=names[index].values())
        elif is_meta(module):
            materialise(module, names[index], device, seed, init)
    return {index: on(module, device) for index, module in cut.modules.items()}
