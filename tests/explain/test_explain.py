"""A step explained: its parts add up, the slow rank is named with what it costs, and advice is what the simulator says."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_steps import close, even, ran, runs, table
from random_tables import valid_tables, whole_numbers

from penstock.explain.explain import time_shares
from penstock.schedule import (
    Costs,
    Kind,
    Measurement,
    ScheduleError,
    Timeline,
    build,
    explain,
    from_rows,
    names,
    simulate,
    with_teacher,
)
from penstock.timing.replay import replay


def slowed(name: str, rank: int, longer: float, ranks: int = 4, microbatches: int = 8) -> Timeline:
    """A step of 20 for F and 40 for B, in which every action of `rank` takes `longer` more."""
    costs = [20 + longer * (stage == rank) for stage in range(ranks)], [40 + longer * (stage == rank) for stage in range(ranks)]
    return simulate(runs(name, ranks, microbatches), Costs(*costs, 0))


# ---- where the time went


@given(valid_tables(), st.lists(whole_numbers(0, 9), min_size=4, max_size=4), whole_numbers(0, 20))
def test_the_shares_add_up_to_the_step(schedule, costs, late):
    timeline = simulate(schedule, Costs(*costs))
    rows = tuple(
        tuple(event._replace(end=event.end - late / 40 * (event.end - event.start)) for event in row) for row in timeline.rows
    )
    for each in (timeline, replace(timeline, rows=rows)):
        parts = time_shares(each, Measurement.from_timelines(each))
        assert all(share >= -1e-12 for share in parts.values())
        assert each.makespan == 0 or sum(parts.values()) == close(1)


@pytest.mark.parametrize("name", names())
def test_without_an_engine_the_shares_are_the_timelines_own(name):
    timeline = simulate(runs(name, 4, 8), Costs(2, 3, 1, send=0.5))
    told = explain(timeline)
    assert told.shares["engine"] == 0
    assert {cause: told.shares[cause] for cause in timeline.causes} == close(timeline.causes)
    busy = sum(told.shares[kind.value] for kind in Kind)
    assert busy == close(sum(timeline.busy) / 4 / timeline.makespan)


def test_time_between_two_actions_with_nothing_to_wait_for_is_the_engines():
    timeline = ran(table("0F0 0F1 0B0 0B1"), [1], engine=1)  # F 4, B 5, and 1 in between
    told = explain(timeline)
    assert told.shares["engine"] == close(3 / 21)
    assert (told.shares["F"], told.shares["B"]) == (close(8 / 21), close(10 / 21))


def test_time_between_two_actions_in_which_the_rank_sends_is_not_the_engines():
    timeline = ran(table("0F0 0F1 0B0 0B1"), [1], engine=1)  # F 4, B 5, and 1 in between
    sent = replace(timeline, rows=tuple(tuple(event._replace(sent=event.end + 0.25) for event in row) for row in timeline.rows))
    told = explain(sent)
    assert (told.shares["engine"], told.shares["sending"]) == (close(3 * 0.75 / 21), close(3 * 0.25 / 21))
    assert sum(told.shares.values()) == close(1)
    assert "sending" in str(told)


def test_the_time_before_a_step_is_told_beside_it():
    timeline = ran(table("0F0 0F1 0B0 0B1"), [1], engine=1)
    assert "between steps" not in str(explain(timeline))
    told = str(explain(replace(timeline, averaging=(0.002, 0.001)))).splitlines()
    assert "averaging gradients: 2.0 ms after the last action, which the table does not hide" in told
    told = str(explain(replace(timeline, between_steps=(7,)))).splitlines()
    assert told[4] == "between steps 7000.0 ms, 25.0% of the loop: the optimizer, the next batch, what else it does"


def test_time_for_a_message_is_not_the_engines():
    told = explain(ran(runs("1f1b", 2, 4), [1, 1], send=2, engine=1))
    assert told.shares["communication"] > 0
    assert told.shares["engine"] > 0


# ---- who holds it up


@pytest.mark.costly
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "naive", "zb-h1"])
@pytest.mark.parametrize("rank", range(4))
def test_the_slow_rank_is_named_with_what_the_step_loses_by_it(name, rank):
    slow, fair = slowed(name, rank, 5), slowed(name, rank, 0)
    straggler = explain(slow).straggler
    assert straggler
    assert straggler.rank == rank
    assert straggler.step_seconds_lost == close(slow.makespan - fair.makespan)
    assert straggler.action_seconds[Kind.F] == (25, 20)


def test_what_an_action_takes_longer_is_the_mean_over_its_rank():
    straggler = explain(slowed("1f1b", 2, 5)).straggler
    assert straggler
    assert straggler.extra_seconds_per_action == close(5)
    assert straggler.action_seconds == {Kind.F: (25, 20), Kind.B: (45, 40)}


def test_a_rank_is_slow_only_if_the_step_that_is_shown_would_be_shorter_for_it_too():
    slow, other = slowed("1f1b", 1, 5), slowed("1f1b", 0, 5)
    three_steps = Measurement.from_timelines(slow, slow, other)
    straggler = explain(slow, three_steps).straggler
    assert straggler
    assert straggler.rank == 1
    assert explain(other, three_steps).straggler is None


def test_a_verdict_by_several_steps_says_so():
    step = slowed("1f1b", 1, 5)
    assert explain(step, Measurement.from_timelines(step, step)).verdict_text.endswith(" (at the medians of 2 steps)")
    assert "medians" not in explain(step).verdict_text


def test_the_slower_of_two_slow_ranks_is_named():
    costs = [20, 27, 20, 25, 20]
    straggler = explain(simulate(build("1f1b", 5, 10), Costs(costs, costs, costs))).straggler
    assert straggler
    assert straggler.rank == 1


@pytest.mark.costly
@pytest.mark.parametrize("name", names())
def test_where_all_ranks_take_the_same_none_is_named(name):
    schedule = runs(name, 4, 8)
    assert explain(ran(schedule, even(schedule.stages), send=0.5, engine=0.25)).straggler is None


def test_a_rank_that_has_more_layers_is_no_straggler_once_that_is_known():
    timeline, layers = ran(runs("1f1b", 4, 8), [6, 6, 9, 3]), [6, 6, 9, 3]
    straggler = explain(timeline).straggler
    assert straggler
    assert straggler.rank == 2
    assert explain(timeline, Measurement.from_timelines(timeline, layers=layers)).straggler is None


def test_one_rank_is_compared_with_nobody():
    told = explain(simulate(build("1f1b", 1, 4)))
    assert (told.straggler, told.fastest, told.shares["F"] + told.shares["B"]) == (None, None, close(1))


def test_a_rank_without_a_stage_is_in_nobodys_way():
    timeline = simulate(table("0F0 0B0\n1F0 1B0", (0, 1)))
    told = explain(replace(timeline, rows=(*timeline.rows, ())))
    assert told.straggler is None
    assert sum(told.shares.values()) == close(1)


# ---- what would make it shorter


def test_even_stages_take_what_the_simulator_says_for_them():
    told = explain(simulate(build("1f1b", 4, 8), Costs([1, 2, 3, 6], 0, 4)))
    assert told.even_stages_seconds == close(simulate(build("1f1b", 4, 8), Costs(3, 0, 4)).makespan)


def test_twice_the_microbatches_take_what_the_simulator_says_for_them():
    told = explain(simulate(build("1f1b", 4, 8), Costs(1, 1, 1, send=0.25)))
    assert told.doubled_microbatches
    assert told.doubled_microbatches.schedule == runs("1f1b", 4, 16)
    assert told.doubled_microbatches.step_seconds == close(simulate(build("1f1b", 4, 16), Costs(1, 1, 1, send=0.25)).makespan)
    assert (told.microbatches_held, told.doubled_microbatches.microbatches_held) == (4, 4)


def test_the_best_schedule_is_the_fastest_of_the_catalog_with_what_it_holds():
    told = explain(ran(runs("gpipe", 4, 8), even(4), send=0.5))
    assert told.fastest
    measured = Measurement.from_timelines(ran(runs("gpipe", 4, 8), even(4), send=0.5))
    times = {name: measured.predict(build(name, 4, 8)).makespan for name in names()}
    assert told.fastest.step_seconds == times[told.fastest.schedule.name] <= 1.01 * min(times.values())
    assert told.fastest.microbatches_held <= told.microbatches_held == 8
    assert told.fastest.assumes_equal_halves  # no W was measured


def test_a_schedule_that_holds_more_is_told_beside_the_best_that_does_not():
    told = explain(simulate(runs("zb-h1", 4, 8), Costs(1, 1, 1, send=0.5)))
    assert told.fastest
    assert told.fastest_in_same_memory
    assert told.fastest.microbatches_held > told.microbatches_held >= told.fastest_in_same_memory.microbatches_held
    assert told.fastest_in_same_memory.step_seconds > told.fastest.step_seconds


def test_what_is_not_notably_faster_is_not_advised():
    told = explain(simulate(runs("zb-v", 4, 40), Costs(1, 1, 1)))
    assert (told.fastest, told.fastest_in_same_memory) == (None, None)
    assert "none of the catalog would be 1% faster" in str(told)


def test_a_table_of_ones_own_is_explained_without_its_family():
    told = explain(simulate(table("0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1")))
    assert told.doubled_microbatches is None
    assert told.fastest
    assert "more microbatches" not in str(told)


def test_the_prediction_is_set_against_the_step():
    timeline = ran(runs("1f1b", 4, 8), even(4), send=0.5)
    told = explain(timeline)
    assert told.predicted_step == close(timeline.makespan) == close(told.step)
    cheaper = Measurement.from_timelines(ran(runs("1f1b", 4, 8), [3] * 4, send=0.25))
    assert explain(timeline, cheaper).predicted_step == close(timeline.makespan / 2)
    assert "50.0% less than measured" in str(explain(timeline, cheaper))


# ---- in words

WORDS = """
1f1b, 4 ranks, 4 stages, 8 microbatches: 730.0 ms from the first action to the last. Of the ranks' time:
  busy    68.5%  F 23.3%, B 45.2%
  idle    31.5%  fill 13.0%, imbalance 4.5%, drain 14.0%
  engine   0.0%  of it: between actions, with nothing to wait for
