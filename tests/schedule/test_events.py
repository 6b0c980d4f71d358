"""Timelines, of any origin: here they are written by hand."""

import pytest

from penstock.schedule import Action, Event, Timeline
from penstock.schedule.events import peaks_in_flight


def timeline(text: str, send: float = 0.0) -> Timeline:
    """The timeline drawn in `text`: a line for each rank, `action@start-end` for each event."""
    rows = []
    for rank, line in enumerate(text.strip().splitlines()):
        cells = [cell.replace("@", "-").split("-") for cell in line.split()]
        rows.append(tuple(Event(rank, Action.parse(action), float(start), float(end)) for action, start, end in cells))
    return Timeline("drawn", tuple(rows), send)


MEASURED = timeline("""
    0F0@10-12 0F1@12-14 0B0@19-22 0B1@24-27
    1F0@13-15 1B0@15-18 1F1@18-20 1B1@20-23
""", send=1)  # fmt: skip


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


def test_a_timeline_without_events_has_no_time_and_no_path():
    for empty in (Timeline("none", ()), Timeline("idle", ((), ()))):
        assert (empty.makespan, empty.span, empty.bubble, empty.bubble_by_span) == (0, 0, 0, 0)
        assert empty.critical_path == empty.events == ()


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
