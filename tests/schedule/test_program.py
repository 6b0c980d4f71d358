"""The program: what each rank posts and waits for, and when."""

from collections import Counter, defaultdict
from itertools import zip_longest

import pytest
from executable_model import Skips, Value, makes, takes
from hypothesis import given, settings
from random_tables import named_tables, valid_tables, whole_numbers, with_skips

from penstock.schedule import Action, Compute, Kind, Program, ProgramLine, Schedule, Transfer, build, from_rows, lower


def drawn(program: Program, rank: int) -> list[str]:
    """One line for each step: +receives posted  ?transfers waited for  action  !transfers sent, skips with >skip_stage."""
    lines = []
    for step in program.lines[rank]:
        parts = [f"+{short(transfer)}" for transfer in step.receives]
        parts += [f"?{short(transfer)}" for transfer in step.needs if transfer.is_remote]
        parts += [str(step.action)]
        parts += [f"!{short(transfer)}" for transfer in step.outputs if transfer.is_remote]
        lines.append(" ".join(parts))
    return lines


def short(transfer: Transfer) -> str:
    return f"{transfer.action}" + ("" if transfer.skip_stage is None else f">{transfer.skip_stage}")


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def test_receives_of_1f1b_are_posted_two_ahead():
    program = lower(build("1f1b", 2, 4))
    assert drawn(program, 0) == lines("""
        +1B0 +1B1 0F0 !0F0
        0F1 !0F1
        ?1B0 0B0
        +1B2 0F2 !0F2
        ?1B1 0B1
        +1B3 0F3 !0F3
        ?1B2 0B2
        ?1B3 0B3
    """)
    assert drawn(program, 1) == lines("""
        +0F0 +0F1 ?0F0 1F0
        +0F2 1B0 !1B0
        ?0F1 1F1
        +0F3 1B1 !1B1
        ?0F2 1F2
        1B2 !1B2
        ?0F3 1F3
        1B3 !1B3
    """)


def test_with_nothing_ahead_a_receive_is_posted_when_it_is_needed():
    assert drawn(lower(build("1f1b", 2, 2), ahead=0), 1) == lines("""
        +0F0 ?0F0 1F0
        1B0 !1B0
        +0F1 ?0F1 1F1
        1B1 !1B1
    """)


def test_the_receives_of_a_channel_are_posted_in_the_order_of_its_sender():
    rows = [map(Action.parse, text.split()) for text in ("0F0 0F1 0F2 0B0 0B1 0B2", "1F2 1F0 1F1 1B0 1B1 1B2")]
    assert drawn(lower(from_rows("x", rows, "loop"), ahead=0), 1)[:3] == ["+0F0 +0F1 +0F2 ?0F2 1F2", "?0F0 1F0", "?0F1 1F1"]


def test_there_is_a_channel_for_each_direction():
    program = lower(build("gpipe", 3, 2))
    assert {ends: [str(transfer.action) for transfer in queue] for ends, queue in program.channels.items()} == {
        (0, 1): ["0F0", "0F1"],
        (1, 2): ["1F0", "1F1"],
        (2, 1): ["2B0", "2B1"],
        (1, 0): ["1B0", "1B1"],
    }


def test_two_stages_of_one_rank_need_no_channel():
    rows = [map(Action.parse, ["0F0", "1F0", "1B0", "0B0"])]
    program = lower(from_rows("x", rows, "loop"))
    assert program.channels == {}
    assert drawn(program, 0) == ["0F0", "1F0", "1B0", "0B0"]


def test_a_transfer_says_what_it_carries_and_for_whom_if_that_is_no_neighbour():
    texts = [str(Transfer(Action(kind, 1, 2), 0, 1)) for kind in (Kind.F, Kind.B, Kind.I)]
    assert texts == ["output of 1F2", "gradient of 1B2", "gradient of 1I2"]
    assert str(Transfer(Action(Kind.F, 0, 3), 0, 1, skip_stage=3)) == "output of 0F3 for stage 3"
    assert str(Transfer(Action(Kind.I, 3, 0), 1, 0, skip_stage=0)) == "gradient of 3I0 for stage 0"


