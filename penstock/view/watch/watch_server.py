"""Serve the page of a run to the browser on this machine. The run's folder is only read.

The page polls `/state`, and has a frame with the page of the run's last timeline.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.view import html, local_server
from penstock.view.local_server import NOT_FOUND, Answer
from penstock.view.reading import load
from penstock.view.watch.live_run import LiveRun

if TYPE_CHECKING:
    from werkzeug.serving import BaseWSGIServer
    from werkzeug.wrappers import Request

POLICY = (  # inline scripts are for the timeline in the frame, whose own policy allows them by hash
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)

FILES = {  # path of the URL -> (package, file in its `page/`)
    "": ("penstock.view.watch", "watch.html"),
    "watch.css": ("penstock.view.watch", "watch.css"),
    "watch.js": ("penstock.view.watch", "watch.js"),
    "page.css": ("penstock.view", "page.css"),
    "format.js": ("penstock.view", "data/format.js"),
}


def make_server(folder: Path, port: int = 0) -> "BaseWSGIServer":
    """Make a server of the page, not started; port 0 takes a free port. Raises PenstockError if the port is not free."""

    run = LiveRun(folder)

    def handle(request: "Request") -> Answer:
        """Return the page, one of its files, the run's state or its timeline."""
        name = request.path.removeprefix("/")
        if request.method != "GET":
            return Answer("The page of a run is read only.\n", "txt", 405)
        if name == "state":
            return Answer(json.dumps(run.state()), "json")
        if name == "timeline":
            try:
                return Answer(html.page([load(folder)]), "html")
            except PenstockError as error:
                return Answer(f"{error}\n", "txt", 404)
        if name in FILES:
            package, file = FILES[name]
            return Answer((files(package) / "page" / file).read_text(encoding="utf-8"), file.rpartition(".")[2])
        return NOT_FOUND

    return local_server.make_server(local_server.application(handle, POLICY, "the page of a run"), port)


@contextmanager
def serve_in_background(folder: Path, port: int = 0) -> Iterator[str]:
    """Serve the page of the run in `folder` during the block. Yields its address."""
    with make_server(folder, port) as web_server:
        thread = threading.Thread(target=web_server.serve_forever, args=(0.1,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{web_server.port}/"
        finally:
            web_server.shutdown()
            thread.join()


def serve(folder: Path, port: int = 0, browser: bool = True) -> None:
    """Serve until Ctrl-C, and open the page in a browser if `browser`."""
    with make_server(folder, port) as web_server:
        local_server.run(web_server, f"{folder} is", browser)
