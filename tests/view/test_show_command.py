"""`penstock show` and `penstock compare`, run as a person would."""

import json
from dataclasses import replace
from functools import partial

import prompt
import pytest
from timelines import COSTS, measured

from penstock.commands.train.config import TrainConfig
from penstock.plan import LayerCost, ModelProfile, plan
from penstock.schedule import Costs, build, simulate, with_teacher
from penstock.view.record import Record, save

pytestmark = pytest.mark.ranks

LOWERED = ["0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1", "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"]


penstock = partial(prompt.penstock, columns=100)


@pytest.fixture
def run(tmp_path):
    """The folder of a run, with the timelines of two of its steps."""
    schedule = build("1f1b", ranks=2, microbatches=4)
    folder = tmp_path / "run"
    folder.mkdir()
    steps = [measured(schedule, 1), measured(schedule, 2)]
    save(steps, simulate(schedule, COSTS), folder / "timeline.json", ["step 10", "step 20"])
    return folder


def test_show_writes_every_picture_it_is_asked_for(tmp_path):
    pytest.importorskip("PIL")
    files = [tmp_path / name for name in ("a.html", "a.json", "a.svg", "a.png")]
    options = [
        word for name, file in zip(("html", "perfetto", "svg", "png"), files, strict=True) for word in (f"--{name}", file)
    ]
    done = penstock("show", "zb-h1", "--ranks", "2", *options)
    assert done.stdout.splitlines()[-4:] == [f"wrote {file}" for file in files], done.stderr
    assert [file.read_bytes()[:9] for file in files] == [b"<!doctype", b'{"display', b"<svg xmln", b"\x89PNG\r\n\x1a\n\x00"]


def test_show_draws_a_run_as_it_was_measured_and_predicted_at_one_scale(run, tmp_path):
    done = penstock("show", run, "--html", tmp_path / "run.html")
    lines = done.stdout.splitlines()
    assert lines[0] == "1f1b, measured, step 20", done.stderr
    assert lines[1].startswith("rank 0 |F0")
    assert lines[3].startswith("makespan 16")
    assert " ms, bubble " in lines[3]
    assert lines[5] == "predicted"
    assert len(lines[6]) < len(lines[1])  # it is shorter
    assert "step 10" in (tmp_path / "run.html").read_text()
    again = penstock("show", run / "timeline.json")
    assert again.stdout.splitlines() == lines[:-1]


def test_show_adds_a_teacher_and_reads_its_table(tmp_path):
    done = penstock("show", "1f1b", "--ranks", "2", "--teacher", "--csv", tmp_path / "taught.csv")
    again = penstock("show", tmp_path / "taught.csv")
    assert done.stdout.splitlines()[0].startswith("proved: 1f1b with a teacher ahead over 2 ranks, 6 stages"), done.stderr
    assert again.stdout.splitlines()[1:] == done.stdout.splitlines()[1:-1], again.stderr


def test_show_reads_a_lowered_table_of_pytorch(tmp_path):
    (tmp_path / "lowered.csv").write_text("\n".join(LOWERED))
    done = penstock("show", tmp_path / "lowered.csv", "--perfetto", tmp_path / "trace.json")
    assert done.stdout.splitlines()[1] == "proved: its own sends and receives, in their order, as well", done.stderr
    assert done.stdout.splitlines()[2].startswith("rank 0 |F0")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "s" for event in trace) == 4


def test_a_table_that_deadlocks_is_drawn_until_where_each_rank_stops(tmp_path):
    (tmp_path / "stuck.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n")
    done = penstock("show", tmp_path / "stuck.csv", "--svg", tmp_path / "a.svg", "--html", tmp_path / "a.html")
    assert done.stdout.splitlines() == [
        "rank 0 |" + "F0".ljust(92, "-"),
        "rank 1 |" + "." * 92,
        "rank 0 stops before 0B0",
        "rank 1 stops before 1F1",
        f"wrote {tmp_path / 'a.html'}",
        f"wrote {tmp_path / 'a.svg'}",
    ]
    assert "stuck.csv deadlocks: rank 0 waits for the gradient of 1B0 from rank 1, before 0B0" in done.stderr
    assert done.returncode == 1
    assert "stops before 1F1" in (tmp_path / "a.svg").read_text()
    assert "deadlocks: rank 0 stops before 0B0, rank 1 stops before 1F1" in (tmp_path / "a.html").read_text()


def test_a_table_that_is_refused_for_another_reason_is_not_drawn(tmp_path):
    (tmp_path / "short.csv").write_text("0F0,0B0,0F1\n1F0,1B0,1F1,1B1\n")
    done = penstock("show", tmp_path / "short.csv")
    assert "is not complete: rank 0 lacks 0B1" in done.stderr
    assert done.stdout == ""


