"""`penstock search`: the shortest table for given stages within the memory."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

from penstock.commands.command_options import command
from penstock.commands.plan import SearchBar, check_writable
from penstock.errors import PenstockError
from penstock.partition.balance import balanced_starts
from penstock.plan import ModelProfile, parse_memory_size
from penstock.plan.model_profile import COSTS_FILE, waiting_gradient_bytes
from penstock.plan.stage_costs import LayerChain, StageCost
from penstock.schedule import Costs, search, simulate
from penstock.schedule.table import PLACEMENTS
from penstock.timing.list_schedule import STAGES_PER_RANK
from penstock.timing.teacher_stages import costs_with_teacher
from penstock.timing.teacher_tables import v_of_teacher
from penstock.view.files import report_write_errors
from penstock.view.terminal import summary


@command(
    costs="FILE | RUN",
    stages="S",
    ranks="P",
    microbatches="M",
    slices="K",
    teacher="SIZE",
    memory="BYTES",
    send="MS",
    csv="FILE",
)
class SearchCommand:
    """Search for the shortest table that fits the memory.

    A run's layers are cut into stages of about equal time. `penstock plan` chooses the cut, schedule and microbatches together.
    """

    costs: Path
    """Costs of each stage, in the form of `penstock plan --save-costs` and `export-costs`, or a run, which has its layers'."""
    stages: int | None = None
    """Cut the layers of the costs into this many stages; by default a run's into one a rank, or two in a V, and no others."""
    ranks: int = 4
    """Ranks."""
    placement: Literal["loop", "V"] = "loop"
    """Rank of each stage: loop puts stage s on rank s mod P, V goes down the ranks and back up."""
    microbatches: int = 8
    """Microbatches."""
    slices: int = 1
    """Slices of its tokens that each microbatch is cut into."""
    teacher: float = 0.0
    """Add a second, frozen model whose forward takes SIZE times the model's, in a V, for the next batch."""
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
        stages = self._stages()
        columns = dict(zip(StageCost._fields, zip(*stages, strict=True), strict=True))
        times = columns["forward"], columns["backward_input"], columns["backward_weight"]
        activations = [
            stage.policies[0].activation + waiting_gradient_bytes(stage.keys_and_values, max(1, self.slices))
            for stage in stages
        ]
        costs = Costs(*times, send=self.send / 1e3, act=activations, keep=columns["keep"])
        placement = PLACEMENTS[self.placement](len(stages), self.ranks)
        first_of_teacher = None
        if self.teacher:
            first_of_teacher, of_teacher = len(stages), v_of_teacher(placement)
            outputs_like_the_models = replace(costs, teacher_output=columns["output"][-1])
            costs = costs_with_teacher(outputs_like_the_models, len(stages), len(of_teacher), self.teacher)
            placement = (*placement, *of_teacher)
        with SearchBar() as bar:
            progress = partial(bar, self.effort)
            limit = parse_memory_size(self.memory)
            result = search(
                costs,
                placement,
                self.microbatches,
                limit,
                self.effort,
                self.seed,
                progress=progress,
                slices=self.slices,
                teacher=first_of_teacher,
            )
        if self.csv is not None:  # before printing: a reader like `head` may end the output early
            with report_write_errors(self.csv):
                result.schedule.to_csv(self.csv)
        print(summary(replace(simulate(result.schedule, costs), memory_unit="bytes"), "s"))
        bound = f"no table within the limit is below {1e3 * result.bound:.4g} ms"
        print(f"step {1e3 * result.makespan:.4g} ms, {bound}: {result.bound_reason}")
        if result.family is not None and result.family_makespan is not None:
            less = 1 - result.makespan / result.family_makespan
            print(f"the best published table, {result.family}, takes {1e3 * result.family_makespan:.4g} ms: {less:.1%} less")
        if self.csv is not None:
            print(f"wrote {self.csv}")

    def _stages(self) -> list[StageCost]:
        """Return the costs of the stages, cut from layers if they are a run's or --stages is given; print the cut."""
        costs_file = self.costs / COSTS_FILE if self.costs.is_dir() else self.costs
        chain = LayerChain(ModelProfile.load(costs_file).samples[-1].layers)
        num_stages = self.stages
        if num_stages is None:
            num_stages = STAGES_PER_RANK[self.placement] * self.ranks if self.costs.is_dir() else len(chain.layers)
        if self.ranks < 1 or num_stages < 1 or num_stages % self.ranks:
            advice = f". If these are a model's layers, cut them: --stages {max(1, self.ranks)}" if self.stages is None else ""
            raise PenstockError(f"{costs_file} has {num_stages} stages, which do not divide by --ranks {self.ranks}{advice}")
        starts = balanced_starts(chain.layer_seconds, num_stages)
        if num_stages < len(chain.layers):
            names = ", ".join(chain.layers[start].name for start in starts[1:])
            print(f"{len(chain.layers)} layers are cut into {num_stages} stages of about equal time, before {names}")
        return [chain.stage_cost(*ends) for ends in pairwise([*starts, len(chain.layers)])]
