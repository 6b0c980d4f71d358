"""A second, frozen model in the ranks' idle time: the bits of one process that runs it without a graph before each loss."""

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from error_text import outcome
from models import toy
from reference import OneProcess, assert_as_one_process, gradients
from runners import cases_on_ranks, cases_under_torchrun, on_ranks_once
from slow_cases import group_of, slow_except
from torch import Tensor, nn

import penstock as ps
from penstock.engine.activation_memory import StorageSet
from penstock.engine.teacher import PassInputs
from penstock.schedule.memory import waiting_outputs
from penstock.stage.connections import StageConnections
from penstock.stage.stage import Stage

pytestmark = pytest.mark.ranks

M, WIDTH = 4, 6
ROWS = [9, 8, 3, 8]  # of the batch of each step: unequal pieces, and fewer rows than microbatches


def student(layers: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(layers)])


def teacher(layers: int = 12, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    layer_list = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*layer_list).to(dtype)


def loss_fn(output: Tensor, target: Tensor, teacher_output: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target) + nn.functional.mse_loss(output, teacher_output.float())


class Unit:
    """Nothing that a message can have."""


class ReadsRows(nn.Module):
    def forward(self, batch: Any) -> Tensor:
        rows = batch["rows"] if isinstance(batch, dict) else batch
        assert isinstance(rows, Tensor)
        return rows


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)) for rows in ROWS]


def train(pipeline: Any, schedule: str, announces: bool) -> tuple[Any, list[str]]:
    """Return what AdamW comes to, and the actions. With `announces`, each step but the last gives the inputs of the next."""
    pipe = pipeline(student(), loss_fn, schedule, M, seed=None, teacher=teacher())
    pipe.train(False)  # dropout of the model off: the reference is one process; the teacher's is always off
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    losses, steps = [], batches()
    for number, (inputs, target) in enumerate(steps):
        next_args = (steps[number + 1][0],) if announces and number + 1 < len(steps) else ()
        optimizer.zero_grad()
        losses.append(pipe.step(inputs, target=target, next_args=next_args))
        if number == 1 and pipeline is ps.Pipeline:
            pipe.eval(inputs, target=target)  # in between, with forwards of its own
        optimizer.step()
    numbers = losses, gradients(pipe.named_parameters()), dict(pipe.state_dict())
    return numbers, [] if pipeline is OneProcess else [str(event.action) for event in pipe.timeline().events]


def rank_trains(schedule: str, announces: bool) -> tuple[Any, list[str]]:
    return train(ps.Pipeline, schedule, announces)


QUICK = (("1f1b", True), ("1f1b", False), ("zb-h1", False), ("zb-v", True), ("interleaved-1f1b", True))
CASES = tuple(product(ps.schedule.names(), (True, False)))


def check(results: list[Any]) -> None:
    assert_as_one_process([numbers for numbers, _ in results], train(OneProcess, "", False)[0])


def test_the_stage_that_passes_inputs_on_returns_their_args_and_keywords() -> None:
    stage = Stage(0, PassInputs(), torch.device("cpu"), connections=StageConnections((), (1,)))
    args, kwargs = (torch.ones(2), 3), {"mask": torch.zeros(2), "names": None}
    stage.begin_step()
    assert stage.forward(0, (args, kwargs), with_backward=False) == (args, kwargs)
    assert not stage.in_flight


