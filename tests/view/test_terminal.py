"""Pictures of timelines as text."""

import random
import re
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule import Action, Costs, Event, Kind, Timeline, build, names, simulate, verify, with_teacher
from penstock.view.terminal import (
    COLOR,
    _kind,
    _scale_that_shows_all,
    _shown_cells,
    draw,
    format_time,
    summary,
    terminal_width,
)

SHOWS = {color: "pair" if kind is None else kind.value for kind, color in COLOR.items()}


def kinds(row):
    """What each character of a coloured row stands for."""
    for color, text, gap, _ in re.findall(r"(\033\[[\d;]+m)([^\033]*)\033\[0m( ?)|(\.)", row):
        yield from [SHOWS[color]] * len(text + gap) if color else ["idle"]


def rows_of(picture):
    """The row of each drawn rank, its parts joined."""
    rows = {}
    for line in picture.splitlines():
        label, bar, row = line.partition("|")
        if bar:
            rows[int(label.split()[1])] = rows.get(int(label.split()[1]), "") + row
    return rows


def simulated(name, ranks, microbatches, *costs):
    return simulate(build(name, ranks, microbatches), Costs(*costs, send=0.3))


def at_random(seed):
    """Ranks with any actions, any of them in pairs, with any idle time between them."""
    dice, rows, overlaps = random.Random(seed), [], set()
    for rank in range(dice.randint(1, 4)):
        row, time = [], dice.choice([0, 5])
        for _ in range(dice.randint(rank == 0, 40)):
            begin = time + dice.choice([0, 0, 0.2, 3])
            time = begin + dice.choice([0.05, 1, dice.random(), 8])
            pair = [Action(dice.choice(list(Kind)), rank, len(row) + half) for half in range(dice.choice([1, 1, 2]))]
            row += [Event(rank, action, begin, time) for action in pair]
            overlaps |= {tuple(pair)} if len(pair) == 2 else set()
        rows.append(tuple(row))
    return Timeline("at random", tuple(rows), overlaps=frozenset(overlaps))


def timeline_columns(timeline, rank, width):
    scale = _scale_that_shows_all((timeline,), width - len("rank 0 |"))
    return _shown_cells(timeline, rank, scale, round(scale * timeline.makespan))


TIMES = st.floats(0.1, 3).map(lambda time: round(time, 2))
STEPS = st.builds(simulated, st.sampled_from(names()), st.integers(1, 6), st.integers(1, 20), TIMES, TIMES, TIMES)
STEPS |= st.integers(0, 10**6).map(at_random)


@pytest.mark.costly
@settings(max_examples=20)
@given(STEPS, st.integers(30, 200))
def test_each_character_shows_what_took_most_of_its_time_or_what_no_other_shows(timeline, width):
    for rank, line in rows_of(draw(timeline, width, color=True)).items():
        row, cells = list(kinds(line)), timeline_columns(timeline, rank, width)
        counts = Counter(cells)
        slot = 1 / _scale_that_shows_all((timeline,), width - len("rank 0 |"))
        for column, shown in enumerate(row):
            begin, end = (timeline.start + place * slot for place in (column, column + 1))
            times = {"idle": slot}
            for cell in timeline.cells(rank):
                inside = max(0.0, min(end, cell[-1].end) - max(begin, cell[0].start))
                kind = cell[0].action.kind.value if len(cell) == 1 else "pair"
                times[kind] = times.get(kind, 0.0) + inside
                times["idle"] -= inside
            is_only_column = counts[cells[column]] == 1
            assert is_only_column or times[shown] >= max(times.values()) - slot / 20, (column, shown, times)


def test_where_there_is_no_room_the_order_is_still_the_tables():
    timeline = simulate(build("zb-v", 8, 32), Costs(1, 1, 1))
    for rank, row in rows_of(draw(timeline, 80)).items():
        kinds = iter(event.action.kind.value for event in timeline.rows[rank])
        assert all(letter in kinds for letter in row.replace(".", ""))


@pytest.mark.costly
@settings(max_examples=20)
@given(STEPS, st.integers(30, 200))
def test_the_order_of_a_picture_never_contradicts_the_table(timeline, width):
    for rank, row in rows_of(draw(timeline, width, color=True)).items():
        columns, cells = timeline_columns(timeline, rank, width), list(timeline.cells(rank))
        shown = [number for number in columns if number is not None]
        assert shown == sorted(shown)
        names = ["idle" if number is None else SHOWS[COLOR[_kind(cells[number])]] for number in columns]
        assert list(kinds(row)) == names


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "width"),
    [("naive", 4, 8, 100), ("naive", 8, 8, 100), ("naive", 16, 8, 80), ("zb-h1", 8, 32, 80), ("interleaved-1f1b", 4, 16, 60)],
)
def test_every_action_has_a_block(name, ranks, microbatches, width):
    timeline = simulate(build(name, ranks, microbatches), Costs(1, 1, 1))
    picture = draw(timeline, width)
    assert max(map(len, picture.splitlines())) <= width
    for rank, row in rows_of(picture).items():
        letters = re.sub("[^FBIW]", "", row)
        assert letters == "".join(event.action.kind.value for event in timeline.rows[rank])


