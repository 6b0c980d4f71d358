"""Every schedule on real processes: the bits of one process."""

import sys
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import toy
from reference import accumulate, assert_same, data, gradients, make, merged
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
}  # fmt: skip
QUICK = ("mlp", 2), ("gpt", 2), ("mixed", 4)


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


def rows_of(microbatches: int) -> int:
    return 2 * microbatches + 1  # uneven pieces


def rank_every_schedule(ranks: int, kind: str):
    """Two steps with each, without an optimizer between."""
    model, loss_fn = make(kind, depth=depth(ranks))
    results = {}
    for table in tables(ranks, kind):
        name, stages_per_rank, microbatches = table
        pipe = ps.Pipeline(model, loss_fn, name, microbatches, seed=None, stages_per_rank=stages_per_rank)
        losses = [
            pipe.step(*inputs, target=target) for *inputs, target in (data(kind, rows_of(microbatches), s) for s in (3, 4))
        ]
        results[table] = losses, gradients(pipe.named_parameters())
        model.zero_grad()
    return results


@pytest.mark.parametrize(("kind", "ranks"), slow_except(QUICK, MICROBATCHES))
def test_every_schedule_has_the_loss_and_the_gradients_of_one_process(kind: str, ranks: int) -> None:
    everyone = on_ranks(rank_every_schedule, ranks, ranks, kind)
    model, loss_fn = make(kind, depth=depth(ranks))
    expected = {}
    for microbatches in {m for _, _, m in tables(ranks, kind)}:
        losses = [accumulate(model, loss_fn, data(kind, rows_of(microbatches), seed), microbatches) for seed in (3, 4)]
        expected[microbatches] = losses, gradients(model.named_parameters())
        model.zero_grad()
    for table in tables(ranks, kind):
        losses, grads = expected[table[2]]
        assert all(result[table][0] == losses for result in everyone), table
        assert_same(merged([result[table][1] for result in everyone]), grads)


# -- memory ---------------------------------------------------------------------------------------------------------


class TrackedMemory(bytearray):
    """Memory one can hold a weak reference to."""


class InputCount:
    """The inputs, of all stages of this rank, still in memory. It is no state of the model, so layers find it by name."""

    def __init__(self) -> None:
        self.alive: list[weakref.ref[TrackedMemory]] = []
        self.peak = 0

    def add(self, memory: TrackedMemory) -> None:
        self.alive.append(weakref.ref(memory))
        self.peak = max(self.peak, sum(reference() is not None for reference in self.alive))


class _Fresh(torch.autograd.Function):
    """The same numbers in memory that is watched."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        memory = TrackedMemory(hidden.numel() * hidden.element_size())
        sys.modules["__input_count__"].count.add(memory)
        return torch.frombuffer(memory, dtype=hidden.dtype).view(hidden.shape).copy_(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class InputCounter(nn.Module):
    """A layer that needs its input for its weight's gradient, and counts it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.weight.register_hook(lambda gradient: None)  # otherwise too small to be deferred

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(_Fresh.apply(hidden))


def rank_peaks(microbatches: int) -> dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]]:
    peaks = {}
    count = InputCount()
    module = sys.modules["__input_count__"] = types.ModuleType("__input_count__")
    module.count = count  # type: ignore[attr-defined]
    for name in ps.schedule.names():
        table = ps.schedule.build(name, 3, microbatches)
        pipe = ps.Pipeline([InputCounter() for _ in range(table.stages)], nn.functional.mse_loss, table)
        for _ in range(2):
            count.peak = 0
            pipe.step(torch.ones(microbatches, 4), target=torch.zeros(microbatches, 4))
        planned = ps.schedule.simulate(table).peak_in_flight
        peaks[name] = count.peak, planned, pipe.timeline().peak_in_flight
    return peaks


def test_the_activations_alive_are_the_tables() -> None:
    for rank, peaks in enumerate(on_ranks(rank_peaks, 3, 8)):
        for name, (counted, planned, measured) in peaks.items():
            assert measured == planned, name
            assert counted == planned[rank], name


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


def rank_awkward() -> dict[tuple[str, str], Any]:
    results = {}
    for case in AWKWARD:
        for name in SPLIT:
            model = awkward(case)
            pipe = ps.Pipeline(model, nn.functional.cross_entropy, name, 5)
            inputs, target = data("mlp", 9)
            results[case, name] = pipe.step(inputs, target=target), gradients(pipe.named_parameters())
    return results


def test_frozen_stages_and_outputs_of_parameters_only_with_a_split_backward() -> None:
    everyone = on_ranks(rank_awkward, 2)
    for (case, name), (loss, _) in everyone[0].items():
        model = awkward(case)
        assert loss == accumulate(model, nn.functional.cross_entropy, data("mlp", 9), 5), (case, name)
        assert_same(merged([result[case, name][1] for result in everyone]), gradients(model.named_parameters()))


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


def rank_own_tables(path: str) -> list[tuple[Tensor, dict[str, Any]]]:
    results = []
    for schedule in (forwards_first, path):
        model, loss_fn = make("mlp")
        pipe = ps.Pipeline(model, loss_fn, schedule, 5)
        inputs, target = data("mlp", 9)
        results.append((pipe.step(inputs, target=target), gradients(pipe.named_parameters())))
    return results


def test_a_function_or_a_csv_is_a_schedule(tmp_path: Path) -> None:
    path = str(tmp_path / "mine.csv")
    ps.schedule.build("zb-v", 2, 5).to_csv(path)
    everyone = on_ranks(rank_own_tables, 2, path)
    model, loss_fn = make("mlp")
    loss = accumulate(model, loss_fn, data("mlp", 9), 5)
    for results in zip(*everyone, strict=True):
        assert all(result == loss for result, _ in results)
        assert_same(merged([grads for _, grads in results]), gradients(model.named_parameters()))


def test_a_csv_is_proved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, proved = str(tmp_path / "mine.csv"), []
    ps.schedule.build("zb-v", 2, 5).to_csv(path)
    monkeypatch.setattr(sys.modules["penstock.schedule.proof"], "prove", lambda program, **_: proved.append(program))
    schedule = build.build_table(path, 2, 5, {})
    assert [ps.schedule.verify(schedule).program] == proved
    assert schedule.actions == ps.schedule.build("zb-v", 2, 5).actions
