"""A run that begins again: with the ranks that there are now, in the folder it had, from its newest whole checkpoint."""

import os
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from penstock.commands.train.config import TrainConfig
from penstock.comms.process import read_process
from penstock.errors import PenstockError

ANY = "1f1b"  # the schedule for any number of ranks
AGENT = "TORCHELASTIC_RUN_ID"  # what torchrun's agent tells its ranks


def may_begin_again(config: TrainConfig) -> bool:
    """Whether another attempt follows one that fails: `--restarts` here, `--max-restarts` under torchrun."""
    return config.restarts > 0 or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0


def for_world(config: TrainConfig, processes: int) -> tuple[TrainConfig, str]:
    """The options for so many processes, which may be fewer than were asked for, and what had to go, in a sentence.

    The ranks that share products stay if they divide the processes, then the replicas if they divide the rest; the pipeline has
    what is left. A table that is not for so many ranks makes room for one that any number runs.
    """
    tp = config.tp if processes % config.tp == 0 else 1
    dp = config.dp if processes % (config.dp * tp) == 0 else 1
    now = replace(config, ranks=processes // (dp * tp), dp=dp, tp=tp)
    told = []
    if gone := [f"--{name} {had}" for name, had, has in (("dp", config.dp, dp), ("tp", config.tp, tp)) if had != has]:
        told.append(f"{processes} processes cannot have {' and '.join(gone)}: the pipeline takes them all")
    if processes != config.processes and not _has_table(now):
        told.append(f"{'the plan' if now.plan else now.schedule} is not for {now.ranks} ranks: {ANY} instead")
        now = replace(now, plan=None, schedule=ANY, stages_per_rank=None, group_size=None)
    return now, "; ".join(told)


def _has_table(config: TrainConfig) -> bool:
    try:
        return config.table().ranks == config.ranks
    except PenstockError:
        return False


def job_name() -> str:
    """A name that all attempts of a job under torchrun share: its id, or else the moment at which its agent was started."""
    given = os.environ.get(AGENT, "none")
    return given if given != "none" else f"{_started(os.getppid()):%Y%m%d-%H%M%S}"


def _started(process: int) -> datetime:
    """When a process was started, by Linux's account; elsewhere: now."""
    try:
        ticks = int(read_process(process).started)
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError):
        return datetime.now()
    return datetime.now() - timedelta(seconds=up - ticks / os.sysconf("SC_CLK_TCK"))
