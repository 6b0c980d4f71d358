"""`verify` refuses exactly the tables that would stop or compute something else, and tells the truth about why."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from executable_model import execute, is_right, takes
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_tables import all_mutants, mutants, named_tables, valid_tables

from penstock.schedule import Action, Kind, Schedule, ScheduleError, build, from_rows, names, verify

SENDS = ("async", "blocking")
SEEDS = st.integers(0, 99)


def table(text: str, placement: str | tuple[int, ...] = "loop") -> Schedule:
    """The table drawn in `text`, a line for each rank."""
    return from_rows("drawn", [map(Action.parse, line.split()) for line in text.strip().splitlines()], placement)


def accepts(schedule: Schedule, sends: str = "async") -> bool:
    try:
        verify(schedule, sends=sends)
    except ScheduleError:
        return False
    return True


def refusal(schedule: Schedule, **options: object) -> str:
    with pytest.raises(ScheduleError) as caught:
        verify(schedule, **options)
    return str(caught.value)


# ---- what is accepted and what is not


@pytest.mark.parametrize("name", names())
def test_every_table_of_the_catalog_is_proved(name):
    for ranks in range(1, 17):
        for microbatches in range(1, 17):
            proof = verify(build(name, ranks, microbatches))
            assert proof.actions == 2 * ranks * microbatches
            assert proof.transfers == 2 * (ranks - 1) * microbatches


@pytest.mark.parametrize("name", names())
def test_only_1f1b_stops_when_compute_waits_for_every_send(name):
    for ranks in range(1, 7):
        for microbatches in range(1, 7):
            stops = name == "1f1b" and ranks > 1 and microbatches > 1
            assert accepts(build(name, ranks, microbatches), "blocking") is not stops, (ranks, microbatches)


@pytest.mark.parametrize("sends", SENDS)
@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 1), (2, 2), (3, 2), (2, 3)])
def test_every_table_one_change_away_is_judged_as_its_execution(name, ranks, microbatches, sends):
    for mutant in all_mutants(build(name, ranks, microbatches)):
        assert accepts(mutant, sends) == is_right(mutant, sends == "blocking"), f"{mutant}"


@settings(max_examples=150, deadline=None)
@given(valid_tables())
def test_any_order_that_respects_the_dependencies_is_proved(schedule):
    proof = verify(schedule)
    assert proof.actions == sum(map(len, schedule.actions))


@settings(max_examples=200, deadline=None)
@given(valid_tables(), SEEDS)
def test_any_order_is_judged_under_blocking_sends_as_its_execution(schedule, seed):
    assert accepts(schedule, "blocking") == is_right(schedule, blocking=True, seed=seed), f"{schedule}"


@settings(max_examples=300, deadline=None)
@given(mutants(valid_tables() | named_tables()), st.sampled_from(SENDS), SEEDS)
def test_any_changed_table_is_judged_as_its_execution(mutant, sends, seed):
    assert accepts(mutant, sends) == is_right(mutant, sends == "blocking", seed), f"{mutant}"


# ---- channels that are emptied in another order than they are filled

CROSSED = """
0F0 0F1 0B1 0B0
1F1 1B1 1F0 1B0
"""


def test_a_channel_may_be_consumed_in_another_order_than_it_is_filled():
    assert verify(table(CROSSED)).transfers == 4


def test_with_blocking_sends_the_receives_of_earlier_transfers_are_posted_too():
    # rank 0 cannot send 0F1 before rank 1, which first wants 0F1, has also posted the receive of 0F0
    assert accepts(table(CROSSED), "blocking")
    # here rank 0 also waits for 1B0 to be received, after which nothing is in the way of 0B1
    assert accepts(table("0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1"), "blocking")
    # and here it sends 0F1 while rank 1 sends 1B0, and neither receives
    assert not accepts(table("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"), "blocking")


def test_two_stages_of_one_rank_hand_over_without_a_transfer():
    proof = verify(table("0F0 1F0 1B0 0B0", (0, 0)))
    assert (proof.ranks, proof.stages, proof.transfers) == (1, 2, 0)


def test_a_rank_without_any_stage_is_accepted():
    assert verify(Schedule("idle", (0,), 1, ((Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)), ()))).ranks == 2


# ---- what a refusal says

REFUSALS = [
    # table                        placement  what is told
    ("0F0 0B0 0F0",                 "loop",    "rank 0 has 0F0 2 times; each action stands once"),
    ("0F0",                         "loop",    "drawn is not complete: rank 0 lacks 0B0"),
    ("0B0",                         "loop",    "drawn is not complete: rank 0 lacks 0F0"),
    ("0F0 0I0",                     "loop",    "drawn is not complete: rank 0 lacks 0W0"),
    ("0F0 0W0",                     "loop",    "drawn is not complete: rank 0 lacks 0I0"),
    ("0F0 0B0 0I0",                 "loop",    "rank 0 has 0B0 and 0I0: a full B is I and W at once"),
    ("0F0 0B0 0W0",                 "loop",    "rank 0 has 0B0 and 0W0: a full B is I and W at once"),
    ("0F0 0F2 0B2",                 "loop",    "drawn is not complete: rank 0 lacks 0B0, rank 0 lacks 0F1, rank 0 lacks 0B1"),
    ("0F4",                         "loop",    "drawn is not complete: rank 0 lacks 0F0, rank 0 lacks 0B0, rank 0 lacks 0F1, "
                                               "rank 0 lacks 0B1 and more"),
    ("0F0 1F0 1B0 0B0\n2F0 2B0",    "loop",    "rank 0 has 1F0, but stage 1 lives on rank 1"),
    ("0F0 0B0",                     (1,),      "drawn places stage 0 on rank 1; the ranks are 0 to 0"),
    ("0F0 0B0",                     (-1,),     "drawn places stage 0 on rank -1; the ranks are 0 to 0"),
    ("0F0 1F0 0B0",                 (0,),      "rank 0 has 1F0; the stages are 0 to 0"),
    ("0B0 0F0",                     "loop",    "drawn deadlocks: rank 0 has 0B0 before 0F0, which it needs"),
    ("0F0 0W0 0I0",                 "loop",    "drawn deadlocks: rank 0 has 0W0 before 0I0, which it needs"),
    ("1F0 0F0 1B0 0B0",             (0, 0),    "drawn deadlocks: rank 0 has 1F0 before 0F0, which it needs"),
    ("0F0 1F0 0B0 1B0",             (0, 0),    "drawn deadlocks: rank 0 has 0B0 before 1B0, which it needs"),
    ("0F0 1F0 0I0 1I0 0W0 1W0",     (0, 0),    "drawn deadlocks: rank 0 has 0I0 before 1I0, which it needs"),
    ("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0",
                                    "loop",    "drawn deadlocks: rank 0 waits for the gradient of 1B0 from rank 1, before 0B0; "
                                               "rank 1 waits for the output of 0F1 from rank 0, before 1F1"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "placement", "told"), REFUSALS)
def test_a_refusal_names_what_is_wrong(text, placement, told):
    assert refusal(table(text, placement)) == told


@pytest.mark.parametrize(
    ("action", "told"),
    [
        (Action(Kind.F, -1, 0), "rank 0 has -1F0; the stages are 0 to 0"),
        (Action(Kind.F, 0, -1), "rank 0 has 0F-1; the microbatches are 0 to 0"),
        (Action(Kind.F, 0, 1), "rank 0 has 0F1; the microbatches are 0 to 0"),
    ],
)
def test_an_action_out_of_range_is_named(action, told):
    assert refusal(Schedule("x", (0,), 1, ((Action(Kind.F, 0, 0), Action(Kind.B, 0, 0), action),))) == told


@pytest.mark.parametrize(("placement", "microbatches", "rows"), [((), 0, ()), ((), 1, ((),)), ((0,), 0, ((),))])
def test_a_table_of_nothing_is_refused(placement, microbatches, rows):
    assert "is empty" in refusal(Schedule("void", placement, microbatches, rows))


def test_blocking_1f1b_is_refused_with_its_circle():
    assert refusal(build("1f1b", 2, 2), sends="blocking") == (
        "1f1b deadlocks: rank 0 waits for rank 1 to receive the output of 0F1, before 0B0; "
        "rank 1 waits for rank 0 to receive the gradient of 1B0, before 1F1"
    )


def test_sends_of_another_kind_are_refused():
    assert refusal(build("naive", 1, 1), sends="eager") == "sends='eager': use 'async' or 'blocking'"


def test_the_proof_says_what_was_counted():
    proof = verify(build("1f1b", 3, 4))
    assert (proof.name, proof.ranks, proof.stages, proof.microbatches, proof.sends) == ("1f1b", 3, 3, 4, "async")
    assert str(proof) == (
        "proved: 1f1b over 3 ranks, 3 stages, 4 microbatches: "
        "24 actions complete, 16 transfers without a circle (async sends), in flight 3/2/1"
    )


# ---- every wait that a deadlock's message tells is true

WAITS = {
    "receive": re.compile(r"rank (?P<rank>\d+) waits for the (?P<what>output|gradient) of (?P<other>\S+) "
                          r"from rank (?P<peer>\d+), before (?P<at>\S+)"),
    "send": re.compile(r"rank (?P<rank>\d+) waits for rank (?P<peer>\d+) "
                       r"to receive the (?P<what>output|gradient) of (?P<other>\S+), before (?P<at>\S+)"),
    "order": re.compile(r"rank (?P<rank>\d+) has (?P<at>\S+) before (?P<other>\S+), which it needs"),
}  # fmt: skip


class Wait:
    """One told wait: `rank` stands before `at` because of `other`, which is `peer`'s to make or to take."""

    def __init__(self, text: str) -> None:
        found = [(kind, match.groupdict()) for kind, form in WAITS.items() if (match := form.fullmatch(text))]
        assert len(found) == 1, text
        self.kind, groups = found[0]
        self.rank = int(groups["rank"])
        self.peer = int(groups.get("peer", self.rank))
        self.at, self.other, self.what = Action.parse(groups["at"]), Action.parse(groups["other"]), groups.get("what")


