"""Why ranks are idle: drawn by hand, and against a look at every moment of every rank."""

from dataclasses import replace

import pytest
from executable_model import makes, takes
from hypothesis import given, settings
from measured_steps import table
from test_simulate import PAIRED, timed_tables
from test_timeline import MEASURED, timeline

from penstock.schedule import Cause, Costs, Kind, MessageCost, Timeline, build, names, simulate


def idle(timeline: Timeline) -> list[str]:
    """For every rank, when it was idle and why."""
    return ["  ".join(f"{start:g}-{end:g} {cause}" for start, end, cause in row) for row in timeline.idle]


# ---- drawn


def test_a_rank_fills_before_its_first_backward_and_drains_after_its_last_forward():
    assert idle(simulate(build("1f1b", 3, 4))) == [
        "3-7 fill  12-13 drain  15-16 drain",
        "0-1 fill  3-5 fill  13-14 drain  16-18 drain",
        "0-2 fill  14-18 drain",
    ]


def test_between_its_last_forward_and_its_first_backward_a_rank_still_fills():
    assert idle(simulate(build("gpipe", 2, 2))) == ["2-5 fill", "0-1 fill  7-9 drain"]


def test_a_rank_that_has_computed_the_stages_in_between_itself_waits_for_the_message_of_the_skip():
    costs = Costs(bandwidth=1, skips={(0, 2): 10})
    assert idle(simulate(table("0F0 0B0\n1F0 2F0 2B0 1B0", (0, 1, 1)), costs)) == [
        "1-16 fill  16-24 communication",  # its gradient is sent from 14 to 24, 1B0 ends at 16
        "0-1 fill  2-11 communication  16-26 drain",
    ]


def test_a_measured_rank_waits_for_the_message_of_a_skip_that_its_timeline_knows_of():
    measured = timeline("0F0@0-1\n1F0@1-2 2F0@5-6")
    skipping = replace(measured, skips={(0, 2): MessageCost()})
    assert (idle(measured)[1], idle(skipping)[1]) == ("0-1 fill  2-5 order", "0-1 fill  2-5 communication")
    assert str(skipping.critical_path[-2].action) == str(measured.critical_path[-2].action) == "1F0"  # ended last


def test_in_between_a_rank_waits_for_one_that_has_more_to_do():
    assert idle(simulate(build("1f1b", 2, 3), Costs([3, 1]))) == ["13-14 drain", "0-3 fill  9-11 imbalance  14-16 drain"]


def test_from_the_end_of_what_it_needs_a_rank_waits_for_the_message():
    assert idle(simulate(build("1f1b", 2, 3), Costs(send=1))) == [
        "2-5 fill  5-6 communication  11-13 drain  13-14 communication",
        "0-1 fill  1-2 communication  8-9 order  9-10 communication  13-16 drain",
    ]


def test_a_queue_is_communication_too():
    forwards = simulate(table("0F0 0F1\n1F0 1F1"), Costs(1, send=3, size=4, bandwidth=2))  # there at 6 and 8
    assert idle(forwards) == ["2-9 drain", "0-1 fill  1-6 communication  7-8 communication"]


def test_a_pair_waits_for_what_both_its_actions_need():
    assert idle(simulate(table(PAIRED), Costs(1, 1, 2, send=1))) == [
        "1-6 fill  6-7 communication  11-16 drain  16-17 communication",
        "0-1 fill  1-2 communication  6-11 order  11-12 communication  16-20 drain",
    ]
    paired = timeline("0F0@0-1 0F1@1-2\n1F0@1-2 1F1@9-12 1B0@9-12\n2F0@2-3 2B0@3-6", pairs="1F1,1B0")
    assert idle(paired)[1] == "0-1 fill  2-6 fill  6-9 communication"  # 0F1 was on its way before, but 2B0 was not computed


def test_a_measured_rank_waits_for_the_message_from_the_end_of_what_it_needs():
    assert idle(replace(MEASURED, message_costs=())) == [
        "14-18 fill  18-19 communication  22-23 drain  23-24 communication",
        "10-12 fill  12-13 communication  23-27 drain",
    ]


