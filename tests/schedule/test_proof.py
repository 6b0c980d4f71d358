"""`verify` refuses exactly the tables that would stop or compute something else, and tells the truth about why."""

import re
from dataclasses import replace
from itertools import pairwise, product
from typing import NamedTuple

import pytest
from executable_model import MODELS, ExecutionModel, Network, Skips, Value, execution, is_right, makes, takes
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_tables import all_mutants, every_skip, mutants, named_tables, standing, valid_tables, with_skips

from penstock.schedule import Action, Kind, Schedule, ScheduleError, build, from_rows, lower, names, verify
from penstock.schedule.table import Cell

SEEDS = st.integers(0, 99)
BLOCKING, SHARED = ExecutionModel(sends="blocking"), ExecutionModel(channels="shared")


def table(text: str, placement: str | tuple[int, ...] = "loop") -> Schedule:
    """The table drawn in `text`, a line for each rank, pairs in braces."""
    return from_rows("drawn", [map(cell, re.findall(r"{.*?}|\S+", line)) for line in text.strip().splitlines()], placement)


def cell(text: str) -> Cell:
    actions = tuple(map(Action.parse, text.strip("{}").split()))
    return actions[0] if len(actions) == 1 else actions


def accepts(schedule: Schedule, model: ExecutionModel = MODELS[0], skips: Skips = ()) -> bool:
    try:
        verify(schedule, sends=model.sends, channels=model.channels, skips=skips)
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
    for ranks in (1, 2, 3, 4, 5, 8):
        few, around = range(1, 2 * ranks + 2), (1, ranks - 1, ranks, ranks + 1, 2 * ranks + 1)
        for microbatches in few if ranks < 5 else around:
            schedule = build(name, ranks, microbatches)
            proof = verify(schedule)
            moves = [ends for ends in pairwise(schedule.placement) if ends[0] != ends[1]]
            halves = sum(action.kind is Kind.W for row in schedule.actions for action in row)
            assert proof.actions == 2 * schedule.stages * microbatches + halves
            assert proof.transfers == 2 * len(moves) * microbatches
            assert proof.program == lower(schedule)


def stops(name: str, model: ExecutionModel, ranks: int, microbatches: int) -> bool:
    """Where a table of the catalog would stop on an engine that is not ours."""
    if ranks == 1 or microbatches == 1 or name in ("naive", "gpipe"):
        return False
    if name == "looped-bfs":
        return microbatches >= ranks if model.sends == "blocking" else ranks == 2
    return True


@pytest.mark.costly
@pytest.mark.parametrize("model", MODELS[1:], ids="-".join)
@pytest.mark.parametrize("name", names())
def test_most_of_the_catalog_stops_when_compute_waits_for_sends_or_both_directions_share_a_channel(name, model):
    for ranks, microbatches in [*product((1, 2, 3, 4), range(1, 6)), (2, 8), (3, 7), (6, 5), (6, 6), (6, 8)]:
        stopped = not accepts(build(name, ranks, microbatches), model)
        assert stopped is stops(name, model, ranks, microbatches), (ranks, microbatches)


SMALL = [(1, 2), (2, 1), (2, 2), (3, 2), (2, 3)]  # P, M
OURS_QUICKLY = [MODELS[0], *[pytest.param(model, marks=pytest.mark.slow) for model in MODELS[1:]]]


@pytest.mark.slow
@pytest.mark.parametrize("model", OURS_QUICKLY, ids="-".join)
@pytest.mark.parametrize("name", names())
def test_every_table_one_change_away_is_judged_as_its_execution(name, model):
    for ranks, microbatches in SMALL if model == MODELS[0] else [(2, 2)]:
        for mutant in all_mutants(build(name, ranks, microbatches)):
            assert accepts(mutant, model) == is_right(mutant, model), f"{mutant}"


SKIPPED = [("gpipe", 3, 2), ("1f1b", 4, 1), ("interleaved-1f1b", 2, 1), ("zb-v", 2, 1)]


@pytest.mark.parametrize("model", OURS_QUICKLY, ids="-".join)
@pytest.mark.parametrize(("name", "ranks", "microbatches"), SKIPPED)
def test_every_table_one_change_away_is_judged_as_its_execution_with_skips(name, ranks, microbatches, model):
    schedule = build(name, ranks, microbatches)
    for skips in ({(0, schedule.stages - 1)}, every_skip(schedule.stages)):
        for mutant in all_mutants(schedule):
            assert accepts(mutant, model, skips) == is_right(mutant, model, skips=skips), f"{mutant}"


