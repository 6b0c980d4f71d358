"""Costs read off a step: those of a simulated one are found again, and tell what any other step takes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_steps import close, even, ran, runs, table
from random_tables import whole_numbers

from penstock.schedule import Costs, Kind, Measurement, ScheduleError, Timeline, build, explain, names, simulate
from penstock.schedule.transform import with_frozen_stages
from penstock.timing.measurement import executed_table, find_gaps

SPLIT = ("zb-h1", "zb-v", "interleaved-zb")  # schedules with I and W on their own


# ---- costs are found again


@given(st.sampled_from(names()), whole_numbers(2, 4), whole_numbers(1, 8), st.data())
def test_the_costs_of_a_simulated_step_are_found_again_exactly(name, ranks, microbatches, data):
    schedule = runs(name, ranks, microbatches)
    forward, inputs, weights = (
        data.draw(st.lists(whole_numbers(1, 9), min_size=schedule.stages, max_size=schedule.stages)) for _ in range(3)
    )
    send = data.draw(whole_numbers(0, 5))
    timeline = simulate(schedule, Costs(forward, inputs, weights, send))
    measured = Measurement.from_timelines(replace(timeline, message_costs=()))
    assert measured.seconds[Kind.F] == tuple(forward)
    assert measured.seconds[Kind.B] == tuple(i + w for i, w in zip(inputs, weights, strict=True))
    for stage in {action.stage for row in schedule.actions for action in row if action.kind is Kind.I}:
        assert (measured.seconds[Kind.I][stage], measured.seconds[Kind.W][stage]) == (inputs[stage], weights[stage])
    assert set(measured.message_seconds) <= {send}
    assert measured.engine_seconds == dict.fromkeys(Kind, (0.0,) * schedule.stages)
    assert measured.predict(schedule).rows == timeline.rows


def test_every_border_has_its_own_message():
    timeline = simulate(build("1f1b", 4, 6), Costs(10, 10, 10, send=[1, 2, 3]))
    assert Measurement.from_timelines(timeline).message_seconds == (1, 2, 3)


@pytest.mark.parametrize("name", names())
def test_the_engines_time_between_two_actions_is_told_from_the_messages(name):
    schedule = runs(name, 4, 8)
    timeline = ran(schedule, even(schedule.stages), send=3, engine=1)
    measured = Measurement.from_timelines(timeline)
    assert all(time == close(1) for times in measured.engine_seconds.values() for time in times)
    crossing = [
        time for time, a, b in zip(measured.message_seconds, schedule.placement, schedule.placement[1:], strict=False) if a != b
    ]
    assert crossing == [close(3)] * len(crossing)
    assert measured.predict(schedule).makespan == close(timeline.makespan)


def test_an_action_costs_its_median_so_one_hiccup_does_not_count():
    timeline = ran(runs("gpipe", 2, 5), [1, 1])
    last = timeline.rows[1][-1]
    late = replace(timeline, rows=(timeline.rows[0], (*timeline.rows[1][:-1], last._replace(end=last.end + 100))))
    assert Measurement.from_timelines(late).seconds == Measurement.from_timelines(timeline).seconds


def test_w_costs_its_mean_since_the_last_of_several_may_do_the_work_of_all():
    timeline = ran(table("0F0 0F1 0I0 0I1 0W0 0W1"), [1])
    *row, first, last = timeline.rows[0]
    merged = first._replace(end=first.start), last._replace(start=first.start)
    assert Measurement.from_timelines(replace(timeline, rows=((*row, *merged),))).seconds[Kind.W] == (2,)


def test_several_steps_of_one_table_are_taken_together():
    steps = [ran(runs("1f1b", 2, 4), layers) for layers in ([1, 1], [2, 2], [9, 9])]
    assert Measurement.from_timelines(*steps).seconds[Kind.F] == (8, 8)


def test_what_i_takes_of_a_backward_is_its_share_on_other_stages_or_half():
    assert Measurement.from_timelines(ran(runs("zb-h1", 2, 4), [5, 5])).seconds[Kind.I] == (15, 15)  # rank 0 runs B only
    halves = Measurement.from_timelines(ran(runs("1f1b", 2, 4), [1, 1]))
    assert (halves.seconds[Kind.I], halves.seconds[Kind.W], halves.assumes_equal_halves) == ((2.5, 2.5), (2.5, 2.5), True)
    assert not Measurement.from_timelines(ran(runs("zb-h1", 2, 4), [5, 5])).assumes_equal_halves


def test_a_full_backward_may_take_other_than_both_halves():
    costs = Costs(1, 2, 3, backward=(4,))
    assert simulate(table("0F0 0F1 0B0 0I1 0W1"), costs).makespan == 1 + 1 + 4 + 2 + 3
    with pytest.raises(ScheduleError, match=r"backward has 1 costs for 2 stages: give one number, or one for each stage"):
        simulate(build("1f1b", 2, 2), costs)


def test_the_table_is_read_off_the_timeline():
    for name in names():
        schedule = build(name, 4, 8)
        assert executed_table(replace(simulate(schedule), name=f"{name}, measured")) == schedule


def test_before_its_first_action_a_rank_waits_and_with_nothing_from_others_it_does_not():
    first, *others = (gap for gap in find_gaps(ran(table("0F0 0F1 0B0 0B1"), [1])))
    assert first.before is None
    assert first.idle_before_arrival(0)
    assert not any(gap.idle_before_arrival(0) for gap in others)


# ---- what another step takes


SOURCES = [("zb-h1", 4, [6, 6, 6, 6]), ("zb-h1", 4, [3, 9, 5, 7]), ("zb-v", 2, [6, 6, 6, 6]), ("interleaved-zb", 3, even(6))]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "ranks", "layers"), SOURCES)
def test_any_other_configuration_is_predicted_as_if_its_costs_were_known(source, ranks, layers):
    measured = Measurement.from_timelines(ran(runs(source, ranks, 8), layers, send=0.5, engine=0.25), layers=layers)
    for other_ranks in (2, 3, 4, 6):
        for microbatches in (6, 13, 24):
            for name in names():
                schedule = runs(name, other_ranks, microbatches)
                stages = even(schedule.stages)
                truth = ran(schedule, stages, send=0.5, engine=0.25)
                assert measured.predict(build(name, other_ranks, microbatches), stages).makespan == close(truth.makespan), name


def test_uneven_stages_are_predicted_by_their_layers():
    measured = Measurement.from_timelines(ran(runs("zb-h1", 4, 8), [6, 6, 6, 6]), layers=[6, 6, 6, 6])
    for layers in ([3, 9, 3, 9], [1, 2, 3, 18], [20, 2, 1, 1]):
        for name in ("gpipe", "1f1b", "zb-h1"):
            assert measured.predict(build(name, 4, 11), layers).makespan == close(ran(runs(name, 4, 11), layers).makespan)


def test_every_layer_takes_along_its_part_of_what_its_stage_took():
    measured = Measurement.from_timelines(simulate(build("1f1b", 2, 2), Costs([4, 8], 1, 1)), layers=[2, 2])
    assert measured.recut(2, [1, 3]).seconds[Kind.F] == (2, 10)
    assert measured.recut(4).seconds[Kind.F] == (2, 2, 4, 4)
    assert measured.recut(1).seconds[Kind.F] == (12,)
    assert measured.recut(2) == measured


def test_a_prediction_shows_the_actions_without_the_engines_time():
    schedule = runs("1f1b", 2, 4)
    timeline = ran(schedule, [1, 1], send=3, engine=1)
    predicted = Measurement.from_timelines(timeline).predict(schedule)
    assert predicted.rows == timeline.rows
    assert predicted.name == "1f1b, predicted"
    assert predicted.causes == timeline.causes


# ---- refusals


def test_what_is_no_step_of_training_is_refused():
    forwards = simulate(build("1f1b", 2, 4).filter_actions(lambda action: action.kind is Kind.F))
    with pytest.raises(
        ScheduleError, match=r"no stage ran a backward, as in an evaluation: take the timeline after a training step, pipe.step"
    ):
        Measurement.from_timelines(forwards)


def test_a_step_in_which_nothing_ran_is_refused():
    with pytest.raises(ScheduleError, match="nothing ran in this timeline: measure a step"):
        Measurement.from_timelines(Timeline("empty", ((), ())))


def test_steps_of_different_tables_are_refused():
    with pytest.raises(ScheduleError, match="measured on one table: give one timeline, or several of the same"):
        Measurement.from_timelines(simulate(build("1f1b", 2, 4)), simulate(build("gpipe", 2, 4)))
    with pytest.raises(ScheduleError, match="measured on one table"):
        Measurement.from_timelines()


@pytest.mark.parametrize("layers", [[1], [1, 2, 3], [0, 1]])
def test_layers_that_do_not_fit_the_stages_are_refused(layers):
    timeline = simulate(build("1f1b", 2, 4))
    with pytest.raises(ScheduleError, match=r"layers is .* for 2 stages: give a number above 0 for each stage"):
        Measurement.from_timelines(timeline, layers=layers)
    with pytest.raises(ScheduleError, match="for 2 stages"):
        Measurement.from_timelines(timeline).predict(build("gpipe", 2, 4), layers)


# ---- frozen stages


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_a_step_with_frozen_stages_tells_what_it_takes_and_what_others_do(name):
    costs = Costs([6, 2, 2, 2], [0, 2, 2, 2], [0, 2, 2, 2])
    timeline = simulate(with_frozen_stages(runs(name, 4, 8), [0]), costs)
    measured = Measurement.from_timelines(replace(timeline, message_costs=()))
    assert measured.schedule.forward_only == {0}
    assert measured.predict(measured.schedule).rows == timeline.rows
    for other in ("1f1b", "gpipe", "zb-h1"):
        assert (
            measured.predict(runs(other, 4, 8)).makespan == simulate(with_frozen_stages(runs(other, 4, 8), [0]), costs).makespan
        )
    fewer = measured.predict(runs("1f1b", 2, 8))
    assert {event.action.kind for event in fewer.rows[0]} == {Kind.F, Kind.B}  # half of stage 0 is trained


def test_other_cuts_of_a_model_with_frozen_layers_have_other_frozen_stages():
    timeline = simulate(with_frozen_stages(build("1f1b", 2, 4), [0]), Costs([6, 2], [0, 2], [0, 2]))
    measured = Measurement.from_timelines(timeline, layers=[12, 4])
    assert measured.without_frozen_backwards(build("1f1b", 4, 4)).forward_only == {0, 1, 2}
    assert measured.without_frozen_backwards(build("1f1b", 4, 4), [4, 9, 2, 1]).forward_only == {0}


def test_no_rank_is_called_slow_for_its_frozen_stages():
    explanation = explain(
        simulate(with_frozen_stages(build("1f1b", 4, 8), [0]), Costs([6, 2, 2, 2], [0, 2, 2, 2], [0, 2, 2, 2]))
    )
    assert explanation.straggler is None
