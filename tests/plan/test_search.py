"""A searched table is proved, timed, within its limit, the same each time, and never longer than a published one."""

import itertools
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_tables import some_skips, whole_numbers

from penstock.plan.search import table_search
from penstock.plan.search.annealing import anneal, shift_actions
from penstock.plan.search.incremental_simulation import IncrementalSimulation
from penstock.plan.search.initial_tables import grouped_rows, published_schedules
from penstock.plan.search.periodic import find_modulo_schedules, unroll_modulo_schedule
from penstock.plan.search.problem import INFINITE, SearchProblem
from penstock.schedule import Costs, Found, ScheduleError, build, search, simulate, verify, with_teacher
from penstock.schedule.table import Chains
from penstock.schedule.transform import with_frozen_stages, with_overlapped_pairs
from penstock.timing.teacher_stages import costs_with_teacher

COSTS = Costs(forward=30, backward_input=40, backward_weight=20, act=0.5)
V = (0, 1, 2, 2, 1, 0)


def soon(done: float, makespan: float) -> bool:
    """Stops a search after a twentieth of its work, with a table."""
    return done > 0.05 and makespan < INFINITE


@st.composite
def pipelines(draw: st.DrawFn, stages: int = 6, microbatches: int = 4) -> tuple[Costs, tuple[int, ...], int]:
    """Costs of every stage and border, a placement and M."""
    dice = random.Random(draw(whole_numbers(0, 2**32 - 1)))
    ranks = draw(whole_numbers(1, 3))
    count = draw(whole_numbers(ranks, max(ranks, stages)))
    placement = [*range(ranks), *(dice.randrange(ranks) for _ in range(count - ranks))]
    dice.shuffle(placement)
    time, border = ([dice.choice([0, 1, 2, 3, 5.5]) for _ in range(count)] for _ in range(2))
    every = {
        "forward": [duration + 1 for duration in time],
        "backward_input": [duration + dice.random() for duration in time],
        "backward_weight": time,
        "backward": draw(st.sampled_from([None, [1.5 * duration + 1 for duration in time]])),
        "send": border[:-1],
        "size": draw(st.sampled_from([0, 3])),
        "bandwidth": 2,
        "act": [duration + 0.5 for duration in time],
        "keep": draw(st.sampled_from([None, [0.4 * duration for duration in time], [duration + 1 for duration in time]])),
        "skips": dict.fromkeys(draw(some_skips(count)), 1.0),
    }
    return Costs(**every), tuple(placement), draw(whole_numbers(1, microbatches))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(pipelines(), st.sampled_from([1.0, 1.3, 2.0, INFINITE]))
def test_what_is_found_is_proved_timed_within_its_limit_and_no_longer_than_a_published_table(pipeline, more):
    costs, placement, microbatches = pipeline
    least = [0.0] * (max(placement) + 1)
    for stage, rank in enumerate(placement):
        least[rank] += costs.act[stage]
    limits = [more * limit for limit in least]
    found = search(costs, placement, microbatches, limits, "quick", progress=soon)
    timeline = simulate(found.schedule, costs)
    verify(found.schedule, skips=list(costs.skips))
    assert (found.schedule.placement, found.schedule.microbatches) == (placement, microbatches)
    assert found.makespan == timeline.makespan
    assert found.bound <= found.makespan
    assert all(peak <= limit * (1 + 1e-9) for peak, limit in zip(timeline.peak_memory, limits, strict=True))
    for table in published_schedules(placement, microbatches):
        published = simulate(table, costs)
        if all(peak <= limit for peak, limit in zip(published.peak_memory, limits, strict=True)):
            assert found.bound <= published.makespan * (1 + 1e-9)
            assert found.makespan <= found.family_makespan <= published.makespan


@pytest.mark.costly
@settings(max_examples=25, deadline=None)
@given(pipelines(), whole_numbers(0, 1000))
def test_rows_that_are_changed_step_by_step_run_as_the_simulator_says(pipeline, seed):
    costs, placement, microbatches = pipeline
    machine = SearchProblem(costs, placement, microbatches, [INFINITE] * (max(placement) + 1))
    position = IncrementalSimulation(machine, grouped_rows(machine, 2), [0.0] * machine.ranks)
    anneal(position, random.Random(seed), 3000, 3.0, 1.0, lambda steps, at: None)
    table = machine.schedule_from_rows(position.rows_with_weights())
    assert simulate(table, Costs(**{**vars(costs), "backward": None})).makespan <= position.makespan * (1 + 1e-12)
    full = IncrementalSimulation(machine, position.rows_with_weights())
    assert full.makespan == simulate(table, Costs(**{**vars(costs), "backward": None})).makespan


