"""The catalog: the families of schedules, by name. A new family is added here."""

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from penstock.errors import ScheduleError, is_whole_number
from penstock.schedule.families import controllable_memory, one_f_one_b, two_chunks
from penstock.schedule.proof import verify
from penstock.schedule.schedule import Schedule, from_rows
from penstock.schedule.table import PLACEMENTS, Cell, pause_garbage_collection


@dataclass(frozen=True)
class Family:
    """A rule that makes a table for any P and M, and the properties by which a reader chooses it."""

    rule: Callable[..., Iterable[Cell]]  # (rank, P, M, options) -> the cells of that rank
    stages_per_rank: int  # V by default
    bubble: str  # idle time of a rank; T: its forward and backward of one microbatch; sends cost nothing
    in_flight: str  # activations in flight on rank r, in microbatches
    placement: str = "loop"
    min_stages_per_rank: int = 1  # the smallest V that the rule supports

    @property
    def summary(self) -> str:
        """The first sentence of the rule's docstring."""
        return (self.rule.__doc__ or "").partition(".\n")[0].partition(": `")[0].partition(" (")[0].strip()

    @property
    def options(self) -> list[str]:
        """The options of `build` for this family, besides P and M."""
        parameters = inspect.signature(self.rule).parameters.values()
        return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]

    @property
    def stages_per_rank_text(self) -> str:
        """The number of stages on a rank as text: `1`, `2, in a V`, or `2 or more`."""
        if "stages_per_rank" in self.options:
            return f"{self.min_stages_per_rank} or more"
        return f"{self.stages_per_rank}, in a V" if self.placement == "V" else str(self.stages_per_rank)


MAX_CELLS = 10**8  # ranks x microbatches: a larger table takes tens of gigabytes

FAMILIES: dict[str, Family] = {
    "naive": Family(one_f_one_b.naive, 1, "(P-1) M T", "1"),
    "gpipe": Family(one_f_one_b.gpipe, 1, "(P-1) T", "M"),
    "1f1b": Family(one_f_one_b.one_f_one_b, 1, "(P-1) T", "min(P-r, M)"),
    "interleaved-1f1b": Family(
        one_f_one_b.interleaved_1f1b, 2, "(P-1) T / V", "((V-1)P + 2(P-1-r) + 1) / V", min_stages_per_rank=2
    ),
    "looped-bfs": Family(one_f_one_b.looped_bfs, 2, "(P-1) T / V", "M"),
    "zb-h1": Family(one_f_one_b.zb_h1, 1, "(P-1)(F + I - W) where F, I >= W", "P"),
    "zb-h2": Family(one_f_one_b.zb_h2, 1, "(P-1)(F + I - 2W) by span", "2P-1"),
    "interleaved-zb": Family(one_f_one_b.interleaved_zb, 2, "(P-1)(F + I - W) / V", "P"),
    "zb-v": Family(two_chunks.zb_v, 2, "0 by span, (P-1) F/2", "P", placement="V"),
    "v-half": Family(controllable_memory.v_half, 2, "about half of 1f1b's", "floor((P+2) / 2)", placement="V"),
    "v-min": Family(controllable_memory.v_min, 2, "about 2/3 of 1f1b's", "floor((P+4) / 3)", placement="V"),
    "dualpipe-v": Family(two_chunks.dualpipe_v, 2, "(P-1)(F&B + B - 3W) / 2", "(2P+1) / 2", placement="V"),
}


def names() -> list[str]:
    """Return the names that `build` knows."""
    return list(FAMILIES)


def family_options(name: str) -> list[str]:
    """Return the options of `build` for a schedule besides P and M. Raises ScheduleError for a name it does not know."""
    return list(dict.fromkeys(["stages_per_rank", *_find_family(name).options]))


def all_build_options() -> list[str]:
    """Return the options of `build` for any schedule, besides P and M."""
    return list(dict.fromkeys(option for name in names() for option in family_options(name)))


def names_with_options(options: Iterable[str]) -> list[str]:
    """Return the schedules that `build` can make with all these options."""
    return [name for name in names() if {*options} <= {*family_options(name)}]


def _find_family(name: str) -> Family:
    if name not in FAMILIES:
        raise ScheduleError(f"unknown schedule {name!r}{did_you_mean(name, names())}: choose from {', '.join(names())}")
    return FAMILIES[name]


