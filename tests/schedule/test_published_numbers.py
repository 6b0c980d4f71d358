"""The figures the papers print and the formulas of every rule, met exactly. Small whole numbers keep floats exact."""

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import product

import pytest

from penstock.schedule import Costs, build, names, simulate

table, compiled = cache(build), cache(lambda formula: compile(formula, formula, "eval"))


# ---- published figures

BUBBLES_BY_SPAN = [
    # arXiv 2401.10241, tables 5 and 6; milliseconds
    # P   M    F       I       W      send    1f1b    zb-h1   zb-h2
    (8,  24,  18.522, 18.086, 9.337, 0.601,  0.2431, 0.1585, 0.1083),
    (8,  64,  18.546, 18.097, 9.321, 0.762,  0.1240, 0.0674, 0.0444),
    (16, 48,  11.347, 11.248, 8.132, 0.377,  0.2552, 0.1397, 0.0672),
    (16, 128, 11.325, 11.308, 8.109, 0.378,  0.1251, 0.0576, 0.0266),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "microbatches", "f", "i", "w", "send", "h0", "h1", "h2"), BUBBLES_BY_SPAN)
def test_the_zero_bubble_papers_bubbles(ranks, microbatches, f, i, w, send, h0, h1, h2):
    timelines = [simulate(table(name, ranks, microbatches), Costs(f, i, w, send)) for name in ("1f1b", "zb-h1", "zb-h2")]
    assert [round(timeline.bubble_by_span, 4) for timeline in timelines] == [h0, h1, h2]


MAKESPANS = [
    # unit costs of a chunk; activations in flight on the rank that holds most, in chunks
    # schedule     P   M   makespan      in flight
    ("dualpipe-v", 4,  10, 66,           9),    # DeepSeek's DualPipe, 8 ranks, 20 microbatches
    ("v-min",      4,  8,  59,           4),    # the optimum in this memory
    ("v-half",     4,  8,  53,           6),    # the optimum in this memory
    ("zb-v",       4,  8,  51,           8),    # the optimum in this memory
    ("v-half",     4,  16, 6 * 16 + 5,   6),    # arXiv 2405.15362: bubbles at M = 4P
    ("v-half",     8,  32, 6 * 32 + 17,  10),
    ("v-min",      4,  16, 6 * 16 + 11,  4),
    ("v-min",      8,  32, 6 * 32 + 27,  8),
]  # fmt: skip


@pytest.mark.parametrize(("name", "ranks", "microbatches", "makespan", "in_flight"), MAKESPANS)
def test_the_v_shaped_tables_makespans_and_memory(name, ranks, microbatches, makespan, in_flight):
    timeline = simulate(table(name, ranks, microbatches))
    assert timeline.makespan == makespan
    assert max(timeline.peak_in_flight) == max(timeline.peak_memory) == in_flight


def test_the_ranking_depends_on_the_cost_of_sends():
    half_a_forward = 1.0  # F of a rank is that of its two stages
    bubbles = {
        name: [round(simulate(table(name, 8, 32), Costs(send=send)).bubble, 3) for send in (0, half_a_forward)]
        for name in ("interleaved-zb", "looped-bfs")
    }
    assert bubbles == {"interleaved-zb": [0.035, 0.304], "looped-bfs": [0.099, 0.154]}


def test_gpipe_and_1f1b_differ_when_stages_are_uneven():
    costs = Costs([15, 6, 6, 6], [15, 6, 6, 6], [15, 6, 6, 6])
    assert [simulate(table(name, 4, 4), costs).makespan for name in ("gpipe", "1f1b")] == [234, 189]


# ---- the rules: P ranks, V stages on each, M microbatches; F, I, W of all stages of a rank, B = I + W, T = F + B

# F, I, W
COSTS = [(12, 12, 12), (24, 12, 12), (12, 24, 12), (36, 60, 24), (72, 48, 24), (48, 24, 72), (108, 12, 48), (24, 36, 36)]

BUBBLES = [
    # schedule           V          where                            time        bubble time
    ("naive",            (1,),      "True",                          "makespan", "(P-1) * M * T"),
    ("gpipe",            (1,),      "True",                          "makespan", "(P-1) * T"),
    ("1f1b",             (1,),      "True",                          "makespan", "(P-1) * T"),
    ("interleaved-1f1b", (2, 3, 4), "M % P == 0",                    "makespan", "(P-1) * T / V"),
    ("looped-bfs",       (2, 3, 4), "M >= P",                        "makespan", "(P-1) * T / V"),
    ("zb-h1",            (1,),      "M >= P and min(F, I) >= W",     "makespan", "(P-1) * (F + I - W)"),
    ("zb-h2",            (1,),      "M >= 2*P-1 and min(F, I) >= W", "span",     "(P-1) * (F + I - 2*W)"),
    ("zb-h2",            (1,),      "M >= 2*P-1 and F == I == W",    "makespan", "(P-1) * (F + I - W)"),
    ("interleaved-zb",   (2, 3, 4), "M % P == 0 and min(F, I) >= W", "makespan", "(P-1) * (F + I - W) / V"),
    ("zb-v",             (2,),      "M >= 2*P-1 and F == I == W",    "span",     "0"),
    ("zb-v",             (2,),      "M >= 3*P//2 and F == I == W",   "makespan", "(P-1) * F / 2"),
    ("dualpipe-v",       (2,),      "M >= 2*P and F == I >= W",      "makespan", "(P-1) * ((F + B) + B - 3*W) / V"),
    ("dualpipe-v",       (2,),      "M >= 2*P and F >= I >= W",      "makespan", "(P-1) * ((F + B) + F - 2*W) / V"),
]  # fmt: skip