@pytest.mark.costly
def test_where_published_tables_fit_the_best_is_told():
    found = search(COSTS, V, 5, limit=2, effort="quick", progress=lambda done, makespan: done > 0.2)
    assert (found.family, found.family_makespan) == ("v-half", simulate(build("v-half", 3, 5), COSTS).makespan)
    assert found.makespan < found.family_makespan


def test_a_search_ends_where_it_is_proven_that_there_is_nothing_shorter():
    results: list[float] = []
    found = search(COSTS, V, 5, effort="long", progress=lambda done, makespan: results.append(done))
    assert found.proven
    assert found.makespan == found.bound
    assert max(results) < 0.1


@pytest.mark.costly
def test_a_table_that_meets_the_bound_of_its_memory_is_proven():
    results: list[float] = []
    found = search(Costs(), (0, 1), 2, limit=1, effort="quick", progress=lambda done, makespan: results.append(done))
    assert found.proven
    assert max(results, default=0) < 0.1


@pytest.mark.costly
def test_the_same_seed_gives_the_same_table_in_any_process():
    first, second = (search(COSTS, V, 4, limit=1.5, effort="quick", seed=7, progress=soon) for _ in range(2))
    assert first == second
    program = """
from penstock.schedule import Costs, search
costs = Costs(forward=30, backward_input=40, backward_weight=20, act=0.5)
found = search(costs, (0, 1, 2, 2, 1, 0), 4, 1.5, "quick", 7, progress=lambda done, best: 0.05 < done and best < 1e9)
print(found.schedule.digest())
"""
    other = os.environ | {"PYTHONHASHSEED": "1"}
    result = subprocess.run([sys.executable, "-c", program], env=other, capture_output=True, check=True, text=True)
    assert result.stdout.strip() == first.schedule.digest()


def test_what_can_run_in_one_order_only_is_not_moved():
    machine = SearchProblem(COSTS, (0, 1, 1, 0), 2, [INFINITE] * 2)
    first, second = machine.rows_from_table(build("zb-v", 2, 2))
    for row in (first, second):
        for index, places in itertools.product(range(len(row)), (-6, -1, 1, 6)):
            new = shift_actions(machine, row, index, places, 2).row
            assert sorted(new) == sorted(row)
            for microbatch in (0, 1):  # F of the earlier stage, F of the later one, its I, the other I
                chain = [action for action in row if action % 2 == microbatch and action < machine.first_weight]
                assert [action for action in new if action in chain] == chain
                assert all(new.index(action) < new.index(action + machine.first_back) for action in chain[2:])


@pytest.mark.slow
def test_tables_for_many_microbatches_grow_from_those_for_few():
    found = search(COSTS, V, 24, limit=1.5, effort="quick", progress=lambda done, makespan: done > 0.8)
    verify(found.schedule)
    assert max(simulate(found.schedule, COSTS).peak_memory) <= 1.5


@pytest.mark.costly
def test_a_table_found_before_is_a_start():
    before = search(COSTS, V, 4, limit=1.5, effort="quick", progress=soon)
    after = search(COSTS, V, 4, limit=1.5, effort="quick", start=before.schedule, progress=lambda *message: True)
    assert after.makespan <= before.makespan


