"""The command `penstock train`: its options, those of a resumed run, and the way to the job."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import tyro

from penstock.commands.train.again import for_world, may_begin_again
from penstock.commands.train.config import PLAN, TrainConfig, saved_options
from penstock.comms.launch.forkserver import start_forkserver_early
from penstock.comms.preemption import catch_preemption
from penstock.comms.system import read_torchrun_integer
from penstock.errors import PenstockError
from penstock.view.files import writing


@dataclass(frozen=True)
class Train(TrainConfig):
    """Train a model cut over several ranks of this machine on real data, and compare it with one process."""

    ranks: Annotated[int, tyro.conf.arg(aliases=["--pp"])] = TrainConfig.ranks
    """Processes the model is cut over, P (under torchrun: its processes)."""

    def run(self) -> None:
        """Check first, then start."""
        catch_preemption()
        processes = read_torchrun_integer("WORLD_SIZE") if "RANK" in os.environ else self.processes
        config: TrainConfig = (
            dataclasses.replace(self, ranks=processes // (self.dp * self.tp)) if self.dp * self.tp > 0 else self
        )
        if "RANK" in os.environ and may_begin_again(self) and min(self.dp, self.tp) > 0:
            config, told = for_world(self, processes)
            if told and os.environ["RANK"] == "0":
                print(told, flush=True)
        if config.processes not in (processes, 0):
            raise PenstockError(f"--dp {self.dp} --tp {self.tp} do not divide torchrun's {processes} processes: start others")
        config.check()
        if os.environ.get("RANK", "0") == "0":
            folder = self.resume or self.out
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
        start_forkserver_early()
        from penstock.commands.train.job import train

        train(config)

    @classmethod
    def of_run(cls, words: Sequence[str]) -> "Train":
        """The options where `words` do not give them: with --resume RUN that run's; but another schedule has its own V."""
        given = {word.split("=")[0]: word.partition("=")[2] or following for word, following in pairwise([*words, ""])}
        if not given.get("--resume"):
            return cls()
        saved = saved_options(folder := Path(given["--resume"]))
        saved["plan"] = saved["plan"] and str(folder / PLAN)  # wherever the folder is now
        if given.keys() & {"--schedule", "--ranks", "--pp", "--microbatches"}:
            saved |= {"plan": None}
        if "--schedule" in given:
            saved |= {"stages_per_rank": None, "group_size": None}
        return cls(**{**saved, "data": saved["data"] and Path(saved["data"]), "out": Path(saved["out"])})
