"""Messages that change while the shapes of the batch stay: a value or its gradient is there or None, needs a gradient or not.

The flags of a microbatch, which travel with its rows, decide what its stages do; the numbers are those of one process.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import OneProcess, assert_as_one_process, assert_same, gradients
from runners import cases_on_ranks, cases_under_torchrun, on_ranks
from slow_cases import group_of, slow_except
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock as ps
from penstock.comms.transport import shared_memory

RANKS, STAGES, ROWS, WIDTH = 2, 4, 8, 4

# Flags: what each stage hands on.
GATE = 1  # a gate, else None
SIDE_GRADIENT = 2  # a side value that needs a gradient, else it is detached
USE_SIDE = 4  # and the next stage uses it
DROP = 8  # the main value is detached: nothing before it learns from it
HALF = 16  # half of the side value's columns, which is thus of another shape
ALL = GATE | SIDE_GRADIENT | USE_SIDE

# By step the flags of four microbatches.
CASES: dict[str, list[tuple[int, int, int, int]]] = {
    "there, then None": [(ALL,) * 4, (ALL - GATE,) * 4, (ALL,) * 4],
    "None, then there": [(ALL - GATE,) * 4, (ALL,) * 4, (ALL - GATE,) * 4],
    "with a gradient, then without": [(ALL,) * 4, (ALL - SIDE_GRADIENT,) * 4, (ALL,) * 4],
    "without a gradient, then with": [(ALL - SIDE_GRADIENT,) * 4, (ALL,) * 4, (ALL - SIDE_GRADIENT,) * 4],
    "used, then unused": [(ALL,) * 4, (ALL - USE_SIDE,) * 4, (ALL - USE_SIDE,) * 4],
    "unused, then used": [(ALL - USE_SIDE,) * 4, (ALL,) * 4, (ALL - USE_SIDE,) * 4],
    "dropped layers": [(ALL,) * 4, (ALL | DROP,) * 4, (DROP,) * 4, (ALL,) * 4],
    "other shapes": [(ALL,) * 4, (ALL | HALF,) * 4, (ALL,) * 4],
    "each microbatch differs": [(ALL, 0, GATE, ALL | DROP), (DROP, ALL, ALL | HALF, 0), (0, ALL, DROP, ALL), (ALL, 0, 0, 0)],
}
SCHEDULES = ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b"]


class Part(nn.Module):
    """A stage of any position; its parameters' names tell its number."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        torch.manual_seed(index)
        for name in (f"main{index}", f"side{index}"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH).double())

    def forward(
        self, hidden: Tensor, flags: Tensor, side: Tensor | None = None, gate: Tensor | None = None, number: float = 1.0
    ) -> Any:
        flag = int(flags[0])
        if side is not None and flag & USE_SIDE:
            hidden = hidden + side.mean(1, keepdim=True) * number
        hidden = torch.tanh(self.get_submodule(f"main{self.index}")(hidden))
        if gate is not None:
            hidden = hidden * gate
        if self.index == STAGES - 1:
            return hidden

        side = self.get_submodule(f"side{self.index}")(hidden)
        side = side if flag & SIDE_GRADIENT else side.detach()
        side = side[:, ::2] if flag & HALF else side
        gate = hidden.detach().abs() if flag & GATE else None
        return hidden.detach() if flag & DROP else hidden, flags, side, gate, 1 + flag / 7


def parts() -> list[nn.Module]:
    return [Part(index) for index in range(STAGES)]


