"""Serve the page of a run to the browser on this machine. The run's folder is only read.

The page polls `/state`; below it a frame shows the page of the run's last timeline.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.view import html, serving
from penstock.view.reading import load
from penstock.view.serving import NOTHING, Answer
from penstock.view.watch.growing import GrowingRun

if TYPE_CHECKING:
    from werkzeug.serving import BaseWSGIServer
    from werkzeug.wrappers import Request

POLICY = (  # the timeline has its script and style inside, and names them by hash in a policy of its own
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)

PARTS = {  # path -> the package and the file in its `page/`
    "": ("penstock.view.watch", "watch.html"),
    "watch.css": ("penstock.view.watch", "watch.css"),
    "watch.js": ("penstock.view.watch", "watch.js"),
    "page.css": ("penstock.view", "page.css"),
    "words.js": ("penstock.view", "data/words.js"),
}


def server(folder: Path, port: int = 0) -> "BaseWSGIServer":
    """Make a server of the page, not started; port 0 takes a free port. Raises PenstockError if the port is not free."""

    run = GrowingRun(folder)

    def handle(request: "Request") -> Answer:
        """Answer with the page, its files, or the run's state."""
        name = request.path.removeprefix("/")
        if request.method != "GET":
            return Answer("The page of a run only reads.\n", "txt", 405)
        if name == "state":
            return Answer(json.dumps(run.state()), "json")
        if name == "timeline":
            try:
                return Answer(html.page([load(folder)]), "html")
            except PenstockError as error:
                return Answer(f"{error}\n", "txt", 404)
        if name in PARTS:
            package, part = PARTS[name]
            return Answer((files(package) / "page" / part).read_text(encoding="utf-8"), part.rpartition(".")[2])
        return NOTHING

    return serving.server(serving.application(handle, POLICY, "the page of a run"), port)


@contextmanager
def watched(folder: Path, port: int = 0) -> Iterator[str]:
    """Serve the page of the run in `folder` meanwhile, and yield its address."""
    with server(folder, port) as web_server:
        thread = threading.Thread(target=web_server.serve_forever, args=(0.1,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{web_server.port}/"
        finally:
            web_server.shutdown()
            thread.join()


def serve(folder: Path, port: int = 0, browser: bool = True) -> None:
    """Serve until Ctrl-C, and open the page in a browser if `browser`."""
    with server(folder, port) as web_server:
        serving.run(web_server, f"{folder} is", browser)
