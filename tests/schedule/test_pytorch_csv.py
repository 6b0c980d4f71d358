"""PyTorch's lowered tables: what can be read, and which of them can stop."""

import types

import pytest
from executable_model import makes, takes
from hypothesis import given, settings
from hypothesis import strategies as st
from random_tables import named_tables, valid_tables, whole_numbers
from test_torch_tables import CLASSES, theirs
from torch.distributed.pipelining import schedules as peer

from penstock.schedule import (
    Action,
    Compute,
    Kind,
    Program,
    Schedule,
    ScheduleError,
    Script,
    Transfer,
    lower,
    prove,
    script_from_compute_comms_csv,
    script_from_compute_comms_rows,
)
from penstock.schedule.table import loop_placement, v_placement

Texts = list[list[str]]

DEFERS = hasattr(peer, "_defer_recv_ops")
deferring = pytest.mark.skipif(not DEFERS, reason="torch before 2.13 defers no receives")


def read(text: str) -> Script:
    """The script of the lowered table drawn in `text`, a line for each rank."""
    return script_from_compute_comms_rows("drawn", [line.split() for line in text.strip().splitlines()])


def refusal(script: Script, **options: bool) -> str:
    """Why the script cannot be proved; empty if it can."""
    try:
        prove(script, **options)
    except ScheduleError as error:
        return str(error)
    return ""


# ---- the peer's own


def lowered(name: str, ranks: int, microbatches: int, stages_per_rank: int, deferred: bool) -> dict[int, list[peer._Action]]:
    """The peer's table with all that its passes add."""
    place = v_placement if name in ("zb-v", "dualpipe-v") else loop_placement
    home = place(ranks * stages_per_rank, ranks).__getitem__
    rows = {}
    for rank, texts in enumerate(theirs(name, ranks, microbatches, stages_per_rank)):
        actions = peer._add_unshard_reshard([peer._Action.from_str(text) for text in texts])
        rows[rank] = peer._add_reduce_grad(actions, microbatches)
    rows = peer._add_send_recv(rows, home, ranks * stages_per_rank)
    rows = getattr(peer, "_add_wait_send", dict)(rows)  # since torch 2.15
    return peer._defer_recv_ops(rows, home) if deferred else rows


def script_of(name: str, *numbers: int, deferred: bool) -> Script:
    rows = lowered(name, *numbers, deferred)
    return script_from_compute_comms_rows(name, [map(str, rows[rank]) for rank in range(len(rows))])


