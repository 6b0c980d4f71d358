"""How all tests run: on one thread, since bits depend on how many there are. Their tiers are marks (see pyproject.toml)."""

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines may be busy
settings.load_profile("patient")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no GPU here"))
