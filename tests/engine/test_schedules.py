"""Every schedule on real processes: the bits of one process."""

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from models import toy
from reference import OneProcess, accumulate, assert_as_one_process, data, make, stepped
from runners import on_ranks
from slow_cases import slow_except
from torch import Tensor, nn

import penstock as ps
from penstock.engine import build

pytestmark = pytest.mark.ranks


MICROBATCHES = {  # of a model on P ranks: with the MLP on 3 every M, elsewhere those about which rules change
    ("mlp", 2): (1, 2, 5), ("mlp", 3): range(1, 10), ("mlp", 4): (1, 4, 11),
    ("gpt", 2): (2,), ("gpt", 3): (1, 5), ("gpt", 4): (7,),
    ("mixed", 2): (7,), ("mixed", 3): (4, 9), ("mixed", 4): (5,),
    ("mlp", 1): (1, 3, 8),
}  # fmt: skip
QUICK = ("mlp", 1), ("mixed", 4)


def tables(ranks: int, kind: str) -> Iterator[tuple[str, int | None, int]]:
    """Name, V, M of everything that is run."""
    for name in ps.schedule.names():
        variable = name in ("interleaved-1f1b", "looped-bfs", "interleaved-zb")
        for stages_per_rank in (2, 3) if variable else (None,):
            for microbatches in MICROBATCHES[kind, ranks]:
                yield name, stages_per_rank, microbatches


def depth(ranks: int) -> int:
    """Enough for 3 stages on each rank, with the layers that every model has before and after."""
    return 3 * ranks - 2


def batches(kind: str, microbatches: int) -> list[tuple[Tensor, Tensor]]:
    """One that is split into unequal pieces, and one into equal ones."""
    return [data(kind, 2 * microbatches + 1, 3), data(kind, 2 * microbatches, 4)]


def rank_every_schedule(ranks: int, kind: str) -> dict[tuple[str, int | None, int], Any]:
    """Two steps with each, without an optimizer between."""
    model, loss_fn = make(kind, depth=depth(ranks))
    results = {}
    for table in tables(ranks, kind):
        name, stages_per_rank, microbatches = table
        pipe = ps.Pipeline(model, loss_fn, name, microbatches, seed=None, stages_per_rank=stages_per_rank)
        results[table] = stepped(pipe, batches(kind, microbatches))
        model.zero_grad()
    return results


KERNELS = ("mlp", 2), ("gpt", 2)
CASES = [
    *(pytest.param(*case, marks=pytest.mark.kernels) for case in KERNELS),
    *slow_except(QUICK, [case for case in MICROBATCHES if case not in KERNELS]),
]


@pytest.mark.parametrize(("kind", "ranks"), CASES)
def test_every_schedule_has_the_loss_and_the_gradients_of_one_process(kind: str, ranks: int) -> None:
    expected, (model, loss_fn) = {}, make(kind, depth=depth(ranks))
    for microbatches in {m for _, _, m in tables(ranks, kind)}:
        expected[microbatches] = stepped(OneProcess(model, loss_fn, None, microbatches), batches(kind, microbatches))
        model.zero_grad()
    assert_as_one_process(
        on_ranks(rank_every_schedule, ranks, ranks, kind), {table: expected[table[2]] for table in tables(ranks, kind)}
    )


# -- where others go wrong ------------------------------------------------------------------------------------------


def awkward(case: str) -> nn.Sequential:
    torch.manual_seed(2)
    constant = toy(lambda self, x: self.value.expand(len(x), 12), value=nn.Parameter(torch.arange(12.0) / 12))
    first: dict[str, list[nn.Module]] = {
        "a frozen first stage": [nn.Linear(12, 12).requires_grad_(False), nn.Identity()],
        "an output of parameters only": [nn.Linear(12, 12), constant],
        "a stage without parameters": [nn.Tanh(), nn.Identity()],
        "everything but the end frozen": [nn.Linear(12, 12).requires_grad_(False), nn.Linear(12, 12).requires_grad_(False)],
    }
    return nn.Sequential(*first[case], nn.Linear(12, 12), nn.Linear(12, 3))


AWKWARD = (
    "a frozen first stage",
    "an output of parameters only",
    "a stage without parameters",
    "everything but the end frozen",
)
SPLIT = ("zb-h1", "zb-h2", "interleaved-zb", "zb-v", "v-min", "dualpipe-v")


def awkward_steps(pipeline: Any) -> dict[tuple[str, str], Any]:
    cases = product(AWKWARD, SPLIT)
    return {
        (case, name): stepped(pipeline(awkward(case), nn.functional.cross_entropy, name, 5), [data("mlp", 9)])
        for case, name in cases
    }


def test_frozen_stages_and_outputs_of_parameters_only_with_a_split_backward() -> None:
    assert_as_one_process(on_ranks(awkward_steps, 2, ps.Pipeline), awkward_steps(OneProcess))


def _boom(gradient: Tensor) -> None:
    raise ArithmeticError("boom in the hook")


def rank_fault_in_w() -> tuple[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 3))
    pipe = ps.Pipeline(model, nn.functional.cross_entropy, "zb-h1", 4)
    inputs, target = data("mlp", 8)
    hook = model[1].weight.register_hook(_boom)
    message = ""
    try:
        pipe.step(inputs, target=target)
    except ps.StageError as error:
        message = str(error)
    hook.remove()
    model.zero_grad()
    return message, pipe.step(inputs, target=target)


def test_an_exception_in_w_is_told_with_its_action_and_the_next_step_works() -> None:
    result, losses = zip(*on_ranks(rank_fault_in_w, 2), strict=True)
    assert set(result) == {"rank 1, stage 1, action 1W0, microbatch 0: ArithmeticError: boom in the hook"}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 3))
    assert losses[0] == losses[1] == accumulate(model, nn.functional.cross_entropy, data("mlp", 8), 4)


# -- tables of one's own ----------------------------------------------------------------------------------------------


def forwards_first(rank: int, ranks: int, microbatches: int) -> Iterator[str]:
    """GPipe with every W at the end, as a user would write it."""
    for kind in "FIW":
        yield from (f"{rank}{kind}{m}" for m in range(microbatches))


def steps_of_own_tables(pipeline: Any, path: str) -> list[Any]:
    return [stepped(pipeline(*make("mlp"), schedule, 5), [data("mlp", 9)]) for schedule in (forwards_first, path)]


@pytest.mark.smoke
def test_a_function_or_a_csv_is_a_schedule(tmp_path: Path) -> None:
    path = str(tmp_path / "mine.csv")
    ps.schedule.build("zb-v", 2, 5).to_csv(path)
    assert_as_one_process(on_ranks(steps_of_own_tables, 2, ps.Pipeline, path), steps_of_own_tables(OneProcess, path))


def test_a_csv_is_proved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, proved = str(tmp_path / "mine.csv"), []
    ps.schedule.build("zb-v", 2, 5).to_csv(path)
    monkeypatch.setattr(sys.modules["penstock.schedule.proof"], "prove", lambda program, **_: proved.append(program))
    schedule = build.build_table(path, 2, 5, {})
    assert [ps.schedule.verify(schedule).program] == proved
    assert schedule.actions == ps.schedule.build("zb-v", 2, 5).actions
