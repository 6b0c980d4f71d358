"""Penstock: pipeline-parallel training for PyTorch that people can read, prove and see.

The names below are found when first used, so that importing the package, and everything about schedules, needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock import checkpoint, comms, microbatch, model, partition, schedule
    from penstock.auxiliary import auxiliary_loss
    from penstock.comms import Topology
    from penstock.errors import LostRankError, MismatchError, PenstockError, ScheduleError, StageError
    from penstock.launcher import launch
    from penstock.model import ShardedMLP
    from penstock.pipeline import Pipeline

__version__ = "0.1.0"

__all__ = [
    "LostRankError",
    "MismatchError",
    "PenstockError",
    "Pipeline",
    "ScheduleError",
    "ShardedMLP",
    "StageError",
    "Topology",
    "auxiliary_loss",
    "checkpoint",
    "comms",
    "launch",
    "microbatch",
    "model",
    "partition",
    "schedule",
]

_HOMES = {
    "LostRankError": "errors",
    "MismatchError": "errors",
    "PenstockError": "errors",
    "Pipeline": "pipeline",
    "ScheduleError": "errors",
    "ShardedMLP": "model",
    "StageError": "errors",
    "Topology": "comms",
    "auxiliary_loss": "auxiliary",
    "launch": "launcher",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    module = importlib.import_module(f"penstock.{_HOMES.get(name, name)}")
    value = getattr(module, name) if name in _HOMES else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