def test_the_weight_half_of_a_backward_neither_waits_for_a_neighbour_nor_sends():
    rows = [map(Action.parse, text.split()) for text in ("0F0 0I0 0W0", "1F0 1I0 1W0")]
    program = lower(from_rows("x", rows, "loop"))
    assert drawn(program, 0) == ["+1I0 0F0 !0F0", "?1I0 0I0", "0W0"]
    assert drawn(program, 1) == ["+0F0 ?0F0 1F0", "1I0 !1I0", "1W0"]


def pairs_over_two_ranks(ahead: int) -> Program:
    pair = Action.parse("0F2"), Action.parse("0B0")
    rows = [[Action.parse("0F0"), Action.parse("0F1"), pair, *map(Action.parse, ["0B1", "0B2"])]]
    rows += [[*map(Action.parse, ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"])]]
    return lower(from_rows("x", rows, "loop"), ahead)


def test_what_a_pair_needs_is_posted_with_its_first_action():
    assert drawn(pairs_over_two_ranks(ahead=0), 0) == lines("""
        0F0 !0F0
        0F1 !0F1
        +1B0 0F2 !0F2
        ?1B0 0B0
        +1B1 ?1B1 0B1
        +1B2 ?1B2 0B2
    """)


def test_a_program_is_read_post_by_post_with_a_pair_between_its_receives_and_its_sends():
    row = pairs_over_two_ranks(ahead=0).instructions(0)
    results = [f"run {cells(cell)}" if isinstance(cell, Compute) else f"post {cell.action}" for cell in row]
    assert ", ".join(results) == (
        "run 0F0, post 0F0, run 0F1, post 0F1, post 1B0, run 0F2+0B0 after 1B0, post 0F2, "
        "post 1B1, run 0B1 after 1B1, post 1B2, run 0B2 after 1B2"
    )


def cells(run: Compute) -> str:
    actions = (run.cell,) if isinstance(run.cell, Action) else run.cell
    return "+".join(map(str, actions)) + "".join(f" after {needs.action}" for needs in run.needs)


# ---- skips


def test_a_skip_goes_straight_from_rank_to_rank_and_its_gradient_the_same_way_back():
    program = lower(build("1f1b", 3, 3), ahead=1, skips={(0, 2)})
    assert drawn(program, 0) == lines("""
        +1B0 +2B0>0                  0F0  !0F0  !0F0>2
                                     0F1  !0F1  !0F1>2
                                     0F2  !0F2  !0F2>2
                      ?1B0  ?2B0>0   0B0
        +1B1 +2B1>0   ?1B1  ?2B1>0   0B1
        +1B2 +2B2>0   ?1B2  ?2B2>0   0B2
    """)
    assert drawn(program, 1) == lines("""
        +0F0 +2B0     ?0F0           1F0  !1F0
        +0F1          ?0F1           1F1  !1F1
        +0F2          ?2B0           1B0  !1B0
             +2B1     ?0F2           1F2  !1F2
                      ?2B1           1B1  !1B1
             +2B2     ?2B2           1B2  !1B2
    """)
    assert drawn(program, 2) == lines("""
        +0F0>2 +1F0   ?0F0>2 ?1F0    2F0
        +0F1>2 +1F1                  2B0  !2B0>0  !2B0
                      ?0F1>2 ?1F1    2F1
        +0F2>2 +1F2                  2B1  !2B1>0  !2B1
                      ?0F2>2 ?1F2    2F2
                                     2B2  !2B2>0  !2B2
    """)


def test_a_skip_shares_a_channel_with_what_else_goes_from_rank_to_rank():
    rows = [map(Action.parse, text.split()) for text in ("0F0 2F0 2I0 0I0 2W0 0W0", "1F0 3F0 3I0 1I0 3W0 1W0")]
    program = lower(from_rows("x", rows, "loop"), skips={(0, 3)})
    assert {ends: [short(transfer) for transfer in queue] for ends, queue in program.channels.items()} == {
        (0, 1): ["0F0", "0F0>3", "2F0", "2I0"],
        (1, 0): ["1F0", "3I0>0", "3I0", "1I0"],
    }


def test_a_skip_whose_ends_are_on_one_rank_is_handed_over():
    rows = [map(Action.parse, text.split()) for text in ("0F0 2F0 2B0 0B0", "1F0 1B0")]
    program = lower(from_rows("x", rows, (0, 1, 0)), skips={(0, 2)})
    assert drawn(program, 0) == ["+1F0 +1B0 0F0 !0F0", "?1F0 2F0", "2B0 !2B0", "?1B0 0B0"]
    output, gradient = Transfer(Action(Kind.F, 0, 0), 0, 0, skip_stage=2), Transfer(Action(Kind.B, 2, 0), 0, 0, skip_stage=0)
    first, second, third, last = program.lines[0]
    assert (output in first.outputs, output in second.needs, output.is_remote) == (True, True, False)
    assert (gradient in third.outputs, gradient in last.needs, gradient.is_remote) == (True, True, False)


def test_a_pair_waits_for_the_skips_of_both_its_actions_and_then_sends_those_of_both():
    rows = [f"{stage}F0 {stage}F1 {stage}B0 {stage}B1".split() for stage in (0, 1, 3, 4)]
    rows.insert(2, ["2F0", "(2F1;2B0)OVERLAP_F_B", "2B1"])
    program = lower(from_rows("x", rows, "loop"), ahead=0, skips={(0, 2), (2, 4)})
    results = [
        f"run {cells(instruction)}" if isinstance(instruction, Compute) else f"post {short(instruction)}"
        for instruction in program.instructions(2)
    ]
    assert results == [
        "post 0F0>2", "post 1F0",
        "run 2F0 after 0F0 after 1F0",
        "post 2F0", "post 2F0>4",
        "post 0F1>2", "post 1F1", "post 3B0", "post 4B0>2",
        "run 2F1+2B0 after 0F1 after 1F1 after 3B0 after 4B0",
        "post 2F1", "post 2F1>4", "post 2B0>0", "post 2B0",
        "post 3B1", "post 4B1>2",
        "run 2B1 after 3B1 after 4B1",
        "post 2B1>0", "post 2B1",
    ]  # fmt: skip


def test_a_program_knows_its_skips():
    assert lower(build("gpipe", 4, 2), skips=[(0, 2), (1, 3), (0, 2)]).skips == {(0, 2), (1, 3)}
    assert lower(build("gpipe", 4, 2)).skips == frozenset()


# ---- any table and any skips

TABLES = valid_tables() | named_tables(microbatches=6)
LOWERED = with_skips(TABLES)
CHECKED = settings(max_examples=100, deadline=None)


def posted_by(program: Program) -> list[tuple[int, ProgramLine]]:
    return [(rank, step) for rank, steps in enumerate(program.lines) for step in steps]


@CHECKED
@given(LOWERED, whole_numbers(0, 4))
def test_a_program_runs_the_table_and_nothing_else(lowered: tuple[Schedule, Skips], ahead):
    schedule, skips = lowered
    program = lower(schedule, ahead, skips)
    assert tuple(tuple(step.action for step in steps) for steps in program.lines) == schedule.actions


@CHECKED
@given(LOWERED, whole_numbers(0, 4))
def test_every_transfer_is_made_once_and_needed_once_and_if_it_travels_posted_once_by_its_destination(
    lowered: tuple[Schedule, Skips], ahead
):
    program = lower(lowered[0], ahead, lowered[1])
    made, needed, posted = Counter[Transfer](), Counter[Transfer](), Counter[Transfer]()
    for rank, step in posted_by(program):
        assert {transfer.source for transfer in step.outputs} <= {rank}
        assert {transfer.destination for transfer in (*step.receives, *step.needs)} <= {rank}
        made.update(step.outputs)
        needed.update(step.needs)
        posted.update(step.receives)
    assert set(made.values()) <= {1}
    assert made == needed
    travelling = Counter({transfer: 1 for transfer in made if transfer.is_remote})
    assert posted == travelling == Counter(transfer for queue in program.channels.values() for transfer in queue)


@pytest.mark.costly
@CHECKED
@given(LOWERED)
def test_a_step_gives_what_other_stages_take_and_needs_what_they_made_in_stage_order(lowered: tuple[Schedule, Skips]):
    schedule, skips = lowered
    home, stages = schedule.placement, schedule.stages
    made = {value: action for row in schedule.actions for action in row for value in messages(makes(action, stages, skips))}

    def transfer(value: Value) -> Transfer:
        skip_stage = None if value.past is None else value.stage
        return Transfer(made[value], home[made[value].stage], home[value.stage], skip_stage)

    for _, step in posted_by(lower(schedule, skips=skips)):
        given = sorted(messages(makes(step.action, stages, skips)), key=lambda value: value.stage)
        taken = sorted(messages(takes(step.action, stages, skips)), key=lambda value: made[value].stage)
        assert step.outputs == tuple(map(transfer, given))
        assert step.needs == tuple(map(transfer, taken))


def messages(values: list[Value]) -> list[Value]:
    """Those of the values that go to another stage."""
    return [value for value in values if value.what in ("activation", "gradient")]


@CHECKED
@given(LOWERED, whole_numbers(0, 4))
def test_a_channel_has_its_transfers_in_the_order_in_which_its_sender_posts_them(lowered: tuple[Schedule, Skips], ahead):
    program = lower(lowered[0], ahead, lowered[1])
    sent = defaultdict(list)
    for _, step in posted_by(program):
        for transfer in step.outputs:
            sent[transfer.source, transfer.destination].append(transfer)
    assert program.channels == {ends: tuple(queue) for ends, queue in sent.items() if ends[0] != ends[1]}


@pytest.mark.costly
@CHECKED
@given(LOWERED, whole_numbers(0, 4))
def test_receives_are_posted_in_channel_order_before_they_are_needed_and_no_earlier_than_allowed(
    lowered: tuple[Schedule, Skips], ahead
):
    schedule, skips = lowered
    program = lower(schedule, ahead, skips)
    for (source, rank), queue in program.channels.items():
        posted: list[Transfer] = []
        consumed: set[Transfer] = set()
        for step, following in zip_longest(program.lines[rank], program.lines[rank][1:]):
            posted += [transfer for transfer in step.receives if transfer.source == source]
            assert posted == list(queue[: len(posted)])
            needs = {transfer for transfer in step.needs if transfer.source == source}
            together = following and (step.action, following.action) in schedule.overlaps
            awaited = needs | {transfer for transfer in (following.needs if together else ()) if transfer.source == source}
            assert awaited <= set(posted)
            consumed |= needs
            farthest = max((queue.index(transfer) + 1 for transfer in consumed | awaited), default=0)
            assert len(posted) <= max(farthest, len(consumed) + ahead)


@pytest.mark.costly
@CHECKED
@given(LOWERED, whole_numbers(0, 2))
def test_the_lines_of_one_rank_are_those_that_it_has_among_all(lowered, ahead):
    program = lower(lowered[0], ahead, lowered[1])
    assert [lower(lowered[0], ahead, lowered[1]).rank_lines(rank) for rank in range(program.schedule.ranks)] == [*program.lines]
    assert set(program.channels) <= set(program.links)