@pytest.mark.costly
@settings(max_examples=150, deadline=None)
@given(with_skips(valid_tables()))
def test_any_order_that_respects_the_dependencies_is_proved_whatever_the_skips(skipping):
    schedule, skips = skipping
    proof = verify(schedule, skips=skips)
    edges = {*pairwise(range(schedule.stages)), *skips}
    moves = [(start, end) for start, end in edges if schedule.placement[start] != schedule.placement[end]]
    assert proof.actions == sum(map(len, schedule.actions))
    assert proof.transfers == 2 * len(moves) * schedule.microbatches


@pytest.mark.costly
@settings(max_examples=250, deadline=None)
@given(with_skips(valid_tables()), st.sampled_from(MODELS[1:]), SEEDS)
def test_any_order_is_judged_in_every_model_as_its_execution(skipping, model, seed):
    schedule, skips = skipping
    assert accepts(schedule, model, skips) == is_right(schedule, model, seed, skips), f"{schedule}"


@pytest.mark.costly
@settings(max_examples=300, deadline=None)
@given(with_skips(mutants(valid_tables() | named_tables())), st.sampled_from(MODELS), SEEDS)
def test_any_changed_table_is_judged_as_its_execution(skipping, model, seed):
    mutant, skips = skipping
    assert accepts(mutant, model, skips) == is_right(mutant, model, seed, skips), f"{mutant}"


# ---- skips


@pytest.mark.parametrize("name", names())
def test_every_table_of_the_catalog_is_proved_for_a_model_with_every_skip(name):
    for ranks in range(1, 6):
        for microbatches in (1, ranks, 2 * ranks + 1):
            schedule = build(name, ranks, microbatches)
            home, skips = schedule.placement, every_skip(schedule.stages)
            proof = verify(schedule, skips=skips)
            moves = [(start, end) for start, end in (*pairwise(range(schedule.stages)), *skips) if home[start] != home[end]]
            assert proof.transfers == 2 * len(moves) * microbatches
            assert proof.program == lower(schedule, skips=skips)


LOOP = """
0F0 2F0 2B0 0B0
1F0 3F0 3B0 1B0
"""


@pytest.mark.parametrize("model", MODELS[1:], ids="-".join)
def test_a_skip_can_stop_a_table_that_runs_for_a_chain_if_sends_block_or_channels_are_shared(model):
    assert accepts(table(LOOP), model)
    assert not accepts(table(LOOP), model, skips={(0, 3)})
    assert accepts(table(LOOP), model, skips={(0, 2), (1, 3)})  # each of them stays on its rank


def test_a_skip_in_a_cycle_is_told_with_the_stage_it_is_for():
    assert refusal(table(LOOP), sends="blocking", skips={(0, 3)}) == (
        "drawn deadlocks: rank 0 waits for rank 1 to receive the output of 0F0 for stage 3, before 2F0; "
        "rank 1 waits for rank 0 to receive the output of 1F0, before 3F0"
    )
    assert refusal(table(LOOP), channels="shared", skips={(0, 3)}) == (
        "drawn deadlocks: rank 0 waits for the output of 1F0 from rank 1, before 2F0, "
        "with the send of the output of 0F0 for stage 3 in front of its queue with rank 1; "
        "rank 1 waits for the output of 0F0 for stage 3 from rank 0, before 3F0, "
        "with the send of the output of 1F0 in front of its queue with rank 0"
    )


def test_the_gradient_of_a_skip_in_a_cycle_is_told_with_the_stage_it_is_for():
    rows = """
    3F0 3B0
    0F0 1F0 1B0 0B0
    2F0 2B0
    """
    assert accepts(table(rows, (1, 1, 2, 0)), BLOCKING)
    assert refusal(table(rows, (1, 1, 2, 0)), sends="blocking", skips={(0, 3)}) == (
        "drawn deadlocks: rank 0 waits for rank 1 to receive the gradient of 3B0 for stage 0, before the end; "
        "rank 1 waits for the gradient of 2B0 from rank 2, before 1B0; "
        "rank 2 waits for the gradient of 3B0 from rank 0, before 2B0"
    )


