"""What a rank does of a program, for each kind of batch and call."""

import pytest

from penstock.schedule import build, lower
from penstock.schedule.rank_program import MAX_CACHED_PROGRAMS, RankPrograms


def programs(name: str = "1f1b", microbatches: int = 4, rank: int = 0, **options: bool) -> RankPrograms:
    return RankPrograms(lower(build(name, 2, microbatches)), rank, **options)


def actions(program) -> str:
    return " ".join(str(step.action) for step in program.lines)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ((True,), "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"),
        ((False,), "0F0 0F1 0F2 0F3"),
        ((True, 2), "0F0 0F1 0B0 0B1"),
        ((False, 2), "0F0 0F1"),
        ((True, 4, frozenset({1, 3})), "0F0 0F1 0B0 0F2 0F3 0B2"),
    ],
)
def test_a_rank_does_what_the_call_needs(call, expected):
    assert actions(programs().select(*call)) == expected


def test_what_was_asked_for_before_is_the_same_program():
    known = programs()
    assert known.select(True) is known.select(True, 4)
    assert known.select(False, 4, frozenset({2})) is known.select(False)
    assert known.select(True, 2) is known.select(True, 2) is not known.select(True, 3)


def test_so_many_kinds_of_batches_as_there_may_be_are_not_all_remembered():
    known = programs(microbatches=8)
    first, kept = known.select(True, 1), known.select(True, 2)
    for number in range(2 * MAX_CACHED_PROGRAMS):
        known.select(True, 3, frozenset(bit for bit in range(8) if number >> bit & 1))
        assert known.select(True, 2) is kept  # asked for again and again
    again = known.select(True, 1)
    assert again == first
    assert again is not first
    assert known._cached_program.cache_info().currsize == MAX_CACHED_PROGRAMS


def test_a_split_backward_is_known_before_its_forward_and_the_last_action_of_a_stage_completes_its_gradients():
    program = programs("zb-h1", 2, rank=1).select(True)
    assert program.split_backwards == {(1, 0, 0), (1, 1, 0)}  # stage, microbatch, slice
    assert {str(action) for action in program.last_backwards} == {"1W1"}
