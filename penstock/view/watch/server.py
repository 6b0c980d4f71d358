"""A run's folder, to the browser on this machine; it is only read.

`/state` is what the page asks again and again; the chart below is the page of the run's last timeline, in a frame.
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

PARTS = {  # what the page is made of: the package that has it, and its file
    "": ("penstock.view.watch", "watch.html"),
    "watch.css": ("penstock.view.watch", "watch.css"),
    "watch.js": ("penstock.view.watch", "watch.js"),
    "page.css": ("penstock.view", "page.css"),
    "words.js": ("penstock.view", "data/words.js"),
}


def server(folder: Path, port: int = 0) -> "BaseWSGIServer":
    """A server of the page, not started; port 0 takes a free one. Raises PenstockError if it cannot be had."""

    run = GrowingRun(folder)

    def answered(request: "Request") -> Answer:
        """The page, its files, and how far the run is."""
        name = request.path.removeprefix("/")
        if request.method != "GET":
            return Answer("A run is only looked at.\n", "txt", 405)
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

    return serving.server(serving.application(answered, POLICY, "the page of a run"), port)


@contextmanager
def watched(folder: Path, port: int = 0) -> Iterator[str]:
    """The address at which the run in `folder` is seen meanwhile."""
    with server(folder, port) as serves:
        thread = threading.Thread(target=serves.serve_forever, args=(0.1,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{serves.port}/"
        finally:
            serves.shutdown()
            thread.join()


def serve(folder: Path, port: int = 0, browser: bool = True) -> None:
    """Serve until Ctrl-C, and open the page in a browser unless told not to."""
    with server(folder, port) as serves:
        serving.run(serves, f"{folder} is", browser)
