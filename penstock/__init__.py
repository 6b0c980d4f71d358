"""Penstock: pipeline-parallel training for PyTorch that people can read, prove and see.

The names below are found when first used, so that importing the package, and everything about schedules, needs no torch.
"""

from typing import TYPE_CHECKING

from penstock.distribution import warn_of_other_distribution
from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock import checkpoint, comms, model, partition, plan, schedule
    from penstock.comms.topology import Topology
    from penstock.engine import cache
    from penstock.engine.loss import tokens
    from penstock.errors import (
        LostRankError,
        MismatchError,
        NonFiniteError,
        PenstockError,
        ResourceError,
        ScheduleError,
        StageError,
    )
    from penstock.launcher.launch import launch
    from penstock.model import ShardedMLP
    from penstock.pipeline import Pipeline
    from penstock.rows import Replicated, Rows
    from penstock.stage.attention import attention
    from penstock.stage.auxiliary import auxiliary_loss

__version__ = "0.2.0"

warn_of_other_distribution()

__all__ = [
    "LostRankError",
    "MismatchError",
    "NonFiniteError",
    "PenstockError",
    "Pipeline",
    "Replicated",
    "ResourceError",
    "Rows",
    "ScheduleError",
    "ShardedMLP",
    "StageError",
    "Topology",
    "attention",
    "auxiliary_loss",
    "cache",
    "checkpoint",
    "comms",
    "launch",
    "model",
    "partition",
    "plan",
    "schedule",
    "tokens",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        **{name: "errors" for name in __all__ if name.endswith("Error")},
        "Pipeline": "pipeline",
        "Replicated": "rows",
        "Rows": "rows",
        "ShardedMLP": "model",
        "Topology": "comms.topology",
        "attention": "stage.attention",
        "auxiliary_loss": "stage.auxiliary",
        "launch": "launcher.launch",
        "tokens": "engine.loss",
    },
    {
        **{name: name for name in ("checkpoint", "comms", "model", "partition", "plan", "schedule")},
        "cache": "engine.cache",
    },
)