@pytest.mark.parametrize(("schedule", "announces"), slow_except(QUICK, CASES))
def test_losses_gradients_and_weights_are_those_of_one_process(schedule: str, announces: bool) -> None:
    case = schedule, announces
    check(cases_on_ranks(rank_trains, 2, group_of(case, QUICK, CASES))[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [3, 4])
def test_on_more_ranks_too_with_all_schedules(ranks: int, case: tuple[str, bool]) -> None:
    check(cases_on_ranks(rank_trains, ranks, CASES)[case])


@pytest.mark.slow
@pytest.mark.fresh
def test_ranks_that_torchrun_starts_have_the_same_numbers(tmp_path: Path) -> None:
    for results in cases_under_torchrun(rank_trains, 2, QUICK, tmp_path).values():
        check(results)


# -- what runs when ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("announces", [True, False])
def test_the_teacher_runs_in_the_step_of_its_batch_or_in_the_one_before(announces: bool) -> None:
    for _, actions in cases_on_ranks(rank_trains, 2, QUICK)["1f1b", announces]:
        by_teacher = [action for action in actions if int(action[0]) > 1]
        assert len(by_teacher) == (0 if announces else 5 * M)  # in the last step, which announces nothing; 4 stages in a V


def teacher_changes(module: nn.Module) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield changes of a teacher's stage that autograd does not count."""
    name, layer = next(iter(module.named_children()))
    yield "data", lambda: next(module.parameters()).data.mul_(2)
    yield "attribute", lambda: setattr(layer, "scale", 2.0)
    yield "hook", lambda: layer.register_forward_hook(lambda _, __, output: output * 2)
    yield "layer", lambda: setattr(module, name, copy.deepcopy(layer))


def table_rule(ranks: int, microbatches: int) -> ps.schedule.Schedule:
    return ps.schedule.with_teacher(ps.schedule.build("1f1b", ranks=ranks, microbatches=microbatches))


def counted_outputs(announces: bool) -> list[tuple[list[int], Any]]:
    """Train with a teacher; return of each step how many of its outputs exist at each loss, and the timeline."""
    frozen, outputs, counts, found = teacher(), StorageSet(), list[int](), []
    frozen[-1].register_forward_hook(lambda _, __, output: outputs.add([output]))

    def loss_that_counts(*arguments: Tensor) -> Tensor:
        counts.append(len(outputs.alive_subset()._storages))
        return loss_fn(*arguments)

    pipe = ps.Pipeline(student(), loss_that_counts, "1f1b", M, teacher=frozen)
    steps = batches()[:2]
    for (inputs, target), following in zip(steps, [steps[1:], []], strict=True):
        counts.clear()  # the first step of a kind calls the loss more often, to test it
        pipe.step(inputs, target=target, next_args=following[0][:1] if announces and following else ())
        found.append((counts[-M:], pipe.timeline()))
    return found


def rank_uses() -> dict[str, Any]:
    torch.manual_seed(3)
    model, frozen, found = student(), teacher(), dict[str, Any]()
    given = {name: value.clone() for name, value in frozen.state_dict().items()}
    (inputs, target), (next_inputs, next_target), *_ = batches()
    pipe = ps.Pipeline(model, loss_fn, "1f1b", M, teacher=frozen)
    rank = pipe.topology.rank

    # What it is, and what it is not.
    found["names"] = (set(pipe.state_dict()) | {name for name, _ in pipe.named_parameters()}) <= set(model.state_dict())
    pipe.train(False)  # dropout depends on the step
    pipe.step(inputs, target=target, next_args=(next_inputs,))
    found["timeline"] = str(pipe.timeline().chains)
    found["explained"] = str(pipe.timeline().explain()).splitlines()
    found["same"] = all(torch.equal(value, given[name]) for name, value in frozen.state_dict().items())
    found["gradients"] = [parameter.grad for parameter in frozen.parameters() if parameter.grad is not None]
    found["equal values"] = pipe.step(next_inputs.clone(), target=next_target).item()  # no other objects are asked for

    # Ranks that do not read a batch need not have it.
    pipe.step(inputs if rank == 0 else None, target=target, next_args=(next_inputs if rank == 0 else None,))
    found["unread"] = pipe.step(next_inputs if rank == 0 else None, target=next_target).item()

    # What is no next batch.
    pipe.step(inputs, target=target, next_args=(next_inputs,))
    found["another batch"] = outcome(lambda: pipe.step(inputs, target=target))
    found["after it"] = pipe.step(next_inputs, target=next_target).item()
    changed = next_inputs.clone()
    pipe.step(inputs, target=target, next_args=(changed,))
    changed.add_(1)
    found["changed in place"] = outcome(lambda: pipe.step(changed, target=next_target))
    pipe.step(inputs, target=target, next_args=(next_inputs,))
    with torch.no_grad():
        next(pipe._engine.stages[4 - rank].module.parameters()).add_(0)
    found["another teacher"] = outcome(lambda: pipe.step(next_inputs, target=next_target))
    for what, change in teacher_changes(pipe._engine.stages[4 - rank].module):
        pipe.step(inputs, target=target, next_args=(next_inputs,))
        change()
        found[what] = outcome(lambda: pipe.step(next_inputs, target=next_target))
    pipe.step(inputs, target=target, next_args=(next_inputs,))
    with torch.autocast("cpu", torch.bfloat16):
        found["autocast"] = outcome(lambda: pipe.step(next_inputs, target=next_target))
    shared = next_inputs.numpy().copy()
    pipe.step(inputs, target=target, next_args=(torch.from_numpy(shared),))
    shared += 1
    found["changed by NumPy"] = outcome(lambda: pipe.step(torch.from_numpy(shared), target=next_target))

    found["no tuple"] = outcome(lambda: pipe.step(inputs, target=target, next_args=next_inputs))
    announced = {"next_args": (next_inputs,)} if rank else {}
    found["one rank only"] = outcome(lambda: pipe.step(inputs, target=target, **announced))
    own = ps.Pipeline(student(), nn.functional.mse_loss, "1f1b", M)
    found["no teacher"] = outcome(lambda: own.step(inputs, target=target, next_args=(inputs,)))

    # What no pipeline can be.
    found["two arguments"] = outcome(lambda: ps.Pipeline(student(), nn.functional.mse_loss, "1f1b", M, teacher=frozen))
    found["two in a module"] = outcome(lambda: ps.Pipeline(student(), nn.MSELoss(), "1f1b", M, teacher=frozen))
    found["two of its own"] = outcome(lambda: ps.Pipeline(student(), lambda a, b: (a - b).mean(), teacher=frozen))
    found["no loss"] = outcome(lambda: ps.Pipeline(student(), None, "1f1b", M, teacher=frozen))
    found["trained"] = outcome(lambda: ps.Pipeline(model, loss_fn, "1f1b", M, teacher=nn.Sequential(*model)))
    found["slices"] = outcome(lambda: ps.Pipeline(student(), loss_fn, "1f1b", M, teacher=frozen, slices=2))
    found["meta"] = outcome(lambda: ps.Pipeline(student(), loss_fn, "1f1b", M, teacher=copy.deepcopy(frozen).to("meta")))
    found["no module"] = outcome(lambda: ps.Pipeline(student(), loss_fn, "1f1b", M, teacher="gpt2"))
    lazy = nn.Sequential(nn.LazyLinear(WIDTH), nn.Linear(WIDTH, WIDTH))
    found["lazy"] = outcome(lambda: ps.Pipeline(student(), loss_fn, "1f1b", M, teacher=lazy))
    table = ps.schedule.with_teacher(ps.schedule.build("1f1b", 2, M))
    found["a table"] = outcome(lambda: ps.Pipeline(student(), nn.functional.mse_loss, table))
    fewer_rows = nn.Sequential(nn.Linear(WIDTH, WIDTH), toy(lambda self, rows: rows[1:]))
    shorter = ps.Pipeline(student(), loss_fn, "1f1b", M, teacher=fewer_rows)
    found["other rows"] = outcome(lambda: shorter.step(inputs, target=target))

    # Inputs that cannot be sent to the teacher's first stage.
    unsendable, first = {"rows": inputs, "unit": Unit()}, ReadsRows()
    passing = ps.Pipeline(nn.Sequential(first, *student()), loss_fn, "1f1b", M, teacher=nn.Sequential(first, *teacher()))
    found["not sent"] = outcome(lambda: passing.step(unsendable, target=target))
    found["not sent in eval"] = outcome(lambda: passing.eval(unsendable, target=target if rank else None))
    found["not sent ahead"] = outcome(lambda: passing.step(inputs, target=target, next_args=(unsendable,)))
    own_ranks = ps.schedule.with_teacher(ps.schedule.build("1f1b", 2, M))
    reading = ps.Pipeline(nn.Sequential(first, *student()), loss_fn, own_ranks, teacher=nn.Sequential(first, *teacher()))
    found["read where it is"] = reading.step(unsendable, target=target).item(), passing.step(inputs, target=target).item()

    # Other ways to give it, and other calls.
    bf16 = ps.Pipeline(student(), loss_fn, "1f1b", M, teacher=teacher(dtype=torch.bfloat16), seed=None)
    found["bf16"] = outcome(lambda: bf16.step(inputs.bfloat16(), target=target))
    wide = ps.Pipeline(student(), loss_fn, "1f1b", M, teacher=nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(4, WIDTH)))
    found["a layer that fails"] = outcome(lambda: wide.step(inputs, target=target, next_args=(next_inputs,)))
    finer = ps.schedule.with_teacher(ps.schedule.build("1f1b", 2, M), stages=[0, 1, 0, 1], ahead=False)
    many = ps.Pipeline(student(), loss_fn, finer, teacher=teacher())
    found["more stages"] = [
        many.step(inputs, target=target, next_args=(next_inputs,)).item(),
        many.step(next_inputs, target=next_target).item(),
    ]
    found["stages of it"] = {int(str(event.action)[0]) for event in many.timeline().events}
    elsewhere = ps.schedule.with_teacher(ps.schedule.build("1f1b", 2, M), stages=[1])
    passed = ps.Pipeline(student(), loss_fn, elsewhere, teacher=teacher())
    found["inputs elsewhere"] = [
        passed.step(inputs if rank == 0 else None, target=target, next_args=(next_inputs if rank == 0 else None,)).item(),
        passed.step(next_inputs, target=next_target).item(),
    ]
    stages = ps.partition.split(teacher(), 2)
    losses = []
    for way in (teacher(), stages, {rank: stages[rank]}):
        other = ps.Pipeline(student(), loss_fn, table, teacher=way)
        losses.append(other.step(inputs, target=target, next_args=(next_inputs,)).item())
        losses.append(other.step(next_inputs, target=next_target).item())
    found["ways"] = losses
    listed = ps.Pipeline(student(), loss_fn, "1f1b", M, teacher=teacher())
    listed.train(False)  # dropout depends on the step
    split = [[*inputs.split(3)], [*target.split(3)]]
    found["list"] = [listed.step_microbatches(*split, order=order).item() for order in ("given", [2, 0, 1])]
    for _ in range(2):
        listed.step(inputs, target=target)
    rebuilt = listed.rebuild("gpipe", 3, cuts="measured")
    found["rebuilt"] = rebuilt.step(inputs, target=target).item()
    found["longer list"], found["recut"] = [], []
    for schedule in ("1f1b", table_rule):
        pipe = ps.Pipeline(student(), loss_fn, schedule, M, teacher=teacher())
        pipe.train(False)
        longer = [*inputs.split(1)], [*target.split(1)]  # more microbatches than M
        found["longer list"].append([pipe.step_microbatches(*longer).item() for _ in range(3)])
        costs = pipe.plan_costs()
        found["stages with costs"] = {stage for _, stage in costs.fits}
        found["bytes of a row's output"] = costs.teacher_output_bytes(1, WIDTH)
        pipe.step(inputs, target=target)
        pipe.step(inputs, target=target)
        found["recut"].append(pipe.rebuild(cuts="measured").step(inputs, target=target).item())
    torch.manual_seed(rank)
    unequal = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ps.Pipeline(student(), loss_fn, "1f1b", M, teacher=unequal)
    found["warnings"] = [str(warning.message) for warning in caught]
    found["counted"] = {announces: counted_outputs(announces) for announces in (True, False)}
    found["checked"] = (
        ps.Pipeline(student(), loss_fn, "1f1b", M, teacher=teacher(), on_nonfinite="skip")
        .step(inputs, target=target, next_args=(next_inputs,))
        .item()
    )
    return found


