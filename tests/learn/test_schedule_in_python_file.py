"""A schedule in a Python file: shown because its path was typed, and never run otherwise."""

import sys

import pytest

import penstock as ps
from penstock import schedule
from penstock.commands.cli import main
from penstock.commands.source import table_of
from penstock.learn.puzzles.puzzle_files import load_puzzle
from penstock.learn.python_schedule import table_from_file

GPIPE = """
def schedule(rank, ranks, microbatches):
    yield from (f"{rank}F{m}" for m in range(microbatches))
    yield from (f"{rank}B{m}" for m in range(microbatches))
"""


@pytest.fixture
def penstock(tmp_path, monkeypatch, capsys):
    """What a command prints that is typed beside `mine.py`; its error if it has one."""
    (tmp_path / "mine.py").write_text(GPIPE)
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["penstock", *words])
        try:
            main()
        except SystemExit as ended:
            return str(ended)
        return capsys.readouterr().out

    return run


def test_a_python_file_is_shown_and_compared_as_a_schedule_with_a_name(penstock):
    named = penstock("show", "gpipe", "--ranks", "3", "--microbatches", "5")
    assert penstock("show", "mine.py", "--ranks", "3", "--microbatches", "5") == named.replace("gpipe", "mine.py")
    assert "makespan" in penstock("compare", "mine.py", "1f1b")
    assert "wrote mine.csv" in penstock("show", "mine.py", "--csv", "mine.csv")
    assert "proved: mine.csv over 4 ranks" in penstock("show", "mine.csv")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("show", "min.py"), "the table min.py does not exist (did you mean mine.py?)"),
        (("show", "mine.py", "--group-size", "2"), "the table mine.py is read as it stands: leave out group_size"),
        (("show", "broken.py"), "broken.py, line 2: ZeroDivisionError: division by zero, in schedule(0, 4, 8)"),
        (("train", "--schedule", "mine.py"), "let `penstock show mine.py --csv mine.csv` write its table, and use that"),
    ],
)
def test_what_is_no_schedule_is_told_in_one_line(penstock, tmp_path, words, message):
    (tmp_path / "broken.py").write_text("def schedule(rank, ranks, microbatches):\n    yield 1 / 0\n")
    assert message in penstock(*words)


def test_only_who_shows_a_python_file_runs_it(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit('it was run')")
    with pytest.raises(ps.PenstockError, match="would be run, which only `penstock show` and `penstock compare` do"):
        table_of(str(file), 2, 2)


@pytest.mark.parametrize(("number", "name"), [(9, "1f1b"), (11, "interleaved-1f1b"), (13, "zb-h1")])
def test_a_solved_puzzle_is_a_schedule(tmp_path, number, name):
    file = tmp_path / "solved.py"
    file.write_text(load_puzzle(number).solution)
    assert table_from_file(str(file), 4, 8).actions == schedule.build(name, ranks=4, microbatches=8).actions


def test_so_is_one_that_is_told_the_costs(tmp_path):
    file = tmp_path / "solved.py"
    file.write_text(load_puzzle(20).solution)
    schedule.verify(table_from_file(str(file), 3, 4))
    file.write_text("def rows(ranks, microbatches, costs):\n    return 1\n")
    with pytest.raises(ps.ScheduleError, match=r"solved.py, line \d+: TypeError|solved.py: TypeError.*in rows\(3, 4, costs\)"):
        table_from_file(str(file), 3, 4)