def test_compare_draws_both_at_one_scale_and_lists_the_differences(tmp_path):
    done = penstock("compare", "1f1b", "zb-v", "--html", tmp_path / "both.html")
    assert done.stdout.splitlines() == [
        "1f1b",
        "rank 0 |F0F1F2F3............B0==F4B1==F5B2==F6B3==F7B4==..B5==..B6==..B7==",
        "rank 1 |..F0F1F2........B0==F3B1==F4B2==F5B3==F6B4==F7B5==..B6==..B7==....",
        "rank 2 |....F0F1....B0==F2B1==F3B2==F4B3==F5B4==F6B5==F7B6==..B7==........",
        "rank 3 |......F0B0==F1B1==F2B2==F3B3==F4B4==F5B5==F6B6==F7B7==............",
        "zb-v",
        "rank 0 |FFFFFFFFIWFIWFIWFIWFIWFIWIWFIWIWFIWIWFIWIWIWIWIW...",
        "rank 1 |.FFFFFFFFIWFIWFIWFIWFIWFIWFIWIWFIWIWFIWIIIWIWIWWW..",
        "rank 2 |..FFFFFFFFIWFIWFIWFIWFIWFIWFIWFIWIWFIWIIIIIWIWWWWW.",
        "rank 3 |...FFFFFFFFIWFIWFIWFIWFIWFIWFIWFIWFIWIIIIIIIWWWWWWW",
        "                         1f1b  zb-v    difference",
        "makespan                   33  25.5        -22.7%",
        "bubble                  27.3%  5.9%  -21.4 points",
        "memory, most on a rank      4     4          same",
        "idle by fill            13.6%  2.9%  -10.7 points",
        "idle by order            0.0%  0.0%          same",
        "idle by imbalance        0.0%  0.0%          same",
        "idle by drain           13.6%  2.9%  -10.7 points",
        "idle by communication    0.0%  0.0%          same",
        f"wrote {tmp_path / 'both.html'}",
    ]


def test_what_did_different_work_is_compared_with_a_warning(run):
    more = run.parent / "more"
    more.mkdir()
    save(measured(build("1f1b", ranks=2, microbatches=6), 1), None, more / "timeline.json")
    for folder, batch in ((run, 8), (more, 16)):
        (folder / "run.json").write_text(json.dumps({"config": TrainConfig(batch=batch, seed=batch).to_json()}))
    output = penstock("compare", run, more).stdout.splitlines()
    assert output[-1] == "these differ in microbatches (4 and 6) and batch (8 and 16): their times are those of different work"


def test_compare_takes_two_runs(run):
    done = penstock("compare", run, run)
    assert done.stdout.count("same") == 8, done.stderr
    assert "ms" in done.stdout


def test_a_schedule_beside_a_run_is_predicted_at_its_costs(run):
    output = penstock("compare", "gpipe", run).stdout
    assert "gpipe, predicted  1f1b, measured" in output
    assert "1f1b, measured, is itself predicted to take 1" in output
    assert "differ in" not in output  # it has the run's ranks and microbatches


def test_a_run_with_a_teacher_is_compared_without_it(tmp_path):
    table = with_teacher(build("1f1b", ranks=2, microbatches=4), "V")
    Record((replace(simulate(table, Costs(0.01, 0.01, 0.01)), name="1f1b, measured"),), None, "s").save(tmp_path / "run.json")
    output = penstock("compare", "gpipe", tmp_path / "run.json").stdout
    alone = "1f1b, measured, without its teacher took 150 ms, and is itself predicted to take 150 ms"
    assert f"{alone}, +0.0%" in output or f"{alone}, -0.0%" in output  # a sum of times rounds either way


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "1f1b", "--html", "nowhere/a.html"], "nowhere/a.html cannot be written: No such file or directory"),
        (
            ["show", "tests"],
            "tests has no timeline: there is no file tests/timeline.json, nor are there traces of torch.profiler",
        ),
        (["show", "nowhere/traces"], "nowhere/traces has no timeline: there is no file nowhere/traces"),
        (["show", "x.json"], "x.json has no timeline: there is no file x.json"),
        (["show", "RUN", "--table"], "is a timeline, not a table: leave out --table, --csv and --teacher"),
        (["compare", "1f1b", "PLAN"], "1f1b is in units of its costs, and "),
        (["compare", "1f1b", "gpip"], "did you mean gpipe?"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(words, message, run, tmp_path):
    if "PLAN" in words:
        layers = ModelProfile.from_layers([LayerCost("a", 0.1, 0.1, 0.1), LayerCost("b", 0.1, 0.1, 0.1)])
        plan(layers, 2, 1e12, batch=2, effort="quick")[0].save(tmp_path / "PLAN.json")
        words = [*words[:-1], str(tmp_path / "PLAN.json")]
    done = penstock(*(run if word == "RUN" else word for word in words))
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_figure_in_a_file_of_another_format_is_refused(tmp_path):
    result = prompt.penstock("show", "1f1b", "--svg", tmp_path / "x.pdf")
    assert result.returncode != 0
    assert f"--svg {tmp_path / 'x.pdf'} would be SVG in a .pdf: give {tmp_path / 'x.svg'}" in " ".join(result.stderr.split())
    assert not (tmp_path / "x.pdf").exists()