def batch(step: int, flags: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.tensor(flags).repeat_interleave(ROWS // len(flags)), y


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


class Chain(nn.Module):
    """Parts as one stage, or as the whole model."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *values: Any) -> Any:
        for part in self.parts:
            values = part(*values)
        return values


def built(pipeline: Any, schedule: str, **options: Any) -> Any:
    """Two stages a rank, or for schedules of one stage a rank two parts in each."""
    model: Any = Chain(parts())
    if pipeline is ps.Pipeline:
        model = parts() if schedule.startswith("interleaved") else [Chain(parts()[:2]), Chain(parts()[2:])]
    return pipeline(model, mse_loss, schedule, 4, **options)


def named_gradients(pipe: Any) -> dict[str, Tensor | None]:
    return {".".join(name.split(".")[-2:]): value for name, value in gradients(pipe.named_parameters()).items()}


def trains(pipeline: Any, schedule: str, case: str, how: str) -> list[tuple[Any, ...]]:
    """Evaluate and train on each batch of the case: given as a batch, or as a list of microbatches, or over Gloo."""
    shared_memory.CAN_SHARE = how != "over gloo"
    pipe, steps = built(pipeline, schedule, recompute="stage" if how == "recomputed" else None), []
    optimizer = adamw(pipe.parameters())
    for step, flags in enumerate(CASES[case]):
        x, how_flags, y = batch(step, flags)
        _, before = pipe.eval(x, how_flags, target=y)
        if how == "list":
            pairs = list(zip(x.split(2), how_flags.split(2), strict=True))
            loss = pipe.step_microbatches(pairs, list(y.split(2)))
        else:
            loss = pipe.step(x, how_flags, target=y)
        steps.append((before, loss, named_gradients(pipe)))
        optimizer.step()
        optimizer.zero_grad()
    return steps


def rank_trains(*case: str) -> list[tuple[Any, ...]]:
    return trains(ps.Pipeline, *case)


@cache
def one_process(case: str) -> list[tuple[Any, ...]]:
    return trains(OneProcess, "", case, "batch")


RUNS = tuple(
    (schedule, case, how) for schedule in SCHEDULES for case in CASES for how in ("batch", "list", "over gloo", "recomputed")
)
FRESH = [
    (schedule, "each microbatch differs", how)
    for schedule, how in zip(SCHEDULES, ("list", "batch", "over gloo", "batch"), strict=True)
]
DEFAULT = [("1f1b", case, "batch") for case in CASES] + [
    ("zb-h1", "used, then unused", "batch"),
    ("interleaved-1f1b", "each microbatch differs", "list"),
    ("1f1b", "each microbatch differs", "over gloo"),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("schedule", "case", "how"), slow_except(DEFAULT, RUNS))
def test_what_is_none_stays_none_and_what_needs_a_gradient_gets_one(schedule: str, case: str, how: str) -> None:
    runs = group_of((schedule, case, how), DEFAULT, RUNS)
    assert_as_one_process(cases_on_ranks(rank_trains, RANKS, runs)[schedule, case, how], one_process(case))


def rank_of_replicas(case: str, data_parallel: str) -> list[dict[str, Tensor | None]]:
    """Each replica has half of the rows, so that a value is used on one of them alone."""
    mesh = ps.comms.init_mesh(pp=2, dp=2)
    pipe, steps = built(ps.Pipeline, "1f1b", mesh=mesh, data_parallel=data_parallel), []
    for step, flags in enumerate(CASES[case]):
        half = slice(0, ROWS // 2) if pipe.position.replica == 0 else slice(ROWS // 2, ROWS)
        x, how_flags, y = batch(step, flags)
        pipe.step(x[half], how_flags[half], target=y[half])
        steps.append(named_gradients(pipe))
        pipe.zero_grad()
    return steps


def gradients_of_untrained(case: str) -> list[dict[str, Tensor | None]]:
    pipe, steps = built(OneProcess, ""), []
    for step, flags in enumerate(CASES[case]):
        x, how_flags, y = batch(step, flags)
        pipe.step(x, how_flags, target=y)
        steps.append(named_gradients(pipe))
        pipe.zero_grad()
    return steps


@pytest.mark.ranks
@pytest.mark.parametrize("case", slow_except(["each microbatch differs"], CASES))
def test_a_gradient_is_none_if_it_is_none_on_all_replicas(case: str) -> None:
    everyone = on_ranks(rank_of_replicas, 4, case, "ddp")
    for number, expected in enumerate(gradients_of_untrained(case)):
        for steps in everyone:
            for name, gradient in steps[number].items():
                assert (gradient is None) == (expected[name] is None)
                assert gradient is None or torch.allclose(gradient, expected[name], rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.fresh
def test_ranks_that_torchrun_starts_have_the_same_numbers(tmp_path: Path) -> None:
    for (_, case, _), runs in cases_under_torchrun(rank_trains, RANKS, FRESH, tmp_path).items():
        assert_as_one_process(runs, one_process(case))


class FirstTokens(nn.Module):
    """A first stage of tokens; `flags` is set between the steps."""

    flags = ALL

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.side = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        side = self.side(tokens) if self.flags & SIDE_GRADIENT else self.side(tokens).detach()
        return self.first(tokens), tokens.abs() if self.flags & GATE else None, side


class LastTokens(nn.Module):
    """The stage after it."""

    flags = ALL

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.last = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, hidden: Tensor, gate: Tensor | None, side: Tensor) -> Tensor:
        query = self.last(hidden)[:, None]
        hidden = hidden + ps.attention(query, query, query)[:, 0]
        hidden = hidden if gate is None else hidden * gate
        return hidden + side if self.flags & USE_SIDE else hidden


def sliced_steps(schedule: str) -> dict[str, dict[str, Tensor | None]]:
    """The loss and the gradients of each step over slices; a world of one has both stages as one model."""
    results = {}
    for case in ("there, then None", "with a gradient, then without", "used, then unused", "unused, then used"):
        parts: list[nn.Module] = [FirstTokens(), LastTokens()]
        alone = ps.comms.init_distributed().world_size == 1
        pipe = ps.Pipeline(Chain(parts) if alone else parts, mse_loss, schedule, 2, slices=2)
        for step, (flags, *_) in enumerate(CASES[case]):
            FirstTokens.flags = LastTokens.flags = flags
            torch.manual_seed(step)
            tokens, target = torch.randn(2, 2, 6, WIDTH).double()
            loss = pipe.step(tokens, target=target)
            results[f"{case} {step}"] = {**named_gradients(pipe), "loss": loss}
            pipe.zero_grad()
    return results


@pytest.mark.costly
@pytest.mark.parametrize("schedule", slow_except(["1f1b"], ["gpipe", "1f1b", "zb-h1"]))
def test_messages_of_slices_change_too(schedule: str) -> None:
    alone, ranks = sliced_steps(schedule), on_ranks(sliced_steps, 2, schedule)
    for step, expected in alone.items():
        assert_same({name: value for rank in ranks for name, value in rank[step].items()}, expected)


class HandsOnASet(nn.Module):
    """Adds to a set of its own, or to the one that it was given, and hands it on."""

    def __init__(self, adds):
        super().__init__()
        self.linear, self.adds, self.names = nn.Linear(WIDTH, WIDTH).double(), adds, {"a"}

    def forward(self, hidden, names=None):
        if names is None:
            names = self.names if self.adds == "own" else {"a"}
        names.add(f"{len(names)}")
        return self.linear(hidden) * len(names), names


class CountsTheSet(HandsOnASet):
    def forward(self, hidden, names):
        names.add("b")
        return self.linear(hidden) * len(names)


def rank_sets(adds):
    torch.manual_seed(0)
    stages = [HandsOnASet(adds), HandsOnASet(adds), CountsTheSet(adds)]
    pipe = ps.Pipeline(stages, mse_loss, "gpipe", 4)
    inputs = torch.ones(ROWS, WIDTH, dtype=torch.double)
    return [pipe.step(inputs, target=inputs).item() for _ in range(2)]


def sets_of_one_process(adds):
    torch.manual_seed(0)
    stages = [HandsOnASet(adds), HandsOnASet(adds), CountsTheSet(adds)]
    inputs = torch.ones(ROWS // 4, WIDTH, dtype=torch.double)
    losses = []
    for _ in range(8):
        hidden, names = stages[1](*stages[0](inputs))
        losses.append(mse_loss(stages[2](hidden, {*names}), inputs).item())  # on a rank of its own the set is one of its own
        if adds == "own":  # the second stage's additions stay on its rank
            stages[0].names.discard(f"{len(names) - 1}")
    return [sum(losses[:4]) / 4, sum(losses[4:]) / 4]


@pytest.mark.ranks
@pytest.mark.parametrize("adds", ["new", "own"])
def test_a_set_that_stages_change_in_place_is_in_each_message_as_it_was_sent(adds):
    for losses in on_ranks(rank_sets, 3, adds):
        assert losses == pytest.approx(sets_of_one_process(adds), rel=1e-12)
