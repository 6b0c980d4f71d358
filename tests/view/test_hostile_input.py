"""Files and requests that nobody of good will sends: a sentence each, in bounded time, and the studio goes on."""

import json
import socket
import time
from contextlib import suppress
from http.client import HTTPException

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from studios import request, served

import penstock as ps
from penstock.commands.source import table_of
from penstock.schedule import Schedule, build, simulate
from penstock.schedule.pytorch_csv import script_from_compute_comms_csv
from penstock.view import local_server, reading, record
from penstock.view.studio import worker
from penstock.view.studio.answers import answer

pytestmark = pytest.mark.slow

FUZZ = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])

TABLES = {
    "a field of many characters": b"0F0,0B0," + b"x" * 200_000,
    "a number of many digits": b"0F" + b"9" * 5000,
    "a microbatch that nobody has": b"0F0,0F999999999,0B0,0B999999999",
    "a stage that nobody has": b"999999999F0,999999999B0",
    "digits of another script": "0F٣,0B٣".encode(),
    "no text": bytes(range(256)),
    "NUL bytes": b"0F0,\x000B0",
    "a quote that does not end": b'"0F0,0B0',
    "a million lines": b"0F0\n" * 1_000_000,
    "a million cells": b"0F0," * 1_000_000,
    "nothing": b"",
    "a picture": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
}


@pytest.mark.parametrize("what", TABLES)
def test_a_table_that_is_none_is_refused_in_a_sentence(what, tmp_path):
    (tmp_path / "table.csv").write_bytes(TABLES[what])
    for read in (Schedule.from_csv, script_from_compute_comms_csv, lambda path: Schedule.from_csv(path, "loop")):
        with pytest.raises(ps.ScheduleError) as raised:
            read(tmp_path / "table.csv")
        assert len(str(raised.value)) < 500 + len(str(tmp_path))
        assert "\n" not in str(raised.value)


def test_a_table_that_does_not_end_is_refused():
    with pytest.raises(ps.ScheduleError, match="/dev/zero has more than 33,554,432 bytes"):
        Schedule.from_csv("/dev/zero")
    with pytest.raises(ps.PenstockError, match="does not exist"):
        table_of("/dev/zero.csv", 2, 2)


def mutated(text: bytes, changes: list[tuple[int, bytes, int]]) -> bytes:
    data = bytearray(text)
    for place, new, gone in changes:
        place %= len(data) + 1
        data[place : place + gone] = new
    return bytes(data)


changes = st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=4), st.integers(0, 5)), min_size=1, max_size=4)
TABLE = b"0F0,0F1,0B0,0B1\n1F0,1B0,1F1,(1B1;0F2)OVERLAP_F_B\n"


@FUZZ
@given(changes)
def test_a_mutated_table_is_read_or_refused(tmp_path, changes):
    (tmp_path / "table.csv").write_bytes(mutated(TABLE, changes))
    for read in (Schedule.from_csv, script_from_compute_comms_csv):
        with suppress(ps.ScheduleError):
            read(tmp_path / "table.csv")
    with suppress(ps.PenstockError):
        answer({"csv": mutated(TABLE, changes).decode(errors="replace")})
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]


# ---- timelines

TIMELINE = json.dumps(
    record.Record((simulate(build("1f1b", ranks=2, microbatches=2)),), None, "s", ("step 1",)).data()
).encode()
NUMBERS = ["1e400", "-1", "9" * 400, "9" * 5000, "NaN", "null", '"1"', "[]", "{}", "true"]


@FUZZ
@given(changes)
def test_a_mutated_timeline_is_read_or_refused(changes):
    with suppress(ps.PenstockError):
        reading.read(mutated(TIMELINE, changes), "timeline.json")


@FUZZ
@given(st.integers(0, 10**6), st.sampled_from(NUMBERS))
def test_a_timeline_with_another_value_somewhere_is_read_or_refused(place, number):
    data = json.loads(TIMELINE)
    places = []

    def walk(inside):
        for key in inside if isinstance(inside, dict) else range(len(inside)):
            places.append((inside, key))
            if isinstance(inside[key], dict | list):
                walk(inside[key])

    walk(data)
    inside, key = places[place % len(places)]
    inside[key] = "@here@"
    text = json.dumps(data).replace('"@here@"', number)
    for read in (lambda: reading.read(text, "timeline.json"), lambda: answer({"run": text})):
        with suppress(ps.PenstockError):
            read()


