"""`penstock plan`, `penstock search` and `penstock train --plan`, as a person would run them."""

import json
import os
import re
import shlex
import signal
from pathlib import Path

import pytest

from penstock import PenstockError
from penstock.commands import cli
from penstock.commands.plan import PlanCommand, SearchBar, call_model_function
from penstock.commands.search import SearchCommand
from penstock.commands.source import question_of
from penstock.commands.train.config import TrainConfig
from penstock.commands.train.plan_option import advice, apply_plan
from penstock.partition.balance import Balance
from penstock.plan import LayerCost, ModelProfile, load, parse_memory_size
from penstock.schedule import Kind, Measurement, Schedule, build
from penstock.view.studio.answers import answer

SMALL = ["--steps", "2", "--batch", "8", "--width", "16", "--context", "16", "--layers", "3", "--checkpoint-every", "0"]
MODEL = """
from torch import nn, randn

def build():
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), (randn(4, 8),)

def half():
    return nn.Linear(8, 8)
"""


@pytest.fixture
def costs(tmp_path):
    """A file with the costs of eight layers, the last one dearer."""
    layers = [LayerCost(f"layers.{number}", 0.003, 0.004, 0.002, 8e6, 4e6, 1e6, 1e6) for number in range(7)]
    ModelProfile.from_layers([*layers, LayerCost("head", 0.006, 0.008, 0.004, 2e6, 1e6, 8e6, 8)]).save(tmp_path / "costs.json")
    return tmp_path / "costs.json"


def run(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["penstock", *map(str, words)])
    cli.main()


@pytest.mark.slow
def test_plan_tells_plans_what_memory_would_buy_and_how_robust_the_best_is(costs, tmp_path, monkeypatch, capsys):
    out, words = tmp_path / "plan.json", ("--memory", "70MB", "--batch", "8", "--effort", "quick")
    run(monkeypatch, "plan", "--costs", costs, "--ranks", "4", *words, "--out", out)
    output = capsys.readouterr().out
    assert re.search(r"^1  +[\d.]+ ms  +[\d.]+%", output, re.MULTILINE)
    assert re.search(r"with [\d.]+ MB a rank: [\d.]+ ms, [\d.]+% less", output)
    assert "in the middle of 200 draws" in output
    assert load(out).why in output
    run(monkeypatch, "show", out)
    assert f"makespan {1e3 * load(out).seconds:.4g} ms" in capsys.readouterr().out
    run(monkeypatch, "compare", out, out)
    assert "same" in capsys.readouterr().out
    shown = answer(question_of(str(out), ranks=4, microbatches=8))
    assert shown["timeline"]["makespan"] == pytest.approx(load(out).timeline.makespan)
    monkeypatch.setenv("RANK", "0")
    assert apply_plan(TrainConfig(plan=str(out)))[1] == load(out)
    assert capsys.readouterr().out.startswith("planned: ")
    monkeypatch.setenv("RANK", "1")  # of torchrun's processes one tells
    apply_plan(TrainConfig(plan=str(out)))
    assert not capsys.readouterr().out
    out.write_text(out.read_text().replace('"penstock plan 1"', '"penstock plan 2"'))
    with pytest.raises(PenstockError, match=r"plan\.json"):
        answer(question_of(str(out), ranks=4, microbatches=8))


