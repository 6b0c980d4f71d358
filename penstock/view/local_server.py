"""Serve HTTP to the browser on this machine only.

The socket listens on 127.0.0.1. A request for another host name is refused, so that pages of other sites cannot send requests
by a name that resolves to this address (DNS rebinding). Nothing is stored.
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
READ_TIMEOUT_SECONDS, REQUEST_TIMEOUT_SECONDS = 10.0, 30.0  # for the next bytes of a request; for all of it
MAX_REQUEST_BYTES = 40_000_000  # mostly a run's timeline
CONTENT_TYPES = {"js": "text/javascript", "css": "text/css", "html": "text/html", "txt": "text/plain"}
CONTENT_TYPES |= {"json": "application/json", "ndjson": "application/x-ndjson"}  # one value; one value a line


class Answer(NamedTuple):
    """An HTTP response."""

    text: str | Iterable[bytes]  # an iterator of parts is closed when the client goes away
    file_type: str  # a key of CONTENT_TYPES
    status: int = 200


NOT_FOUND = Answer("This page does not exist.\n", "txt", 404)


def application(handle: Callable[["Request"], Answer], policy: str, name: str) -> "WSGIApplication":
    """Return a WSGI application that answers with `handle`. `policy`: its content security policy; `name`: for its errors.

    Raises PenstockError if Werkzeug is not installed.
    """
    try:
        from werkzeug.exceptions import HTTPException
        from werkzeug.sansio.utils import host_is_trusted
        from werkzeug.wrappers import Request, Response
    except ImportError as error:
        raise PenstockError(
            f"{name} is served with Werkzeug, which is not installed: pip install 'penstock-pipeline[studio]'"
        ) from error

    def to_response(answer: Answer) -> "Response":
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
        headers |= {"Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin"}
        return Response(answer.text, answer.status, headers, content_type=f"{CONTENT_TYPES[answer.file_type]}; charset=utf-8")

    def check_origin_and_handle(request: "Request") -> Answer:
        """Refuse a request for another host, or from another site's page; handle all others."""
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
            return to_response(check_origin_and_handle(request))
        except HTTPException as error:
            return to_response(Answer(f"{error.description}\n", "txt", error.code or 400))

    return app


def make_server(app: "WSGIApplication", port: int = 0) -> "BaseWSGIServer":
    """Make a server for this machine, not started; port 0 takes a free port. Raises PenstockError if the port is not free."""
    from werkzeug.serving import WSGIRequestHandler
    from werkzeug.serving import make_server as make_wsgi_server

    class Handler(WSGIRequestHandler):
        """A request handler that logs nothing, and disconnects a client that is idle or slow."""

        timeout = READ_TIMEOUT_SECONDS

        def setup(self) -> None:
            """Limit the time to read the request."""
            super().setup()
            self._timer = threading.Timer(REQUEST_TIMEOUT_SECONDS, self._stop_reading)
            self._timer.daemon = True
            self._timer.start()

        def _stop_reading(self) -> None:
            with suppress(OSError):  # the client has disconnected
                self.connection.shutdown(socket.SHUT_RD)

        def finish(self) -> None:
            """Cancel the limit."""
            self._timer.cancel()
            super().finish()

        def log(self, type: str, message: str, *args: object) -> None:
            """Log nothing."""

    try:
        listening = socket.create_server(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "ports are numbers up to 65535"
        raise PenstockError(f"--port {port} cannot be used: {why}; leave it out to take a free one") from error
    with listening:  # the server duplicates its file descriptor
        return make_wsgi_server("127.0.0.1", port, app, threaded=True, request_handler=Handler, fd=listening.fileno())


def run(web_server: "BaseWSGIServer", name: str, browser: bool) -> None:
    """Print the address, open it in a browser if `browser`, and serve until Ctrl-C."""
    address = f"http://127.0.0.1:{web_server.port}/"
    print(f"{name} at {address} (Ctrl-C ends it)", flush=True)
    if browser:
        webbrowser.open(address)
    web_server.serve_forever()