@pytest.mark.parametrize(
    "text", [b"", b"\x80\x04.", b"[" * 100_000, b'{"a":' * 100_000, b"null", b"{}", b"\xff\xfe{\0}\0", b"9" * 5000]
)
def test_what_is_no_timeline_is_refused_in_a_sentence(text, tmp_path):
    (tmp_path / "timeline.json").write_bytes(text)
    with pytest.raises(ps.PenstockError, match=r"timeline.json is not a timeline that Penstock wrote") as raised:
        reading.load(tmp_path)
    assert len(str(raised.value)) < 500 + len(str(tmp_path))


# ---- the studio


@pytest.fixture(scope="module")
def port():
    with served() as number:
        yield number


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1", "http://localhost:1", "file://"])
def test_a_page_from_elsewhere_is_not_answered(port, origin):
    question = json.dumps({"schedule": "1f1b", "ranks": 2, "microbatches": 2})
    response, text = request(port, "POST", "/answer", question, Origin=origin, Content_Type="application/json")
    assert (response.status, text) == (403, "The studio answers its own page only.\n")
    own = f"http://127.0.0.1:{port}"
    assert request(port, "POST", "/answer", question, Origin=own, Content_Type="application/json")[0].status == 200


def test_a_client_that_says_nothing_or_little_is_let_go(monkeypatch):
    monkeypatch.setattr(local_server, "READ_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(local_server, "REQUEST_TIMEOUT_SECONDS", 1000)
    with served() as port:
        for bit in (b"", b"GET / HT", b"POST /answer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(bit)
                while client.recv(4096):
                    pass


def test_a_client_that_goes_on_without_end_is_let_go(monkeypatch):
    monkeypatch.setattr(local_server, "READ_TIMEOUT_SECONDS", 1000)
    monkeypatch.setattr(local_server, "REQUEST_TIMEOUT_SECONDS", 0.6)
    with served() as port:
        with socket.create_connection(("127.0.0.1", port)) as client, suppress(OSError):
            while True:
                client.sendall(b"a")
                time.sleep(0.1)
        monkeypatch.setattr(local_server, "REQUEST_TIMEOUT_SECONDS", 1000)
        assert request(port)[0].status == 200


PATHS = ["/", "/answer", "/../../etc/passwd", "//etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/page.css/..", "/studio.js%00"]
paths = st.sampled_from(PATHS) | st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20).map("/{}".format)
methods = st.sampled_from(["GET", "POST", "PUT", "HEAD", "OPTIONS", "X"])
kinds = st.sampled_from(["application/json", "text/plain", "", "multipart/form-data; boundary=x"])
requests = st.tuples(methods, paths, st.binary(max_size=30), kinds)


@FUZZ
@given(requests)
def test_odd_requests_are_answered_without_a_traceback_and_without_a_file_from_elsewhere(port, asked):
    method, path, body, kind = asked
    with suppress(HTTPException):
        response, text = request(port, method, path, body, Content_Type=kind)
        assert response.status < 500 or response.status == 501
        assert "Traceback" not in text
        assert "root:" not in text


WORDS = ["schedule", "ranks", "microbatches", "rows", "costs", "csv", "run", "placement", "stages", "sizes", "0"]
atoms = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["1f1b", "0F0", "ms"])
questions = st.recursive(
    atoms,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS), inner),
    max_leaves=12,
)


@FUZZ
@given(questions)
def test_odd_questions_are_refused_in_a_sentence(question):
    data = worker.answer_question(json.loads(json.dumps(question)))
    assert "timeline" in data or not data["error"].startswith("Penstock failed")


@FUZZ
@given(st.binary(max_size=60))
def test_odd_bytes_do_not_stop_the_studio(port, data):
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(data + b"\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            text = b""
            while more := client.recv(65536):
                text += more
            assert b"Traceback" not in text