def test_what_a_measured_rank_loses_without_waiting_is_no_communication():
    lossy = timeline(
        "0F0@0-1 0F1@2-3 0B0@7-8 0F2@9-10 0B1@10-11 0B2@12-13\n1F0@1-3 1B0@4-6 1F1@6-7 1B1@7-8 1F2@10-11 1B2@11-12"
    )
    assert idle(lossy)[0] == "1-2 fill  3-6 fill  6-7 communication  8-9 order  11-12 drain"
    assert idle(lossy)[1] == "0-1 fill  3-4 fill  8-10 order  12-13 drain"


def test_a_clock_that_is_behind_makes_no_negative_time():
    assert idle(timeline("0F0@0-3\n1F0@2-4"))[1] == "0-2 fill"


def test_without_backwards_a_rank_fills_until_its_first_action():
    forwards = build("1f1b", 2, 2).filter_actions(lambda action: action.kind is Kind.F)
    assert idle(simulate(forwards, Costs([2, 1]))) == ["4-5 drain", "0-2 fill  3-4 imbalance"]


def test_without_forwards_a_rank_drains_from_its_first_action():
    assert idle(timeline("0B0@3-4 0B1@5-6\n1B0@0-3 1B1@3-5"))[0] == "0-3 fill  4-5 drain"


def test_measured_events_that_overlap_leave_no_time_between_them():
    assert idle(timeline("0F0@0-9 0F1@2-5 0B0@7-11 0B1@13-14")) == ["11-13 drain"]


def test_a_rank_without_actions_is_idle_by_the_tables_order():
    alone = Timeline("alone", (*timeline("0F0@3-4 0B0@4-6").rows, ()))
    assert idle(alone) == ["", "3-6 order"]
    assert alone.causes == {"fill": 0, "order": 0.5, "imbalance": 0, "drain": 0, "communication": 0, "sending": 0}


def handed_over(drawn, **sent):
    """`drawn`, with the times at which its actions' messages were sent: `a0F0=3`."""
    at = {action[1:]: time for action, time in sent.items()}
    return replace(drawn, rows=tuple(tuple(cell._replace(sent=at.get(str(cell.action))) for cell in row) for row in drawn.rows))


def test_a_rank_that_hands_over_what_it_made_is_sending_first_and_waits_then():
    drawn = timeline("0F0@0-2 0F1@3-5 0B0@12-14 0B1@18-20\n1F0@4-6 1B0@6-10 1F1@10-11 1B1@11-16")
    sent = handed_over(drawn, a0F0=2.5, a0F1=6, a1B0=10, a1B1=17, a0B1=20)
    assert idle(drawn)[0] == "2-3 fill  5-10 fill  10-12 communication  14-16 drain  16-18 communication"
    assert (
        idle(sent)[0]
        == "2-2.5 sending  2.5-3 fill  5-6 sending  6-10 fill  10-12 communication  14-16 drain  16-18 communication"
    )
    assert idle(sent)[1] == "0-2 fill  2-4 communication  16-17 sending  17-20 drain"
    assert sent.causes["sending"] == 2.5 / 40
    assert sum(sent.causes.values()) == pytest.approx(sum(drawn.causes.values()))
    assert sent.busy == drawn.busy


def test_sending_ends_where_the_next_action_begins():
    drawn = handed_over(timeline("0F0@0-2 0F1@3-5\n1F0@4-6 1F1@6-7"), a0F0=4, a1F1=9)
    assert idle(drawn) == ["2-3 sending  5-7 drain", "0-2 fill  2-4 communication"]


def test_the_causes_are_shares_of_the_time_of_all_ranks():
    assert simulate(build("1f1b", 2, 3), Costs(send=1)).causes == {
        "fill": 4 / 32,
        "order": 1 / 32,
        "imbalance": 0,
        "drain": 5 / 32,
        "communication": 4 / 32,
        "sending": 0,
    }


@pytest.mark.parametrize("name", names())
def test_messages_that_cost_nothing_leave_no_communication(name):
    assert simulate(build(name, 4, 8), Costs(3, 2, 1)).causes["communication"] == 0
    assert simulate(build(name, 4, 8), Costs(3, 2, 1, send=1)).causes["communication"] > 0


# ---- order and imbalance


@pytest.mark.parametrize("name", names())
def test_equal_stages_have_no_imbalance(name):
    for costs in (Costs(0.3, 0.2, 0.1), Costs(3, 2, 1, send=1), Costs(1, microbatch_factors=[1, 3, 1, 1, 2, 1, 1, 5])):
        assert simulate(build(name, 4, 8), costs).causes["imbalance"] == 0


