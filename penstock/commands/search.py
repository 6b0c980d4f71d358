"""`penstock search`: the shortest table for given stages within the memory."""

from functools import partial
from pathlib import Path
from typing import Literal

from penstock.commands.options import command
from penstock.commands.plan import SearchBar, check_writable
from penstock.errors import PenstockError
from penstock.plan import ModelProfile, parse_memory_size
from penstock.plan.model_profile import COSTS_FILE, waiting_gradient_bytes
from penstock.schedule import Costs, search, simulate
from penstock.schedule.table import PLACEMENTS
from penstock.view.files import report_write_errors
from penstock.view.terminal import summary


@command(costs="FILE", ranks="P", microbatches="M", slices="K", memory="BYTES", send="MS", csv="FILE")
class SearchCommand:
    """Search for the shortest table that fits the memory.

    The cut into stages is given; `penstock plan` also chooses the cut.
    """

    costs: Path
    """Costs of each stage, in the form that `penstock plan --save-costs` writes for layers."""
    ranks: int = 4
    """Ranks."""
    placement: Literal["loop", "V"] = "loop"
    """Rank of each stage: loop puts stage s on rank s mod P, V goes down the ranks and back up."""
    microbatches: int = 8
    """Microbatches."""
    slices: int = 1
    """Slices of its tokens that each microbatch is cut into."""
    memory: str = "1TB"
    """Memory of each rank for activations, such as 500MB."""
    effort: Literal["quick", "normal", "long", "optimal"] = "normal"
    """About 1, 10 or 60 seconds; optimal proves small tables the shortest, with OR-Tools, in minutes."""
    send: float = 0.0
    """Milliseconds that a message between two ranks takes."""
    seed: int = 0
    """Seed of the search: the same seed gives the same table."""
    csv: Path | None = None
    """Write the table to this file."""

    def run(self) -> None:
        """Read the costs, search, print the table and the bound."""
        check_writable(self.csv)
        costs_file = self.costs / COSTS_FILE if self.costs.is_dir() else self.costs
        stages = ModelProfile.load(costs_file).samples[-1].layers
        if self.ranks < 1 or len(stages) % self.ranks:
            raise PenstockError(
                f"{costs_file} has {len(stages)} stages, which do not divide by --ranks {self.ranks}. If these are a model's "
                f"layers, cut them too: penstock plan --costs {costs_file} --ranks {self.ranks}; or write a run's stages: "
                "penstock export-costs RUN stages.json"
            )
        columns = dict(zip(stages[0]._fields, zip(*stages, strict=True), strict=True))
        times = columns["forward"], columns["backward_input"], columns["backward_weight"]
        activations = [
            stage.activation + stage.ends + waiting_gradient_bytes(stage.keys_and_values, max(1, self.slices))
            for stage in stages
        ]
        costs = Costs(*times, send=self.send / 1e3, act=activations, keep=columns["keep"])
        placement = PLACEMENTS[self.placement](len(stages), self.ranks)
        with SearchBar() as bar:
            progress = partial(bar, self.effort)
            limit = parse_memory_size(self.memory)
            result = search(
                costs, placement, self.microbatches, limit, self.effort, self.seed, progress=progress, slices=self.slices
            )
        if self.csv is not None:  # before printing: a reader like `head` may end the output early
            with report_write_errors(self.csv):
                result.schedule.to_csv(self.csv)
        print(summary(simulate(result.schedule, costs)))
        bound = f"no table within the limit is below {1e3 * result.bound:.4g} ms"
        print(f"step {1e3 * result.makespan:.4g} ms, {bound}: {result.bound_reason}")
        if result.family is not None and result.family_makespan is not None:
            less = 1 - result.makespan / result.family_makespan
            print(f"the best published table, {result.family}, takes {1e3 * result.family_makespan:.4g} ms: {less:.1%} less")
        if self.csv is not None:
            print(f"wrote {self.csv}")
