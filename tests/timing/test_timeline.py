"""Timelines, of any origin: here they are written by hand."""

import pytest

from penstock.schedule import Action, ActivationSize, Event, MessageCost, Timeline
from penstock.schedule.memory import peaks_in_flight


def timeline(text: str, pairs: str = "", **known) -> Timeline:
    """The timeline drawn in `text`: a line for each rank, `action@start-end` for each event. `pairs`: `0F1,0B0 ...`."""
    rows = []
    for rank, line in enumerate(text.strip().splitlines()):
        cells = [cell.replace("@", "-").split("-") for cell in line.split()]
        rows.append(tuple(Event(rank, Action.parse(action), float(start), float(end)) for action, start, end in cells))
    overlaps = frozenset(tuple(map(Action.parse, pair.split(","))) for pair in pairs.split())
    return Timeline("drawn", tuple(rows), overlaps=overlaps, **known)


MEASURED = timeline("""
    0F0@10-12 0F1@12-14 0B0@19-22 0B1@24-27
    1F0@13-15 1B0@15-18 1F1@18-20 1B1@20-23
""", message_costs=(MessageCost(latency=1),))  # fmt: skip


def test_times_are_counted_from_the_first_start():
    assert MEASURED.start == 10
    assert MEASURED.makespan == 17
    assert MEASURED.span == 17
    assert MEASURED.ranks == 2


def test_a_rank_is_busy_in_its_actions_only():
    assert MEASURED.busy == (10, 10)
    assert MEASURED.bubble == MEASURED.bubble_by_span == 7 / 17


def test_work_is_that_of_the_busiest_rank():
    uneven = timeline("0F0@0-1 0B0@9-10\n1F0@1-5 1B0@5-9")
    assert uneven.busy == (2, 8)
    assert uneven.bubble == 2 / 10
    assert uneven.bubble_by_span == 2 / 10


def test_the_span_is_that_of_the_rank_that_took_longest():
    skewed = timeline("0F0@0-1 0I0@3-4 0W0@4-5\n1F0@1-2 1I0@2-3 1W0@3-8")
    assert (skewed.makespan, skewed.span) == (8, 7)
    assert (skewed.bubble, skewed.bubble_by_span) == (1 / 8, 0)


def test_the_time_of_a_pair_counts_once():
    paired = timeline("0F0@0-1 0F1@5-9 0B0@5-9 0B1@9-12\n1F0@1-2 1B0@2-5 1F1@9-10 1B1@10-13", pairs="0F1,0B0")
    assert paired.busy == (1 + 4 + 3, 1 + 3 + 1 + 3)
    assert [" ".join(str(event.action) for event in cell) for cell in paired.cells(0)] == ["0F0", "0F1 0B0", "0B1"]


def test_time_in_which_measured_events_overlap_counts_once():
    assert timeline("0F0@0-9 0F1@2-5 0B0@7-11").busy == (11,)


def test_events_come_rank_by_rank_in_the_order_they_ran():
    assert [f"{event.rank}:{event.action}" for event in MEASURED.events] == [
        *("0:0F0", "0:0F1", "0:0B0", "0:0B1"),
        *("1:1F0", "1:1B0", "1:1F1", "1:1B1"),
    ]


def test_the_critical_path_is_what_the_end_waited_for():
    assert [str(event.action) for event in MEASURED.critical_path] == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]


def test_on_a_tie_the_critical_path_stays_on_its_rank():
    tied = timeline("0F0@0-1 0F1@1-2 0B0@2-3\n1F0@0-1 1B0@1-2")
    assert [str(event.action) for event in tied.critical_path] == ["0F0", "0F1", "0B0"]


def test_the_critical_path_of_a_pair_goes_to_what_either_of_its_actions_needed():
    paired = timeline("0F0@0-1 0F1@1-2 0F2@2-3\n1F0@1-2 1F1@9-13 1B0@9-13 1B1@13-14 \n2F0@2-3 2B0@3-9", pairs="1F1,1B0")
    assert [str(event.action) for event in paired.critical_path] == ["0F0", "1F0", "2F0", "2B0", "1B0", "1B1"]


@pytest.mark.parametrize(("borders", "path"), [((MessageCost(latency=1),), "0F0 0F1 1F1"), ((), "0F0 1F0 1F1")])
def test_where_messages_are_not_known_the_critical_path_goes_to_what_ended_last(borders, path):
    late = timeline("0F0@0-1 0F1@1-4.5\n1F0@2-5 1F1@5.5-6", message_costs=borders)
    assert " ".join(str(event.action) for event in late.critical_path) == path


def test_the_memory_curve_is_that_of_the_sizes():
    halves = timeline(
        "0F0@0-1 1F0@1-2 1I0@3-4 0I0@5-7 1W0@7-8 0W0@8-9", activation_sizes=(ActivationSize(10, 4), ActivationSize(7, 7))
    )
    assert halves.memory(0) == [(0, 10), (1, 17), (7, 11), (8, 4), (9, 0)]  # 1I0 frees nothing
    assert halves.peak_memory == (17,)
    assert halves.peak_in_flight == (2,)


def test_what_is_not_known_to_have_a_size_counts_one():
    assert MEASURED.memory(1) == [(13, 1), (18, 0), (18, 1), (23, 0)]
    assert MEASURED.peak_memory == MEASURED.peak_in_flight == (2, 1)


def test_a_timeline_without_events_has_no_time_and_no_path():
    for empty in (Timeline("none", ()), Timeline("idle", ((), ()))):
        assert (empty.makespan, empty.span, empty.bubble, empty.bubble_by_span) == (0, 0, 0, 0)
        assert empty.critical_path == empty.events == ()
        assert set(empty.causes.values()) == {0}
        assert empty.idle == empty.rows
        assert set(empty.peak_memory) <= {0}


def test_an_idle_rank_counts_for_nothing_but_its_place():
    idle = Timeline("idle", (*timeline("0F0@3-4 0B0@4-6").rows, ()))
    assert (idle.start, idle.makespan, idle.span, idle.busy, idle.peak_in_flight) == (3, 3, 3, (3, 0), (1, 0))


PEAKS = [
    ("",                                       0),
    ("0F0 0B0 0F1 0B1",                        1),
    ("0F0 0F1 0B0 0F2 0B1 0B2",                2),
    ("0F0 1F0 1B0 0B0",                        2),  # every stage counts
    ("0F0 0I0 0F1 0I1 0W0 0W1",                2),  # I lets nothing go
    ("0F0 0I0 0W0 0F1 0I1 0W1",                1),
    ("0F0 0F1 0F2",                            3),
]  # fmt: skip


@pytest.mark.parametrize(("row", "peak"), PEAKS)
def test_activations_are_counted_from_the_forward_to_the_end_of_the_backward(row, peak):
    assert peaks_in_flight([[Action.parse(text) for text in row.split()]]) == (peak,)


@pytest.mark.parametrize("pair", ["0F1 0B0", "0B0 0F1"])
def test_of_a_pair_the_forward_counts_before_the_backward_ends(pair):
    first, *middle, last = (Action.parse(text) for text in f"0F0 {pair} 0B1".split())
    assert peaks_in_flight([[first, tuple(middle), last]]) == (2,)