@pytest.mark.slow
def test_plan_measures_the_model_that_a_function_gives(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(MODEL)
    words = ("--ranks", "2", "--batch", "8", "--effort", "quick", "--save-costs", tmp_path / "costs.json")
    run(monkeypatch, "plan", f"{tmp_path / 'mine.py'}:build", *words)
    assert ModelProfile.load(tmp_path / "costs.json").layer_names == ["0", "1", "2", "3"]
    with pytest.raises(PenstockError, match=r"mine\.py names no function: write it as model\.py:build"):
        call_model_function(str(tmp_path / "mine.py"))
    with pytest.raises(PenstockError, match="must be a function that returns"):
        call_model_function(f"{tmp_path / 'mine.py'}:half")
    with pytest.raises(PenstockError, match=r"did you mean .*mine\.py"):
        call_model_function(f"{tmp_path / 'mime.py'}:build")
    (tmp_path / "broken.py").write_text("def build():\n    return 1 / 0\n")
    with pytest.raises(PenstockError, match=r"^build\(\) fails: broken\.py, line 2: ZeroDivisionError: division by zero$"):
        call_model_function(f"{tmp_path / 'broken.py'}:build")
    (tmp_path / "broken.py").write_text("x = = 3\n")
    with pytest.raises(PenstockError, match=r"^broken\.py, line 1: invalid syntax$"):
        call_model_function(f"{tmp_path / 'broken.py'}:build")


def test_ctrl_c_takes_the_best_so_far():
    with SearchBar() as bar:
        assert not bar("table 1 of 1", 0.5, 0.08)
        os.kill(os.getpid(), signal.SIGINT)
        assert bar("table 1 of 1", 0.6, 0.08)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_search_writes_a_table_that_keeps_the_limit(costs, tmp_path, capsys):
    SearchCommand(costs, ranks=4, microbatches=4, memory="64MB", effort="quick", csv=tmp_path / "found.csv").run()
    output = capsys.readouterr().out
    assert "no table within the limit is below" in output
    assert "the best published table" in output
    assert Schedule.from_csv(tmp_path / "found.csv").num_stages == 8
    with pytest.raises(PenstockError, match="8 stages, which do not divide by --ranks 0"):
        SearchCommand(costs, ranks=0).run()


@pytest.mark.costly
def test_search_orders_a_teacher_too(costs, tmp_path, capsys):
    SearchCommand(costs, ranks=2, stages=2, microbatches=4, teacher=0.5, effort="quick", csv=tmp_path / "found.csv").run()
    assert "the best published table, " in capsys.readouterr().out
    table = Schedule.from_csv(tmp_path / "found.csv")
    assert (table.placement, table.teacher, table.ahead) == ((0, 1, 1, 0, 0, 1), 2, True)


@pytest.mark.costly
def test_search_cuts_the_layers_of_a_run_and_says_times_and_memory_in_their_units(costs, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "costs.json").write_bytes(costs.read_bytes())
    for source, stages in ((tmp_path / "run", None), (costs, 4)):
        SearchCommand(source, stages, ranks=4, microbatches=2, memory="64MB", effort="quick", csv=tmp_path / "found.csv").run()
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("8 layers are cut into 4 stages of about equal time, before ")
        assert re.match(r"makespan [\d.]+ ms, .* activations in flight [\d/]+, which take [\d.]+ [kM]B/", lines[1])
        makespan = re.match(r"makespan ([\d.]+ ms)", lines[1])[1]
        assert f"step {makespan}, no table within the limit is below" in lines[3]
        assert Schedule.from_csv(tmp_path / "found.csv").num_stages == 4
    SearchCommand(tmp_path / "run", ranks=4, placement="V", microbatches=2, effort="quick").run()
    assert "layers are cut" not in capsys.readouterr().out  # eight layers are the eight stages of a V
    with pytest.raises(PenstockError, match=r"8 stages, which do not divide by --ranks 3\. If .* cut them: --stages 3"):
        SearchCommand(costs, ranks=3).run()


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GB", 2e9), ("500 mb", 5e8), ("2GiB", 2**31), ("2e9", 2e9), ("1.5T", None), ("0MB", None), ("2", None), ("lots", None)],
)
def test_memory_is_written_with_a_unit(text, size):
    if size is None:
        with pytest.raises(PenstockError, match="write it as 2GB"):
            parse_memory_size(text)
    else:
        assert parse_memory_size(text) == size


def test_plan_takes_a_model_or_costs(tmp_path):
    with pytest.raises(PenstockError, match="give a model to measure"):
        PlanCommand().run()
    with pytest.raises(PenstockError, match=r"has no costs\.json: a run of `penstock train` without --plan"):
        PlanCommand(costs=tmp_path).run()
    with pytest.raises(PenstockError, match=r"^there is no config\.jsn\.json"):
        PlanCommand("transformers:config.jsn.json").run()
    with pytest.raises(PenstockError, match=r"plan\.json cannot be written: there is no folder /not/there"):
        PlanCommand("model.py:build", out=Path("/not/there/plan.json")).run()
    with pytest.raises(PenstockError, match="cannot be written: it is a folder"):
        PlanCommand("model.py:build", out=tmp_path).run()


