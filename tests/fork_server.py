"""The server that ranks are forked from, for processes that have not started it."""

import os
from multiprocessing import forkserver
from typing import Any

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