def uses() -> list[dict[str, Any]]:
    return on_ranks_once(rank_uses, 2)


def test_a_teacher_is_no_part_of_the_model() -> None:
    for found in uses():
        assert found["names"]
        assert found["same"]
        assert not found["gradients"]
        assert found["explained"][0].startswith("teacher: ")
        assert found["explained"][1].startswith("1f1b, 2 ranks, 2 stages, 4 microbatches: ")
        # Stage 2 passes the inputs on, from rank 0 to rank 1, where a V of 4 stages begins and ends.
        assert found["timeline"] == "Chains(num_stages=7, forward_only=frozenset({2, 3, 4, 5, 6}), teacher=2, ahead=True)"


WRONG = {
    "another batch": "step() was given another batch than the one that next_args= and next_kwargs= of the step before",
    "changed in place": "step() was given a batch that was changed in place after it was next_args= of the step before",
    "another teacher": "the teacher's parameters or buffers have changed since it ran ahead on this batch",
    "data": "the teacher's parameters or buffers have changed since it ran ahead",
    "attribute": "the teacher's layers' attributes or hooks have changed since it ran ahead",
    "hook": "the teacher's layers' attributes or hooks have changed since it ran ahead",
    "layer": "the teacher's layers have changed since it ran ahead",
    "autocast": "the teacher's autocast has changed since it ran ahead",
    "changed by NumPy": "step() was given a batch that was changed in place after it was next_args= of the step before",
    "no tuple": "next_args= has the arguments of the next step, in a tuple, not a Tensor: give next_args=(inputs,)",
    "one rank only": "the ranks do not all get next_args= or next_kwargs=",
    "no teacher": "step() was given next_args= or next_kwargs=, for which a teacher runs ahead, but the pipeline has none",
    "two arguments": "and mse_loss of torch takes the output and the target: give",
    "two in a module": "and MSELoss of torch takes the output and the target: give",
    "two of its own": "which does not take three arguments (too many positional arguments): give",
    "no loss": "a teacher's outputs are for the loss: give Pipeline(.., loss_fn=) a function of (output, target, teacher",
    "trained": "is the trained model's own 0.0.weight: a teacher is another model",
    "slices": "a teacher does not run in slices: use slices=1, or a mesh whose ranks along cp share the tokens",
    "meta": "of the teacher has tensors without values, on the meta device",
    "no module": "the teacher is an nn.Module, a list with one for each stage, or {stage: module}, not a str",
    "lazy": "0.weight has no shape yet: run one batch through the teacher before",
    "a table": "1f1b with a teacher ahead is a table with a teacher: give Pipeline(.., teacher=model)",
    "a layer that fails": "action 3F0, microbatch 0: stage 1 of the teacher: RuntimeError: mat1 and mat2 shapes",
    "not sent": "the teacher's first stage is on another rank than the model's, which sends it its inputs: ",
    "not sent in eval": 'To keep it on the rank that reads them: schedule=ps.schedule.with_teacher(ps.schedule.build("1f1b"',
    "not sent ahead": 'To keep it on the rank that reads them: schedule=ps.schedule.with_teacher(ps.schedule.build("1f1b"',
    "other rows": "the teacher's output of shape (2, 6) does not have the 3 rows of the microbatch in dimension 0",
}


