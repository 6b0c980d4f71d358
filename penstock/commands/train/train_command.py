"""`penstock train`: parse the options, complete those of a resumed run, start the job."""

import dataclasses
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import tyro

from penstock.commands.command_options import command
from penstock.commands.source import table_of
from penstock.commands.train.config import PLAN, TrainConfig, saved_options
from penstock.commands.train.restarts import may_restart, resize_for_processes
from penstock.comms.preemption import catch_preemption
from penstock.comms.system import read_torchrun_integer
from penstock.errors import PenstockError
from penstock.launcher.forkserver import start_forkserver_early
from penstock.plan import load
from penstock.view.files import report_write_errors


@command(
    ranks="P", dp="N", tp="N", schedule="NAME | FILE", plan="auto | BYTES | FILE", microbatches="M", stages_per_rank="V",
    group_size="N", batch="ROWS", learning_rate="RATE", checkpoint_every="STEPS", keep="N", digests_every="STEPS", resume="RUN",
    restarts="N", least="N", out="FOLDER",
)  # fmt: skip
class TrainCommand(TrainConfig):
    """Train a small model over several processes.

    The model learns real data: text, or images of digits. With --compare the same steps also run in one process.
    """

    ranks: Annotated[int, tyro.conf.arg(aliases=["--pp"])] = TrainConfig.ranks
    """P, the processes that the model is cut over, a table's own for a table; torchrun's number under torchrun."""

    def run(self) -> None:
        """Check the options, then train."""
        catch_preemption()
        processes = read_torchrun_integer("WORLD_SIZE") if "RANK" in os.environ else self.processes
        config: TrainConfig = (
            dataclasses.replace(self, ranks=processes // (self.dp * self.tp)) if self.dp * self.tp > 0 else self
        )
        if "RANK" in os.environ and may_restart(self) and min(self.dp, self.tp) > 0:
            config, changes = resize_for_processes(self, processes)
            if changes and os.environ["RANK"] == "0":
                print(changes, flush=True)
        if config.processes not in (processes, 0):
            raise PenstockError(f"--dp {self.dp} --tp {self.tp} do not divide torchrun's {processes} processes: start others")
        config.check()
        if os.environ.get("RANK", "0") == "0":
            folder = self.resume or self.out
            with report_write_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
        start_forkserver_early()
        from penstock.commands.train.job import train

        train(config)

    @classmethod
    def defaults_for(cls, words: Sequence[str]) -> "TrainCommand":
        """Return the defaults of options that `words` do not set: with --resume RUN, that run's; with a table, its numbers.

        A new schedule, number of ranks or of microbatches drops the run's plan. A new schedule also drops its V.
        """
        typed = {word.split("=")[0]: word.partition("=")[2] or following for word, following in pairwise([*words, ""])}
        if not typed.get("--resume"):
            return _defaults_for_table(cls(), typed.get("--plan") or typed.get("--schedule") or "")
        saved = saved_options(folder := Path(typed["--resume"]))
        saved["plan"] = saved["plan"] and str(folder / PLAN)  # the folder may have moved
        if saved["schedule"].endswith(".py") and "--schedule" not in typed:
            problem = f"the schedule of {folder} is the Python file {saved['schedule']}, which is run only if you type its name"
            raise PenstockError(f"{problem}: add --schedule {saved['schedule']}")
        if typed.keys() & {"--schedule", "--ranks", "--pp", "--microbatches"}:
            saved |= {"plan": None}
        if "--schedule" in typed:
            saved |= {"stages_per_rank": None, "group_size": None}
        resumed = cls(**{**saved, "data": saved["data"] and Path(saved["data"]), "out": Path(saved["out"])})
        return _defaults_for_table(resumed, typed.get("--plan") or "")


def _defaults_for_table(defaults: TrainCommand, path: str) -> TrainCommand:
    """Return `defaults` with the ranks and microbatches of the CSV table or plan in the file `path`, if it is one."""
    is_plan = path.endswith(".json")
    if not is_plan and not path.endswith(".csv"):
        return defaults
    try:
        table = load(path).schedule if is_plan else table_of(path, None, None)
    except PenstockError:
        return defaults  # `check` says what is wrong
    return dataclasses.replace(defaults, ranks=table.ranks, microbatches=table.microbatches)
