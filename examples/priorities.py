"""Three published schedules, each from a priority: which of a rank's ready actions goes first.

python examples/priorities.py      # proves and draws them, next to 1F1B; torch is not needed
"""

from typing import Any

from penstock.schedule import Action, Costs, Kind, RankProgress, Schedule, build, list_schedule, simulate, verify
from penstock.view.terminal import draw, summary


def eager_1f1b(ranks: int, microbatches: int) -> Schedule:
    """1F1B with twice the forwards ahead, which hide messages (Zhuang et al. 2022)."""

    def backward_first(action: Action, progress: RankProgress) -> Any:
        return action.kind is Kind.F

    limit = [2 * (ranks - rank) - 1 for rank in range(ranks)]
    return list_schedule("loop", backward_first, ranks=ranks, microbatches=microbatches, limit=limit, name="eager-1f1b")


def wave(ranks: int, microbatches: int) -> Schedule:
    """Two waves down the ranks and back up, after Hanayo (Liu et al. 2023, arXiv 2308.15762)."""

    def in_turn(action: Action, progress: RankProgress) -> Any:
        return progress.last_action is not None and action.kind is progress.last_action.kind, action.microbatch

    limit = 4 * (ranks + 1)
    return list_schedule("V", in_turn, ranks=ranks, microbatches=microbatches, stages_per_rank=4, limit=limit, name="wave")


def half_chimera(ranks: int, microbatches: int) -> Schedule:
    """Chimera (Li and Hoefler 2021, arXiv 2107.06925) folded: a V; two replicas (dp=2) of it are the two directions."""

    def in_turn(action: Action, progress: RankProgress) -> Any:
        return progress.last_action is not None and action.kind is progress.last_action.kind, -action.stage

    return list_schedule("V", in_turn, ranks=ranks, microbatches=microbatches, limit=2 * ranks + 2, name="half-chimera")


RULES = (eager_1f1b, wave, half_chimera)

if __name__ == "__main__":
    for table in (build("1f1b", ranks=4, microbatches=8), *(rule(4, 8) for rule in RULES)):
        share = table.ranks / table.stages  # F = I = W = 1 of a whole rank
        timeline = simulate(table, Costs(share, share, share))
        print(f"{verify(table)}\n{draw(timeline, 140)}\n{summary(timeline)}\n")
