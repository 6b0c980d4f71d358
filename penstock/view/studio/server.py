"""Serve the studio's page and its answers to the browser on this machine."""

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
    first_answer = answer(START)
    record = {"name": first_answer["name"], "unit": "", "planned": None}
    inside = {
        "styles": "\n".join(f'<link rel="stylesheet" href="{name}">' for name in STYLES),
        "scripts": "\n".join(f'<script src="{name}"></script>' for name in (*DRAWN_BY, *OWN)),
        "records": _embedded([record | {"steps": [{"label": "planned", "timeline": first_answer["timeline"]}]}]),
        "choices": _embedded({**choices(), "start": START, "first": first_answer, "opened": opened is not None}),
    }
    return re.sub(r"\$(\w+)", lambda match: inside[match[1]], part("studio.html"))


def _embedded(data: object) -> str:
    """Return JSON for a script element, which no text in it can end early."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def respond(workers: Workers, body: bytes) -> Answer:
    """Answer the question in `body`, line by line; a refused question is answered with its error."""
    try:
        return Answer(workers.answer(json.loads(body)), "ndjson")
    except (ValueError, RecursionError) as error:
        return Answer(json.dumps({"error": f"the question is not JSON: {error}"}), "json", 400)


def handle(workers: Workers, opened: Opened | None, request: "Request") -> Answer:
    """Answer a request: the page, a file, or a question."""
    name = request.path.removeprefix("/")
    if request.method == "GET" and not name:
        return Answer(page(opened), "html")
    if request.method == "GET" and name == "opened" and opened:
        return Answer(json.dumps(opened.data(), separators=(",", ":")), "json")
    if request.method == "GET" and name in (*DRAWN_BY, *OWN, *STYLES):
        return Answer(part(name), name.rpartition(".")[2])
    if request.method == "POST" and name == "answer":
        if request.mimetype != "application/json":  # other sites' pages cannot send this type without permission
            return Answer("A question is JSON, as application/json.\n", "txt", 415)
        return respond(workers, request.get_data())
    return NOTHING


def server(port: int = 0, opened: Opened | None = None, workers: Workers | None = None) -> "BaseWSGIServer":
    """Make a server for this machine, not started; port 0 takes a free port. Raises PenstockError if the port is not free."""
    app = serving.application(partial(handle, workers or Workers(), opened), POLICY, "the studio")
    return serving.server(app, port)


def serve(port: int = 0, browser: bool = True, opened: Opened | None = None) -> None:
    """Serve until Ctrl-C, and open the page in a browser if `browser`."""
    with closing(Workers()) as workers, server(port, opened, workers) as web_server:
        workers.warm()
        serving.run(web_server, "the studio is", browser)
