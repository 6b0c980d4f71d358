"""Restart a run in the same folder with the ranks that are left: adapt its options to fewer processes."""

import os
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from penstock.commands.train.config import TrainConfig
from penstock.comms.process import read_process
from penstock.errors import PenstockError

FALLBACK_SCHEDULE = "1f1b"  # runs on any number of ranks
RUN_ID_VARIABLE = "TORCHELASTIC_RUN_ID"  # set by torchrun's agent


def may_restart(config: TrainConfig) -> bool:
    """Return whether a failed attempt is followed by another: `--restarts` here, `--max-restarts` under torchrun."""
    return config.restarts > 0 or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0


def resize_for_processes(config: TrainConfig, processes: int) -> tuple[TrainConfig, str]:
    """Return the options for this number of processes, which may be smaller than before, and a sentence about the changes.

    Keep `tp` if it divides the processes, then `dp` if it divides the quotient; the pipeline gets the remaining factor. Replace
    a table for another number of ranks by 1F1B.
    """
    tp = config.tp if processes % config.tp == 0 else 1
    dp = config.dp if processes % (config.dp * tp) == 0 else 1
    resized = replace(config, ranks=processes // (dp * tp), dp=dp, tp=tp)
    changes = []
    if dropped := [f"--{name} {old}" for name, old, new in (("dp", config.dp, dp), ("tp", config.tp, tp)) if old != new]:
        changes.append(f"{processes} processes cannot have {' and '.join(dropped)}: the pipeline takes them all")
    if processes != config.processes and not _has_table(resized):
        changes.append(
            f"{'the plan' if resized.plan else resized.schedule} is not for {resized.ranks} ranks: {FALLBACK_SCHEDULE} instead"
        )
        resized = replace(resized, plan=None, schedule=FALLBACK_SCHEDULE, stages_per_rank=None, group_size=None)
    return resized, "; ".join(changes)


def _has_table(config: TrainConfig) -> bool:
    try:
        return config.table().ranks == config.ranks
    except PenstockError:
        return False


def job_name() -> str:
    """Return a name that all attempts of a job under torchrun share: its id, or the start time of its agent."""
    run_id = os.environ.get(RUN_ID_VARIABLE, "none")
    return run_id if run_id != "none" else f"{_start_time(os.getppid()):%Y%m%d-%H%M%S}"


def _start_time(process: int) -> datetime:
    """Return when a process was started, from Linux's /proc; on other systems return the current time."""
    try:
        ticks = int(read_process(process).start_ticks)
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError):
        return datetime.now()
    return datetime.now() - timedelta(seconds=up - ticks / os.sysconf("SC_CLK_TCK"))
