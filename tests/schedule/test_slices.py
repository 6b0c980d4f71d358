"""Tables whose microbatches are cut into slices along their sequence."""

import re
from dataclasses import replace
from itertools import accumulate, pairwise, product
from math import inf

import pytest
from slow_cases import slow_except

from penstock.errors import MismatchError
from penstock.plan import plan_slices
from penstock.schedule import Costs, Schedule, ScheduleError, build, from_rows, names, search, simulate, verify
from penstock.schedule.catalog import family_options
from penstock.schedule.program import Program, Script, lower
from penstock.schedule.proof import prove
from penstock.schedule.table import Action, dependencies
from penstock.view.terminal import draw

SLICED = [name for name in names() if "slices" in family_options(name)]


def test_the_families_with_slices():
    assert SLICED == ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1"]
    told = "zb-v has no option slices: it has none; gpipe, 1f1b, interleaved-1f1b, zb-h1 have it"
    with pytest.raises(ScheduleError, match=told):
        build("zb-v", 2, 2, slices=2)


def test_1f1b_is_drawn_as_seq1f1b():
    drawn = """
        rank 0 |   0F0 0F0.1   0F1 0B0.1 0F1.1   0B0 0B1.1   0B1
        rank 1 |   1F0 1F0.1 1B0.1   1F1   1B0 1F1.1 1B1.1   1B1
    """
    assert str(build("1f1b", 2, 2, slices=2)).splitlines() == [line.strip() for line in drawn.strip().splitlines()]


@pytest.mark.parametrize("name", SLICED)
def test_one_slice_is_the_table_without(name):
    for ranks, microbatches in product((1, 2, 4), (1, 3, 8)):
        assert build(name, ranks, microbatches, slices=1) == build(name, ranks, microbatches)


@pytest.mark.parametrize("name", SLICED)
def test_any_number_of_slices_is_proved_and_holds_no_more_microbatches(name):
    for ranks, microbatches, slices in product((1, 2, 3, 5), (1, 2, 5, 8), (2, 3, 4, 7)):
        table = build(name, ranks, microbatches, slices=slices)
        proof, whole = verify(table), verify(build(name, ranks, microbatches))
        assert table.slices == slices
        assert re.search(rf"\b{microbatches} microbatch(es)? in {slices} slices", str(proof))
        assert proof.actions == slices * whole.actions
        assert max(proof.peak_in_flight) <= max(whole.peak_in_flight)
        for row in table.actions:
            for stage, m in {action[1:3] for action in row}:
                parts = [(each.kind.value, each.slice) for each in row if each[1:3] == (stage, m)]
                assert [k for kind, k in parts if kind == "F"] == [*range(slices)]
                assert [k for kind, k in parts if kind in "BI"] == [*reversed(range(slices))]


def test_a_slice_waits_for_the_one_before_forward_and_for_the_one_after_backward():
    wanted = {
        "1F4.1": "0F4.1 1F4",
        "0F4": "",
        "1B4.1": "1F4.1 2B4.1|2I4.1 1B4.2|1I4.2",
        "2I4.2": "2F4.2",
        "1W4.1": "1I4.1",
    }
    for action, waits in wanted.items():
        found = ["|".join(map(str, options)) for options in dependencies(Action.parse(action), 3, slices=3)]
        assert found == waits.split()


def test_a_wrong_order_of_slices_is_refused_with_its_actions():
    for row, told in (
        ("0F0.1 0F0 0B0.1 0B0", "rank 0 has 0F0.1 before 0F0, which it needs"),
        ("0F0 0F0.1 0B0 0B0.1", "rank 0 has 0B0 before 0B0.1, which it needs"),
        ("0F0 0F0.1 0I0.1 0I0 0W0", "rank 0 lacks 0W0.1"),
        ("0F0 0F0.1 0F1 0B0.1 0B0 0B1", "rank 0 lacks 0F1.1, rank 0 lacks 0B1.1"),
    ):
        table = from_rows("x", [row.split()])
        with pytest.raises(ScheduleError, match=told):
            verify(table)
        if "before" in told:
            with pytest.raises(ScheduleError, match="rank 0 waits for ever before " + told.split()[3]):
                simulate(table)


def test_the_bubble_and_the_memory_of_slices():
    whole, sliced = (simulate(build("1f1b", 4, 8, slices=slices)) for slices in (1, 4))
    assert (round(whole.bubble, 3), whole.peak_in_flight) == (0.273, (4, 3, 2, 1))
    assert (round(sliced.bubble, 3), sliced.peak_in_flight, sliced.peak_memory) == (0.086, *[(1.75, 1.5, 1.25, 1)] * 2)
    assert sum(sliced.busy) == sum(whole.busy)
    with pytest.raises(ScheduleError, match=r"rank 0 holds 1.75 activations in flight, max_in_flight allows 1.5"):
        verify(build("1f1b", 4, 8, slices=4), max_in_flight=1.5)


def test_messages_of_slices_are_shares_of_a_message_and_arrive_as_simulated():
    table = build("1f1b", 3, 4, slices=2)
    timeline = simulate(table, Costs(2, 2, 2, send=0.25, size=4, bandwidth=8, microbatch_factors=[1, 2, 1, 3]))
    for event in timeline.events:
        for needed in timeline.needed_events(event):
            arrival = timeline.arrivals.get((needed.action, event.action.stage))
            assert event.start >= (needed.end if arrival is None else arrival.time)
    first = timeline.arrivals[Action.parse("0F0"), 1]
    assert first.time == 1 + 4 / 8 / 2 + 0.25


