"""HTTP for the browser on this machine only.

The socket listens on 127.0.0.1, and a request with another host name is refused: so pages of other sites cannot send requests,
not even with a name that resolves to this address (DNS rebinding). Nothing is stored.
"""

import os
import socket
import threading
import webbrowser
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication
    from werkzeug.serving import BaseWSGIServer
    from werkzeug.wrappers import Request, Response

LOOPBACK = ("127.0.0.1", "localhost")
PIECE_TIMEOUT_SECONDS, REQUEST_TIMEOUT_SECONDS = 10.0, 30.0  # seconds between two pieces of a request; for all of it
MAX_REQUEST_BYTES = 40_000_000  # a run's timeline is the largest part of one
TYPES = {"js": "text/javascript", "css": "text/css", "html": "text/html", "txt": "text/plain"}
TYPES |= {"json": "application/json", "ndjson": "application/x-ndjson"}  # one value, and one a line


class Answer(NamedTuple):
    """The answer to a request."""

    text: str | Iterable[bytes]  # in parts: closed when the client goes away
    kind: str  # of TYPES
    status: int = 200


NOTHING = Answer("This page does not exist.\n", "txt", 404)


def application(handle: Callable[["Request"], Answer], policy: str, name: str) -> "WSGIApplication":
    """Return a WSGI application that answers with `handle`, under that content security policy. `name`: for its errors.

    Raises PenstockError if Werkzeug is not installed.
    """
    try:
        from werkzeug.exceptions import HTTPException
        from werkzeug.sansio.utils import host_is_trusted
        from werkzeug.wrappers import Request, Response
    except ImportError as error:
        raise PenstockError(
            f"{name} is served with Werkzeug, which is not installed: pip install 'penstock[studio]'"
        ) from error

    def reply(answer: Answer) -> "Response":
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
        headers |= {"Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin"}
        return Response(answer.text, answer.status, headers, content_type=f"{TYPES[answer.kind]}; charset=utf-8")

    def routed(request: "Request") -> Answer:
        """Answer a request of this machine and of its own page; refuse others."""
        if not host_is_trusted(request.headers.get("Host"), LOOPBACK):
            refusal = f"{name.capitalize()} answers at http://127.0.0.1 only, not at {request.headers.get('Host')!r}.\n"
            return Answer(refusal, "txt", 403)
        if request.headers.get("Origin", own_origin := f"http://{request.headers['Host']}") != own_origin:
            return Answer(f"{name.capitalize()} answers its own page only.\n", "txt", 403)
        return handle(request)

    class Limited(Request):
        max_content_length = MAX_REQUEST_BYTES

    @Limited.application
    def app(request: "Request") -> "Response":
        try:
            return reply(routed(request))
        except HTTPException as error:
            return reply(Answer(f"{error.description}\n", "txt", error.code or 400))

    return app


def server(app: "WSGIApplication", port: int = 0) -> "BaseWSGIServer":
    """Make a server for this machine, not started; port 0 takes a free port. Raises PenstockError if the port is not free."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        """A handler without a log, which limits the time of a client that is idle or slow."""

        timeout = PIECE_TIMEOUT_SECONDS

        def setup(self) -> None:
            """Start the timer of the request."""
            super().setup()
            self._end = threading.Timer(REQUEST_TIMEOUT_SECONDS, self._stop_reading)
            self._end.daemon = True
            self._end.start()

        def _stop_reading(self) -> None:
            with suppress(OSError):  # the client has gone
                self.connection.shutdown(socket.SHUT_RD)

        def finish(self) -> None:
            """Stop the timer."""
            self._end.cancel()
            super().finish()

        def log(self, type: str, message: str, *args: object) -> None:
            """Log nothing."""

    try:
        listening = socket.create_server(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "ports are numbers up to 65535"
        raise PenstockError(f"--port {port} cannot be used: {why}; leave it out to take a free one") from error
    with listening:  # the server has its own copy
        return make_server("127.0.0.1", port, app, threaded=True, request_handler=Handler, fd=listening.fileno())


def run(web_server: "BaseWSGIServer", name: str, browser: bool) -> None:
    """Print the address, open it in a browser if `browser`, and serve until Ctrl-C."""
    address = f"http://127.0.0.1:{web_server.port}/"
    print(f"{name} at {address} (Ctrl-C ends it)", flush=True)
    if browser:
        webbrowser.open(address)
    web_server.serve_forever()
