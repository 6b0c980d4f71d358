"""The tables of the families, drawn."""

import pytest

from penstock.schedule import build, names

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
    ("interleaved-1f1b", 2, 2): """
        rank 0 | 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        rank 1 | 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """,
    ("looped-bfs", 2, 3): """
        rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
        rank 1 | 1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2
    """,
    ("zb-h1", 2, 3): """
        rank 0 | 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        rank 1 | 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """,
    ("zb-h2", 2, 4): """
        rank 0 | 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        rank 1 | 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3
    """,
    ("interleaved-zb", 2, 2): """
        rank 0 | 0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
        rank 1 | 1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """,
    ("zb-v", 2, 3): """
        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        rank 1 | 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """,
    ("dualpipe-v", 1, 2): """
        rank 0 |       0F0       1F0       0F1       1B0 {1F1 0B0}       1B1       0I1       0W1
    """,
    ("dualpipe-v", 2, 1): """
        rank 0 | 0F0 3F0 3I0 3W0 0B0
        rank 1 | 1F0 2F0 2B0 1B0
    """,
}


@pytest.mark.parametrize(("name", "ranks", "microbatches"), TABLES)
def test_the_table_is_as_drawn(name, ranks, microbatches):
    drawn = [line.strip() for line in TABLES[name, ranks, microbatches].strip().splitlines()]
    assert str(build(name, ranks, microbatches)).splitlines() == drawn


def test_every_rank_of_naive_and_gpipe_runs_the_same_on_its_own_stage():
    for name in ("naive", "gpipe"):
        for rank, row in enumerate(build(name, 5, 4).actions):
            assert [(kind, microbatch) for kind, stage, microbatch, _ in row if stage == rank] == [
                (kind, microbatch) for kind, _, microbatch, _ in build(name, 1, 4).actions[0]
            ]


def test_1f1b_with_many_microbatches_warms_up_one_forward_less_on_each_following_rank():
    for rank, row in enumerate(build("1f1b", 8, 20).actions):
        warmup = next(index for index, action in enumerate(row) if action.kind.value == "B") - 1
        assert warmup == 7 - rank


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("microbatches", [2, 4, 6])
def test_every_stage_takes_the_microbatches_in_order_as_one_process_does(name, ranks, microbatches):
    if name == "interleaved-1f1b":
        microbatches *= ranks
    for row in build(name, ranks, microbatches).actions:
        for kind, stage in {(action.kind, action.stage) for action in row}:
            order = [action.microbatch for action in row if (action.kind, action.stage) == (kind, stage)]
            assert order == sorted(order), f"{kind.value} of stage {stage}"
