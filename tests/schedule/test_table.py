"""Actions and tables: their text, their CSV, their placements."""

import copy
import csv
import pickle
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_tables import valid_tables

from penstock.schedule import Action, Kind, Schedule, ScheduleError, build, from_rows, names, verify
from penstock.schedule.catalog import FAMILIES
from penstock.schedule.table import dependencies, loop_placement, v_placement


def row(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


# ---- text

TEXTS = {
    "0F0": Action(Kind.F, 0, 0),
    "2B1": Action(Kind.B, 2, 1),
    "1I0": Action(Kind.I, 1, 0),
    "10W23": Action(Kind.W, 10, 23),
    "2F3.1": Action(Kind.F, 2, 3, 1),
}


@pytest.mark.parametrize(("text", "action"), TEXTS.items())
def test_an_action_is_written_stage_kind_microbatch(text, action):
    assert str(action) == text
    assert Action.parse(text) == action
    assert Action.parse(f"  {text} ") == action


NO_ACTIONS = ["", "0", "F", "0F", "F0", "0X0", "0f0", "-1F0", "0F-1", "0F0B1", "0 F 0", "0F1.", "0F.5", "0F1.5.2", "0SEND_F1"]


@pytest.mark.parametrize("text", NO_ACTIONS)
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ScheduleError, match="as an action: expected stage, kind") as caught:
        Action.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0R0", "; recomputation is no action: Pipeline(recompute='block') recomputes inside the backward"),
        ("0OPT", "; the optimizer is no action: call optimizer.step() after pipe.step()"),
        ("2opt3", "; the optimizer is no action"),
        ("1OFFLOAD2.1", "; offload is no action: save activations on the host in the model's forward"),
        ("1ALLREDUCE", "; a collective is no action: Pipeline(mesh=) averages, gathers and scatters inside actions"),
        ("0SEND_F0", "; messages follow from the table: script_from_compute_comms_csv reads tables that have their own"),
    ],
)
def test_what_other_tables_say_is_refused_with_what_to_do_instead(text, reason):
    with pytest.raises(ScheduleError) as caught:
        Action.parse(text)
    assert f"cannot read {text!r} as an action: expected stage, kind (F, B, I or W), microbatch, as in 2F3{reason}" in str(
        caught.value
    )
    assert "(see what a table cannot say, in the docs)" in str(caught.value)


def test_an_unknown_kind_has_no_reason():
    with pytest.raises(ScheduleError, match=r"as in 2F3$"):
        Action.parse("0X0")


def test_a_kind_has_its_letter_as_value():
    assert [kind.value for kind in Kind] == [repr(kind) for kind in Kind] == ["F", "B", "I", "W"]


def test_an_action_survives_copying_and_pickling_as_a_key():
    table = {Action(Kind.I, 1, 2): "here"}
    for again in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert again[Action(Kind.I, 1, 2)] == "here"


DEPENDENCIES = {
    # action of 3 stages -> what it waits for; a stroke separates alternatives
    "0F4": "",
    "1F4": "0F4",
    "2B4": "2F4",
    "1B4": "1F4 2B4|2I4",
    "0I4": "0F4 1B4|1I4",
    "1W4": "1I4",
}


SKIPPING = {
    # action of 4 stages with the skips 0-2, 0-3 and 1-3 -> what it waits for
    "0F4": "",
    "1F4": "0F4",
    "2F4": "1F4 0F4",
    "3F4": "2F4 0F4 1F4",
    "3B4": "3F4",
    "2B4": "2F4 3B4|3I4",
    "1I4": "1F4 2B4|2I4 3B4|3I4",
    "0B4": "0F4 1B4|1I4 2B4|2I4 3B4|3I4",
    "0W4": "0I4",
}


@pytest.mark.parametrize(
    ("action", "waits", "stages", "skips"),
    [
        *[(*each, 3, ()) for each in DEPENDENCIES.items()],
        *[(*each, 4, ((0, 2), (0, 3), (1, 3))) for each in SKIPPING.items()],
    ],
)
def test_an_action_waits_for_its_neighbours_and_the_other_ends_of_skips(action, waits, stages, skips):
    found = ["|".join(map(str, alternatives)) for alternatives in dependencies(Action.parse(action), stages, skips)]
    assert found == waits.split()


# ---- placement


