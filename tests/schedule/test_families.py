"""The tables of naive, gpipe and 1f1b, drawn."""

import pytest

from penstock.schedule import build

TABLES = {
    ("naive", 1, 1): """
        rank 0 | 0F0 0B0
    """,
    ("naive", 2, 3): """
        rank 0 | 0F0 0B0 0F1 0B1 0F2 0B2
        rank 1 | 1F0 1B0 1F1 1B1 1F2 1B2
    """,
    ("naive", 4, 1): """
        rank 0 | 0F0 0B0
        rank 1 | 1F0 1B0
        rank 2 | 2F0 2B0
        rank 3 | 3F0 3B0
    """,
    ("gpipe", 1, 3): """
        rank 0 | 0F0 0F1 0F2 0B0 0B1 0B2
    """,
    ("gpipe", 2, 3): """
        rank 0 | 0F0 0F1 0F2 0B0 0B1 0B2
        rank 1 | 1F0 1F1 1F2 1B0 1B1 1B2
    """,
    ("gpipe", 3, 2): """
        rank 0 | 0F0 0F1 0B0 0B1
        rank 1 | 1F0 1F1 1B0 1B1
        rank 2 | 2F0 2F1 2B0 2B1
    """,
    ("1f1b", 1, 3): """
        rank 0 | 0F0 0B0 0F1 0B1 0F2 0B2
    """,
    ("1f1b", 2, 4): """
        rank 0 | 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
        rank 1 | 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
    """,
    ("1f1b", 3, 3): """
        rank 0 | 0F0 0F1 0F2 0B0 0B1 0B2
        rank 1 | 1F0 1F1 1B0 1F2 1B1 1B2
        rank 2 | 2F0 2B0 2F1 2B1 2F2 2B2
    """,
    ("1f1b", 3, 5): """
        rank 0 | 0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0B3 0B4
        rank 1 | 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1B4
        rank 2 | 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4
    """,
    ("1f1b", 4, 2): """
        rank 0 | 0F0 0F1 0B0 0B1
        rank 1 | 1F0 1F1 1B0 1B1
        rank 2 | 2F0 2F1 2B0 2B1
        rank 3 | 3F0 3B0 3F1 3B1
    """,
    ("1f1b", 4, 1): """
        rank 0 | 0F0 0B0
        rank 1 | 1F0 1B0
        rank 2 | 2F0 2B0
        rank 3 | 3F0 3B0
    """,
    ("1f1b", 2, 11): """
        rank 0 |  0F0  0F1  0B0  0F2  0B1  0F3  0B2  0F4  0B3  0F5  0B4  0F6  0B5  0F7  0B6  0F8  0B7  0F9  0B8 0F10  0B9 0B10
        rank 1 |  1F0  1B0  1F1  1B1  1F2  1B2  1F3  1B3  1F4  1B4  1F5  1B5  1F6  1B6  1F7  1B7  1F8  1B8  1F9  1B9 1F10 1B10
    """,
}


@pytest.mark.parametrize(("name", "ranks", "microbatches"), TABLES)
def test_the_table_is_as_drawn(name, ranks, microbatches):
    drawn = [line.strip() for line in TABLES[name, ranks, microbatches].strip().splitlines()]
    assert str(build(name, ranks, microbatches)).splitlines() == drawn


def test_every_rank_of_naive_and_gpipe_runs_the_same_on_its_own_stage():
    for name in ("naive", "gpipe"):
        for rank, row in enumerate(build(name, 5, 4).actions):
            assert [(kind, microbatch) for kind, stage, microbatch in row if stage == rank] == [
                (kind, microbatch) for kind, _, microbatch in build(name, 1, 4).actions[0]
            ]


def test_1f1b_with_many_microbatches_warms_up_one_forward_less_on_each_following_rank():
    for rank, row in enumerate(build("1f1b", 8, 20).actions):
        warmup = next(index for index, action in enumerate(row) if action.kind.value == "B") - 1
        assert warmup == 7 - rank
