"""Pictures of timelines as text."""

import random
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule import Action, Costs, Event, Kind, Timeline, build, names, simulate
from penstock.view.terminal import COLOR, _kind, _scale, draw, format_time, summary, terminal_width

SHOWS = {color: "pair" if kind is None else kind.value for kind, color in COLOR.items()}


def kinds(row):
    """What each character of a coloured row stands for."""
    for color, text, gap, _ in re.findall(r"(\033\[[\d;]+m)([^\033]*)\033\[0m( ?)|(\.)", row):
        yield from [SHOWS[color]] * len(text + gap) if color else ["idle"]


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


TIMES = st.floats(0.1, 3).map(lambda time: round(time, 2))
STEPS = st.builds(simulated, st.sampled_from(names()), st.integers(1, 6), st.integers(1, 20), TIMES, TIMES, TIMES)
STEPS |= st.integers(0, 10**6).map(at_random)


@pytest.mark.costly
@settings(max_examples=60)
@given(STEPS, st.integers(30, 200))
def test_each_character_shows_what_took_most_of_its_time(timeline, width):
    for rank, line in enumerate(draw(timeline, width, color=True).splitlines()):
        row = list(kinds(line.partition("|")[2]))
        slot = 1 / _scale((timeline,), width - len("rank 0 |"))
        for column, shown in enumerate(row):
            begin, end = (timeline.start + place * slot for place in (column, column + 1))
            times = {"idle": slot}
            for cell in timeline.cells(rank):
                inside = max(0.0, min(end, cell[-1].end) - max(begin, cell[0].start))
                kind = cell[0].action.kind.value if len(cell) == 1 else "pair"
                times[kind] = times.get(kind, 0.0) + inside
                times["idle"] -= inside
            assert times[shown] >= max(times.values()) - slot / 20, (column, shown, times)


def test_where_there_is_no_room_the_order_is_still_the_tables():
    timeline = simulate(build("zb-v", 8, 32), Costs(1, 1, 1))
    for rank, line in enumerate(draw(timeline, 80).splitlines()):
        kinds = iter(event.action.kind.value for event in timeline.rows[rank])
        assert all(letter in kinds for letter in line.partition("|")[2].replace(".", ""))


@settings(max_examples=60)
@given(STEPS, st.integers(30, 200))
def test_the_order_of_a_picture_never_contradicts_the_table(timeline, width):
    for rank, line in enumerate(draw(timeline, width, color=True).splitlines()):
        table = (_kind(cell) for cell in timeline.cells(rank))
        blocks = [SHOWS[color] for color in re.findall(r"(\033\[[\d;]+m)[^\033]+\033\[0m", line)]
        assert all(shown in ("pair" if kind is None else kind.value for kind in table) for shown in blocks)


def test_of_more_ranks_than_fit_a_screen_one_in_so_many_is_drawn_and_that_is_said():
    lines = draw(simulate(build("1f1b", 150, 4)), 80).splitlines()
    assert [line.split()[1] for line in lines[:3]] == ["0", "3", "6"]
    assert (len(lines), lines[-1]) == (51, "one in 3 of the 150 ranks is drawn")
    assert len(draw(simulate(build("1f1b", 64, 2)), 80).splitlines()) == 64


@pytest.mark.parametrize("width", [40, 80, 100])
def test_rows_are_equally_wide(width):
    lines = draw(simulate(build("dualpipe-v", 4, 10), Costs(1, 1, 1, 0.2, overlap=0.5)), width).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= width


def test_a_number_without_a_unit_has_six_digits_and_no_exponent():
    assert [format_time(number) for number in (15357, 0.1 + 0.2, 12.345678, 12345678.0)] == [
        "15357",
        "0.3",
        "12.3457",
        "12345700",
    ]


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
