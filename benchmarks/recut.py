"""A training on four emulated devices, one slower than it was thought: before and after `rebuild(cuts="measured")`.

python benchmarks/recut.py            three cases: two minutes

Layers sleep as devices would compute. After ten steps the pipeline is cut anew from the times of its last steps; then its
steps alternate with those of a pipeline whose plan knew the speeds. Weights and losses stay, to the bit, those of a training
that was not cut anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import NamedTuple

import torch
import tyro
from tables import Row, show
from torch import Tensor, nn

import penstock as ps
from penstock.comms import current_topology
from penstock.learn.devices import EmulatedDevice
from penstock.plan import LayerCost

LAYERS, RANKS, MICROBATCHES, WIDTH = 24, 4, 8, 16
FORWARD, BACKWARD = 0.002, 0.004  # seconds of a layer of cost 1
OVERSLEPT = 0.0001  # seconds by which a sleep is longer
STEPS = 10  # before the cut


class Case(NamedTuple):
    """Costs of layers and speeds of ranks, and whether the first cut measures the layers on an example."""

    name: str
    costs: Sequence[float]
    speeds: Sequence[float]
    has_example: bool


EVEN, HEAVY = [1.0] * LAYERS, [1.0] * 15 + [4.0] + [1.0] * 8
CASES = (
    Case("rank 1 at 0.6 of the speed", EVEN, (1, 0.6, 1, 1), has_example=True),
    Case("the same, layers not measured", EVEN, (1, 0.6, 1, 1), has_example=False),
    Case("layer 15 heavy, layers not measured", HEAVY, (1, 1, 1, 1), has_example=False),
)


@dataclass
class RecutOptions:
    """Compare steps before and after a measured cut, and those of the plan that knew."""

    steps: int = 30  # of each after the cut


class SleepingLayer(EmulatedDevice):
    """Multiplies by a matrix, and sleeps as long as a device of this rank's speed would work."""

    def __init__(self, cost: float, speeds: Sequence[float]) -> None:
        super().__init__(cost * FORWARD, cost * BACKWARD)
        self.linear, self.speeds = nn.Linear(WIDTH, WIDTH), tuple(speeds)

    @property
    def seconds(self) -> tuple[float, float]:
        """Of F and B on this rank."""
        forward, backward = self._full_speed_seconds
        speed = self.speeds[current_topology().rank]
        return forward / speed, backward / speed

    @seconds.setter
    def seconds(self, value: tuple[float, float]) -> None:
        self._full_speed_seconds = value

    def forward(self, hidden: Tensor) -> Tensor:
        """(rows, WIDTH) -> the same."""
        return super().forward(torch.tanh(self.linear(hidden)))


def model_of(case: Case) -> nn.Sequential:
    """The model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(SleepingLayer(cost, case.speeds) for cost in case.costs))


def plan_that_knew(case: Case) -> ps.plan.Plan:
    """The plan from the true costs and speeds."""
    layers = [
        LayerCost(str(number), cost * FORWARD + OVERSLEPT, (cost * BACKWARD + OVERSLEPT) / 2, (cost * BACKWARD + OVERSLEPT) / 2)
        for number, cost in enumerate(case.costs)
    ]
    return ps.plan.plan(
        layers, RANKS, 1e12, batch=MICROBATCHES, microbatches=MICROBATCHES, schedules="1f1b", speeds=case.speeds, fewer=False
    )[0]


class Trained:
    """A pipeline in training, and the seconds and losses of its steps."""

    def __init__(self, pipe: ps.Pipeline) -> None:
        self.pipe, self.optimizer = pipe, torch.optim.AdamW(pipe.parameters())
        self.seconds, self.losses = list[float](), list[float]()

    def step(self) -> None:
        """Train one step."""
        rows = torch.randn(2 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(self.pipe.step_count))
        self.losses.append(float(self.pipe.step(rows, target=rows)))
        self.optimizer.step(), self.optimizer.zero_grad()
        report = self.pipe.report
        assert report is not None
        self.seconds.append(report.makespan)


def run_case(case: Case, plan: ps.plan.Plan, steps: int) -> tuple[list[float], list[float], list[float], list[str], bool]:
    """What every rank runs: return the seconds before and after, those of the plan, the cuts, and whether losses are equal."""
    ps.comms.init_distributed()
    example = (torch.ones(2, WIDTH),) if case.has_example else None
    ours = Trained(ps.Pipeline(model_of(case), nn.functional.mse_loss, "1f1b", MICROBATCHES, example_args=example))
    knew = Trained(ps.Pipeline(model_of(case), nn.functional.mse_loss, plan=plan))
    for _ in range(STEPS):
        ours.step()
    ours.pipe, ours.optimizer = ours.pipe.rebuild(cuts="measured", optimizer=ours.optimizer)
    for _ in range(STEPS):
        knew.step()
    for _ in range(steps):
        ours.step()
        knew.step()
    before, after = ours.seconds[1:STEPS], ours.seconds[STEPS + 1 :]
    return before, after, knew.seconds[STEPS + 1 :], ours.pipe.cuts, ours.losses == knew.losses


def main(options: RecutOptions) -> None:
    """Run all cases and print them."""
    rows: list[Row] = []
    for case in CASES:
        plan = plan_that_knew(case)
        *times, cuts, is_equal = ps.launch(run_case, RANKS, case, plan, options.steps)[0]
        (_, before, _), (low, after, high), (_, knew, _) = (quantiles(seconds, n=4) for seconds in times)
        row: Row = {
            "case": case.name,
            "before ms": 1e3 * before,
            "after ms": 1e3 * after,
            "quartiles": f"{1e3 * low:.1f} .. {1e3 * high:.1f}",
            "plan that knew ms": 1e3 * knew,
            "longer %": 100 * (after / knew - 1),
            "cuts": " ".join(cuts),
            "its cuts": " ".join(plan.cuts),
            "losses": "equal bits" if is_equal else "DIFFERENT",
        }
        rows.append(row)
        show([row], *row)


if __name__ == "__main__":
    main(tyro.cli(RecutOptions))