def test_a_table_of_slices_is_read_from_its_csv_and_drawn(tmp_path):
    table = build("zb-h1", 3, 2, slices=3)
    table.to_csv(tmp_path / "table.csv")
    assert Schedule.from_csv(tmp_path / "table.csv", name="zb-h1") == table
    picture = draw(simulate(table), 200, False)
    assert "F1.2" in picture
    assert "W0.1" in picture


SEARCHES = [  # costs, placement, microbatches, slices, limit
    (Costs(3, 4, 2), (0, 1, 2), 3, 3, None),
    (Costs(3, 4, 2, send=0.2, size=1, bandwidth=4), (0, 1, 2), 4, 2, 2),
    (Costs(3, 4, 2, act=0.5), (0, 1, 1, 0), 3, 4, 2.5),
    (Costs(3, 4, 2, slice_factors=[0.7, 1.3]), (0, 1), 4, 2, None),
    (Costs(3, 4, 2, microbatch_factors=[2, 1, 1]), (0, 1), 3, 2, None),
    (Costs(3, 4, 2, backward=5, overlap=0.3), (0, 1), 3, 2, None),
]


@pytest.mark.parametrize("number", slow_except({0, 2}, range(len(SEARCHES))))
def test_a_search_over_slices_is_proved_within_its_limit_and_no_longer_than_a_family(number):
    costs, placement, microbatches, slices, limit = SEARCHES[number]
    found = search(costs, placement, microbatches, limit, "quick", slices=slices)
    timeline = simulate(found.schedule, costs)
    verify(found.schedule)
    assert found.schedule.slices == slices
    assert found.bound <= timeline.makespan == found.makespan
    assert max(timeline.peak_memory) <= (limit or inf) * (1 + 1e-9)
    if found.family is not None:
        assert found.makespan <= found.family_makespan


def test_a_search_over_slices_beats_zb_h1_in_slices():
    found = search(Costs(3, 4, 2), (0, 1, 2, 3), 4, effort="quick", slices=4)
    assert (found.family, found.family_makespan, found.proven) == ("zb-h1", 39.75, True)
    assert found.makespan == 38.25


def test_a_search_refuses_slices_that_it_cannot_have():
    table = build("1f1b", 2, 2, slices=2)
    with pytest.raises(ScheduleError, match="no start: it has slices=2, not 1"):
        search(Costs(), table.placement, 2, start=table)
    with pytest.raises(ScheduleError, match="slices=0: use a whole number of 1 or more"):
        search(Costs(), (0, 1), 2, slices=0)
    assert search(Costs(), (0, 1), 2, start=table, effort="quick", slices=2).makespan <= simulate(table).makespan


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_planned_lengths_win_back_what_equal_slices_lose_to_attention(name):
    """Attention is 30 % of a forward: of 2,048 tokens, 0.7 x the share of tokens + 0.3 x the share of pairs."""
    table, num_tokens = build(name, 4, 8, slices=4), 2048

    def timeline(lengths):
        borders = [0, *accumulate(lengths)]
        work = [0.7 * place / num_tokens + 0.3 * (place / num_tokens) ** 2 for place in borders]
        return simulate(table, Costs(slice_factors=[4 * (end - start) for start, end in pairwise(work)]))

    equal = timeline([512] * 4)
    lengths = plan_slices(equal, [512] * 4)
    assert lengths == [645, 529, 461, 413] == plan_slices(timeline([700, 600, 400, 348]), [700, 600, 400, 348])
    shortest, planned = simulate(table).makespan, timeline(lengths).makespan
    assert equal.makespan - planned > 0.95 * (equal.makespan - shortest) > 0
    assert sum(timeline(lengths).busy) == pytest.approx(sum(equal.busy))


def test_planned_lengths_have_a_token_each_and_are_equal_where_slices_take_equally_long():
    timeline = simulate(build("1f1b", 2, 2, slices=3))
    assert plan_slices(timeline, [7, 7, 7]) == [7, 7, 7]
    rising = simulate(build("1f1b", 2, 2, slices=3), Costs(slice_factors=[0.1, 1, 1.9]))
    assert plan_slices(rising, [1, 1, 1]) == [1, 1, 1]
    with pytest.raises(MismatchError, match=r"the timeline has 3 slices of a microbatch, the lengths are \[7, 7\]"):
        plan_slices(timeline, [7, 7])
    with pytest.raises(ScheduleError, match="slice_factors has 2 costs for 3 slices"):
        simulate(build("1f1b", 2, 2, slices=3), Costs(slice_factors=[1, 2]))
    assert simulate(build("1f1b", 2, 2), Costs(slice_factors=[2])).makespan == 2 * simulate(build("1f1b", 2, 2)).makespan


@pytest.mark.parametrize("name", SLICED)
def test_the_quick_proof_and_the_machine_judge_every_exchange_of_two_actions_alike(name):
    schedule, verdicts = build(name, 2, 2, slices=2), set()
    for rank, row in enumerate(schedule.actions):
        for first in range(len(row) - 1):
            swapped = (*row[:first], row[first + 1], row[first], *row[first + 2 :])
            table = replace(schedule, actions=(*schedule.actions[:rank], swapped, *schedule.actions[rank + 1 :]))
            program = lower(table)
            script = Script(table, tuple(tuple(program.instructions(number)) for number in range(table.ranks)))
            quick, machine = raises(program), raises(script)
            assert quick == machine
            verdicts.add(quick is None)
    assert verdicts == {True, False}


def raises(program: Program | Script) -> str | None:
    try:
        prove(program)
    except ScheduleError as error:
        return str(error)
    return None