@pytest.mark.costly
def test_the_command_that_a_run_ends_with_writes_the_plan_that_it_tells(tmp_path, monkeypatch, capsys):
    table = build("1f1b", 2, 4)
    seconds = dict(zip(Kind, [(0.003, 0.006), (0.006, 0.012), (0.003, 0.006), (0.003, 0.006)], strict=True))
    sizes = ((8e6, 4e6), (8e6, 4e6))
    measured = Measurement(table, seconds, dict.fromkeys(Kind, (0.0, 0.0)), (0.00123456789,), activation_sizes=sizes)
    balance = Balance(tuple("abcdef"), (1.0,) * 6, (0, 3))
    monkeypatch.setattr("penstock.commands.train.plan_option.count_cores", lambda: 2)
    folder = tmp_path / "a run"
    folder.mkdir()
    result = advice(TrainConfig(ranks=2, microbatches=4, batch=8), folder, balance, dict.fromkeys("abcdef", 1e6), measured)
    words = r"planner: (\S+) on 2 ranks, (\d+) micro.*: (\S+) ms, .*; penstock train (.*) goes on with it"
    name, count, step, options = re.findall(words, result)[0]
    assert shlex.split(options) == ["--resume", str(folder), "--plan", str(folder / "better_plan.json"), "--steps", "200"]
    found = load(folder / "better_plan.json")
    assert (found.schedule.name, str(found.microbatches), f"{1e3 * found.seconds:.4g}") == (name, count, step)
    assert re.fullmatch(r'the cut: (pipe.rebuild\(cuts=\["[b-f]"\]\): .* ms, .*% less|no other cut .*)', result.splitlines()[0])


@pytest.mark.slow
@pytest.mark.ranks
def test_train_plans_runs_the_plan_and_says_how_they_compare(tmp_path, monkeypatch, capfd):
    run(monkeypatch, "train", "--ranks", "2", "--plan", "auto", "--compare", "--out", tmp_path, *SMALL)
    output = capfd.readouterr().out
    assert re.search(r"planned: \S+ on [12] ranks", output)
    assert re.search(r"a step of the table: planned [\d.]+ ms, measured [\d.]+ ms", output) or "on 1 ranks" in output
    assert len(re.findall(r"^tried: .* planned [\d.]+ ms, a whole step [\d.]+ ms$", output, re.MULTILINE)) in (2, 3)
    assert re.search(r"^chosen: .*\d ranks, \d+ microbatches: the fastest of those tried", output, re.MULTILINE)
    assert "equal to the last bit, all steps" in output
    (folder,) = tmp_path.iterdir()
    explained = (folder / "report.txt").read_text()
    assert re.search(r"rank 0 works [\d.]+ ms, [\d.]+ ms; holds .* of activations", explained) or "on 1 ranks" in output
    found = load(folder / "plan.json")
    assert json.loads((folder / "run.json").read_text())["config"]["microbatches"] == found.microbatches
    moved = folder.rename(tmp_path / "moved")
    run(monkeypatch, "train", "--resume", moved, "--steps", "3")
    assert len((moved / "metrics.jsonl").read_text().splitlines()) == 3
    assert [*tmp_path.iterdir()] == [moved]


@pytest.mark.ranks
def test_a_plan_for_another_model_leaves_no_folder(costs, tmp_path, monkeypatch):
    run(monkeypatch, "plan", "--costs", costs, "--ranks", "2", "--effort", "quick", "--out", tmp_path / "plan.json")
    with pytest.raises(SystemExit, match=r"^penstock: cannot cut before 'layers"):
        run(monkeypatch, "train", "--plan", tmp_path / "plan.json", "--out", tmp_path / "runs", *SMALL)
    assert not [*(tmp_path / "runs").iterdir()]
