"""A searched table is proved, timed, within its limit, the same each time, and never longer than a published one."""

import pytest

from penstock.schedule import Costs, ScheduleError, build, search, simulate, verify

COSTS = Costs(forward=30, backward_input=40, backward_weight=20, act=0.5)
V = (0, 1, 2, 2, 1, 0)


def test_a_searched_table_is_proved_timed_and_within_its_limit():
    found = search(COSTS, V, 5, limit=2, effort="quick")
    timeline = simulate(found.schedule, COSTS)
    verify(found.schedule)
    assert found.makespan == timeline.makespan
    assert max(timeline.peak_memory) <= 2
    assert found.bound <= found.makespan <= found.family_makespan
    assert found.family == "v-half"


def test_the_same_seed_gives_the_same_table():
    first, second = (search(COSTS, V, 4, limit=2, effort="quick", seed=7) for _ in range(2))
    assert first == second


def test_a_limit_below_one_microbatch_is_refused_with_what_it_takes():
    with pytest.raises(ScheduleError, match=r"take on rank 0 1 \(limit 0.9\), rank 1 1"):
        search(COSTS, V, 4, limit=0.9)


def test_whoever_watches_can_stop_it():
    told = []
    found = search(COSTS, V, 4, limit=2, progress=lambda done, makespan: told.append((done, makespan)) or True)
    assert len(told) == 1
    assert found.makespan <= simulate(build("v-half", 3, 4), COSTS).makespan