@pause_garbage_collection()
def build(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None, **options: Any) -> Schedule:
    """Return the table of a schedule of the catalog.

    `name`: one of `names()`.
    `ranks`: P, the number of ranks.
    `microbatches`: M, the number of microbatches of a batch.
    `stages_per_rank`: V, by default that of the family: S = P x V stages in all.
    `options`: of the family. `group_size`, of the interleaved ones: how many microbatches pass through a rank's stages
    together; `slices`: K, the slices of a microbatch along its sequence (1 with any family).

    Raises ScheduleError, with the nearest value that works, for a name, a number or an option that it cannot build.

        print(build("1f1b", ranks=2, microbatches=3))
        # rank 0 | 0F0 0F1 0B0 0F2 0B1 0B2
        # rank 1 | 1F0 1B0 1F1 1B1 1F2 1B2
    """
    family = _find_family(name)
    if is_whole_number(options.get("slices")) and options["slices"] == 1:
        del options["slices"]  # the default of every family
    if unknown := sorted(set(options) - set(family.options)):
        option_text = f"it has {', '.join(family.options)}" if family.options else "it has none"
        if with_option := names_with_options(unknown):
            option_text += f"; {', '.join(with_option)} {'have' if len(with_option) > 1 else 'has'} it"
        raise ScheduleError(f"{name} has no option {', '.join(unknown)}: {option_text}")
    optional = {option: value for option, value in {"stages_per_rank": stages_per_rank, **options}.items() if value is not None}
    for count_name, value in {"ranks": ranks, "microbatches": microbatches, **optional}.items():
        if not is_whole_number(value, 1):
            raise ScheduleError(f"{name} cannot be built with {count_name}={value!r}: use a whole number of 1 or more")
    ranks, microbatches = int(ranks), int(microbatches)
    if ranks * microbatches > MAX_CELLS:
        raise ScheduleError(
            f"{name} of {ranks} ranks and {microbatches} microbatches is too large: {MAX_CELLS:,} in all at most"
        )
    options = {option: int(value) for option, value in options.items() if value is not None}
    stages_per_rank = family.stages_per_rank if stages_per_rank is None else int(stages_per_rank)
    _check_stages_per_rank(name, family, stages_per_rank)
    if "stages_per_rank" in family.options:
        options["stages_per_rank"] = stages_per_rank
    placement = PLACEMENTS[family.placement](ranks * stages_per_rank, ranks)

    def build_table(microbatches: int) -> Schedule:
        return from_rows(name, [family.rule(rank, ranks, microbatches, **options) for rank in range(ranks)], placement)

    if "group_size" in options:
        _check_group_size(build_table, microbatches, options["group_size"])
    return build_table(microbatches)


def _check_stages_per_rank(name: str, family: Family, stages_per_rank: int) -> None:
    if "stages_per_rank" not in family.options and stages_per_rank != family.stages_per_rank:
        has = "one stage" if family.stages_per_rank == 1 else f"{family.stages_per_rank} stages"
        raise ScheduleError(f"{name} has {has} on each rank, not stages_per_rank={stages_per_rank}: leave it out")
    if stages_per_rank < family.min_stages_per_rank:
        raise ScheduleError(f"{name} needs stages_per_rank={family.min_stages_per_rank} or more, not {stages_per_rank}")


def _check_group_size(build_schedule: Callable[[int], Schedule], microbatches: int, group_size: int) -> None:
    """Raise ScheduleError, with the nearest number of microbatches that works, for groups that no proof accepts."""
    if reason := _proof_failure(build_schedule(microbatches)):
        by_distance = sorted(range(1, 2 * microbatches + group_size), key=lambda m: (abs(m - microbatches), m))
        nearest = next((m for m in by_distance if not _proof_failure(build_schedule(m))), None)
        advice = f"use microbatches={nearest}, or leave" if nearest else "leave"
        raise ScheduleError(f"{reason}: with group_size={group_size}, {advice} group_size out")


def _proof_failure(schedule: Schedule) -> str:
    """Return why `schedule` cannot be proved; empty if it can."""
    try:
        verify(schedule)
    except ScheduleError as error:
        return str(error)
    return ""


def did_you_mean(text: str, choices: list[str]) -> str:
    """Return ` (did you mean 1f1b?)` when a choice is near `text`, else nothing."""
    near = difflib.get_close_matches(str(text).lower().replace("_", "-"), choices, n=1, cutoff=0.5)
    return f" (did you mean {near[0]}?)" if near else ""