@pytest.mark.parametrize("use", WRONG)
def test_a_wrong_use_is_one_sentence_on_every_rank(use: str) -> None:
    for found in uses():
        assert WRONG[use] in found[use]
        assert "\n" not in found[use]


def test_teachers_of_other_values_are_told_by_name() -> None:
    first, second = [found["warnings"] for found in uses()]
    assert len(first) == 1
    assert first[0].startswith(
        "rank 1 has built another teacher than rank 0: 4 of its 4 tensors have other values (0.weight, ..)"
    )
    assert not second


def test_after_a_wrong_use_the_next_step_runs_the_teacher_itself() -> None:
    for found in uses():
        assert found["after it"] == found["unread"]


def test_a_teacher_may_be_given_in_all_ways_of_a_model_and_reads_any_call() -> None:
    for found in uses():
        first, second, *others = found["ways"]
        assert others == [first, second] * 2
        assert found["more stages"] == found["inputs elsewhere"] == [first, second]
        assert found["stages of it"] == {0, 1}  # the second step only used what was there
        assert found["list"][0] == pytest.approx(found["list"][1])
        assert found["rebuilt"] == pytest.approx(found["list"][0])
        assert found["longer list"][0] == found["longer list"][1]
        assert found["stages with costs"] == {0, 1}  # not the teacher's
        assert found["bytes of a row's output"] == pytest.approx(4 * WIDTH)
        assert found["recut"][0] == found["recut"][1]
        assert found["checked"] == first
        assert found["read where it is"][0] == found["read where it is"][1]