def test_a_rank_in_the_way_that_waits_for_a_skip_is_told_as_well_even_if_the_stage_has_the_number_of_the_rank_it_keeps():
    rows = """
    0F0 0F1 0B0 0B1
    2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1
    1F0 1F1 1B0 1B1
    """
    assert refusal(table(rows, (0, 2, 1, 1)), channels="shared", skips={(0, 2)}) == (
        "drawn deadlocks: rank 2 waits for the gradient of 2B0 from rank 1, before 1B0, "
        "with the send of the output of 1F1 in front of its queue with rank 1; "
        "rank 1 has the send of the gradient of 2B0 in front of its queue with rank 2, "
        "and waits for the output of 0F1 for stage 2 from rank 0, before 2F1"
    )


def test_a_skip_that_is_taken_before_it_is_made_on_one_rank_is_told_by_the_chain_it_goes_past():
    rows = """
    2F0 0F0 2B0 0B0
    1F0 1B0
    """
    assert refusal(table(rows, (0, 1, 0)), skips={(0, 2)}) == (
        "drawn deadlocks: rank 0 waits for the output of 1F0 from rank 1, before 2F0; "
        "rank 1 waits for the output of 0F0 from rank 0, before 1F0"
    )


NO_SKIPS = [
    # skip     what is told
    ((0, 1),   "no skip goes from stage 0 to stage 1 of 4: it passes at least one by"),
    ((2, 2),   "no skip goes from stage 2 to stage 2 of 4: it passes at least one by"),
    ((3, 0),   "no skip goes from stage 3 to stage 0 of 4: it passes at least one by"),
    ((2, 4),   "no skip goes from stage 2 to stage 4 of 4: it passes at least one by"),
    ((-1, 2),  "no skip goes from stage -1 to stage 2 of 4: it passes at least one by"),
]  # fmt: skip


@pytest.mark.parametrize(("skip", "message"), NO_SKIPS)
def test_a_skip_that_the_model_cannot_have_is_refused(skip, message):
    assert refusal(build("gpipe", 4, 2), skips=[(0, 3), skip]) == message


def test_a_table_is_checked_before_its_skips():
    assert refusal(table("0F0"), skips={(0, 1)}) == "drawn is not complete: rank 0 lacks 0B0"


# ---- channels that are emptied in another order than they are filled

CROSSED = """
0F0 0F1 0B1 0B0
1F1 1B1 1F0 1B0
"""


def test_a_channel_may_be_consumed_in_another_order_than_it_is_filled():
    assert verify(table(CROSSED)).transfers == 4


def test_with_blocking_sends_the_receives_of_earlier_transfers_are_posted_too():
    # rank 0 cannot send 0F1 before rank 1, which first wants 0F1, has also posted the receive of 0F0
    assert accepts(table(CROSSED), BLOCKING)
    # here rank 0 also waits for 1B0 to be received, after which nothing is in the way of 0B1
    assert accepts(table("0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1"), BLOCKING)
    # and here it sends 0F1 while rank 1 sends 1B0, and neither receives
    assert not accepts(table("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"), BLOCKING)


def test_two_stages_of_one_rank_hand_over_without_a_transfer():
    proof = verify(table("0F0 1F0 1B0 0B0", (0, 0)))
    assert (proof.ranks, proof.num_stages, proof.transfers) == (1, 2, 0)


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
    ("0F0 1F0 1B0 0B0\n2F0 2B0",    "loop",    "a stage is on one rank: stage 1 is on rank 1, and rank 0 has 1F0"),
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
    ("{0F0 0B0}",                   "loop",    "drawn deadlocks: rank 0 has {0F0 0B0} as a pair, but 0B0 needs 0F0"),
    ("{0B0 0F0}",                   "loop",    "drawn deadlocks: rank 0 has {0B0 0F0} as a pair, but 0B0 needs 0F0"),
    ("0F0 0F1 {1F0 0I1} 0I0 0W0 0W1 1F1 1I0 1W0 1I1 1W1",
                                    (0, 0),    "drawn deadlocks: rank 0 has 0I1 before 1I1, which it needs"),
    ("0F0 {0F1 0B0} 0B1\n1F0 1F1 1B0 1B1",
                                    "loop",    "drawn deadlocks: "
                                               "rank 0 waits for the gradient of 1B0 from rank 1, before {0F1 0B0}; "
                                               "rank 1 waits for the output of 0F1 from rank 0, before 1F1"),
    ("{0F0 0F1} 0B0 0B1",           "loop",    "0F0 and 0F1 are no pair: a pair is a forward and a backward, B or I"),
    ("0F0 0I0 {0F1 0W0} 0I1 0W1",   "loop",    "0F1 and 0W0 are no pair: a pair is a forward and a backward, B or I"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "placement", "message"), REFUSALS)
