"""The page and its answers, to the browser on this machine."""

import json
import re
from contextlib import closing
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING

from penstock.view import serving
from penstock.view.html import SCRIPTS
from penstock.view.serving import NOTHING, Answer
from penstock.view.studio.answers import answer, choices
from penstock.view.studio.opened import Opened
from penstock.view.studio.worker import Workers

if TYPE_CHECKING:
    from werkzeug.serving import BaseWSGIServer
    from werkzeug.wrappers import Request

START = {"schedule": "1f1b", "ranks": 4, "microbatches": 8}

# What the page is made of, in the order its scripts build on each other; the canvas is that of `penstock show --html`.
DRAWN_BY = SCRIPTS
OWN = (
    *("asking.js", "address.js", "working.js", "circle.js", "table.js", "picture.js"),
    *("controls.js", "editor.js", "showing.js", "studio.js"),
)
STYLES = ("page.css", "studio.css")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def part(name: str) -> str:
    """The text of a file of the page."""
    package = "penstock.view" if name in (*DRAWN_BY, STYLES[0]) else "penstock.view.studio"
    return (files(package) / "page" / name).read_text(encoding="utf-8")


def page(opened: Opened | None = None) -> str:
    """The page, with its first answer inside, so that there is a picture before any question."""
    first = answer(START)
    record = {"name": first["name"], "unit": "", "planned": None}
    inside = {
        "styles": "\n".join(f'<link rel="stylesheet" href="{name}">' for name in STYLES),
        "scripts": "\n".join(f'<script src="{name}"></script>' for name in (*DRAWN_BY, *OWN)),
        "records": _embedded([record | {"steps": [{"label": "planned", "timeline": first["timeline"]}]}]),
        "choices": _embedded({**choices(), "start": START, "first": first, "opened": opened is not None}),
    }
    return re.sub(r"\$(\w+)", lambda found: inside[found[1]], part("studio.html"))


def _embedded(data: object) -> str:
    """JSON that no text in it can end before its time."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def respond(workers: Workers, body: bytes) -> Answer:
    """The answer to the question in `body`, line by line; a question that Penstock refuses is answered with its sentence."""
    try:
        return Answer(workers.answer(json.loads(body)), "ndjson")
    except (ValueError, RecursionError) as error:
        return Answer(json.dumps({"error": f"the question is not JSON: {error}"}), "json", 400)


def answered(workers: Workers, opened: Opened | None, request: "Request") -> Answer:
    """The answer to one request: a page, a file, or what a question comes to."""
    name = request.path.removeprefix("/")
    if request.method == "GET" and not name:
        return Answer(page(opened), "html")
    if request.method == "GET" and name == "opened" and opened:
        return Answer(json.dumps(opened.data(), separators=(",", ":")), "json")
    if request.method == "GET" and name in (*DRAWN_BY, *OWN, *STYLES):
        return Answer(part(name), name.rpartition(".")[2])
    if request.method == "POST" and name == "answer":
        if request.mimetype != "application/json":  # what a page from elsewhere may send unasked is not that
            return Answer("A question is JSON, as application/json.\n", "txt", 415)
        return respond(workers, request.get_data())
    return NOTHING


def server(port: int = 0, opened: Opened | None = None, workers: Workers | None = None) -> "BaseWSGIServer":
    """A server for this machine alone, not started; port 0 takes a free one. Raises PenstockError if it cannot be had."""
    app = serving.application(partial(answered, workers or Workers(), opened), POLICY, "the studio")
    return serving.server(app, port)


def serve(port: int = 0, browser: bool = True, opened: Opened | None = None) -> None:
    """Serve until Ctrl-C, and open the page in a browser unless told not to."""
    with closing(Workers()) as workers, server(port, opened, workers) as serves:
        workers.warm()
        serving.run(serves, "the studio is", browser)