# -- memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("announces", [True, False])
def test_the_timeline_counts_the_outputs_that_wait_for_their_losses(announces: bool) -> None:
    for counts, timeline in uses()[1]["counted"][announces]:
        actions = [event.action for event in timeline.rows[1]]
        of_losses = [number for number, action in enumerate(actions) if str(action).startswith("1F")]
        waiting = waiting_outputs(actions, timeline.stage_chains)
        assert counts == [waiting[number + 1] + 1 for number in of_losses]  # and the one that the loss has
        assert timeline.peak_waiting_outputs == (0, max(waiting))


@pytest.mark.parametrize("announces", [True, False])
def test_their_bytes_are_a_part_of_the_memory_of_their_rank(announces: bool) -> None:
    for (_, timeline), rows in zip(uses()[1]["counted"][announces], (3, 2), strict=True):
        assert timeline.teacher_output == rows * WIDTH * 4  # of the largest microbatch, of 9 rows in 4 and of 8
        without = dataclasses.replace(timeline, teacher_output=0.0)
        actions, memory = zip(*without.memory_after_actions(1), strict=True)
        waiting = [count * timeline.teacher_output for count in waiting_outputs(actions, timeline.stage_chains)[1:]]
        assert timeline.peak_memory == (without.peak_memory[0], max(map(sum, zip(memory, waiting, strict=True))))


def test_a_simulation_counts_them_and_a_proof_names_them() -> None:
    table, costs = ps.schedule.build("1f1b", ranks=4, microbatches=8), ps.schedule.Costs(teacher_output=0.25)
    ahead, of_this_batch = (ps.schedule.with_teacher(table, ahead=ahead) for ahead in (True, False))
    assert ps.schedule.simulate(ahead, costs).peak_memory == (4, 3, 2, 1 + 7 * 0.25)
    assert ps.schedule.simulate(table, costs).peak_memory == (4, 3, 2, 1)
    assert str(ps.schedule.verify(ahead)).endswith("in flight 4/3/2/1, up to 8 outputs of the teacher waiting")
    assert ps.schedule.verify(of_this_batch).peak_waiting_outputs == 1