def test_a_refusal_names_what_is_wrong(text, placement, message):
    assert refusal(table(text, placement)) == message


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (Action(Kind.F, -1, 0), "rank 0 has -1F0; the stages are 0 to 0"),
        (Action(Kind.F, 0, -1), "rank 0 has 0F-1; the microbatches are 0 to 0"),
        (Action(Kind.F, 0, 1), "rank 0 has 0F1; the microbatches are 0 to 0"),
    ],
)
def test_an_action_out_of_range_is_named(action, message):
    assert refusal(Schedule("x", (0,), 1, ((Action(Kind.F, 0, 0), Action(Kind.B, 0, 0), action),))) == message


PAIRS = [
    # said to be pairs       what is told
    ("0F1 0B0, 0B0 0F2",     "0B0 is in 2 pairs; each action is in one at most"),
    ("0B0 0F1",              "0B0 and 0F1 are no pair: no rank has 0F1 right after 0B0"),
    ("0F0 0B0",              "0F0 and 0B0 are no pair: no rank has 0B0 right after 0F0"),
    ("0F1 1B0",              "0F1 and 1B0 are no pair: no rank has 1B0 right after 0F1"),
    ("0F7 0B0",              "0F7 and 0B0 are no pair: no rank has 0B0 right after 0F7"),
]  # fmt: skip


@pytest.mark.parametrize(("pairs", "message"), PAIRS)
def test_a_pair_that_is_not_in_the_table_or_not_alone_is_refused(pairs, message):
    row = table("0F0 0F1 0B0 0F2 0B1 0B2")
    assert refusal(replace(row, overlaps=frozenset(cell(pair) for pair in pairs.split(", ")))) == message


@pytest.mark.parametrize(("placement", "microbatches", "rows"), [((), 0, ()), ((), 1, ((),)), ((0,), 0, ((),))])
def test_a_table_of_nothing_is_refused(placement, microbatches, rows):
    assert "is empty" in refusal(Schedule("void", placement, microbatches, rows))


def test_blocking_1f1b_is_refused_with_its_cycle():
    assert refusal(build("1f1b", 2, 2), sends="blocking") == (
        "1f1b deadlocks: rank 0 waits for rank 1 to receive the output of 0F1, before 0B0; "
        "rank 1 waits for rank 0 to receive the gradient of 1B0, before 1F1"
    )


def test_1f1b_over_one_queue_for_each_pair_of_ranks_is_refused_with_what_stands_in_front():
    assert refusal(build("1f1b", 2, 2), channels="shared") == (
        "1f1b deadlocks: rank 0 waits for the gradient of 1B0 from rank 1, before 0B0, "
        "with the send of the output of 0F1 in front of its queue with rank 1; "
        "rank 1 waits for the output of 0F1 from rank 0, before 1F1, "
        "with the send of the gradient of 1B0 in front of its queue with rank 0"
    )


def test_a_rank_in_the_way_that_waits_for_somebody_else_is_told_as_well():
    rows = """
    0F0 0F1 3F0 3B0 0B0 3F1 3B1 0B1
    1F0 1F1 1B0 1B1
    2F0 2F1 2B0 2B1
    """
    assert refusal(table(rows, (0, 1, 2, 0)), channels="shared") == (
        "drawn deadlocks: rank 2 waits for the gradient of 3B0 from rank 0, before 2B0, "
        "with the send of the output of 2F1 in front of its queue with rank 0; "
        "rank 0 has the send of the gradient of 3B0 in front of its queue with rank 2, "
        "and waits for the gradient of 1B0 from rank 1, before 0B0"
    )


def test_a_model_that_there_is_not_is_refused():
    assert refusal(build("naive", 1, 1), sends="eager") == "sends='eager': use 'async' or 'blocking'"
    assert refusal(build("naive", 1, 1), channels="both") == "channels='both': use 'directed' or 'shared'"


