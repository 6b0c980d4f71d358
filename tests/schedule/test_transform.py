"""Tables made from tables."""

import pytest

from penstock.schedule import build, from_rows, names, verify
from penstock.schedule.transform import with_full_backwards


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