def test_naive_is_idle_by_its_order_however_it_is_cut():
    equal, unequal = (simulate(build("naive", 4, 8), Costs(sizes, sizes, sizes)).causes for sizes in (1, [1, 3, 1, 1]))
    assert (equal["order"], equal["imbalance"]) == pytest.approx((39 / 64, 0))
    assert (unequal["order"] > 0.5, unequal["imbalance"] < 0.01) == (True, True)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_what_a_table_loses_between_by_unequal_stages_is_imbalance(name):
    causes = simulate(build(name, 4, 8), Costs(*[[1, 1, 3, 1]] * 3)).causes
    assert causes["order"] == 0
    assert (causes["imbalance"] > 0.1) == (name != "gpipe")  # it waits only while it fills and drains


def between(timeline: Timeline) -> float:
    return sum(end - start for row in timeline.idle for start, end, cause in row if cause in (Cause.ORDER, Cause.IMBALANCE))


@pytest.mark.parametrize("name", names())
def test_imbalance_is_what_the_waits_lose_at_the_mean_of_the_stages_times(name):
    schedule = build(name, 4, 8)
    sizes = [1, 2, 2, 4, 1, 3, 1, 2][: schedule.stages]
    mean = sum(sizes) / len(sizes)
    timeline = simulate(replace(schedule, overlaps=frozenset()), Costs(sizes, sizes, sizes))
    even = simulate(replace(schedule, overlaps=frozenset()), Costs(mean, mean, mean))
    imbalance = timeline.causes["imbalance"] * timeline.ranks * timeline.makespan
    assert imbalance == pytest.approx(max(0.0, between(timeline) - between(even)), abs=1e-9)


def test_a_wait_is_order_until_even_stages_would_have_ended_it():
    assert idle(simulate(build("1f1b", 2, 3), Costs([3, 1], send=1)))[1] == (
        "0-3 fill  3-4 communication  10-11 order  11-13 imbalance  13-14 communication  17-20 drain"
    )


# ---- at every moment

MOMENT = 0.5  # all times of `timed_tables` are multiples


def cause_at(time: float, rank: int, timeline: Timeline, makers: dict) -> str:
    """What `rank` does between `time` and the next moment, from the definitions."""
    row, middle = timeline.rows[rank], time + MOMENT / 2
    if any(event.start < middle < event.end for event in row):
        return "busy"
    if not row:
        return "in between"
    earlier, later = [e for e in row if e.start < middle], [e for e in row if e.start > middle]
    stages = 1 + max(event.action.stage for event in timeline.events)
    if later:
        cell = next(cell for cell in timeline.cells(rank) if later[0] in cell)
        needed = [makers[value] for event in cell for value in takes(event.action, stages, timeline.skips)]
        elsewhere = [event.end for event in needed if event.rank != rank]
        if elsewhere and max(elsewhere) < middle:
            return "communication"
        if all(event.action.kind is Kind.F for event in earlier):
            return "fill"
    return "in between" if any(event.action.kind is Kind.F for event in later) else "drain"


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(timed_tables())
def test_at_every_moment_the_cause_is_what_the_definitions_say(timed):
    planned = simulate(*timed)
    stages = timed[0].stages
    makers = {value: event for event in planned.events for value in makes(event.action, stages, planned.skips)}
    for rank, row in enumerate(planned.idle):
        for moment in range(round(planned.makespan / MOMENT)):
            time = moment * MOMENT
            causes = [cause for start, end, cause in row if start < time + MOMENT and time < end] or ["busy"]
            results = [*dict.fromkeys("in between" if cause in (Cause.ORDER, Cause.IMBALANCE) else cause for cause in causes)]
            assert results == [cause_at(time, rank, planned, makers)], (rank, time)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(timed_tables())
def test_busy_and_idle_time_are_all_the_time(timed):
    planned = simulate(*timed)
    for busy, row in zip(planned.busy, planned.idle, strict=True):
        assert busy + sum(end - start for start, end, _ in row) == planned.makespan
        assert all(start < end for start, end, _ in row)
    if planned.makespan:
        share = sum(planned.busy) / (planned.ranks * planned.makespan)
        assert share + sum(planned.causes.values()) == pytest.approx(1, abs=1e-12)
    assert replace(planned, message_costs=()).idle == planned.idle  # so a measured step is explained as a planned one