def test_the_proof_says_what_was_counted():
    proof = verify(build("1f1b", 3, 4))
    assert (proof.name, proof.ranks, proof.num_stages, proof.microbatches, proof.sends) == ("1f1b", 3, 3, 4, "async")
    assert str(proof) == (
        "proved: 1f1b over 3 ranks, 3 stages, 4 microbatches: "
        "24 actions complete, 16 transfers without a cycle (async sends), in flight 3/2/1"
    )
    assert "(async sends, shared channels)" in str(verify(build("gpipe", 2, 2), channels="shared"))


def test_the_proof_has_the_program_that_was_proved():
    schedule = build("gpipe", 2, 3)
    assert verify(schedule).program == lower(schedule)
    assert verify(schedule, channels="shared").program == verify(schedule, sends="blocking").program == lower(schedule, ahead=0)
    skipping = build("gpipe", 3, 3)
    assert verify(skipping, skips={(0, 2)}).program == lower(skipping, skips={(0, 2)})
    assert verify(skipping, sends="blocking", skips={(0, 2)}).program == lower(skipping, ahead=0, skips={(0, 2)})


# ---- every wait that a deadlock's message tells is true

CELL = r"(?P<at>{\S+ \S+}|\S+|the end)"
TAKER = r"(?: for stage (?P<taker>\d+))?"
CARRIED = rf"the (?P<waits>output|gradient) of (?P<other>\S+){TAKER}"
FORMS = {
    "receive": rf"rank (?P<rank>\d+) waits for {CARRIED} from rank (?P<peer>\d+), before {CELL}",
    "send": rf"rank (?P<rank>\d+) waits for rank (?P<peer>\d+) to receive {CARRIED}, before {CELL}",
    "order": rf"rank (?P<rank>\d+) has {CELL} before (?P<other>\S+), which it needs",
    "pair": rf"rank (?P<rank>\d+) has {CELL} as a pair, but (?P<needy>\S+) needs (?P<other>\S+)",
}
FRONT = re.compile(
    rf"the (?P<end>send|receive) of the (?P<what>output|gradient) of (?P<maker>\S+){TAKER} "
    r"in front of its queue with rank (?P<peer>\d+)"
)


class Wait:
    """What is told of one rank that cannot go on: what it waits for, or where its row is wrong, and what it has in front."""

    def __init__(self, text: str) -> None:
        self.front, self.in_front_of_itself = FRONT.search(text), ", with the " in text
        if self.front:  # `rank 1 waits for .., with the send ..` or `rank 1 has the send .., and waits for ..`
            text = text.replace(self.front[0], "").removesuffix(", with ").replace(" has , and waits", " waits")
        found = [(kind, match.groupdict()) for kind, form in FORMS.items() if (match := re.fullmatch(form, text))]
        assert len(found) == 1, text
        self.kind, self.groups = found[0]
        self.rank, self.peer = int(self.groups["rank"]), int(self.groups.get("peer", self.groups["rank"]))
        self.leads_to = int(self.front["peer"]) if self.front else self.peer

    def action(self, name: str) -> Action:
        return Action.parse(self.groups[name])

    def cell(self) -> tuple[Action, ...]:
        """Where the rank stands; nothing for the end of its row."""
        text = self.groups["at"]
        return tuple(map(Action.parse, text.strip("{}").split())) if text != "the end" else ()


class Stands(NamedTuple):
    """Where a table stands that cannot go on."""

    schedule: Schedule
    skips: Skips
    at: tuple[int, ...]
    network: Network


def check_told(schedule: Schedule, model: ExecutionModel, skips: Skips) -> None:
    """The message of this stopping table is a cycle, and everything it says is so."""
    _, _, message = refusal(schedule, sends=model.sends, channels=model.channels, skips=skips).partition(" deadlocks: ")
    waits = [Wait(text) for text in message.split("; ")]
    assert len({wait.rank for wait in waits}) == len(waits)
    assert all(wait.leads_to == following.rank for wait, following in pairwise([*waits, waits[0]]))
    at, network = execution(schedule, model, skips=skips)
    stands = Stands(schedule, skips, at, network)
    for wait in waits:
        if wait.kind in ("order", "pair"):
            check_order(wait, schedule)
        else:
            check_wait(wait, stands)
            assert (wait.front is not None) == (model.channels == "shared")
            assert wait.in_front_of_itself == (model.channels == "shared" and wait.leads_to == wait.peer)
        if wait.front:
            check_front(wait, stands)