def wider(stages: int, **more) -> Costs:
    """Ranks of two speeds, whatever the placement: every second stage is slower."""
    slower = [1.5 if stage % 2 else 1.0 for stage in range(stages)]
    times = ([base * factor for factor in slower] for base in (30, 40, 20))
    return Costs(*times, **({"act": 0.5} | more))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("costs", "placement"),
    [
        (wider(8, send=5), (0, 1, 2, 3, 3, 2, 1, 0)),
        (wider(8, send=2, size=[8] * 3 + [16] * 4, bandwidth=[2] * 6 + [1]), (0, 1, 2, 3, 3, 2, 1, 0)),
        (wider(8, size=8, bandwidth=2, skips={(0, 7): 4.0}), (0, 1, 2, 3, 0, 1, 2, 3)),
        (wider(9), (0, 1, 2, 0, 1, 2, 0, 1, 2)),
        (wider(12, keep=0.2), (0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0)),
        (wider(8, overlap=0.8), (0, 1, 2, 3, 3, 2, 1, 0)),
        (wider(4), (0, 1, 2, 3)),
    ],
    ids=["latency", "bandwidth", "skip", "three each", "four each", "pairs", "one each"],
)
def test_any_pipeline_is_searched_within_its_memory_and_none_comes_out_longer_than_published(costs, placement):
    limit = 0.75 * len(placement) / 2
    found = search(costs, placement, 6, limit, "quick", progress=soon)
    timeline = simulate(found.schedule, costs)
    verify(found.schedule, skips=list(costs.skips))
    assert found.bound <= found.makespan == timeline.makespan
    assert max(timeline.peak_memory) <= limit * (1 + 1e-9)
    times = [simulate(table, costs) for table in published_schedules(placement, 6)]
    fit = [duration.makespan for duration in times if max(duration.peak_memory) <= limit]
    assert found.makespan <= min(fit, default=INFINITE)


@pytest.mark.costly
def test_what_repeats_for_every_microbatch_is_far_shorter_than_v_min_in_its_memory():
    costs, ranks, microbatches = Costs(30, 40, 20, act=0.5), 4, 32
    published = simulate(build("v-min", ranks, microbatches), costs)
    machine = SearchProblem(costs, (0, 1, 2, 3, 3, 2, 1, 0), microbatches, [max(published.peak_memory)] * ranks)
    wheels = list(find_modulo_schedules(machine, random.Random(0), 2000))
    times = [IncrementalSimulation(machine, unroll_modulo_schedule(machine, turns), [0.0] * ranks).makespan for turns in wheels]
    assert min(times) < 0.92 * published.makespan


def test_the_critical_chain_takes_as_long_as_the_step():
    machine = SearchProblem(Costs(30, 40, 20), V, 5, [INFINITE] * 3)
    position = IncrementalSimulation(machine, grouped_rows(machine, 2))  # without W, and none is put in
    chain = [position.rows[rank][place] for rank, place in position.critical_actions()]
    assert sum(machine.cost[action] for action in chain) == position.makespan


@pytest.mark.parametrize("more", [{}, {"backward": 52}, {"keep": 0.2, "size": 3, "bandwidth": 1, "send": 1}])
def test_or_tools_proves_that_nothing_is_shorter(more, monkeypatch):
    pytest.importorskip("ortools")
    monkeypatch.setitem(table_search.EFFORTS, "optimal", 100_000)
    costs = Costs(30, 40, 20, **({"act": 0.5} | more))
    found = search(costs, (0, 1, 1, 0), 3, limit=1.5, effort="optimal")
    searched = search(costs, (0, 1, 1, 0), 3, limit=1.5, effort="quick", progress=soon)
    assert found.proven
    assert found.makespan <= searched.makespan
    assert simulate(found.schedule, costs).makespan == found.makespan


def test_without_or_tools_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ScheduleError, match=r"pip install 'penstock-pipeline\[optimal\]'"):
        search(COSTS, V, 4, effort="optimal")


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "progress"), [(4, None), (4, soon), (8, None)])
def test_forwards_and_backwards_that_overlap_become_pairs(limit, progress):
    costs, placement = Costs(3, 4, 3, overlap=0.2), (0, 1, 1, 0)
    found = search(costs, placement, 4, limit, "quick", progress=progress)
    verify(found.schedule)
    plain = replace(found.schedule, overlaps=frozenset())
    assert found.makespan == simulate(found.schedule, costs).makespan < simulate(plain, costs).makespan
    assert with_overlapped_pairs(plain, lambda table: simulate(table, costs).makespan, 100).overlaps


def test_or_tools_is_not_asked_about_pairs():
    with pytest.raises(ScheduleError, match=r"knows no pairs that overlap: use 'long', or overlap=0 and not 0\.5"):
        search(Costs(overlap=0.5), V, 4, effort="optimal")