def sizes(name: str) -> list[tuple[int, int, int]]:
    """P, M and V of the tables that are tried: all that the peer builds up to P = 4, M = 8, V = 3."""
    found = [(ranks, microbatches, stages) for ranks in (2, 3, 4) for microbatches in range(1, 9) for stages in (2, 3)]
    if name in ("zb-v", "dualpipe-v"):
        found = [size for size in found if size[2] == 2]
    if name == "dualpipe-v":
        found = [size for size in found if size[1] >= 2 * size[0]]
    if name.startswith("interleaved"):
        found = [size for size in found if size[1] % max(1, size[1] // size[0]) == 0]
    return found


@pytest.mark.costly
@pytest.mark.parametrize("name", CLASSES)
def test_the_peers_lowering_cannot_stop_in_either_model(name):
    for size in sizes(name):
        script = script_of(name, *size, deferred=False)
        assert script.schedule.csv_rows() == theirs(name, *size)
        assert refusal(script, shared=True) == refusal(script, shared=False) == ""


REFUSED = {
    # with one queue for each pair of ranks, with one for each direction, of all that were tried
    "interleaved-1f1b": (36, 0, 42),
    "looped-bfs": (14, 0, 48),
    "interleaved-zb": (36, 8, 42),
    "zb-v": (21, 15, 24),
    "dualpipe-v": (9, 4, 9),
}


@pytest.mark.costly
@deferring
@pytest.mark.parametrize("name", CLASSES)
def test_most_of_the_peers_tables_with_deferred_receives_can_stop(name):
    scripts = [script_of(name, *size, deferred=True) for size in sizes(name)]
    refused = [sum(bool(refusal(script, shared=shared)) for script in scripts) for shared in (True, False)]
    assert (*refused, len(scripts)) == REFUSED[name]


@deferring
def test_the_smallest_table_with_deferred_receives_that_stops():
    script = script_of("looped-bfs", 2, 2, 2, deferred=True)
    assert refusal(script, shared=True) == (
        "looped-bfs deadlocks: rank 0 waits for the gradient of 3B0 from rank 1, before 2B0, "
        "with the send of the gradient of 2B1 in front of its queue with rank 1; "
        "rank 1 waits for the gradient of 2B1 from rank 0, before 1B1, "
        "with the send of the gradient of 3B0 in front of its queue with rank 0"
    )
    assert refusal(script, shared=False) == ""


@deferring
def test_deferred_receives_can_also_take_each_others_place():
    # run on Gloo, the peer ends this step without an error and with wrong gradients
    assert refusal(script_of("zb-v", 2, 3, 2, deferred=True)) == (
        "zb-v mixes up what it sends: rank 0 sends the output of 0F2 where rank 1 receives the gradient of 3I0"
    )


def test_the_csv_that_the_peer_writes_is_read(tmp_path):
    for name in CLASSES:
        rows = lowered(name, 2, 4, 2, deferred=DEFERS)
        peer._PipelineScheduleRuntime._dump_csv(types.SimpleNamespace(pipeline_order_with_comms=rows), tmp_path / "theirs.csv")
        script = script_from_compute_comms_csv(tmp_path / "theirs.csv")
        assert script.schedule.name == str(tmp_path / "theirs.csv")
        assert script_from_compute_comms_csv(tmp_path / "theirs.csv", name=name) == script_of(name, 2, 4, 2, deferred=DEFERS)


# ---- what is read, and what is not


def test_a_lowered_table_is_read_cell_by_cell():
    script = read("""
    0UNSHARD 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD 0RESHARD
    1RECV_F0 1F0 1I0 1SEND_B0 1W0
    """)
    output, gradient = Transfer(Action(Kind.F, 0, 0), 0, 1), Transfer(Action(Kind.I, 1, 0), 1, 0)
    assert script.rows == (
        (Compute(Action(Kind.F, 0, 0), ()), output, gradient, Compute(Action(Kind.B, 0, 0), (gradient,))),
        (
            *(output, Compute(Action(Kind.F, 1, 0), (output,))),
            *(Compute(Action(Kind.I, 1, 0), ()), gradient, Compute(Action(Kind.W, 1, 0), ())),
        ),
    )
    assert str(script.schedule) == "rank 0 | 0F0 0B0\nrank 1 | 1F0 1I0 1W0"
    prove(script, shared=True)


def test_a_pair_waits_for_both_and_sends_after_both():
    script = read("""
    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 (0F2;0B0)OVERLAP_F_B 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2
    1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2
    """)
    assert [str(action) for pair in script.schedule.overlaps for action in pair] == ["0F2", "0B0"]
    assert refusal(script) == ""
    assert "rank 1 waits for the output of 0F1 from rank 0, before 1F1, with the send of" in refusal(script, shared=True)


def test_a_wait_for_a_send_ends_when_the_other_rank_receives():
    drawn = """
    0F0 0SEND_F0 0F1 0SEND_F1 {} 0RECV_B0 0B0 0RECV_B1 0B1 0WAIT_REDUCE_GRAD
    1RECV_F0 1F0 1B0 1SEND_B0 {} 1RECV_F1 1F1 1B1 1SEND_B1 1WAIT_SEND_B1
    """
    assert refusal(read(drawn.format("0WAIT_SEND_F0", "1WAIT_SEND_B0"))) == ""
    assert refusal(read(drawn.format("", "1WAIT_SEND_B0"))) == ""
    assert refusal(read(drawn.format("0WAIT_SEND_F1", ""))) == ""
    assert refusal(read(drawn.format("0WAIT_SEND_F1", "1WAIT_SEND_B0"))) == (
        "drawn deadlocks: rank 0 waits for rank 1 to receive the output of 0F1, before 0B0; "
        "rank 1 waits for rank 0 to receive the gradient of 1B0, before 1F1"
    )


PLAIN = "0F0 0SEND_F0 0RECV_B0 0B0 / 1RECV_F0 1F0 1B0 1SEND_B0"
UNREADABLE = [
    # instead of               this                      what is told
    ("0SEND_F0",               "0SENT_F0",               "cannot read '0SENT_F0' as an action: "
                                                         "expected stage, kind (F, B, I or W), microbatch, as in 2F3"),
    ("1B0",                    "",                       "drawn is not complete: rank 1 lacks 1B0"),
    ("1B0",                    "1B0 1B0",                "rank 1 has 1B0 2 times; each action stands once"),
    ("0SEND_F0",               "",                       "rank 0 never sends the output of 0F0, which rank 1 needs"),
    ("1SEND_B0",               "",                       "rank 1 never sends the gradient of 1B0, which rank 0 needs"),
    ("0SEND_F0",               "0WAIT_SEND_F0 0SEND_F0", "rank 0 has 0WAIT_SEND_F0, but before it no send "
                                                         "of the output of 0F0"),
    ("1RECV_F0",               "",                       "rank 1 has 1F0, but before it no receive of the output of 0F0"),
    ("1RECV_F0 1F0",           "1F0 1RECV_F0",           "rank 1 has 1F0, but before it no receive of the output of 0F0"),
    ("0RECV_B0 0B0",           "0B0 0RECV_B0",           "rank 0 has 0B0, but before it no receive of the gradient of 1B0"),
    ("0F0 0SEND_F0",           "0SEND_F0 0F0",           "rank 0 has 0SEND_F0 before 0F0, which makes what is sent"),
    ("1B0 1SEND_B0",           "1SEND_B0 1B0",           "rank 1 has 1SEND_B0 before 1B0, which makes what is sent"),
    ("0SEND_F0",               "0SEND_F0 0SEND_F0",      "rank 0 has 0SEND_F0 twice"),
    ("1RECV_F0",               "1RECV_F0 1RECV_F0",      "rank 1 has 1RECV_F0 twice"),
    ("0SEND_F0",               "0SEND_F0 1SEND_F0",      "rank 0 has 1SEND_F0, but not stage 1"),
    ("0SEND_F0",               "0SEND_F0 7RECV_B0",      "rank 0 has 7RECV_B0, but not stage 7"),
    ("0SEND_F0",               "0SEND_F0 0SEND_B0",      "rank 0 has 0SEND_B0, but no other rank makes or needs that"),
    ("0SEND_F0",               "0SEND_F0 0RECV_F0",      "rank 0 has 0RECV_F0, but no other rank makes or needs that"),
    ("0SEND_F0",               "0SEND_F0 0SEND_F1",      "rank 0 has 0SEND_F1, but no other rank makes or needs that"),
    ("1F0 1B0",                "3F0 3B0",                "drawn has actions of stage 3, but none of stage 1: "
                                                         "give every stage its actions"),
    ("0B0",                    "0B0 1F0",                "a stage is on one rank: stage 1 is on rank 0, and rank 1 has 1F0"),
]  # fmt: skip


@pytest.mark.parametrize(("instead_of", "this", "told"), UNREADABLE)
def test_a_table_that_cannot_run_at_all_is_not_read(instead_of, this, told):
    read(PLAIN.replace("/", "\n"))
    with pytest.raises(ScheduleError) as caught:
        read(PLAIN.replace(instead_of, this).replace("/", "\n"))
    assert str(caught.value) == told


def test_an_action_before_what_its_own_rank_makes_is_refused_by_the_proof():
    assert refusal(read("0F0 1B0 1F0 0B0")) == "drawn deadlocks: rank 0 has 1B0 before 1F0, which it needs"


def test_receives_first_on_both_sides_stop_only_where_both_directions_share_a_queue():
    script = read("""
    0RECV_B0 0F0 0SEND_F0 0B0
    1RECV_F0 1F0 1B0 1SEND_B0
    """)
    assert refusal(script) == ""
    assert refusal(script, shared=True) == (
        "drawn deadlocks: rank 0 waits for the gradient of 1B0 from rank 1, before 0B0, "
        "with the receive of the gradient of 1B0 in front of its queue with rank 1; "
        "rank 1 waits for the output of 0F0 from rank 0, before 1F0, "
        "with the receive of the output of 0F0 in front of its queue with rank 0"
    )


# ---- random ones, against an execution of the texts


def script(program: Program) -> Script:
    return Script(program.schedule, tuple(tuple(program.instructions(rank)) for rank in range(program.schedule.ranks)))


def texts(script: Script) -> Texts:
    return [[text(each, rank) for each in row] for rank, row in enumerate(script.rows)]


def text(instruction: Transfer | Compute, rank: int) -> str:
    if isinstance(instruction, Compute):
        cell = instruction.cell
        return str(cell) if isinstance(cell, Action) else f"({cell[0]};{cell[1]})OVERLAP_F_B"
    kind, stage, microbatch, _ = instruction.action
    letter, step = ("F", 1) if kind is Kind.F else ("B", -1)
    return f"{stage}SEND_{letter}{microbatch}" if rank == instruction.source else f"{stage + step}RECV_{letter}{microbatch}"


@pytest.mark.costly
@settings(max_examples=100, deadline=None)
@given(valid_tables() | named_tables(), whole_numbers(0, 3))
def test_our_own_programs_written_in_the_peers_form_are_read_again(schedule, ahead):
    ours = script(lower(schedule, ahead))
    assert script_from_compute_comms_rows("random", texts(ours)).rows == ours.rows


def finishes(schedule: Schedule, rows: list[list[Transfer | Compute]], shared: bool) -> bool:
    """Execute the rows until nothing moves any more, one instruction at a time; whether all have been."""
    at, made, here = [0] * len(rows), [set() for _ in rows], [set() for _ in rows]
    posted: dict[object, list[Transfer]] = {}
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            if at[rank] == len(row):
                continue
            instruction = row[at[rank]]
            if isinstance(instruction, Transfer):
                if rank == instruction.source and not made[rank].issuperset(makes(instruction.action, schedule.stages)):
                    return False  # there is nothing to send yet
                posted.setdefault((rank, line(instruction, shared)), []).append(instruction)
            else:
                actions = [instruction.cell] if isinstance(instruction.cell, Action) else instruction.cell
                if not here[rank].issuperset(value for action in actions for value in takes(action, schedule.stages)):
                    continue
                made[rank].update(value for action in actions for value in makes(action, schedule.stages))
                here[rank] |= made[rank]
            at[rank] += 1
            progress = True
        for (rank, _), queue in posted.items():
            for other in range(len(rows)):
                theirs = posted.get((other, line(queue[0], shared)), []) if queue and other != rank else []
                if theirs and theirs[0] == queue[0]:
                    here[queue[0].destination].update(makes(queue[0].action, schedule.stages))
                    del queue[0], theirs[0]
                    progress = True
    return at == list(map(len, rows))


def line(transfer: Transfer, shared: bool) -> object:
    ends = transfer.source, transfer.destination
    return frozenset(ends) if shared else ends


@pytest.mark.costly
@settings(max_examples=200, deadline=None)
@given(st.data(), valid_tables(ranks=3, microbatches=3), whole_numbers(0, 3), st.booleans())
def test_a_table_whose_posts_are_moved_about_is_judged_as_its_execution(data, schedule, ahead, shared):
    ours = script(lower(schedule, ahead))
    rows = [list(row) for row in ours.rows]
    for row in rows:
        posts = [each for each in row if isinstance(each, Transfer)]
        for post in data.draw(st.lists(st.sampled_from(posts), max_size=3)) if posts else []:
            row.remove(post)
            row.insert(data.draw(whole_numbers(0, len(row))), post)
    try:
        moved = script_from_compute_comms_rows("moved", texts(Script(schedule, tuple(map(tuple, rows)))))
        prove(moved, shared=shared)
        proved = True
    except ScheduleError:
        proved = False
    assert proved == finishes(schedule, rows, shared)
