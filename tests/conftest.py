"""How the tests run: on one thread, since bits depend on the number of threads; two files at once, but for those that measure."""

import pytest
import torch

torch.set_num_threads(1)

# What is measured here, or must be over in time, wants the machine for itself; the most delicate is last.
TIMED = ["cli", "labs", "hosts", "faults", "studio_browser", "browser", "collectives", "lines", "clock", "prediction"]


def pytest_itemcollected(item: pytest.Item) -> None:
    """With `-n 2 --dist loadgroup` two processes take file by file; all that is timed goes to one of them."""
    item.add_marker(pytest.mark.xdist_group("timed" if _turn(item) else item.path.stem))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is timed comes last, when the other process has nothing left to do."""
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    name = item.path.stem.removeprefix("test_")
    return 1 + TIMED.index(name) if name in TIMED else 0