def check_told(schedule: Schedule, blocking: bool) -> None:
    """The message of this stopping table is a circle, and everything it says is so."""
    _, _, told = refusal(schedule, sends="blocking" if blocking else "async").partition(" deadlocks: ")
    waits = [Wait(text) for text in told.split("; ")]
    assert len({wait.rank for wait in waits}) == len(waits)
    assert all(wait.peer == following.rank for wait, following in pairwise([*waits, waits[0]]))
    run = execute(schedule, blocking)
    for wait in waits:
        row, peers = schedule.actions[wait.rank], schedule.actions[wait.peer]
        assert row[run[wait.rank]] == wait.at  # that is where it stands
        assert wait.other in (row if wait.kind == "send" else peers)
        if wait.kind == "send":
            assert row[run[wait.rank] - 1] == wait.other  # what it did last
            consumer = next(action for action in peers if feeds(wait.other, action, schedule))
            assert peers.index(consumer) >= run[wait.peer]
        else:
            assert feeds(wait.other, wait.at, schedule)
            assert peers.index(wait.other) >= run[wait.peer]
        assert wait.what == (None if wait.kind == "order" else "output" if wait.other.kind is Kind.F else "gradient")


def feeds(maker: Action, taker: Action, schedule: Schedule) -> bool:
    """Whether `taker` works on something that `maker` makes."""
    value = {Kind.F: ("activation", 1), Kind.B: ("gradient", -1), Kind.I: ("gradient", -1)}
    wanted = {(value.what, value.stage, value.microbatch) for value in takes(taker, schedule.stages)}
    made = {("saved", maker.stage, maker.microbatch)} if maker.kind is Kind.F else set()
    made |= {("owed", maker.stage, maker.microbatch)} if maker.kind is Kind.I else set()
    if maker.kind in value:
        what, step = value[maker.kind]
        made.add((what, maker.stage + step, maker.microbatch))
    return bool(made & wanted)