def test_ctrl_c_before_there_is_any_table_gives_one_microbatch_after_the_other(monkeypatch):
    def pressed(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(table_search, "_search_backward_form", pressed)
    found = search(COSTS, (0, 1, 0, 1, 1), 3, limit=1.5, effort="long")
    assert (found.makespan, found.family) == (3 * 5 * 90, None)


def test_whoever_watches_can_end_a_search_before_any_published_table_fits():
    results = []
    found = search(Costs(3, 4, 2), (0, 0, 1, 1), 4, limit=2, effort="long", progress=lambda *far: results.append(far) or True)
    assert found.family is None
    assert results == [(0.0, INFINITE)]
    assert found.makespan == 4 * 4 * (3 + 4 + 2)  # one microbatch after the other


def test_ctrl_c_gives_the_best_so_far():
    def pressed(done: float, makespan: float) -> None:
        raise KeyboardInterrupt

    assert isinstance(search(COSTS, V, 4, limit=2, progress=pressed), Found)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"limit": 0.9}, r"take on rank 0 1 \(limit 0.9\), rank 1 1"),
        ({"limit": [2, 2]}, "limit has 2 numbers for 3 ranks"),
        ({"limit": float("nan")}, "no table keeps the limit"),
        ({"placement": (0, 2)}, "is none: give the rank of every stage"),
        ({"placement": ()}, "is none: give the rank of every stage"),
        ({"limit": "2"}, "limit='2': give one number, or one for each rank"),
        ({"placement": 3}, "is none: give the rank of every stage"),
        ({"microbatches": 0}, "microbatches=0: use a whole number"),
        ({"seed": None}, "seed=None: use a whole number"),
        ({"costs": None}, "costs=None are none"),
        ({"costs": Costs(overlap=2)}, "overlap is 2: give the share"),
        ({"effort": "huge"}, "effort='huge': use quick, normal, long"),
        ({"costs": Costs(forward=[1, 2])}, "forward has 2 costs for 6 stages"),
        ({"costs": Costs(forward=-1)}, "a cost is a time, 0 or more"),
        ({"start": build("1f1b", 2, 2)}, "1f1b is no start: it has 2 microbatches"),
        ({"start": with_frozen_stages(build("1f1b", 2, 2), [0])}, "is no start: it has frozen stages"),
        (
            {"start": with_teacher(build("1f1b", 2, 2))},
            "1f1b with a teacher ahead is no start: it has teacher=2, ahead=True, not teacher=None, ahead=False",
        ),
        ({"teacher": 0}, "teacher=0: give the first stage of the teacher in the placement, 1 to 5"),
        ({"teacher": 3}, "the teacher's last stage 5 is on rank 0, but the loss, which takes its outputs, on rank 2"),
        ({"teacher": 1, "slices": 2}, "slices=2 with a teacher, whose tokens are not cut: use slices=1"),
        ({"teacher": 1, "effort": "optimal"}, "effort='optimal' knows no teacher: use 'long'"),
        ({"teacher": 1, "costs": Costs(teacher_output=3), "limit": 11}, r"outputs and .* take on rank 0 12 \(limit 11\)"),
    ],
)
def test_what_is_wrong_is_said_in_numbers(wrong, message):
    with pytest.raises(ScheduleError, match=message):
        search(**({"costs": COSTS, "placement": V, "microbatches": 4, "effort": "quick"} | wrong))


@st.composite
def pipelines_with_teacher(draw: st.DrawFn) -> tuple[Costs, tuple[int, ...], int, int]:
    """Costs of the stages of a model and its teacher, their placement, M and the teacher's first stage."""
    costs, placement, microbatches = draw(pipelines(stages=4))
    dice = random.Random(draw(whole_numbers(0, 2**32 - 1)))
    more = [*(dice.randrange(max(placement) + 1) for _ in range(dice.randrange(4))), placement[-1]]

    def extended(values, choices):
        return values and [*values, *(dice.choice(choices) for _ in more)]

    per_stage = {
        name: getattr(costs, name) for name in ("forward", "backward_input", "backward_weight", "backward", "act", "keep")
    }
    longer = {name: extended(values, [0.5, 1, 3]) for name, values in per_stage.items()}
    send = [*costs.send, *(dice.choice([0, 1]) for _ in more)]
    costs = replace(costs, **longer, send=send, teacher_output=dice.choice([0, 2.5]))
    return costs, (*placement, *more), microbatches, len(placement)