straggler: rank 2 takes 5.0 ms an action longer than its share of the model (F 25.0 instead of 20.0 ms, B 45.0 instead of \
40.0 ms), which costs the step 70.0 ms (9.6%)
another cut: 687.5 ms, 5.8% less if all stages took the same
more microbatches: 16 of the same size, 645.0 ms, 11.6% less for as many rows; a rank holds up to 4 microbatches, now 4
another schedule: interleaved-zb (2 stages a rank): 548.8 ms, 24.8% less, if I and W each take half of B; a rank holds \
up to 4 microbatches, now 4
prediction: 730.0 ms at these costs, 0.0% more than measured
"""


def test_it_is_told_in_a_few_lines_with_units():
    slow = slowed("1f1b", 2, 5)
    rows = tuple(tuple(event._replace(start=event.start / 1e3, end=event.end / 1e3) for event in row) for row in slow.rows)
    assert str(explain(replace(slow, rows=rows))).splitlines() == WORDS.strip("\n").splitlines()


def test_the_verdict_is_one_line_of_what_was_found_each_with_the_step_as_it_would_be():
    told = explain(slowed("1f1b", 2, 5))
    assert told.straggler
    assert told.fastest
    slow, cut, schedule = told.verdict  # what is wrong first
    assert (slow.kind, slow.rank, slow.timeline) == ("straggler", 2, told.straggler.timeline)
    assert slow.text == "rank 2 is slow: 70 s, 9.6 % of the step"
    assert (schedule.text, schedule.timeline) == ("another schedule, interleaved-zb: -24.8 %", told.fastest.timeline)
    assert (cut.text, cut.timeline) == ("another cut: -5.8 %", told.even_stages_timeline)
    assert told.verdict_text == "; ".join(each.text for each in told.verdict)
    even = explain(simulate(runs("zb-v", 4, 40), Costs(1, 1, 1)))
    assert even.verdict == ()
    assert even.verdict_text == "no rank is slow, and no other schedule or cut would make the step 1% shorter"


def test_slow_messages_a_wrong_order_and_few_microbatches_are_in_the_verdict():
    table = build("1f1b", 4, 8)
    link = explain(simulate(table, Costs(1, 1, 1, send=(0.0, 2.0, 0.0)))).verdict[0]
    assert link.kind == "message"
    assert re.match(r"messages from rank (1 to rank 2|2 to rank 1) take 2000.0 ms each", link.text)
    everywhere = explain(simulate(table, Costs(1, 1, 1, send=1.0))).verdict[0]
    assert everywhere.text.startswith("messages between ranks take 1000.0 ms each, without that: -")

    first, *others = table.actions
    swapped = [action._replace(microbatch=action.microbatch ^ 1) if action.kind is Kind.F else action for action in first]
    wrong = explain(simulate(from_rows("wrong", [swapped, *others]), Costs(1, 1, 1))).verdict[0]
    assert wrong.kind == "order"
    assert wrong.text.startswith("rank 0 runs microbatches out of order, in order: -")

    few = explain(simulate(build("1f1b", 4, 4), Costs(1, 1, 1))).verdict[0]
    assert few.text == "4 microbatches are few for 4 ranks, 8 of the same size: -21.4 % a row"
    assert explain(simulate(build("gpipe", 1, 1), Costs(1, 1, 1))).verdict == ()  # more would gain nothing


def test_a_rank_that_is_slow_since_its_collectives_are_blocked_is_not_named_a_second_time():
    slow = explain(slowed("1f1b", 2, 5))
    by_itself, cut, schedule = slow.verdict
    blocked = by_itself._replace(kind="blocked", gain=0.6 * by_itself.gain)
    assert replace(slow, findings=(blocked,)).verdict == (blocked, schedule)
    elsewhere = blocked._replace(rank=1)
    assert replace(slow, findings=(elsewhere,)).verdict == (by_itself, cut, elsewhere, schedule)


def test_a_replayed_step_keeps_its_order_and_starts_everything_as_early_as_it_can():
    measured = simulate(build("1f1b", 2, 4), Costs(1, 1, 1, send=1.0))
    assert [event[1:4] for event in replay(measured, {}).events] == [event[1:4] for event in measured.events]
    quick = {event.action: 1.0 for event in measured.events if event.rank == 1 and event.action.kind is Kind.F}
    assert replay(measured, {}, quick).makespan < measured.makespan
    assert replay(measured, {measured.rows[0][0].action: 0.5}).makespan == measured.makespan - 0.5


def test_a_step_without_backwards_is_refused():
    forwards = simulate(build("1f1b", 2, 4).filter_actions(lambda action: action.kind is Kind.F))
    with pytest.raises(
        ScheduleError, match=r"no stage ran a backward, as in an evaluation: take the timeline after a training step, pipe.step"
    ):
        explain(forwards)


def test_a_cut_that_is_even_enough_is_told_so():
    timeline = simulate(build("1f1b", 4, 8), Costs())
    assert "another cut: would gain nothing, the stages are as even as the table needs" in str(explain(timeline))


def test_a_pipeline_s_own_step_has_the_call_that_cuts_anew():
    timeline = replace(slowed("1f1b", 2, 5), recut_call='pipe.rebuild(cuts="measured")')
    assert 'if all stages took the same; pipe.rebuild(cuts="measured") cuts anew\n' in str(explain(timeline))


def test_microbatches_of_unlike_sizes_are_predicted_as_they_are_and_a_better_order_is_named() -> None:
    """As measured: 1F1B on four ranks, the longest microbatches first and sixth."""
    table = build("1f1b", ranks=4, microbatches=8)
    timeline = replace(simulate(table, Costs(microbatch_factors=[5, 1, 1, 2, 1, 8, 1, 3])), name="1f1b, measured")
    explanation = explain(timeline)
    assert explanation.predicted_step == pytest.approx(timeline.makespan)
    first = explanation.verdict[0]
    assert first.text.startswith('microbatches take unlike times, in the planned order (order="planned"): -31')
    assert not explain(simulate(table)).repairs


def test_a_microbatch_that_is_slow_on_one_rank_is_not_of_another_size() -> None:
    timeline = simulate(build("1f1b", ranks=4, microbatches=8))
    slow = tuple(
        event._replace(end=event.end + 0.9) if event.rank == 2 and event.action.microbatch == 3 else event
        for event in timeline.rows[2]
    )
    rows = (*timeline.rows[:2], slow, timeline.rows[3])
    assert Measurement.from_timelines(replace(timeline, rows=rows)).microbatch_factors == ()


def test_microbatches_that_took_unlike_times_in_one_of_several_steps_are_of_one_size() -> None:
    table = build("1f1b", ranks=4, microbatches=8)
    even, uneven = (
        replace(simulate(table, Costs(microbatch_factors=factors)), name="1f1b, measured", microbatch_factors=())
        for factors in ([], [5, 1, 1, 2, 1, 8, 1, 3])
    )
    assert Measurement.from_timelines(even, even, uneven).microbatch_factors == ()
    assert Measurement.from_timelines(uneven, uneven).microbatch_factors


def test_microseconds_are_never_a_time_of_zero() -> None:
    scaled = slowed("1f1b", 2, 5)
    rows = tuple(
        tuple(event._replace(start=event.start * 1e-6, end=event.end * 1e-6, sent=None) for event in row) for row in scaled.rows
    )
    text = str(explain(replace(scaled, rows=rows)))
    assert "straggler: rank 2 takes 5 µs an action longer" in text
    assert "0.0 ms an action" not in text


def test_microbatches_that_the_engine_knows_to_be_of_one_size_are_never_unlike() -> None:
    timeline = simulate(build("1f1b", 4, 8), Costs(microbatch_factors=[5, 1, 1, 2, 1, 8, 1, 3]))
    slow = replace(timeline, name="1f1b, measured", microbatch_factors=(), microbatch_sizes=(64,) * 7 + (56,))
    assert Measurement.from_timelines(slow, slow).microbatch_factors == ()
    assert "unlike" not in explain(slow).verdict_text
    lengths = replace(slow, microbatch_sizes=(5, 1, 1, 2, 1, 8, 1, 3))
    assert Measurement.from_timelines(lengths).microbatch_factors


# ---- a teacher


def test_a_step_with_a_teacher_is_explained_without_it_and_with_what_it_adds():
    own, costs = build("1f1b", ranks=3, microbatches=6), Costs(0.01, 0.01, 0.01)
    alone, told = explain(simulate(own, costs)), explain(simulate(with_teacher(own), costs))
    assert told.schedule.actions == alone.schedule.actions
    assert told.step == close(alone.step)
    assert told.shares == close(alone.shares)
    assert told.teacher == close((0.06, 0.02))
    text = "teacher: 60.0 ms on a rank, 67% of it in idle time, the step 20.0 ms longer"
    assert str(told).splitlines()[0] == f"{text}. Without it:"
    assert told.verdict_text.endswith(f" ({text})")
