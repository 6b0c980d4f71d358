"""The options of a pipeline: all arguments of `Pipeline`, which of them must be equal on all ranks, and which may change."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from os import PathLike
from typing import Annotated, Any, Literal, Protocol, TypeGuard, get_args, get_type_hints

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.batch.agreement import Reduction
from penstock.comms.topology import Topology
from penstock.errors import MismatchError, is_whole_number
from penstock.mesh.data_parallel import ApplyDataParallel
from penstock.mesh.tensor_parallel import TensorParallelPlan
from penstock.partition.materialise import Init
from penstock.schedule.catalog import all_build_options, did_you_mean, family_options
from penstock.schedule.schedule import Schedule, ScheduleRule
from penstock.stage.recompute import Recompute

LossFn = Callable[..., Tensor]  # (output, target), with a teacher (output, target, teacher_output)
Model = nn.Module | Sequence[nn.Module] | Mapping[int, nn.Module]
OnNonfinite = Literal["raise", "skip"]


class PlanLike(Protocol):
    """The attributes of a plan that a pipeline uses as its options."""

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
    @property
    def teacher_cuts(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def teacher_layers(self) -> Sequence[str]: ...  # noqa: D102


class Stays(str):
    """The reason why `rebuild` does not change an option."""


class Mark(Enum):
    """What else is said of an option."""

    EQUAL = 1  # on all ranks
    IN_PLAN = 2  # a plan has it


EQUAL, IN_PLAN = Mark.EQUAL, Mark.IN_PLAN
MODEL_STAYS, RANKS_STAY = Stays("the model stays the one it was cut from"), Stays("the ranks stay where they are")


@dataclass(frozen=True, eq=False)
class PipelineOptions:
    """The arguments of `Pipeline`, whose `__init__` has the descriptions and defaults: a new option is added there too."""

    model: Annotated[Model, MODEL_STAYS]
    loss_fn: LossFn | None
    schedule: Annotated[str | Schedule | ScheduleRule, IN_PLAN]
    microbatches: Annotated[int | None, IN_PLAN]
    loss_weight: Callable[[Any], Any] | None
    topology: Annotated[Topology | None, RANKS_STAY]
    seed: Annotated[int | None, EQUAL]
    cuts: Annotated[Sequence[str] | None, IN_PLAN]
    example_args: Annotated[Sequence[Any] | None, MODEL_STAYS]
    example_kwargs: Annotated[Mapping[str, Any] | None, MODEL_STAYS]
    recompute: Annotated[Recompute | Sequence[Recompute | None] | None, IN_PLAN]
    plan: PlanLike | None
    scaler: torch.amp.GradScaler | None
    init: Annotated[Init | None, MODEL_STAYS]
    mesh: Annotated[DeviceMesh | None, RANKS_STAY]
    data_parallel: Annotated[str | ApplyDataParallel, EQUAL, RANKS_STAY]
    tensor_parallel: Annotated[TensorParallelPlan | None, EQUAL, RANKS_STAY]
    on_nonfinite: Annotated[OnNonfinite | None, EQUAL]
    rows_dim: Annotated[int | None, EQUAL, MODEL_STAYS]
    sequence_dim: Annotated[int, EQUAL]
    slices: Annotated[int | Sequence[int], EQUAL]
    reduction: Annotated[Reduction, EQUAL]
    rows_per_sample: Annotated[int, EQUAL]
    teacher: Annotated[Model | None, Stays("the ranks have its stages already")]
    family_options: Mapping[str, Any]  # of the schedule's family

    def equal_values(self) -> dict[str, Any]:
        """Return the options that must be equal on all ranks, besides those that the schedule and the model say themselves."""
        return {name: getattr(self, name) for name, marks in _MARKS.items() if EQUAL in marks}

    def with_plan(self) -> "PipelineOptions":
        """Return these with what the plan has. Raise MismatchError for what is no plan, and for options that it replaces."""
        if self.plan is None:
            return self
        if not hasattr(self.plan, "schedule") or not hasattr(self.plan, "recompute"):
            got = describe_value(self.plan)
            raise MismatchError(f"plan is what ps.plan.plan found, or ps.plan.load(path) reads, not {got}")
        if self.cuts or self.recompute or self.family_options:
            raise MismatchError("the plan has its own cuts, recomputation and stages: leave out cuts=, recompute= and options")
        return replace(self, **self._values_of_plan())

    def _values_of_plan(self) -> dict[str, Any]:
        return {name: getattr(self.plan, name) for name, marks in _MARKS.items() if IN_PLAN in marks}

    def with_changes(self, changes: Mapping[str, Any]) -> "PipelineOptions":
        """Return these with changes of `rebuild`. Another schedule, or a plan, drops the options of the old family.

        Raises MismatchError for what cannot be changed.
        """
        if fixed := [name for name in changes if name in STAYS]:
            raise MismatchError(f"rebuild() takes no {fixed[0]}=: {STAYS[fixed[0]]}. Make a new Pipeline for another one")
        has_new_plan, old = changes.get("plan") is not None, dict[str, Any]()
        if self.plan is not None:
            old |= self._values_of_plan() | {"plan": None}
        if has_new_plan:
            old |= {"cuts": None, "recompute": None}

        if "schedule" in changes or has_new_plan:
            old["family_options"] = {}
            if is_fixed_table(changes.get("schedule")):
                old["microbatches"] = None  # the table has its own number
        elif "microbatches" in changes and is_fixed_table(old.get("schedule", self.schedule)):
            raise MismatchError(
                f"microbatches={changes['microbatches']} changes nothing: the schedule is a table, which has its own number; "
                "give schedule= too"
            )
        unchanged = replace(self, **old)
        named = {name: value for name, value in changes.items() if name in _MARKS}
        others = {name: value for name, value in changes.items() if name not in _MARKS}
        return replace(unchanged, **named, family_options={**unchanged.family_options, **others})

    def check(self) -> None:
        """Raise MismatchError for a value of another kind, and for an option that no pipeline and no such schedule has."""
        schedule: object = self.schedule
        if not isinstance(schedule, str | PathLike | Schedule) and not callable(schedule):
            got = describe_value(schedule)
            raise MismatchError(f"the schedule is a name, a Schedule, a CSV file's path or a function, not {got}")
        for name, function in (("loss_fn", self.loss_fn), ("loss_weight", self.loss_weight)):
            if function is not None and (isinstance(function, type) or not callable(function)):
                raise MismatchError(f"{name} is a function or a module, not {describe_value(function)}")
        if self.seed is not None and not is_whole_number(self.seed):
            raise MismatchError(f"seed is a whole number or None, not {describe_value(self.seed)}")
        if not isinstance(self.scaler, torch.amp.GradScaler | None):
            raise MismatchError(f"scaler is a GradScaler or None, not {describe_value(self.scaler)}")
        if self.on_nonfinite not in (None, *get_args(OnNonfinite)):
            raise MismatchError(f"on_nonfinite={self.on_nonfinite!r}: use 'raise', 'skip' or None")
        if not is_whole_number(self.sequence_dim, 0):
            raise MismatchError(f"sequence_dim is the dimension that has the tokens, 0 or more, not {self.sequence_dim!r}")
        if not is_whole_number(self.rows_per_sample, 1):
            raise MismatchError(f"rows_per_sample is how many rows stay together, 1 or more, not {self.rows_per_sample!r}")
        if self.family_options:
            self._check_family_options()

    def _check_family_options(self) -> None:
        if isinstance(self.schedule, Schedule):
            schedule_options, source = [], f"the table of {self.schedule.name}"
        elif is_family_name(self.schedule):
            schedule_options, source = family_options(self.schedule), f"the schedule {self.schedule}"
        else:
            schedule_options, source = ["placement"], "a table from rows"
        for name in self.family_options:
            if name not in schedule_options:
                guess = did_you_mean(name, [*_MARKS, *schedule_options])
                takes = f"takes {', '.join(schedule_options)}" if schedule_options else "takes no options"
                raise MismatchError(f"a Pipeline has no argument {name}{guess}, and {source} {takes}")


_MARKS: dict[str, Sequence[object]] = {
    name: getattr(hint, "__metadata__", ())
    for name, hint in get_type_hints(PipelineOptions, include_extras=True).items()
    if name != "family_options"
}
STAYS = {name: mark for name, marks in _MARKS.items() for mark in marks if isinstance(mark, Stays)}


@cache
def option_names() -> tuple[str, ...]:
    """Return the names of all options, of any family of schedules too."""
    return (*_MARKS, *all_build_options())


def is_family_name(schedule: object) -> TypeGuard[str]:
    """Whether a schedule is the name of a family, neither a table nor a rule."""
    return isinstance(schedule, str) and not schedule.endswith(".csv")


def is_fixed_table(schedule: object) -> bool:
    """Whether a schedule is a table, or the path of one, which has its own number of microbatches."""
    return isinstance(schedule, Schedule | PathLike) or (isinstance(schedule, str) and not is_family_name(schedule))


def describe_value(value: object) -> str:
    """Return as text what was given in place of something else: a class, None, or an object of a class."""
    if isinstance(value, type):
        return f"the class {value.__name__}: make one, {value.__name__}(..)"
    return "None" if value is None else f"a {type(value).__name__}"
