"""HTTP for the browser on this machine and for nobody else.

The socket listens on 127.0.0.1 only, and a request that calls the machine by another name is refused: so no page from
elsewhere gets here, not even by a name that it points to this address (DNS rebinding). Nothing is stored.
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
PATIENCE, LONGEST = 10.0, 30.0  # seconds between two pieces of a request; for all of it
LARGEST = 40_000_000  # bytes of a question; a run's timeline is the largest thing in one
TYPES = {"js": "text/javascript", "css": "text/css", "html": "text/html", "txt": "text/plain"}
TYPES |= {"json": "application/json", "ndjson": "application/x-ndjson"}  # one value, and one a line


class Answer(NamedTuple):
    """What a request is answered with."""

    text: str | Iterable[bytes]  # in parts: closed when the client goes away
    kind: str  # of TYPES
    status: int = 200


NOTHING = Answer("There is nothing here.\n", "txt", 404)


def application(answered: Callable[["Request"], Answer], policy: str, what: str) -> "WSGIApplication":
    """The WSGI application of what is `answered`, under that content security policy; `what` is what people call it.

    Raises PenstockError if Werkzeug is not installed.
    """
    try:
        from werkzeug.exceptions import HTTPException
        from werkzeug.sansio.utils import host_is_trusted
        from werkzeug.wrappers import Request, Response
    except ImportError as error:
        told = f"{what} is served with Werkzeug, which is not installed: pip install 'penstock[studio]'"
        raise PenstockError(told) from error

    def reply(answer: Answer) -> "Response":
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
        headers |= {"Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin"}
        return Response(answer.text, answer.status, headers, content_type=f"{TYPES[answer.kind]}; charset=utf-8")

    def routed(request: "Request") -> Answer:
        """The answer to a request of this machine's and of the page's own; others are told that there is none."""
        if not host_is_trusted(request.headers.get("Host"), LOOPBACK):
            told = f"{what.capitalize()} answers at http://127.0.0.1 only, not at {request.headers.get('Host')!r}.\n"
            return Answer(told, "txt", 403)
        if request.headers.get("Origin", own := f"http://{request.headers['Host']}") != own:
            return Answer(f"{what.capitalize()} answers its own page only.\n", "txt", 403)
        return answered(request)

    class Limited(Request):
        max_content_length = LARGEST

    @Limited.application
    def app(request: "Request") -> "Response":
        try:
            return reply(routed(request))
        except HTTPException as error:
            return reply(Answer(f"{error.description}\n", "txt", error.code or 400))

    return app


def server(app: "WSGIApplication", port: int = 0) -> "BaseWSGIServer":
    """A server for this machine alone, not started; port 0 takes a free one. Raises PenstockError if it cannot be had."""
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


def run(serves: "BaseWSGIServer", what: str, browser: bool) -> None:
    """Say where it is, open that in a browser if told to, and serve until Ctrl-C."""
    address = f"http://127.0.0.1:{serves.port}/"
    print(f"{what} at {address} (Ctrl-C ends it)", flush=True)
    if browser:
        webbrowser.open(address)
    serves.serve_forever()
