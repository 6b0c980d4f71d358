"""The server that ranks are forked from, for processes that have not started it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any

import pytest

from penstock.launcher.forkserver import forkserver_context

SERVER: dict[str, Any] = vars(forkserver._forkserver)


def server_address() -> dict[str, Any]:
    """Start the server unless it runs; return where it listens, and what Python 3.14 asks of those who come."""
    forkserver_context()
    return {name: value for name, value in SERVER.items() if name in ("_forkserver_address", "_forkserver_authkey")}


def use_server(address: dict[str, Any]) -> None:
    """Have this process fork its ranks from the server at `address`, which is not its child."""
    SERVER.update(address)
    if SERVER["_forkserver_alive_fd"] is None:
        SERVER["_forkserver_alive_fd"] = os.pipe()[1]  # is handed on to what is forked
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None


@contextmanager
def own_server() -> Iterator[None]:
    """Have this process start a server that no other test uses, so that a test may kill it."""
    server = forkserver.ForkServer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "_forkserver", server)
        for name in ("ensure_running", "connect_to_new_process", "set_forkserver_preload"):
            patch.setattr(forkserver, name, getattr(server, name))
        yield
    server._stop()  # type: ignore[attr-defined]
