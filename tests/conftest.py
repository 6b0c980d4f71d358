"""How all tests run: on one thread, since bits depend on how many there are. Their tiers are marks (see pyproject.toml)."""

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines may be busy
settings.load_profile("patient")