def check_order(wait: Wait, schedule: Schedule) -> None:
    row, here, maker = schedule.actions[wait.rank], wait.cell(), wait.action("other")
    if wait.kind == "pair":
        needy = wait.action("needy")
        assert row[row.index(here[0]) :][:2] == here
        assert {needy, maker} == set(here)
    else:
        (needy,) = here
        assert row.index(needy) < row.index(maker)
    assert set(makes(maker, schedule.stages)) & set(takes(needy, schedule.stages))


def check_wait(wait: Wait, stands: Stands) -> None:
    schedule, skips, ran, network = stands
    row, here, at = schedule.actions[wait.rank], wait.cell(), ran[wait.rank]
    assert row[at : at + len(here)] == here  # that is where it stands
    assert here or at == len(row)
    value = carried(wait.action("other"), wait.groups["waits"], wait.groups["taker"], stands)
    assert value not in network.arrived
    source, destination = (wait.rank, wait.peer) if wait.kind == "send" else (wait.peer, wait.rank)
    assert network.channel[value] == (source, destination)
    if wait.kind == "send":
        assert wait.action("other") in row[:at]
    else:
        assert any(value in takes(action, schedule.stages, skips) for action in here)


def check_front(wait: Wait, stands: Stands) -> None:
    value, network = carried(Action.parse(wait.front["maker"]), wait.front["what"], wait.front["taker"], stands), stands.network
    assert network.posted[frozenset({wait.rank, wait.leads_to}), wait.rank][0] == value
    assert network.channel[value][wait.front["end"] == "receive"] == wait.rank


def carried(maker: Action, what: str, taker: str | None, stands: Stands) -> Value:
    """What the message calls the output or the gradient of `maker`, for a neighbour or the stage `taker`."""
    far = maker.stage if taker else None
    made = makes(maker, stands.schedule.stages, stands.skips)
    (value,) = (
        value
        for value in made
        if value.what in ("activation", "gradient") and value.past == far and (taker is None or value.stage == int(taker))
    )
    assert what == ("output" if value.what == "activation" else "gradient")
    return value


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(with_skips(valid_tables()), st.sampled_from(MODELS[1:]))
def test_every_wait_told_of_a_stop_in_another_model_is_true(skipping, model):
    schedule, skips = skipping
    assume(not is_right(schedule, model, skips=skips))
    check_told(schedule, model, skips)


@pytest.mark.costly
@settings(max_examples=150, deadline=None)
@given(st.data(), with_skips(valid_tables(ranks=3)), st.sampled_from(MODELS))
def test_every_wait_told_of_rows_with_an_action_moved_is_true(data, skipping, model):
    schedule, skips = skipping
    rows = [list(row) for row in schedule.actions]
    for row in filter(None, rows):
        here, there = (data.draw(st.sampled_from(range(len(row)))) for _ in range(2))
        row.insert(here, row.pop(there))
    shuffled = standing(replace(schedule, actions=tuple(map(tuple, rows))))
    assume(not is_right(shuffled, model, skips=skips))
    check_told(shuffled, model, skips)


@pytest.mark.costly
@settings(max_examples=150, deadline=None)
@given(st.data(), with_skips(valid_tables(pairs=False)), st.sampled_from(MODELS))
def test_every_wait_told_of_actions_that_must_not_overlap_is_true(data, skipping, model):
    schedule, skips = skipping
    kinds = {frozenset({Kind.F, Kind.B}), frozenset({Kind.F, Kind.I})}
    able = [pair for row in schedule.actions for pair in pairwise(row) if {action.kind for action in pair} in kinds]
    assume(able)
    paired = replace(schedule, overlaps=frozenset({data.draw(st.sampled_from(able))}))
    assume(not is_right(paired, model, skips=skips))
    check_told(paired, model, skips)


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


def test_both_of_a_pair_are_in_flight_at_once_whichever_stands_first():
    rows = "0F0 0F1 {} 0B1 0B2"
    assert (
        verify(table(rows.format("0F2 0B0"))).peak_in_flight == verify(table(rows.format("{0B0 0F2}"))).peak_in_flight == (3,)
    )
    assert verify(table(rows.format("0B0 0F2"))).peak_in_flight == (2,)


def test_a_proof_counts_one_rank_stage_and_microbatch_in_the_singular() -> None:
    assert str(verify(build("1f1b", 1, 1))).startswith("proved: 1f1b over 1 rank, 1 stage, 1 microbatch: 2 actions complete")