def test_a_short_forward_beside_much_idle_time_is_seen():
    rows = [[(Kind.F, 0, 0.1), (Kind.B, 9, 10)], [(Kind.F, 3.03, 3.06), (Kind.B, 5, 8)]]
    events = [tuple(Event(rank, Action(kind, rank, 0), *times) for kind, *times in row) for rank, row in enumerate(rows)]
    assert draw(Timeline("two ranks", tuple(events)), 28) == "rank 0 |F.................B0\nrank 1 |......F...B0====...."


def test_a_picture_without_room_says_what_a_column_stands_for():
    lines = draw(simulate(build("1f1b", 4, 400), Costs(1, 1, 1)), 80, unit="s").splitlines()
    assert len(lines) == 5
    assert lines[-1] == (
        "a column stands for 16.8 s and shows one action: 2912 of 3200 are not seen; a page (--html) shows all"
    )


def test_of_more_ranks_than_fit_a_screen_one_in_so_many_is_drawn_and_that_is_said():
    lines = draw(simulate(build("1f1b", 150, 4)), 80).splitlines()
    assert [line.split()[1] for line in lines[:3]] == ["0", "3", "6"]
    assert (len(lines), lines[-1]) == (52, "one in 3 of the 150 ranks is drawn")
    assert len(rows_of(draw(simulate(build("1f1b", 64, 2)), 80))) == 64


@pytest.mark.parametrize("width", [40, 80, 100])
def test_rows_are_equally_wide(width):
    picture = draw(simulate(build("dualpipe-v", 4, 10), Costs(1, 1, 1, 0.2, overlap=0.5)), width)
    for part in picture.split("\n\n"):
        lines = part.splitlines()
        assert len({len(line) for line in lines}) == 1
        assert len(lines[0]) <= width


def test_a_number_without_a_unit_has_six_digits_and_no_exponent():
    assert [format_time(number) for number in (15357, 0.1 + 0.2, 12.345678, 12345678.0)] == [
        "15357",
        "0.3",
        "12.3457",
        "12345700",
    ]


@pytest.mark.parametrize(
    ("table", "in_flight"),
    [
        (build("1f1b", 2, 4), "2/1"),
        (build("zb-v", 2, 4), "4/4 (2 for each microbatch)"),
        (with_teacher(build("1f1b", 2, 4)), "2/1"),
    ],
)
def test_activations_in_flight_say_how_many_are_a_microbatch(table, in_flight):
    assert f"activations in flight {in_flight}\n" in summary(simulate(table))
    assert str(verify(table)).partition("in flight ")[2].partition(", up to")[0] == in_flight


def test_the_summary_of_many_ranks_is_short_and_says_idle_and_bubble():
    summary_text = summary(simulate(build("1f1b", 64, 70), Costs(1, 1, 1)))
    assert "activations in flight 1 to 64 on 64 ranks" in summary_text
    assert max(map(len, summary_text.splitlines())) < 130
    uneven = simulate(build("1f1b", 2, 4), Costs([1, 3], 1, 1))
    assert f"idle {uneven.idle_share:.1%} (the bubble is that of the busiest rank alone) by" in summary(uneven)
    assert uneven.idle_share != uneven.bubble


@pytest.mark.parametrize(("message", "width"), [("40", 40), ("", 100), ("wide", 100), ("0", 100), ("-5", 100)])
def test_a_width_that_is_no_number_of_columns_is_not_believed(monkeypatch, message, width):
    monkeypatch.setenv("COLUMNS", message)
    monkeypatch.setattr(sys, "__stdout__", None)  # which may be a terminal
    assert terminal_width() == width


def test_forwards_of_a_teacher_are_in_lower_case():
    timeline = simulate(with_teacher(build("1f1b", 2, 2)), Costs(1, 1, 1))
    first, second = rows_of(draw(timeline, 60)).values()
    assert re.findall("[FBfb][0-9]", first) == ["F0", "F1", "f0", "f1", "B0", "B1"]
    assert re.findall("[FBfb][0-9]", second) == ["F0", "B0", "F1", "B1", "f0", "f1"]
    assert "2f0::" in first
    assert "\033[30;47m" in draw(timeline, 60, color=True)
