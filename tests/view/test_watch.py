"""The page of a run while it runs: what it reads, to whom it is shown, and that it changes nothing."""

import json

import pytest
from prompt import penstock
from studios import request, run_of

from penstock.view.reading import load
from penstock.view.watch.live_run import LiveRun
from penstock.view.watch.watch_server import serve_in_background

RECORD = {"loss": 2.5, "seconds": 0.1, "tokens_per_second": 1000.0, "bubble": 0.2, "bubble_of_the_table": 0.1}


def got(address, path, method="GET", **headers):
    response, text = request(int(address.rstrip("/").rpartition(":")[2]), method, path, **headers)
    return response.status, text


def test_a_run_is_seen_from_its_first_line_on(tmp_path):
    run = LiveRun(tmp_path)
    assert run.state()["last"] is None
    lines = [json.dumps({"step": step, **RECORD}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines[:2]) + "\n" + lines[2][:20])  # the third is being written
    found = run.state()
    assert found["last"]["step"] == 2
    assert found["losses"] == [(1, 2.5), (2, 2.5)]
    assert found["timeline"] is None
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({**RECORD, "step": step}) + "\n" for step in range(3000)))
    assert len(LiveRun(tmp_path).state()["losses"]) <= 400


def test_what_was_read_of_a_run_is_not_read_again_until_the_run_begins_another_file(tmp_path):
    file, run = tmp_path / "metrics.jsonl", LiveRun(tmp_path)
    text = "".join(json.dumps({"step": step, **RECORD}) + "\n" for step in (1, 2))
    file.write_text(text)
    assert run.state()["last"]["step"] == 2
    with file.open("r+") as open_file:
        open_file.write("x" * len(text))  # would be no JSON
        open_file.write(json.dumps({"step": 3, **RECORD}) + "\n")
    assert [step for step, _ in run.state()["losses"]] == [1, 2, 3]
    (tmp_path / "beside").write_text(text)
    (tmp_path / "beside").replace(file)  # as a run that is resumed does
    assert [step for step, _ in run.state()["losses"]] == [1, 2]
    file.write_text(json.dumps({"step": 1, **RECORD, "loss": float("nan")}) + "\n")
    assert run.state()["losses"] == [(1, None)]  # the browser's JSON has no NaN


def test_the_page_is_for_this_machine_and_only_reads(tmp_path):
    pytest.importorskip("werkzeug")
    with serve_in_background(tmp_path) as address:
        for path in ("/", "/watch.js", "/format.js", "/watch.css", "/page.css", "/state"):
            assert got(address, path)[0] == 200
        status, result = got(address, "/timeline")
        assert status == 404
        assert "has no timeline" in result
        (tmp_path / "timeline.json").write_text(run_of())
        status, page = got(address, "/timeline")
        assert status == 200
        assert "step 7" in page
        assert json.loads(got(address, "/state")[1])["timeline"] is not None
        assert got(address, "/state", "POST")[0] == 405
        assert got(address, "/../run.json")[0] == 404
        assert got(address, "/state", Host="evil.example")[0] in (400, 403)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["timeline.json"]


@pytest.mark.ranks
def test_a_run_that_is_watched_leaves_timelines_while_it_trains(tmp_path):
    pytest.importorskip("werkzeug")
    sizes = {"ranks": 2, "microbatches": 2, "batch": 4, "layers": 1, "width": 16, "context": 16, "steps": 11}
    small = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    done = penstock("train", *small, "--watch", "--no-timeline", "--out", tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    assert "watch it at http://127.0.0.1:" in done.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    assert load(folder).label == "step 10"
    assert LiveRun(folder).state()["last"]["step"] == 11
