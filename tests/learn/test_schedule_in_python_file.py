"""A schedule in a Python file: shown because its path was typed, and never run otherwise."""

import pytest

import penstock as ps
from penstock import schedule
from penstock.commands.source import table_of
from penstock.learn.puzzles.puzzle_files import load_puzzle
from penstock.python_file import table_from_file
from penstock.schedule.schedule import from_rule


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
        (("show", "lacking.py"), "lacking.py has no function schedule(rank, ranks, microbatches), nor schedule(ranks, microb"),
        (("show", "whole.py", "--ranks", "3"), "whole.py: schedule(3, 8) returns a table of 2 ranks: let it have 3"),
        (("show", "text.py"), "text.py: schedule(4, 8) returns a str: let it return a Schedule"),
        (("show", "raising.py"), "raising.py, line 2: ZeroDivisionError: division by zero, in schedule(4, 8)"),
        (("bench", "--schedule", "mine.py"), "let `penstock show mine.py --csv mine.csv` write its table, and use that"),
        (
            ("train", "--schedule", "mine.py", "--stages-per-rank", "2"),
            "mine.py is read as it stands: leave out stages_per_rank",
        ),
        (("train", "--schedule", "broken.py"), "broken.py, line 2: ZeroDivisionError"),
    ],
)
def test_what_is_no_schedule_is_told_in_one_line(penstock, tmp_path, words, message):
    whole = (
        "from penstock.schedule import build\ndef schedule(ranks, microbatches):\n    return build('1f1b', 2, microbatches)\n"
    )
    for name, text in {
        "broken": "def schedule(rank, ranks, microbatches):\n    yield 1 / 0\n",
        "lacking": "def table(ranks, microbatches): ...",
        "whole": whole,
        "text": "def schedule(ranks, microbatches): return '0F0'",
        "raising": "def schedule(ranks, microbatches):\n    return 1 / 0\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert message in penstock(*words)


def test_a_function_of_ranks_and_microbatches_makes_the_whole_table(penstock, tmp_path):
    rule = """
from penstock.schedule import Kind, list_schedule

def schedule(ranks, microbatches):
    limit = [ranks - rank for rank in range(ranks)]
    return list_schedule("loop", lambda action, _: action.kind is Kind.F, ranks=ranks, microbatches=microbatches, limit=limit)
"""
    (tmp_path / "rule.py").write_text(rule)
    named = penstock("show", "1f1b", "--ranks", "3", "--microbatches", "5")
    assert penstock("show", "rule.py", "--ranks", "3", "--microbatches", "5") == named.replace("1f1b", "rule.py")
    with pytest.raises(ps.ScheduleError, match="rule returns a whole table, which has its own placement"):
        from_rule(lambda ranks, microbatches: schedule.build("1f1b", ranks, microbatches), 2, 2, "rule", "V")


@pytest.mark.ranks
@pytest.mark.costly
def test_train_runs_a_rule_at_any_number_of_microbatches_and_again_only_if_it_is_typed(penstock, tmp_path):
    words = ("train", "--model", "gpt", "--ranks", "2", "--layers", "2", "--width", "8", "--context", "8", "--batch", "6")
    small = (*words, "--steps", "2", "--no-timeline", "--device", "cpu", "--compare", "--out", "runs")
    assert "equal to the last bit, all steps" in penstock(*small, "--schedule", "mine.py", "--microbatches", "3")
    [run] = (tmp_path / "runs").iterdir()
    refused = penstock("train", "--resume", str(run), "--steps", "3")
    assert "is the Python file mine.py, which is run only if you type its name: add --schedule mine.py" in refused


def test_only_who_shows_a_python_file_runs_it(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit('it was run')")
    with pytest.raises(ps.PenstockError, match="would be run, which only `penstock show`, `compare`, `studio` and `train` do"):
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
