"""How the tests run: on one thread, since bits depend on that; with `-n 2` in two processes, but for those that measure."""

from typing import Any

import pytest
import torch

torch.set_num_threads(1)

# What is measured here, or must be over in time, wants the machine for itself; the most delicate is last.
TIMED = ["cli", "labs", "hosts", "faults", "studio_browser", "browser", "collectives", "lines", "clock", "prediction"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is timed comes last, when the other process has nothing left to do."""
    items.sort(key=lambda item: _turn(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The processes take file by file; one of them takes all that is timed."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "timed" if _turn(nodeid) else nodeid.split("::")[0]

    return Scheduler(config, log)


def _turn(nodeid: str) -> int:
    name = nodeid.split("::")[0].rpartition("test_")[2].removesuffix(".py")
    return 1 + TIMED.index(name) if name in TIMED else 0
