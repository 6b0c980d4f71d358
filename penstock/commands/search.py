"""`penstock search`: the table with the shortest step that fits the memory, for stages as they are."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from penstock.commands.plan import Watched, check_writable
from penstock.errors import PenstockError
from penstock.plan import Layers, bytes_of
from penstock.schedule import Costs, search, simulate
from penstock.schedule.table import PLACEMENTS
from penstock.view.files import writing
from penstock.view.terminal import summary


@dataclass(frozen=True)
class Search:
    """Search for the table with the shortest step, for stages as they are, in the memory there is for activations."""

    costs: Path
    """What each stage costs, in the form that `penstock plan --save-costs` writes for layers."""
    ranks: int = 4
    """P."""
    placement: Literal["loop", "V"] = "loop"
    """Where stages live: stage s on rank s mod P, or down the ranks and back up."""
    microbatches: int = 8
    """M."""
    memory: str = "1TB"
    """Of each rank, for activations."""
    effort: Literal["quick", "normal", "long", "optimal"] = "normal"
    """About 1, 10 or 60 seconds; optimal, for small pipelines: up to minutes of OR-Tools, to prove that nothing is shorter."""
    send: float = 0.0
    """Milliseconds that a message between two ranks takes."""
    seed: int = 0
    """The same gives the same table."""
    csv: Path | None = None
    """Write the table to this file."""

    def run(self) -> None:
        """Read, search, tell."""
        check_writable(self.csv)
        stages = Layers.load(self.costs).samples[-1].layers
        if self.ranks < 1 or len(stages) % self.ranks:
            raise PenstockError(f"{self.costs} has {len(stages)} stages, which do not divide by --ranks {self.ranks}")
        columns = dict(zip(stages[0]._fields, zip(*stages, strict=True), strict=True))
        times = columns["forward"], columns["backward_input"], columns["backward_weight"]
        held = [inside + end for inside, end in zip(columns["activation"], columns["ends"], strict=True)]
        costs = Costs(*times, send=self.send / 1e3, act=held, keep=columns["keep"])
        placement = PLACEMENTS[self.placement](len(stages), self.ranks)
        with Watched() as watched:
            told = partial(watched, self.effort)
            found = search(costs, placement, self.microbatches, bytes_of(self.memory), self.effort, self.seed, progress=told)
        if self.csv is not None:  # before anything is told: whoever reads that may stop at any line
            with writing(self.csv):
                found.schedule.to_csv(self.csv)
        print(summary(simulate(found.schedule, costs)))
        least = f"no table within the limit is below {1e3 * found.bound:.4g} ms"
        print(f"step {1e3 * found.makespan:.4g} ms, {least}: {found.because}")
        if found.family is not None and found.family_makespan is not None:
            less = 1 - found.makespan / found.family_makespan
            print(f"the best published table, {found.family}, takes {1e3 * found.family_makespan:.4g} ms: {less:.1%} less")
        if self.csv is not None:
            print(f"wrote {self.csv}")
