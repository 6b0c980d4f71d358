"""The studio: its answers, and its server."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from http.client import HTTPConnection
from unittest.mock import Mock

import pytest
from studios import request, run_of, served

from penstock import PenstockError
from penstock.commands.source import question_of
from penstock.schedule import ActivationSize, Costs, Measurement, build, simulate, verify, with_teacher
from penstock.view.reading import read
from penstock.view.record import Record
from penstock.view.studio import answers
from penstock.view.studio.answers import answer
from penstock.view.studio.studio_server import OpenedFile
from penstock.view.studio.worker import Workers

CIRCLE = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]


def asked(name="1f1b", ranks=4, microbatches=8, **more):
    return answer({"schedule": name, "ranks": ranks, "microbatches": microbatches, **more})


# ---- answers


def test_an_answer_is_what_verify_and_simulate_say():
    found, table = asked("zb-v", 4, 8), build("zb-v", ranks=4, microbatches=8)
    assert found["proof"]["text"] == str(verify(table))
    assert found["timeline"]["makespan"] == simulate(table).makespan
    assert found["rows"] == table.csv_rows()
    assert not found["stopped"]
    json.dumps(found)


def test_costs_are_those_of_all_stages_but_where_a_stage_has_its_own():
    found = asked(costs={"forward": 2, "send": 0.5, "stages": {"1": {"backward_weight": 3}, "9": {"forward": 7}}})
    costs = Costs([2] * 4, [1] * 4, [1, 3, 1, 1], send=0.5)
    assert found["timeline"]["makespan"] == simulate(build("1f1b", ranks=4, microbatches=8), costs).makespan


def test_a_memory_limit_that_is_passed_fails_the_proof_and_leaves_the_picture():
    found = asked(max_in_flight=3)
    assert found["proof"]["text"] == "rank 0 holds 4 activations in flight, max_in_flight allows 3"
    assert not found["proof"]["holds"]
    assert found["timeline"]["makespan"] == 33


def test_a_cycle_is_told_with_its_actions_and_drawn_as_far_as_it_runs():
    found = answer({"rows": CIRCLE, "placement": [0, 1], "name": "mine"})
    assert not found["proof"]["holds"]
    assert found["proof"]["text"].startswith("mine deadlocks: rank 0 waits for the gradient of 1B0 from rank 1, before 0B0")
    assert sorted(found["proof"]["actions"]) == ["0B0", "0F1", "1B0", "1F1"]
    assert found["proof"]["waits"] == [("1B0", "0B0"), ("0F1", "1F1")]
    assert found["stopped"]
    assert [event["action"] for row in found["timeline"]["ranks"] for event in row["events"]] == ["0F0", "1F0"]


def test_a_rank_that_needs_its_own_later_action_is_told():
    found = answer({"rows": [["0B0", "0F0"]], "placement": [0]})
    assert found["proof"]["waits"] == [("0F0", "0B0")]
    assert found["timeline"]["makespan"] == 0


def test_csv_goes_out_and_comes_back_the_same():
    for name in ("zb-v", "dualpipe-v"):  # the second with pairs
        before = asked(name)
        after = answer({"csv": before["csv"], "file": "mine.csv"})
        assert after["rows"] == before["rows"]
        assert after["name"] == "mine.csv"
        assert list(csv.reader(io.StringIO(after["csv"]))) == before["rows"]


def test_an_incomplete_table_is_shown_and_said_to_be():
    found = answer({"csv": "0F0,0B0\n1F0\n"})
    assert found["proof"]["text"] == "table is not complete: rank 1 lacks 1B0"
    assert found["rows"] == [["0F0", "0B0"], ["1F0"]]


@pytest.mark.slow
def test_a_better_table_is_found_within_the_memory_that_was_taken_or_the_limit():
    results, costs = [], {"forward": 3, "backward_input": 4, "backward_weight": 2}
    question = {"schedule": "zb-h1", "ranks": 3, "microbatches": 6, "costs": costs}
    before, found = answer(question), answer({**question, "better": True}, results.append)
    assert found["name"] == "zb-h1 (searched)"
    assert found["proof"]["holds"]
    assert found["found"]["bound"] <= found["timeline"]["makespan"] <= before["timeline"]["makespan"]
    assert all(
        now <= then for now, then in zip(*(value["timeline"]["peak_in_flight"] for value in (found, before)), strict=True)
    )
    assert all(0 <= result["share"] <= 1 for result in results)
    tight = answer({**question, "max_in_flight": 2, "better": True})
    assert max(tight["timeline"]["peak_in_flight"]) <= 2
    with pytest.raises(PenstockError, match="64 stages of 512 microbatches are more than the studio searches for"):
        answer({"schedule": "1f1b", "ranks": 64, "microbatches": 512, "better": True})


@pytest.mark.slow
def test_a_table_with_a_teacher_is_edited_and_searched_as_any_other():
    table = with_teacher(build("1f1b", ranks=2, microbatches=4))
    text = io.StringIO()
    csv.writer(text).writerows(table.csv_rows())
    loaded = answer({"csv": text.getvalue(), "file": "taught.csv"})
    assert loaded["proof"]["text"] == str(verify(replace(table, name="taught.csv")))
    assert loaded["timeline"]["makespan"] == simulate(table).makespan

    first, second = loaded["rows"]
    mark, *cells = first
    edited = {"rows": [[mark, *sorted(cells, key=lambda cell: cell[0] == "0")], second]}  # the teacher's forwards first
    assert answer(edited)["proof"]["holds"]
    assert answer(edited)["timeline"]["makespan"] > loaded["timeline"]["makespan"]
    assert answer({**edited, "better": True})["timeline"]["makespan"] <= loaded["timeline"]["makespan"]


def test_a_run_brings_its_table_and_its_costs_in_milliseconds():
    found = answer({"run": run_of(), "file": "timeline.json"})
    assert found["rows"] == build("1f1b", ranks=2, microbatches=4).csv_rows()
    assert found["costs"]["stages"]["0"]["forward"] == pytest.approx(10, rel=0.01)
    assert found["costs"]["stages"]["1"]["forward"] == pytest.approx(20, rel=0.01)
    assert found["costs"]["send"] == pytest.approx(1, rel=0.01)
    assert found["measured"]["steps"][0]["label"] == "step 7"
    assert found["timeline"]["makespan"] == pytest.approx(found["measured"]["steps"][0]["timeline"]["makespan"], rel=0.02)
    planned = answer({"rows": found["rows"], "placement": found["placement"], "costs": found["costs"], "unit": "ms"})
    assert planned["timeline"] == found["timeline"]


def test_the_verdict_on_a_run_is_of_all_its_steps_as_on_its_page():
    fast, slow = (read(run_of(), "run").steps[0] for _ in range(2))
    slow = replace(
        slow, rows=tuple(tuple(cell._replace(start=3 * cell.start, end=3 * cell.end) for cell in row) for row in slow.rows)
    )
    run = json.dumps(Record((fast, slow, slow), None, "s").data())
    assert answer({"run": run})["measured"]["verdict"]["text"] == read(run, "run").explanation.verdict_text


def beside_a_run(run, **table):
    return answer({**table, "costs": answer({"run": run})["costs"], "unit": "ms"})


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "zb-h1", "gpipe", "dualpipe-v"])
def test_another_schedule_beside_a_run_takes_what_the_verdict_on_the_run_says(name):
    run = run_of(layers=(5, 4))
    found = beside_a_run(run, schedule=name, ranks=2, microbatches=4)
    steps = read(run, "run").steps
    predicted = Measurement.from_timelines(*steps, layers=(5, 4)).predict(build(name, ranks=2, microbatches=4))
    assert found["timeline"]["makespan"] == pytest.approx(predicted.makespan, rel=1e-9)
    assert found["proof"]["holds"]
    assert not found["stopped"]
    assert found["stuck"] == []


def test_two_stages_on_a_rank_do_not_double_the_work_of_a_run():
    one, two = (beside_a_run(run_of(), schedule=name, ranks=2, microbatches=4)["timeline"] for name in ("1f1b", "zb-v"))
    assert two["busy"] == pytest.approx(one["busy"], rel=0.35)  # the slower half of the model is on both ranks
    assert sum(two["busy"]) == pytest.approx(sum(one["busy"]), rel=1e-6)


def test_a_table_that_stops_is_drawn_as_far_as_it_runs_beside_a_run_too():
    found = beside_a_run(run_of(), rows=CIRCLE, placement=[0, 1])
    assert found["stopped"]
    assert [event["action"] for row in found["timeline"]["ranks"] for event in row["events"]] == ["0F0", "1F0"]


@pytest.mark.costly
def test_microbatches_may_be_unlike_in_size():
    """By hand, and as a run had them: drawn at their width, also in another schedule, and searched."""
    costs = {"microbatches": {"1": 3}}
    expected = simulate(build("1f1b", ranks=2, microbatches=4), Costs(microbatch_factors=[1, 3, 1, 1]))
    assert asked("1f1b", 2, 4, costs=costs)["timeline"]["makespan"] == expected.makespan
    of_three = simulate(build("1f1b", ranks=2, microbatches=3), Costs(microbatch_factors=[1, 3, 1]))  # a quick search
    assert asked("1f1b", 2, 3, costs=costs, better=True)["found"]["makespan"] <= of_three.makespan

    ragged = replace(expected, name="1f1b, measured", rows=expected.rows, microbatch_factors=())
    run = json.dumps(Record((ragged,), None, "s").data())
    factors = answer({"run": run})["costs"]["microbatches"]
    assert [factors[str(number)] for number in range(4)] == pytest.approx([2 / 3, 2, 2 / 3, 2 / 3])
    planned = beside_a_run(run, schedule="gpipe", ranks=2, microbatches=4)["timeline"]
    lengths = [event["end"] - event["start"] for event in planned["ranks"][0]["events"]]
    assert lengths[1] == pytest.approx(3 * lengths[0])
    with pytest.raises(PenstockError, match="the factor of microbatch 1 is -1"):
        asked("1f1b", 2, 4, costs={"microbatches": {"1": -1}})


def test_a_rank_may_take_several_times_as_long():
    found = asked(costs={"ranks": {"2": 3}, "stages": {"1": {"forward": 2}}})
    costs = Costs([1, 2, 3, 1], [1, 1, 3, 1], [1, 1, 3, 1])
    assert found["timeline"]["makespan"] == simulate(build("1f1b", ranks=4, microbatches=8), costs).makespan
    slower = beside_a_run(run_of(), schedule="1f1b", ranks=2, microbatches=4)["timeline"]["busy"]
    costs = {**answer({"run": run_of()})["costs"], "ranks": {"1": 2}}
    found = answer({"schedule": "1f1b", "ranks": 2, "microbatches": 4, "costs": costs, "unit": "ms"})["timeline"]["busy"]
    assert found == pytest.approx((slower[0], 2 * slower[1]))


MEASURED = {"placement": [0, 1], "layers": [1, 1], "full": [1, 1], "engine": [[0] * 4] * 2, "sends": [1]}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"placement": []}, "the run has 0 stages"),
        ({"placement": [10**9]}, "a rank is 1000000000"),
        ({"layers": [1]}, "layers has 1 numbers, not 2"),
        ({"layers": [0, 1]}, "layers has a 0"),
        ({"engine": [[0] * 3] * 2}, "engine has 3 numbers, not 4"),
        ({"engine": []}, "engine has 0 rows for 2 stages"),
        ({"sends": "x"}, "sends is 'x': give a list"),
    ],
)
def test_costs_of_a_run_that_cannot_be_are_refused_in_a_sentence(changed, sentence):
    with pytest.raises(PenstockError, match=sentence):
        answer({"rows": [["0F0", "0B0"]], "unit": "ms", "costs": {"measured": {**MEASURED, **changed}}})


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        ([], "the question is .*: give an object"),
        ({}, "schedule is None: give a text"),
        ({"schedule": "1f1", "ranks": 4, "microbatches": 8}, "did you mean 1f1b"),
        ({"schedule": "1f1b", "ranks": 65, "microbatches": 8}, "ranks is 65: the studio takes a whole number from 1 to 64"),
        ({"schedule": "1f1b", "ranks": 4, "microbatches": "8"}, "microbatches is '8'"),
        ({"schedule": "1f1b", "ranks": True, "microbatches": 8}, "ranks is True"),
        ({"schedule": "1f1b", "ranks": 4, "microbatches": 8, "stages_per_rank": 2}, "1f1b has one stage on each rank"),
        ({"rows": [[f"{stage}F2100"] for stage in range(64)]}, "use 2048 microbatches or fewer"),
        ({"rows": CIRCLE, "costs": {"send": -1}}, "send is -1: a cost is a number from 0"),
        ({"rows": CIRCLE, "costs": {"forward": float("nan")}}, "forward of stage 0 is nan"),
        ({"rows": CIRCLE, "costs": {"stages": {"0": 3}}}, "the cost of stage 0 is 3: give an object"),
        ({"rows": CIRCLE, "max_in_flight": 0}, "max_in_flight is 0"),
        ({"rows": CIRCLE, "unit": "h"}, "unit is 'h'"),
        ({"rows": CIRCLE, "placement": [0, 2]}, "placement has 2: give the rank of every stage, 0 to 1"),
        ({"rows": [["0F999999999", "0B0"]]}, "has a number of"),
        ({"rows": [["0F٩٩٩٩٩٩٩٩٩"]]}, "has a number of"),
        ({"rows": [["0F0"] * 400_000]}, "400000 actions: the studio takes up to 393216"),
        ({"rows": [[1]]}, "a cell is 1: give a text"),
        ({"csv": "0F0,0X0"}, "cannot read '0X0' as an action"),
        ({"run": "{}"}, "timeline.json is not a timeline that Penstock wrote"),
        ({"run": "[" * 100_000}, "timeline.json is not a timeline that Penstock wrote"),
        ({"run": run_of(unit="")}, "was planned, not measured"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_a_sentence(question, sentence):
    with pytest.raises(PenstockError, match=sentence):
        answer(question)


@pytest.mark.costly
def test_the_largest_question_is_built_proved_and_timed_once(monkeypatch):
    calls = {name: Mock(side_effect=getattr(answers, name)) for name in ("build", "verify", "simulate_at_page_costs")}
    for name, call in calls.items():
        monkeypatch.setattr(answers, name, call)
    found = asked("interleaved-zb", 16, 32, stages_per_rank=4)
    assert sum(map(len, found["rows"])) == 3 * 16 * 4 * 32
    assert [call.call_count for call in calls.values()] == [1, 1, 1]


# ---- over HTTP


@pytest.fixture(scope="module")
def port():
    with served() as number:
        yield number


def post(port, question, **headers):
    body = question if isinstance(question, str) else json.dumps(question)
    return request(port, "POST", "/answer", body, **{"Content_Type": "application/json", **headers})


def test_the_page_and_its_parts_are_served_with_a_policy_that_allows_only_them(port):
    response, text = request(port)
    assert response.status == 200
    assert "default-src 'none'; script-src 'self'" in response.headers["Content-Security-Policy"]
    parts = re.findall(r'<(?:script src|link rel="stylesheet" href)="([^"]+)"', text)
    assert len(parts) >= 9
    assert {request(port, path=f"/{part}")[0].status for part in parts} == {200}


def test_a_question_is_answered_and_a_refusal_is_a_sentence(port):
    response, text = post(port, {"schedule": "1f1b", "ranks": 4, "microbatches": 8})
    assert response.status == 200
    assert json.loads(text)["timeline"]["makespan"] == 33
    response, text = post(port, {"schedule": "1f1b", "ranks": 99, "microbatches": 8})
    assert json.loads(text) == {"error": "ranks is 99: the studio takes a whole number from 1 to 64"}


@pytest.mark.costly
def test_what_nobody_waits_for_any_more_is_stopped(port):
    huge = {"schedule": "interleaved-zb", "ranks": 64, "microbatches": 512, "stages_per_rank": 4}
    with closing(Workers()) as workers:
        parts = workers.answer(huge)
        assert next(parts) == b"\n"  # it is still computed
        [worker] = workers.processes
        parts.close()
        assert worker.poll() == -signal.SIGKILL
        small = b"".join(workers.answer({"schedule": "1f1b", "ranks": 2, "microbatches": 2}))
        assert json.loads(small)["proof"]["holds"]
    assert not workers.processes


def test_a_process_that_dies_is_told_and_the_next_question_is_answered():
    with closing(Workers()) as workers:
        workers.warm()
        [worker] = workers.processes
        worker.kill()
        assert "was ended" in json.loads(b"".join(workers.answer({"schedule": "1f1b", "ranks": 2, "microbatches": 2})))["error"]
        assert b"proved" in b"".join(workers.answer({"schedule": "1f1b", "ranks": 2, "microbatches": 2}))


def test_a_file_it_was_opened_with_is_read_again_when_it_has_changed(tmp_path, port):
    path, rule = tmp_path / "mine.py", "def schedule(rank, ranks, microbatches):\n    return ['0F0', '0{}0']\n"
    path.write_text(rule.format("B"))
    opened = OpenedFile(path, partial(question_of, str(path), 1, 1))
    with served(opened) as own:
        first, again = (json.loads(request(own, path="/opened")[1]) for _ in range(2))
        assert again == first == {"changed": first["changed"], "rows": [["0F0", "0B0"]], "placement": [0], "name": "mine.py"}
        for later, (text, name, part) in enumerate(
            ((rule.format("I"), "rows", "0I0"), (rule.format("X"), "error", "0X0"), ("x = = 3", "error", "line 1")), 1
        ):
            path.write_text(text)
            os.utime(path, ns=(0, int(first["changed"]) + later))  # the clock of files may be slow
            data = json.loads(request(own, path="/opened")[1])
            assert data["changed"] != first["changed"]
            assert part in str(data[name])
        path.unlink()
        assert json.loads(request(own, path="/opened")[1]) == {"changed": "", "error": f"{path} is gone"}
    assert request(port, path="/opened")[0].status == 404


def test_what_is_no_table_is_told_before_the_studio_opens(tmp_path):
    with pytest.raises(PenstockError, match=r"notes\.txt is no table: the studio opens a \.csv or a \.py file"):
        question_of(str(tmp_path / "notes.txt"), 4, 8)
    with pytest.raises(PenstockError, match=r"mine\.csv does not exist"):
        question_of(str(tmp_path / "mine.csv"), 4, 8)
    (tmp_path / "mine.csv").write_bytes(b"\xff\xfe0F0")
    with pytest.raises(PenstockError, match="cannot be read"):
        question_of(str(tmp_path / "mine.csv"), 4, 8)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "10.0.0.1", "localhost.", "", "0.0.0.0"])
def test_another_host_is_refused(port, host):
    for method, path in (("GET", "/"), ("POST", "/answer"), ("GET", "/studio.js")):
        response, text = request(port, method, path, Host=host)
        assert response.status in (400, 403)
        assert "records" not in text


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8080"])
def test_this_machine_by_its_names_is_answered(port, host):
    assert request(port, Host=host)[0].status == 200


def test_bad_requests_get_a_line_and_the_server_goes_on(port):
    assert post(port, "{")[0].status == 400
    assert post(port, "[" * 200_000)[0].status == 400
    assert post(port, "{}", Content_Type="text/plain")[0].status == 415
    assert request(port, path="/../../etc/passwd")[0].status == 404
    assert request(port, path="/answer")[0].status == 404
    connection = HTTPConnection("127.0.0.1", port)
    connection.putrequest("POST", "/answer")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(10**9))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()
    assert request(port)[0].status == 200


def test_only_this_machine_can_connect(port):
    from penstock.view.studio.studio_server import make_server

    with make_server() as serving:
        assert serving.socket.getsockname() == ("127.0.0.1", serving.port)


def test_a_port_that_is_taken_is_told(port):
    from penstock.view.studio.studio_server import make_server

    with pytest.raises(PenstockError, match=f"--port {port} cannot be used: .*leave it out"):
        make_server(port)


@pytest.mark.ranks
def test_without_werkzeug_one_line_says_what_to_install():
    code = "import sys; sys.modules['werkzeug'] = None; sys.modules['werkzeug.exceptions'] = None\n"
    code += "sys.argv = ['penstock', 'studio', '--no-browser']\nfrom penstock.commands.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    message = "penstock: the studio is served with Werkzeug, which is not installed: pip install 'penstock-pipeline[studio]'"
    assert done.stderr.strip() == message


def test_what_never_runs_is_laid_out_where_its_rank_would_come_to_it():
    table = {"rows": [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]], "placement": [0, 1]}
    found = answer({**table, "costs": {"forward": 2, "backward_input": 1, "backward_weight": 3}})
    assert found["stopped"]
    assert sorted(found["proof"]["actions"]) == ["0B0", "0F1", "1B0", "1F1"]
    laid = [(value["rank"], value["action"], value["start"], value["end"]) for value in found["stuck"]]
    assert laid[:3] == [(0, "0B0", 2, 6), (0, "0F1", 6, 8), (0, "0B1", 8, 12)]
    assert laid[3:] == [(1, "1F1", 4, 6), (1, "1B0", 6, 10), (1, "1B1", 10, 14)]
    assert answer({"schedule": "1f1b", "ranks": 2, "microbatches": 2})["stuck"] == []


def test_a_pair_that_never_runs_is_laid_out_as_one():
    rows = [["0F0", "(0B0;0F1)OVERLAP_F_B", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    found = answer({"rows": rows, "placement": [0, 1]})
    assert [(value["action"], value["start"], value.get("half")) for value in found["stuck"]][:3] == [
        ("0B0", 1, 0),
        ("0F1", 1, 1),
        ("0B1", 4, None),
    ]


def test_a_run_whose_memory_was_measured_is_planned_in_bytes():
    record = read(run_of(), "run")
    step = replace(
        record.steps[0], activation_sizes=(ActivationSize(3000, 1000), ActivationSize(2000, 2000)), memory_unit="bytes"
    )
    found = answer({"run": json.dumps(Record((step,), None, "s", ("step 7",)).data()), "file": "timeline.json"})
    assert found["costs"]["sizes"] == [[3000, 1000], [2000, 2000]]
    assert (found["timeline"]["memory_unit"], found["timeline"]["peak_memory"]) == ("bytes", (6000, 2000))
    assert found["measured"]["steps"][0]["timeline"]["peak_memory"] == (6000, 2000)
    again = answer({"schedule": "gpipe", "ranks": 2, "microbatches": 4, "costs": found["costs"], "unit": "ms"})
    assert again["timeline"]["peak_memory"] == (12000, 8000)
    other = answer({"schedule": "gpipe", "ranks": 3, "microbatches": 4, "costs": found["costs"], "unit": "ms"})
    assert other["timeline"]["memory_unit"] == "bytes"  # of thirds of the model
    assert other["timeline"]["peak_memory"] == pytest.approx((4 * 2000, 4 * 5000 / 3, 4 * 4000 / 3))
    with pytest.raises(PenstockError, match="sizes has other than two numbers for each stage"):
        answer({"schedule": "gpipe", "ranks": 2, "microbatches": 4, "costs": {"sizes": [[1], [2]]}})
