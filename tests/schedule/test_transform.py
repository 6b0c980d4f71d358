"""Tables made from tables."""

import pytest

from penstock.schedule import build, from_rows, names, verify
from penstock.schedule.table import Kind
from penstock.schedule.transform import with_frozen_stages, with_full_backwards


def test_an_i_and_its_w_become_a_b_where_no_other_rank_waits_in_between() -> None:
    table = from_rows("x", [["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"], ["1F0", "1I0", "1W0", "1F1", "1I1", "1W1"]])
    assert with_full_backwards(table).csv_rows() == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1I0", "1W0", "1F1", "1I1", "1W1"],  # rank 0 waits for the gradient of 1I0
    ]


def test_it_does_where_the_stage_before_lives_on_the_same_rank() -> None:
    table = from_rows("x", [["0F0", "1F0", "1I0", "1W0", "0I0", "0W0"]])
    assert with_full_backwards(table).csv_rows() == [["0F0", "1F0", "1B0", "0B0"]]


def test_a_w_of_another_microbatch_stays() -> None:
    row = ["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]
    assert with_full_backwards(from_rows("x", [row])).csv_rows() == [row]


@pytest.mark.parametrize("name", names())
def test_what_was_proved_stays_proved(name: str) -> None:
    for ranks in (1, 2, 4):
        for microbatches in (1, 3, 8):
            table = build(name, ranks, microbatches)
            assert verify(with_full_backwards(table)).peak_in_flight == verify(table).peak_in_flight


def test_frozen_stages_have_forwards_only_and_hold_nothing() -> None:
    table = with_frozen_stages(build("1f1b", 2, 2), [0])
    assert table.csv_rows() == [["0FROZEN", "0F0", "0F1"], ["1F0", "1B0", "1F1", "1B1"]]
    assert verify(table).peak_in_flight == (0, 1)


@pytest.mark.parametrize("name", names())
def test_a_proved_table_stays_proved_without_backwards_of_frozen_stages(name: str) -> None:
    for ranks in (1, 2, 4):
        table = build(name, ranks, 8)
        for count in range(table.stages):
            frozen = with_frozen_stages(table, range(count))
            proof = verify(with_full_backwards(frozen))
            assert all(map(float.__le__, map(float, proof.peak_in_flight), map(float, verify(table).peak_in_flight)))
            backwards = {action.stage for row in frozen.actions for action in row if action.kind is not Kind.F}
            assert backwards == set(range(count, table.stages))
