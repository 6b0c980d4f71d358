"""The program: what each rank posts and waits for, and when."""

from collections import Counter
from itertools import zip_longest

from executable_model import makes, takes
from hypothesis import given, settings
from random_tables import named_tables, valid_tables, whole_numbers

from penstock.schedule import Action, Kind, Program, Run, Schedule, Step, Transfer, build, from_rows, lower


def drawn(program: Program, rank: int) -> list[str]:
    """One line for each step: +receives posted  ?transfer waited for  action  !transfer sent."""
    lines = []
    for step in program.steps[rank]:
        parts = [f"+{transfer.action}" for transfer in step.receives]
        parts += [f"?{step.needs.action}"] if step.needs else []
        parts += [str(step.action)]
        parts += [f"!{step.sends.action}"] if step.sends else []
        lines.append(" ".join(parts))
    return lines


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


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


def test_a_transfer_says_what_it_carries():
    texts = [str(Transfer(Action(kind, 1, 2), 0, 1)) for kind in (Kind.F, Kind.B, Kind.I)]
    assert texts == ["output of 1F2", "gradient of 1B2", "gradient of 1I2"]


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
    row = pairs_over_two_ranks(ahead=0).row(0)
    told = [f"run {cells(each)}" if isinstance(each, Run) else f"post {each.action}" for each in row]
    assert ", ".join(told) == (
        "run 0F0, post 0F0, run 0F1, post 0F1, post 1B0, run 0F2+0B0 after 1B0, post 0F2, "
        "post 1B1, run 0B1 after 1B1, post 1B2, run 0B2 after 1B2"
    )


def cells(run: Run) -> str:
    actions = (run.cell,) if isinstance(run.cell, Action) else run.cell
    return "+".join(map(str, actions)) + "".join(f" after {needs.action}" for needs in run.needs)


TABLES = valid_tables() | named_tables(microbatches=6)
CHECKED = settings(max_examples=100, deadline=None)


def posted_by(program: Program) -> list[tuple[int, Step]]:
    return [(rank, step) for rank, steps in enumerate(program.steps) for step in steps]


@CHECKED
@given(TABLES, whole_numbers(0, 4))
def test_a_program_runs_the_table_and_nothing_else(schedule: Schedule, ahead):
    program = lower(schedule, ahead)
    assert tuple(tuple(step.action for step in steps) for steps in program.steps) == schedule.actions


@CHECKED
@given(TABLES, whole_numbers(0, 4))
def test_every_transfer_is_sent_once_posted_once_and_needed_once_by_its_destination(schedule: Schedule, ahead):
    program = lower(schedule, ahead)
    every = Counter((end, each) for queue in program.channels.values() for each in queue for end in ("send", "post", "need"))
    found: Counter[tuple[str, Transfer]] = Counter()
    for rank, step in posted_by(program):
        assert step.sends is None or step.sends.source == rank
        assert all(transfer.destination == rank for transfer in (*step.receives, *filter(None, [step.needs])))
        found.update([("send", step.sends)] if step.sends else [])
        found.update([("need", step.needs)] if step.needs else [])
        found.update(("post", transfer) for transfer in step.receives)
    assert found == every


@CHECKED
@given(TABLES)
def test_a_step_sends_what_another_rank_takes_and_needs_what_another_rank_made(schedule: Schedule):
    for rank, step in posted_by(lower(schedule)):
        away = [value for value in makes(step.action, schedule.stages) if schedule.placement[value.stage] != rank]
        assert (step.sends is not None) == bool(away)
        if step.sends:
            assert (step.sends.action, step.sends.destination) == (step.action, schedule.placement[away[0].stage])
        needed = set(makes(step.needs.action, schedule.stages)) if step.needs else set()
        wanted = {value for value in takes(step.action, schedule.stages) if value.what in ("activation", "gradient")}
        home = {value: schedule.placement[value.stage + (1 if value.what == "gradient" else -1)] for value in wanted}
        assert {value for value in wanted if home[value] != rank} == wanted & needed


@CHECKED
@given(TABLES, whole_numbers(0, 4))
def test_receives_are_posted_in_channel_order_before_they_are_needed_and_no_earlier_than_allowed(schedule: Schedule, ahead):
    program = lower(schedule, ahead)
    for (source, rank), queue in program.channels.items():
        posted: list[Transfer] = []
        consumed: set[Transfer] = set()
        for step, following in zip_longest(program.steps[rank], program.steps[rank][1:]):
            fresh = [transfer for transfer in step.receives if transfer.source == source]
            posted += fresh
            assert posted == list(queue[: len(posted)])
            awaited = [step.needs]
            if following and (step.action, following.action) in schedule.overlaps:
                awaited.append(following.needs)
            awaited = [transfer for transfer in awaited if transfer and transfer.source == source]
            assert set(awaited) <= set(posted)
            if step.needs in awaited:
                consumed.add(step.needs)
            farthest = max((queue.index(transfer) + 1 for transfer in {*consumed, *awaited}), default=0)
            assert len(posted) <= max(farthest, len(consumed) + ahead)
