"""Tables in which some stages have F only: frozen ones at the model's beginning, and those of a second model, a teacher."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.schedule import Costs, Schedule, ScheduleError, build, from_rows, lower, prove, simulate, verify
from penstock.schedule.program import Transfer
from penstock.schedule.table import Action, Chains, dependencies, receiving_stages
from penstock.schedule.transform import with_full_backwards
from penstock.view.reading import load
from penstock.view.record import save

FROZEN = [["0FROZEN", "0F0", "0F1"], ["1F0", "1B0", "1F1", "1B1"]]
TEACHER = [["0F0", "2F0", "0F1", "2F1", "0B0", "0B1"], ["3F0", "1F0", "1B0", "3F1", "1F1", "1B1"]]


def rows_with_teacher(mark: str) -> list[list[str]]:
    return [[f"2{mark}", *TEACHER[0]], TEACHER[1]]


def waits(action: str, chains: Chains, skips: tuple[tuple[int, int], ...] = ()) -> str:
    return " ".join("|".join(map(str, options)) for options in dependencies(Action.parse(action), chains, skips))


def test_nothing_waits_for_a_backward_of_a_frozen_stage() -> None:
    chains = Chains(4, forward_only=frozenset({0, 1}))
    assert waits("2B5", chains) == "2F5 3B5|3I5"
    assert waits("3B5", chains) == "3F5"
    assert receiving_stages(chains)[Action.parse("2B5").kind] == [[], [], [], [2]]


def test_a_teacher_reads_the_batch_and_the_loss_waits_for_it() -> None:
    chains = Chains(4, frozenset({2, 3}), teacher=2)
    assert [waits(action, chains) for action in ("2F5", "3F5", "1F5", "1B5")] == ["", "2F5", "0F5 3F5", "1F5"]


def test_the_loss_does_not_wait_for_a_teacher_that_runs_ahead() -> None:
    assert waits("1F5", Chains(4, frozenset({2, 3}), teacher=2, ahead=True)) == "0F5"


def test_a_frozen_stage_gets_no_gradient() -> None:
    proof = verify(from_rows("frozen", FROZEN))
    assert (proof.transfers, proof.peak_in_flight) == (2, (0, 1))  # two outputs
    assert [line.outputs for line in proof.program.lines[1]] == [()] * 4


def test_a_teachers_output_stays_on_the_rank_of_the_loss() -> None:
    proof = verify(from_rows("taught", rows_with_teacher("TEACHER")))
    assert (proof.transfers, proof.peak_in_flight) == (6, (2, 1))
    lines = {str(line.action): line for line in proof.program.lines[1]}
    output = Transfer(Action.parse("3F0"), 1, 1, skip_stage=1)
    assert lines["3F0"].outputs == (output,)
    assert lines["1F0"].needs == (Transfer(Action.parse("0F0"), 0, 1), output)


def test_without_its_teacher_a_table_is_that_of_the_model() -> None:
    table = from_rows("taught", rows_with_teacher("TEACHER_AHEAD"))
    program = lower(table.filter_actions(lambda action: action.stage < 2))
    prove(program)
    alone = lower(from_rows("alone", [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]))
    assert program.lines == alone.lines


@pytest.mark.parametrize("rows", [FROZEN, rows_with_teacher("TEACHER"), rows_with_teacher("TEACHER_AHEAD")])
def test_a_csv_file_has_a_mark_for_each_such_stage(rows: list[list[str]], tmp_path: Path) -> None:
    table = from_rows("table", rows)
    table.to_csv(tmp_path / "table.csv")
    again = Schedule.from_csv(tmp_path / "table.csv", name="table")
    assert (again, again.digest()) == (table, table.digest())
    assert again.csv_rows() == rows


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([["0FROZEN", "0F0", "0B0"], ["1F0", "1B0"]], "rank 0 has 0B0, but stage 0 is frozen: it has F only"),
        ([["0FROZEN", "0F0"], ["1F0", "1B0", "1F1", "1B1"]], "is not complete: rank 0 lacks 0F1"),
        ([["0F0"], ["1F0", "1B0"]], "is not complete: rank 0 lacks 0B0"),
        ([["0F0", "0B0"], ["1FROZEN", "1F0", "2F0", "2B0"]], "stage 0 needs a gradient from it: only the first stages can be"),
        ([["0F0", "0B0"], ["1FROZEN", "1F0"]], "only stages before the last, 1, can be frozen"),
        ([["0TEACHER", "0F0"], ["1F0"]], "has a teacher from stage 0 on, and stages 0 to 1, the model's first"),
        (
            [["0F0", "3F0", "0B0"], ["2TEACHER", "2F0", "1F0", "1B0"]],
            "is on rank 0, but the loss, which takes its output, is",
        ),
        ([["0F0", "1F0", "2F0", "1B0", "0B0", "1TEACHER", "2TEACHER"]], "has teachers from stages 1, 2 on: mark one at most"),
        ([["0F0", "0F0.1", "0B0.1", "0B0", "1TEACHER", "1F0", "1F0.1"]], "has 2 slices and a teacher"),
        ([["0F0", "0B0", "1TEACHER", "1F0"]], "deadlocks: rank 0 has 0F0 before 1F0, which it needs"),
    ],
)
def test_what_cannot_be_is_a_sentence(rows: list[list[str]], says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        verify(from_rows("table", rows))


def test_a_backward_of_the_first_trained_stage_is_merged_because_no_rank_waits_for_it() -> None:
    table = from_rows("halves", [["0FROZEN", "0F0"], ["1F0", "1I0", "1W0"]])
    assert with_full_backwards(table).csv_rows() == [["0FROZEN", "0F0"], ["1F0", "1B0"]]


def test_frozen_stages_take_no_time_and_no_memory_for_a_backward() -> None:
    frozen = replace(build("1f1b", 4, 8), name="frozen", forward_only=frozenset({0, 1}))
    table = frozen.filter_actions(lambda action: action.stage > 1 or action.kind.value == "F")
    assert verify(table).peak_in_flight == (0, 0, 2, 1)
    timeline = simulate(table, Costs(forward=10, backward_input=10, backward_weight=10))
    assert timeline.peak_memory == (0, 0, 2, 1)
    assert timeline.makespan == 2 * 10 + 9 * 30  # 330 with all stages trained


@pytest.mark.parametrize("mark", ["TEACHER", "TEACHER_AHEAD"])
def test_a_saved_timeline_has_its_chains(mark: str, tmp_path: Path) -> None:
    timeline = simulate(from_rows("taught", rows_with_teacher(mark)))
    save(timeline, None, tmp_path / "timeline.json")
    again = load(tmp_path / "timeline.json").usual
    assert again.chains == timeline.chains
    assert (again.peak_in_flight, again.peak_memory, again.causes) == ((2, 1), (2, 1), timeline.causes)