@pytest.mark.parametrize(
    ("place", "stages", "ranks", "expected"),
    [
        (loop_placement, 4, 4, (0, 1, 2, 3)),
        (loop_placement, 6, 3, (0, 1, 2, 0, 1, 2)),
        (loop_placement, 3, 1, (0, 0, 0)),
        (v_placement, 3, 3, (0, 1, 2)),
        (v_placement, 6, 3, (0, 1, 2, 2, 1, 0)),
        (v_placement, 8, 2, (0, 1, 1, 0, 0, 1, 1, 0)),
    ],
)
def test_stages_are_placed(place, stages, ranks, expected):
    assert place(stages, ranks) == expected


# ---- the table


def test_a_schedule_counts_its_ranks_and_stages():
    schedule = Schedule("x", [0, 1, 1, 0], 2, [[], []])
    assert (schedule.ranks, schedule.num_stages, schedule.stages_of(0), schedule.stages_of(1)) == (2, 4, (0, 3), (1, 2))


def test_a_schedule_of_lists_equals_one_of_tuples():
    lists, tuples = Schedule("x", [0], 1, [[Action(Kind.F, 0, 0)]]), Schedule("x", (0,), 1, ((Action(Kind.F, 0, 0),),))
    assert lists == tuples
    assert hash(lists) == hash(tuples)


def test_the_numbers_of_stages_and_microbatches_are_read_off_the_rows():
    schedule = from_rows("x", [row("0F0 2F4"), row("1F0")], "loop")
    assert (schedule.ranks, schedule.num_stages, schedule.microbatches, schedule.placement) == (2, 3, 5, (0, 1, 0))


def test_a_stage_lives_where_its_first_action_stands_unless_told():
    schedule = from_rows("x", [["2F0", "0F0", "2B0", "0B0"], ["1F0", "1B0"], []])
    assert (schedule.ranks, schedule.placement) == (3, (0, 1, 0))
    assert schedule == from_rows("x", [row("2F0 0F0 2B0 0B0"), row("1F0 1B0"), ()], (0, 1, 0))


def test_a_stage_without_any_action_is_refused():
    with pytest.raises(ScheduleError, match="x has actions of stage 3, but none of stage 1: give every stage its actions"):
        from_rows("x", [row("0F0 3F0 3B0 0B0"), row("2F0 2B0")])


def test_an_unknown_placement_is_refused_with_those_there_are():
    with pytest.raises(ScheduleError, match="unknown placement 'ring': use loop or V, or the rank of every stage"):
        from_rows("x", [row("0F0 0B0")], "ring")


def test_keeping_the_forwards_leaves_their_order():
    forwards = build("1f1b", 2, 3).filter_actions(lambda action: action.kind is Kind.F)
    assert str(forwards) == "rank 0 | 0F0 0F1 0F2\nrank 1 | 1F0 1F1 1F2"
    assert (forwards.name, forwards.placement, forwards.microbatches) == ("1f1b", (0, 1), 3)


def test_keeping_one_action_of_a_pair_leaves_it_alone():
    schedule = build("dualpipe-v", 2, 4)
    assert len(schedule.overlaps) == len(schedule.filter_actions(lambda action: True).overlaps) == 6
    assert not schedule.filter_actions(lambda action: action.kind is Kind.F).overlaps
    fewer = schedule.filter_actions(lambda action: action.microbatch != 3)
    assert {str(each) for pair in fewer.overlaps for each in pair} == {"3F2", "0B0", "2F2", "1B0"}


def test_the_digest_tells_tables_apart_but_not_their_names():
    base = Schedule("x", (0, 1), 2, (row("0F0 0B0"), row("1F0 1B0")))
    others = [
        Schedule("x", (1, 0), 2, base.actions),
        Schedule("x", (0, 1), 3, base.actions),
        Schedule("x", (0, 1), 2, (row("0B0 0F0"), row("1F0 1B0"))),
        Schedule("x", (0, 1), 2, (row("0F0 0B0 1F0 1B0"), ())),
        Schedule("x", (0, 1), 2, (row("0F0 0B0 1F0"), row("1B0"))),
    ]
    assert len({base.digest(), *(other.digest() for other in others)}) == 1 + len(others)
    assert Schedule("y", (0, 1), 2, base.actions).digest() == base.digest()


