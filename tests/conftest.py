"""How the tests run: on one thread, since bits depend on the number of threads; those without ranks beside those with."""

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

TESTS = Path(__file__).parent
TIMED = ("browser", "cli", "clock", "collectives", "faults", "hosts", "labs", "lines", "prediction", "studio_browser")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n 2 --dist loadgroup`, one process runs all tests that start ranks, the other those that only compute.

    What is measured or must be over in time comes last, when the other process has nothing left to do.
    """
    for item in items:
        alone = item.path.parent != TESTS and item.path.stem != "test_browser"
        item.add_marker(pytest.mark.xdist_group(item.path.stem if alone else "ranks"))
    items.sort(key=lambda item: (_group(item) != "ranks", item.path.stem.removeprefix("test_") in TIMED))


def _group(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    assert marker is not None
    return marker.args[0]