@settings(max_examples=200, deadline=None)
@given(valid_tables())
def test_every_wait_told_of_blocking_sends_is_true(schedule):
    assume(not is_right(schedule, blocking=True))
    check_told(schedule, blocking=True)


@settings(max_examples=200, deadline=None)
@given(st.data(), valid_tables(ranks=3))
def test_every_wait_told_of_rows_with_an_action_moved_is_true(data, schedule):
    rows = [list(row) for row in schedule.actions]
    for row in filter(None, rows):
        here, there = (data.draw(st.sampled_from(range(len(row)))) for _ in range(2))
        row.insert(here, row.pop(there))
    shuffled = replace(schedule, actions=tuple(map(tuple, rows)))
    assume(not is_right(shuffled))
    check_told(shuffled, blocking=False)


# ---- the memory bound


@pytest.mark.parametrize("name", names())
def test_the_memory_bound_is_refused_just_below_the_peak(name):
    peaks = verify(build(name, 4, 6)).peak_in_flight
    schedule = build(name, 4, 6)
    assert verify(schedule, max_in_flight=max(peaks)).peak_in_flight == peaks
    assert verify(schedule, max_in_flight=peaks).peak_in_flight == peaks
    for rank, peak in enumerate(peaks):
        bounds = [*peaks[:rank], peak - 1, *peaks[rank + 1 :]]
        assert refusal(schedule, max_in_flight=bounds) == (
            f"rank {rank} holds {peak} activations in flight, max_in_flight allows {peak - 1}"
        )


def test_one_memory_bound_holds_for_every_rank():
    assert refusal(build("gpipe", 2, 3), max_in_flight=2) == "rank 0 holds 3 activations in flight, max_in_flight allows 2"


def test_memory_bounds_of_the_wrong_number_are_refused():
    assert refusal(build("gpipe", 2, 3), max_in_flight=[3]) == "max_in_flight has 1 numbers for 2 ranks"


def test_an_activation_is_in_flight_until_its_weight_gradient_is_done():
    schedule = table("0F0 0I0 0F1 0I1 0W0 0W1")
    assert verify(schedule, max_in_flight=2).peak_in_flight == (2,)
    assert "rank 0 holds 2" in refusal(schedule, max_in_flight=1)
