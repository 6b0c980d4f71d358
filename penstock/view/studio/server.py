"""The page and its answers over HTTP, for the browser on this machine and for nobody else.

The socket listens on 127.0.0.1 only, and a request that calls the machine by another name is refused: so no page from
elsewhere gets here, not even by a name that it points to this address (DNS rebinding). Nothing is stored.
"""

import json
import os
import re
import socket
import threading
import webbrowser
from contextlib import suppress
from importlib.resources import files
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.view.html import SCRIPTS
from penstock.view.studio.answers import Data, answer, choices

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication
    from werkzeug.serving import BaseWSGIServer
    from werkzeug.wrappers import Request, Response

LOOPBACK = ("127.0.0.1", "localhost")
PATIENCE, LONGEST = 10.0, 30.0  # seconds between two pieces of a request; for all of it
LARGEST = 40_000_000  # bytes of a question; a run's timeline is the largest thing in one
START = {"schedule": "1f1b", "ranks": 4, "microbatches": 8}

# What the page is made of, in the order its scripts build on each other; the canvas is that of `penstock show --html`.
DRAWN_BY = SCRIPTS
OWN = ("address.js", "table.js", "picture.js", "controls.js", "studio.js")
STYLES = ("page.css", "studio.css")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
TYPES = {"js": "text/javascript", "css": "text/css", "html": "text/html", "json": "application/json", "txt": "text/plain"}


def _part(name: str) -> str:
    package = "penstock.view" if name in (*DRAWN_BY, STYLES[0]) else "penstock.view.studio"
    return (files(package) / "page" / name).read_text(encoding="utf-8")


def page() -> str:
    """The page, with its first answer inside, so that there is a picture before any question."""
    first = answer(START)
    record = {"name": first["name"], "unit": "", "planned": None}
    inside = {
        "styles": "\n".join(f'<link rel="stylesheet" href="/{name}">' for name in STYLES),
        "scripts": "\n".join(f'<script src="/{name}"></script>' for name in (*DRAWN_BY, *OWN)),
        "records": _embedded([record | {"steps": [{"label": "planned", "timeline": first["timeline"]}]}]),
        "choices": _embedded({**choices(), "start": START, "first": first}),
    }
    return re.sub(r"\$(\w+)", lambda found: inside[found[1]], _part("studio.html"))


def _embedded(data: object) -> str:
    """JSON that no text in it can end before its time."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def respond(body: bytes) -> tuple[int, Data]:
    """The status and the answer to the question in `body`; a question that Penstock refuses is answered with its sentence."""
    try:
        return 200, answer(json.loads(body))
    except PenstockError as error:
        return 200, {"error": str(error)}
    except (ValueError, RecursionError) as error:
        return 400, {"error": f"the question is not JSON: {error}"}


def application() -> "WSGIApplication":
    """The WSGI application. Raises PenstockError if Werkzeug is not installed."""
    try:
        from werkzeug.exceptions import HTTPException
        from werkzeug.sansio.utils import host_is_trusted
        from werkzeug.wrappers import Request, Response
    except ImportError as error:
        told = "the studio is served with Werkzeug, which is not installed: pip install 'penstock[studio]'"
        raise PenstockError(told) from error

    def reply(text: str, kind: str, status: int = 200) -> "Response":
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
        headers |= {"Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin"}
        return Response(text, status, headers, content_type=f"{TYPES[kind]}; charset=utf-8")

    def routed(request: "Request") -> "Response":
        """The answer to one request: a page, a file, or what a question comes to."""
        if not host_is_trusted(request.headers.get("Host"), LOOPBACK):
            return reply(f"The studio answers at http://127.0.0.1 only, not at {request.headers.get('Host')!r}.\n", "txt", 403)
        if request.headers.get("Origin", own := f"http://{request.headers['Host']}") != own:
            return reply("The studio answers its own page only.\n", "txt", 403)
        name = request.path.removeprefix("/")
        if request.method == "GET" and not name:
            return reply(page(), "html")
        if request.method == "GET" and name in (*DRAWN_BY, *OWN, *STYLES):
            return reply(_part(name), name.rpartition(".")[2])
        if request.method == "POST" and name == "answer":
            if request.mimetype != "application/json":  # what a page from elsewhere may send unasked is not that
                return reply("A question is JSON, as application/json.\n", "txt", 415)
            status, data = respond(request.get_data())
            return reply(json.dumps(data, separators=(",", ":")), "json", status)
        return reply("There is nothing here.\n", "txt", 404)

    class Limited(Request):
        max_content_length = LARGEST

    @Limited.application
    def app(request: "Request") -> "Response":
        try:
            return routed(request)
        except HTTPException as error:
            return reply(f"{error.description}\n", "txt", error.code or 400)

    return app


def server(port: int = 0) -> "BaseWSGIServer":
    """A server for this machine alone, not started; port 0 takes a free one. Raises PenstockError if it cannot be had."""
    app = application()
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        """Says nothing, and gives a client that is idle, or sends a request byte by byte, the time that it may take."""

        timeout = PATIENCE

        def setup(self) -> None:
            """Begin: from now on the request has to come."""
            super().setup()
            self._end = threading.Timer(LONGEST, self._hear_no_more)
            self._end.daemon = True
            self._end.start()

        def _hear_no_more(self) -> None:
            with suppress(OSError):  # the client has gone
                self.connection.shutdown(socket.SHUT_RD)

        def finish(self) -> None:
            """It is answered."""
            self._end.cancel()
            super().finish()

        def log(self, type: str, message: str, *args: object) -> None:
            """Say nothing of requests."""

    try:
        listening = socket.create_server(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "ports are numbers up to 65535"
        raise PenstockError(f"--port {port} cannot be used: {why}; leave it out to take a free one") from error
    with listening:  # the server has its own copy
        return make_server("127.0.0.1", port, app, threaded=True, request_handler=Handler, fd=listening.fileno())


def serve(port: int = 0, browser: bool = True) -> None:
    """Serve until Ctrl-C, and open the page in a browser unless told not to."""
    with server(port) as serving:
        address = f"http://127.0.0.1:{serving.port}/"
        print(f"the studio is at {address} (Ctrl-C ends it)", flush=True)
        if browser:
            webbrowser.open(address)
        serving.serve_forever()  # Ctrl-C ends it
