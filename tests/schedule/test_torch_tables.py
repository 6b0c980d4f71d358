"""PyTorch's own tables, cell by cell against ours."""

import pytest
from torch.distributed.pipelining import schedules as peer

from penstock.schedule import ScheduleError, build

CLASSES = {
    "interleaved-1f1b": peer.ScheduleInterleaved1F1B,
    "looped-bfs": peer.ScheduleLoopedBFS,
    "interleaved-zb": peer.ScheduleInterleavedZeroBubble,
    "zb-v": peer.ScheduleZBVZeroBubble,
    "dualpipe-v": peer.ScheduleDualPipeV,
}


def theirs(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> list[list[str]]:
    """The peer's table, bubbles left out. Its constructor wants running stages; the rule itself needs only numbers."""
    table = CLASSES[name].__new__(CLASSES[name])
    rounds = max(1, microbatches // ranks)
    table.__dict__.update(
        pp_group_size=ranks,
        n_local_stages=stages_per_rank,
        num_stages=ranks * stages_per_rank,
        _n_microbatches=microbatches,
        _stages=range(stages_per_rank),
        number_of_rounds=rounds,
        microbatches_per_round=microbatches // rounds,
    )
    rows = [table._calculate_single_rank_operations(rank) for rank in range(ranks)]
    return [[str(action) for action in row if action is not None] for row in rows]


def backwards_ascending(row: list[str]) -> list[str]:
    """The peer's looped-bfs runs the backwards of a stage in descending order of microbatches."""
    forwards = [cell for cell in row if "F" in cell]
    stages = sorted({int(cell.split("B")[0]) for cell in row if "B" in cell}, reverse=True)
    return forwards + [f"{stage}B{m}" for stage in stages for m in range(len(forwards) // len(stages))]


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_the_tables_are_equal_wherever_both_exist(name: str) -> None:
    compared = 0
    for ranks in (1, 2, 3, 4, 5, 8):
        for stages_per_rank in (2, 3) if name in ("interleaved-1f1b", "looped-bfs", "interleaved-zb") else (2,):
            for microbatches in range(1, 25):
                if name.startswith("interleaved") and microbatches % max(1, microbatches // ranks):
                    continue  # the peer refuses these
                if name == "dualpipe-v" and microbatches < 2 * ranks:
                    continue  # and these
                expected = theirs(name, ranks, microbatches, stages_per_rank)
                if name == "looped-bfs":
                    expected = [backwards_ascending(row) for row in expected]
                assert build(name, ranks, microbatches, stages_per_rank).csv_rows() == expected, (ranks, microbatches)
                compared += 1
    assert compared > 100


def test_the_group_size_is_the_peers_number_of_microbatches_in_a_round() -> None:
    assert build("interleaved-1f1b", 4, 10, 2).csv_rows() == theirs("interleaved-1f1b", 4, 10, 2)
    assert build("interleaved-1f1b", 4, 10, 2) == build("interleaved-1f1b", 4, 10, 2, group_size=5)
    with pytest.raises(ScheduleError, match="use microbatches=4, or leave group_size out"):
        build("interleaved-1f1b", 4, 5, 3, group_size=4)