IN_FLIGHT = [
    # schedule           V          where        activations in flight on rank r, all V chunks of one microbatch = 1
    ("naive",            (1,),      "True",       "1"),
    ("gpipe",            (1,),      "True",       "M"),
    ("1f1b",             (1,),      "True",       "min(P-r, M)"),
    ("interleaved-1f1b", (2, 3, 4), "M % P == 0", "min(((V-1)*P + 2*(P-1-r) + 1) / V, M)"),
    ("looped-bfs",       (2, 3),    "True",       "M"),
    ("zb-h1",            (1,),      "M >= P",     "P"),
    ("zb-h2",            (1,),      "M >= 2*P-1", "2*P-1"),
    ("interleaved-zb",   (2, 3, 4), "M % P == 0", "P"),
    ("zb-v",             (2,),      "M >= 2*P-1", "P"),
    ("dualpipe-v",       (2,),      "M >= 2*P",   "(2*P+1) / 2"),
]  # fmt: skip

MOST_IN_FLIGHT = [
    # schedule   where      on the rank that holds most
    ("v-half",   "M >= P", "(P+2) // 2"),
    ("v-min",    "M >= P", "(P+4) // 3"),
]  # fmt: skip


MICROBATCHES = (*range(1, 10), 11, 12, 13, 14, 16, 17, 20)  # each side of P, 2P-1, 2P and 3P/2, multiples of P and others


def value(formula: str, **letters: int) -> Fraction:
    """What `formula` says for these letters, exactly."""
    return eval(compiled(formula), {letter: Fraction(number) for letter, number in letters.items()})


def sizes(where: str, stages_per_rank: tuple[int, ...] = (2,), **letters: int) -> Iterator[dict[str, int]]:
    """P, M and V in the range of the tests for which `where` holds."""
    for P, M, V in product((2, 3, 4, 6, 7), MICROBATCHES, stages_per_rank):
        if eval(compiled(where), {"P": P, "M": M, "V": V, **letters}):  # whole numbers are enough
            yield {"P": P, "M": M, "V": V}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stages_per_rank", "where", "time", "bubble"), BUBBLES, ids=[row[0] for row in BUBBLES])
def test_the_bubble_is_what_the_rule_says(name, stages_per_rank, where, time, bubble):
    compared = 0
    for F, I, W in COSTS:  # noqa: E741 - the field's letter
        costs = {"F": F, "I": I, "W": W}
        for size in sizes(where, stages_per_rank, **costs):
            P, M, V = size.values()
            timeline = simulate(table(name, P, M, V), Costs(F / V, I / V, W / V))
            work = M * (F + I + W)
            assert timeline.busy == (work,) * P
            assert getattr(timeline, time) - work == value(bubble, **size, **costs, B=I + W, T=F + I + W), (size, costs)
            compared += 1
    assert compared > 40


@pytest.mark.costly
@pytest.mark.parametrize(("name", "stages_per_rank", "where", "in_flight"), IN_FLIGHT, ids=[row[0] for row in IN_FLIGHT])
def test_the_activations_in_flight_are_what_the_rule_says(name, stages_per_rank, where, in_flight):
    for size in sizes(where, stages_per_rank):
        P, M, V = size.values()
        expected = tuple(V * value(in_flight, **size, r=rank) for rank in range(P))
        timeline = simulate(table(name, P, M, V))
        assert timeline.peak_in_flight == timeline.peak_memory == expected, size


@pytest.mark.costly
@pytest.mark.parametrize(("name", "where", "in_flight"), MOST_IN_FLIGHT)
def test_the_most_activations_in_flight_are_what_the_rule_says(name, where, in_flight):
    for size in sizes(where):
        P, M, V = size.values()
        assert max(simulate(table(name, P, M, V)).peak_in_flight) == V * value(in_flight, **size), size


def test_every_rule_of_the_catalog_is_held_to_its_memory():
    assert {row[0] for row in IN_FLIGHT + MOST_IN_FLIGHT} == set(names())


OVERLAPS = [0, 0.25, 0.5, 1]


@pytest.mark.costly
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_dualpipes_bubble_shrinks_with_the_time_of_a_pair(overlap):
    for F, I, W in [(1, 1, 1), (4, 4, 2), (8, 4, 4), (8, 4, 2)]:  # noqa: E741 - the field's letter
        B, pair = I + W, F + I + W - overlap * min(F, I + W)
        for P, M in ((size["P"], size["M"]) for size in sizes("M >= 2*P")):
            timeline = simulate(table("dualpipe-v", P, M), Costs(F, I, W, overlap=overlap))
            longest_idle = timeline.makespan - min(timeline.busy)  # of the last rank, which has most of the pairs
            assert longest_idle == (P - 1) * (pair + F - 2 * W), (P, M)
            if F == I:
                assert longest_idle == (P - 1) * (pair + B - 3 * W), (P, M)
