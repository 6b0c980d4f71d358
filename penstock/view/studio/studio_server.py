"""Serve the studio's page and its answers to the browser on this machine."""

import json
import re
from collections.abc import Callable
from contextlib import closing
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.view import local_server
from penstock.view.data.timeline_data import Data
from penstock.view.html import SCRIPTS
from penstock.view.local_server import NOT_FOUND, Answer
from penstock.view.studio.answers import answer, choices
from penstock.view.studio.worker import Workers

if TYPE_CHECKING:
    from werkzeug.serving import BaseWSGIServer
    from werkzeug.wrappers import Request

FIRST_QUESTION = {"schedule": "1f1b", "ranks": 4, "microbatches": 8}

# Scripts of the page in order: later ones use earlier ones. The first draw, as in `penstock show --html`.
DRAWING_SCRIPTS = SCRIPTS
STUDIO_SCRIPTS = (
    *("client.js", "address.js", "progress.js", "wait_arrows.js", "table.js", "chart_editor.js"),
    *("controls.js", "editor.js", "answer_view.js", "studio.js"),
)
STYLES = ("page.css", "studio.css")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
Reader = Callable[[], Data]  # returns the question for the file's table, or raises PenstockError


class OpenedFile:
    """A file that the studio was opened with, whose table the page polls for. It is read again when it changes."""

    def __init__(self, path: Path, reader: Reader) -> None:
        self.path, self._reader = path, reader
        self._version_and_data = "", Data()  # when the file was changed, as read last; its question or error

    def data(self) -> Data:
        """Return the question for the file's table, or {"error"}. "changed" is another text after each change of the file."""
        try:
            version = str(self.path.stat().st_mtime_ns)
        except OSError:
            return {"changed": "", "error": f"{self.path} is gone"}
        if version != self._version_and_data[0]:
            try:
                data = self._reader()
            except PenstockError as error:
                data = {"error": str(error)}
            self._version_and_data = version, data
        return {"changed": version, **self._version_and_data[1]}


def read_page_file(name: str) -> str:
    """Return the text of a script or style of the page."""
    package = "penstock.view" if name in (*DRAWING_SCRIPTS, STYLES[0]) else "penstock.view.studio"
    return (files(package) / "page" / name).read_text(encoding="utf-8")


def page(opened: OpenedFile | None = None) -> str:
    """Return the page. It contains the answer for the first table, so that it draws at once."""
    first_answer = answer(FIRST_QUESTION)
    record = {"name": first_answer["name"], "unit": "", "predicted": None}
    substitutions = {
        "styles": "\n".join(f'<link rel="stylesheet" href="{name}">' for name in STYLES),
        "scripts": "\n".join(f'<script src="{name}"></script>' for name in (*DRAWING_SCRIPTS, *STUDIO_SCRIPTS)),
        "records": _script_json([record | {"steps": [{"label": "planned", "timeline": first_answer["timeline"]}]}]),
        "choices": _script_json({**choices(), "start": FIRST_QUESTION, "first": first_answer, "opened": opened is not None}),
    }
    return re.sub(r"\$(\w+)", lambda match: substitutions[match[1]], read_page_file("studio.html"))


def _script_json(data: object) -> str:
    """Return JSON for a script element, escaped so that no text in it can end the element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def respond(workers: Workers, body: bytes) -> Answer:
    """Return the answer to the question in `body`, as lines of JSON; {"error"} if it is not JSON."""
    try:
        return Answer(workers.answer(json.loads(body)), "ndjson")
    except (ValueError, RecursionError) as error:
        return Answer(json.dumps({"error": f"the question is not JSON: {error}"}), "json", 400)


def handle(workers: Workers, opened: OpenedFile | None, request: "Request") -> Answer:
    """Return the page, one of its files, the opened file's table, or the answer to a question."""
    name = request.path.removeprefix("/")
    if request.method == "GET" and not name:
        return Answer(page(opened), "html")
    if request.method == "GET" and name == "opened" and opened:
        return Answer(json.dumps(opened.data(), separators=(",", ":")), "json")
    if request.method == "GET" and name in (*DRAWING_SCRIPTS, *STUDIO_SCRIPTS, *STYLES):
        return Answer(read_page_file(name), name.rpartition(".")[2])
    if request.method == "POST" and name == "answer":
        if request.mimetype != "application/json":  # other sites' pages cannot send this type without permission
            return Answer("A question is JSON, as application/json.\n", "txt", 415)
        return respond(workers, request.get_data())
    return NOT_FOUND


def make_server(port: int = 0, opened: OpenedFile | None = None, workers: Workers | None = None) -> "BaseWSGIServer":
    """Make a server for this machine, not started; port 0 takes a free port. Raises PenstockError if the port is not free."""
    app = local_server.application(partial(handle, workers or Workers(), opened), POLICY, "the studio")
    return local_server.make_server(app, port)


def serve(port: int = 0, browser: bool = True, opened: OpenedFile | None = None) -> None:
    """Serve until Ctrl-C, and open the page in a browser if `browser`."""
    with closing(Workers()) as workers, make_server(port, opened, workers) as web_server:
        workers.warm()
        local_server.run(web_server, "the studio is", browser)