@pytest.mark.costly
@settings(max_examples=25, deadline=None)
@given(pipelines_with_teacher(), st.booleans(), whole_numbers(0, 1000))
def test_rows_with_a_teacher_run_as_the_simulator_says(pipeline, ahead, seed):
    costs, placement, microbatches, teacher = pipeline
    chains = Chains(len(placement), frozenset(range(teacher, len(placement))), teacher, ahead)
    machine = SearchProblem(costs, placement, microbatches, [INFINITE] * (max(placement) + 1), chains=chains)
    position = IncrementalSimulation(machine, grouped_rows(machine, 2), [0.0] * machine.ranks)
    assert position.makespan < INFINITE
    anneal(position, random.Random(seed), 3000, 3.0, 1.0, lambda steps, at: None)
    table = machine.schedule_from_rows(position.rows_with_weights())
    verify(table, skips=list(costs.skips))
    simulated = simulate(table, replace(costs, backward=None))
    full = IncrementalSimulation(machine, position.rows_with_weights())
    assert full.makespan == simulated.makespan
    peaks = [max([memory for _, memory, *_ in trace[1:]], default=0.0) for trace in full.trace]
    assert peaks == pytest.approx(simulated.peak_memory)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(pipelines_with_teacher(), st.booleans(), st.sampled_from([1.0, 1.5, INFINITE]))
def test_a_table_with_a_teacher_is_proved_within_its_limit_and_no_longer_than_the_rules(pipeline, ahead, more):
    costs, placement, microbatches, teacher = pipeline
    least = [0.0] * (max(placement) + 1)
    for stage, rank in enumerate(placement):
        least[rank] += costs.act[stage] * (stage < teacher)
    least[placement[-1]] += costs.teacher_output * (microbatches if ahead else 1)
    found = search(
        costs, placement, microbatches, [more * size for size in least], "quick", progress=soon, teacher=teacher, ahead=ahead
    )
    table, timeline = found.schedule, simulate(found.schedule, costs)
    verify(table, skips=list(costs.skips))
    assert (table.placement, table.microbatches, table.teacher, table.ahead) == (placement, microbatches, teacher, ahead)
    assert found.bound <= found.makespan == timeline.makespan
    assert all(peak <= more * size * (1 + 1e-9) for peak, size in zip(timeline.peak_memory, least, strict=True))
    for own in published_schedules(placement[:teacher], microbatches):
        rule = simulate(with_teacher(own, placement[teacher:], ahead, costs), costs)
        if all(peak <= more * size for peak, size in zip(rule.peak_memory, least, strict=True)):
            assert found.bound * (1 - 1e-9) <= found.makespan <= found.family_makespan <= rule.makespan


@pytest.mark.costly
@pytest.mark.parametrize(("ahead", "limit"), [(True, None), pytest.param(False, 9, marks=pytest.mark.slow)])
def test_a_teacher_gets_the_shortest_order_that_any_table_has(ahead, limit):
    placement, costs = (0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3), costs_with_teacher(Costs(teacher_output=2), 4, 8)
    found = search(costs, placement, 8, limit, "quick", teacher=4, ahead=ahead)
    assert found.proven
    assert (found.makespan, found.family_makespan) == (33, 33)
    assert found.family.endswith("with a teacher" + " ahead" * ahead)


@pytest.mark.costly
def test_numbers_of_numpy_are_numbers():
    np = pytest.importorskip("numpy")
    found = search(COSTS, np.array(V), np.int64(4), limit=np.float32(2), effort="quick", seed=np.int64(1), progress=soon)
    assert found.schedule == search(COSTS, V, 4, limit=2, effort="quick", seed=1, progress=soon).schedule
    assert build("zb-v", np.int64(2), np.int32(4), stages_per_rank=np.int64(2)) == build("zb-v", 2, 4)
    assert build("interleaved-zb", 2, 4, group_size=np.int64(1)) == build("interleaved-zb", 2, 4, group_size=1)