def test_the_digest_is_the_same_in_every_process():
    assert build("1f1b", 2, 2).digest() == "b3a945674ebb973307d1306cf2a970bd394c80d108aa3b94991131c206f09cac"


# ---- CSV


@settings(max_examples=50, deadline=None)
@given(valid_tables())
def test_a_table_written_and_read_is_the_same(tmp_path_factory, schedule):
    path = tmp_path_factory.mktemp("csv") / "table.csv"
    schedule.to_csv(path)
    assert Schedule.from_csv(path, schedule.placement, name="random") == schedule


@pytest.mark.parametrize("name", names())
def test_a_table_of_the_catalog_needs_no_placement_told(name, tmp_path):
    for microbatches in (1, 4, 7):
        schedule = build(name, 3, microbatches)
        schedule.to_csv(tmp_path / "table.csv")
        assert Schedule.from_csv(tmp_path / "table.csv", name=name) == schedule
        assert Schedule.from_csv(tmp_path / "table.csv", FAMILIES[name].placement, name) == schedule


def test_a_pair_that_may_overlap_is_written_as_one_cell(tmp_path):
    schedule = build("dualpipe-v", 1, 2)
    schedule.to_csv(tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text() == "0F0,1F0,0F1,1B0,(1F1;0B0)OVERLAP_F_B,1B1,0I1,0W1\n"
    assert schedule.overlaps == {(Action(Kind.F, 1, 1), Action(Kind.B, 0, 0))}
    assert schedule.actions[0][4:6] == (Action(Kind.F, 1, 1), Action(Kind.B, 0, 0))


def test_the_csv_has_a_line_for_each_rank_and_a_cell_for_each_action(tmp_path):
    build("1f1b", 2, 2).to_csv(tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text().splitlines() == ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"]


def read(text: str, tmp_path, placement="loop") -> Schedule:
    path = tmp_path / "table.csv"
    path.write_text(text)
    return Schedule.from_csv(path, placement)


def test_bubbles_and_spaces_are_passed_over(tmp_path):
    schedule = read("0F0,,, 0B0\n ,1F0 ,1B0,\n", tmp_path)
    assert str(schedule) == "rank 0 | 0F0 0B0\nrank 1 | 1F0 1B0"
    assert schedule.name == str(tmp_path / "table.csv")


PLACED = {
    "loop": ("0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n", (0, 1, 0, 1)),
    "V": ("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n", (0, 1, 1, 0)),
    (1, 1, 0, 0): ("2F0,3F0,3B0,2B0\n0F0,1F0,1B0,0B0\n", (1, 1, 0, 0)),
}


@pytest.mark.parametrize("placement", PLACED)
def test_a_table_is_read_with_its_placement_and_no_other(placement, tmp_path):
    text, expected = PLACED[placement]
    assert read(text, tmp_path, placement).placement == expected
    for other in PLACED.keys() - {placement}:
        with pytest.raises(ScheduleError, match=r"a stage is on one rank: stage \d is on rank \d, and rank \d has .*"):
            read(text, tmp_path, other)


UNREADABLE = [
    ("0F0,0B0,spam\n", "cannot read 'spam' as an action"),
    ("0F0,0SEND_F0,0B0\n", "cannot read '0SEND_F0' as an action"),
    ("0F0\n", "lacks 0B0"),
    ("0F0,0F0,0B0\n", "rank 0 has 0F0 2 times"),
    ("0B0,0F0\n", "rank 0 has 0B0 before 0F0"),
    ("", "is empty: 0 ranks"),
]


@pytest.mark.parametrize(("text", "told"), UNREADABLE)
def test_a_table_that_cannot_be_proved_is_not_read(text, told, tmp_path):
    with pytest.raises(ScheduleError, match=told):
        read(text, tmp_path)


# ---- PyTorch's form


@pytest.fixture(scope="module")
def peer():
    return pytest.importorskip("torch.distributed.pipelining.schedules")


@pytest.mark.parametrize("placement", ["loop", "V"])
def test_pytorch_reads_our_csv_and_we_read_its(peer, placement, tmp_path):
    schedule = from_rows("x", [row(line) for line in _SPLIT_BACKWARDS[placement]], placement)
    verify(schedule)
    schedule.to_csv(tmp_path / "ours.csv")
    theirs = types.SimpleNamespace(pipeline_order={}, _validate_and_set_stage_mapping=lambda order: None)
    peer.PipelineScheduleMulti._load_csv(theirs, tmp_path / "ours.csv")
    kinds = {kind: peer._ComputationType.from_str(kind.value) for kind in Kind}
    for rank, actions in enumerate(schedule.actions):
        assert theirs.pipeline_order[rank] == [peer._Action(stage, kinds[kind], m) for kind, stage, m, _ in actions]
    peer.PipelineScheduleMulti._dump_csv(theirs, tmp_path / "theirs.csv")
    assert Schedule.from_csv(tmp_path / "theirs.csv", placement, name="x") == schedule


_SPLIT_BACKWARDS = {
    "loop": ["0F0 0F1 2F0 2I0 2F1 2W0 2B1 0I0 0W0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1I0 1W0 1I1 1W1"],
    "V": ["0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1", "1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1"],
}

PEERS = [
    # its class                      placement  P  M
    ("ScheduleInterleaved1F1B",       "loop",   2, 4),
    ("ScheduleInterleaved1F1B",       "loop",   4, 8),
    ("ScheduleInterleavedZeroBubble", "loop",   2, 4),
    ("ScheduleInterleavedZeroBubble", "loop",   4, 8),
    ("ScheduleZBVZeroBubble",         "V",      2, 4),
    ("ScheduleZBVZeroBubble",         "V",      4, 8),
    ("ScheduleDualPipeV",             "V",      2, 4),
    ("ScheduleDualPipeV",             "V",      4, 8),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "placement", "ranks", "microbatches"), PEERS)
def test_the_tables_that_pytorch_makes_are_read_and_proved(peer, kind, placement, ranks, microbatches, tmp_path):
    schedule = types.SimpleNamespace(
        n_local_stages=2, num_stages=2 * ranks, pp_group_size=ranks, _n_microbatches=microbatches, microbatches_per_round=ranks
    )
    rows = [getattr(peer, kind)._calculate_single_rank_operations(schedule, rank) for rank in range(ranks)]
    with open(tmp_path / "theirs.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    proof = verify(Schedule.from_csv(tmp_path / "theirs.csv", placement))
    assert (proof.ranks, proof.num_stages, proof.microbatches) == (ranks, 2 * ranks, microbatches)


def test_the_last_row_of_pytorchs_1f1b_is_refused(peer):
    order = peer.Schedule1F1B._get_pipeline_order(types.SimpleNamespace(_num_stages=3, _n_microbatches=4))
    rows = [[str(cell) for cell in cells if cell is not None and "REDUCE_GRAD" not in str(cell)] for cells in order.values()]
    assert rows[2][0] == "2F1"
    with pytest.raises(ScheduleError, match="not complete: rank 0 lacks 0F4"):
        verify(from_rows("peer", [row(" ".join(cells)) for cells in rows], "loop"))


@pytest.mark.costly
@given(st.text(max_size=8))
@settings(max_examples=200, deadline=None)
def test_any_text_is_an_action_or_refused(text):
    try:
        action = Action.parse(text)
    except ScheduleError:
        return
    assert action.stage >= 0
    assert action.microbatch >= 0


def test_a_table_says_where_weights_come_in_the_order_of_inputs():
    rows = [["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"], ["1F0", "1F1", "1I0", "1I1", "1W1", "1W0"]]
    table = from_rows("mine", rows)
    assert [table.has_weights_in_backward_order(stage) for stage in range(2)] == [True, False]
    mixed = from_rows("mixed", [["0F0", "0F1", "0F2", "0I0", "0B1", "0I2", "0W0", "0W2"]])
    assert not mixed.has_weights_in_backward_order(0)  # a B between I and W
    assert from_rows("full", [["0F0", "0F1", "0B1", "0B0"]]).has_weights_in_backward_order(0)


def test_a_cell_that_cannot_be_read_is_named_by_row_and_cell(tmp_path):
    (tmp_path / "mine.csv").write_text("0F0,0B0\n1F0,,1X0\n")
    with pytest.raises(ScheduleError, match=r"mine\.csv, row 2 \(rank 1\), cell 3: .*1X0"):
        Schedule.from_csv(tmp_path / "mine.csv")


def test_one_of_a_kind_is_no_plural():
    assert repr(build("1f1b", 1, 1)) == "<Schedule 1f1b: 1 rank, 1 stage, 1 microbatch>"
