"""A studio that is served, requests to it, and a run to show in it."""

import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection

import pytest

from penstock.schedule import Costs, Timeline, build, simulate
from penstock.view.record import Record


@contextmanager
def served(opened=None) -> Iterator[int]:
    """The port at which the studio answers meanwhile, opened with a file if one is given."""
    pytest.importorskip("werkzeug")
    from penstock.view.studio.studio_server import make_server
    from penstock.view.studio.worker import Workers

    with closing(Workers()) as workers, make_server(0, opened, workers) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield serving.port
        finally:
            serving.shutdown()
            thread.join()


def request(port, method="GET", path="/", body=None, **headers):
    """The response of a server on this machine, and its text."""
    connection = HTTPConnection("127.0.0.1", port)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    text = response.read().decode(errors="replace")
    connection.close()
    return response, text


def run_of(name="1f1b", unit="s", layers=()):
    """A timeline.json as a training run leaves it."""
    table = build(name, ranks=2, microbatches=4)
    timeline = simulate(table, Costs([0.010, 0.020], 0.010, 0.010, send=0.001))
    return json.dumps(Record((Timeline(f"{name}, measured", timeline.rows),), None, unit, ("step 7",), layers).data())
