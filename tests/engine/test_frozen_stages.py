"""The first stages of a model, frozen: they have forwards only and get no gradient; the numbers are those of one process."""

from typing import Any

import pytest
import torch
from error_text import NO_ERROR, outcome
from models import CASES
from reference import OneProcess, accumulate, assert_as_one_process, assert_same, data, gradients, make, merged
from runners import cases_on_ranks, on_ranks, on_ranks_once
from slow_cases import group_of, slow_except
from torch import nn

import penstock as ps

pytestmark = pytest.mark.ranks

M, ROWS = 4, 10


def model(kind: str = "mlp", frozen: int = 6) -> tuple[nn.Sequential, Any]:
    """A model whose first layers are frozen, with running statistics among those of an MLP."""
    whole, loss_fn = make(kind, depth=6)
    layers = list(whole)
    if kind == "mlp":
        layers.insert(1, nn.BatchNorm1d(12))
    for layer in layers[:frozen]:
        layer.requires_grad_(False)
    return nn.Sequential(*layers), loss_fn


def kinds_of_stages(pipe: ps.Pipeline) -> list[str]:
    actions = [action for row in pipe.schedule.actions for action in row]
    return ["".join(sorted({act.kind.value for act in actions if act.stage == stage})) for stage in range(pipe.schedule.stages)]


def rank_step(kind: str, schedule: str, frozen: int, cuts: tuple[str, ...], slices: int) -> dict[str, Any]:
    whole, loss_fn = model(kind, frozen)
    pipe = ps.Pipeline(whole, loss_fn, schedule, M, cuts=list(cuts), slices=slices)
    inputs, target = data(kind, ROWS)
    loss = pipe.step(inputs, target=target)
    return {
        "loss": loss,
        "gradients": gradients(pipe.named_parameters()),
        "buffers": {name: value for name, value in pipe.state_dict().items() if "running" in name},
        "kinds": kinds_of_stages(pipe),
        "with backwards": {
            event.action.stage for event in pipe.timeline().events if event.action.kind is not ps.schedule.Kind.F
        },
        "memory": pipe.timeline().peak_memory,
        "evaluated": pipe.eval(inputs, target=target)[1],
    }


STEPS = {  # model, schedule, frozen layers, cuts, slices -> the kinds of each stage's actions
    ("mlp", "1f1b", 6, ("6",), 1): ["F", "BF"],
    ("mlp", "1f1b", 5, ("8",), 1): ["BF", "BF"],  # stage 0 has trained layers too
    ("mlp", "gpipe", 8, ("4",), 1): ["F", "BF"],
    ("mlp", "interleaved-1f1b", 9, ("4", "8", "12"), 1): ["F", "F", "BF", "BF"],
    ("mlp", "zb-v", 9, ("4", "8", "12"), 1): ["F", "F", "FIW", "FIW"],
    ("mlp", "zb-h1", 6, ("6",), 1): ["F", "FIW"],
    ("mlp", "zb-v", 18, ("4", "8", "12"), 1): ["F", "F", "F", "FIW"],  # all is frozen
    ("gpt", "1f1b", 3, ("3",), 1): ["F", "BF"],
    ("gpt", "1f1b", 3, ("3",), 2): ["F", "BF"],
}
QUICK = tuple(case for case in STEPS if case[1] in ("1f1b", "zb-v"))


@pytest.mark.parametrize(
    ("kind", "schedule", "frozen", "cuts", "slices"),
    slow_except(QUICK, STEPS),
)
def test_frozen_stages_have_forwards_only_and_the_bits_of_one_process(kind, schedule, frozen, cuts, slices):
    case = kind, schedule, frozen, cuts, slices
    found = cases_on_ranks(rank_step, 2, group_of(case, QUICK, STEPS))[case]
    whole, loss_fn = model(kind, frozen)
    loss = accumulate(whole, loss_fn, data(kind, ROWS), M)
    if slices == 1:
        buffers = {name: value for name, value in whole.state_dict().items() if "running" in name}
        expected = [loss, gradients(whole.named_parameters()), buffers]
        assert_as_one_process([[rank[what] for what in ("loss", "gradients", "buffers")] for rank in found], expected)
    for rank in found:
        assert rank["kinds"] == STEPS[case]
        assert rank["with backwards"] == {stage for stage, kinds in enumerate(STEPS[case]) if kinds != "F"}


def test_a_rank_of_frozen_stages_keeps_nothing_for_a_backward():
    found = cases_on_ranks(rank_step, 2, QUICK)["mlp", "1f1b", 6, ("6",), 1]
    for rank in found:
        assert rank["memory"][0] == 0 < rank["memory"][1]


def rank_mistakes() -> dict[str, Any]:
    """Stage 0 is frozen; what a user may do then."""
    rank, found = ps.comms.init_distributed().rank, dict[str, Any]()
    (whole, loss_fn), (inputs, target) = model(), data("mlp", ROWS)
    pipe = ps.Pipeline(whole, loss_fn, "1f1b", M, cuts=["6"])
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    found["told of inputs"] = outcome(lambda: pipe.step(inputs.clone().requires_grad_(), target=target))
    for stage in pipe.stages.values():
        stage.requires_grad_(True)
    found["told of thawing"] = outcome(lambda: pipe.step(inputs, target=target))
    found["evaluated"] = pipe.eval(inputs, target=target)[1]
    pipe, optimizer = pipe.rebuild(optimizer=optimizer)
    found["thawed kinds"] = kinds_of_stages(pipe)
    pipe.step(inputs, target=target)
    found["thawed"] = gradients(pipe.named_parameters())

    whole, loss_fn = model()
    table = ps.schedule.build("1f1b", 2, M)
    pipe, given = ps.Pipeline(whole, loss_fn, table, cuts=["6"]), inputs.clone().requires_grad_()
    pipe.step(given, target=target)
    found["given kinds"], found["input gradient"] = kinds_of_stages(pipe), given.grad
    found["given"] = gradients(pipe.named_parameters())

    whole, loss_fn = model()
    pipe = ps.Pipeline(whole, loss_fn, "1f1b", M, cuts=["6"])
    rows = (
        [inputs[first : first + 2] for first in range(0, ROWS, 2)],
        [target[first : first + 2] for first in range(0, ROWS, 2)],
    )
    pipe.step_microbatches(*rows), pipe.step_microbatches(*rows)
    found["costs"] = pipe.plan_costs().step_costs([(2, 12)] * 5).backward
    pipe.step_microbatches(*rows, order="planned")
    pipe.zero_grad()
    pipe.step_microbatches(*rows)
    found["list"] = gradients(pipe.named_parameters())
    found["recut"] = outcome(lambda: pipe.rebuild(cuts="measured"))

    whole, loss_fn = model(frozen=0 if rank else 6)  # each rank's own stages count
    found["kinds by the owner"] = kinds_of_stages(ps.Pipeline(whole, loss_fn, "1f1b", M, cuts=["6"]))
    return found


def mistakes() -> list[dict[str, Any]]:
    return on_ranks_once(rank_mistakes, 2)


TOLD = {
    "inputs": "an input requires a gradient, but stage 0 was frozen when the table was made, which has no backward for it: "
    "give a table, schedule=ps.schedule.build('1f1b', ranks, microbatches)",
    "thawing": "0.weight is trained, but stage 0 was frozen when the table was made, which has no backward for it: "
    "pipe.rebuild() makes it anew",
}


@pytest.mark.parametrize("what", TOLD)
def test_what_does_not_fit_to_frozen_stages_is_told_alike_on_all_ranks(what):
    assert [rank[f"told of {what}"] for rank in mistakes()] == [TOLD[what]] * 2


def test_the_rank_of_a_stage_says_whether_it_is_frozen():
    assert [rank["kinds by the owner"] for rank in mistakes()] == [["F", "BF"]] * 2


def test_what_was_thawed_is_trained_after_a_rebuild():
    whole, loss_fn = model(frozen=0)
    model_with_statistics = accumulate(whole, loss_fn, data("mlp", ROWS), M)
    assert model_with_statistics.isfinite()
    assert [rank["thawed kinds"] for rank in mistakes()] == [["BF", "BF"]] * 2
    assert_same(merged([rank["thawed"] for rank in mistakes()]), gradients(whole.named_parameters()))


def test_a_table_that_was_given_is_what_runs():
    whole, loss_fn = model()
    inputs, target = data("mlp", ROWS)
    inputs.requires_grad_()
    accumulate(whole, loss_fn, (inputs, target), M)
    assert [rank["given kinds"] for rank in mistakes()] == [["BF", "BF"]] * 2
    assert_same(merged([rank["given"] for rank in mistakes()]), gradients(whole.named_parameters()))
    assert torch.equal(mistakes()[0]["input gradient"], inputs.grad)


def test_lists_of_more_microbatches_have_no_backward_of_frozen_stages():
    whole, loss_fn = model()
    accumulate(whole, loss_fn, data("mlp", ROWS), 5)
    assert_same(merged([rank["list"] for rank in mistakes()]), gradients(whole.named_parameters()))
    assert [rank["recut"] for rank in mistakes()] == [NO_ERROR] * 2
    assert all(sum(rank["costs"][0]) == 0 < sum(rank["costs"][1]) for rank in mistakes())


SKIPS = {  # model, its frozen parts, cuts -> the kinds of each stage's actions
    ("u-net", ("down1", "down2"), ("down2", "middle")): ["F", "F", "BF"],
    ("u-net", ("down1",), ("down2", "up1")): ["F", "BF", "BF"],
    ("tied", ("token", "position"), ("blocks.0", "norm")): ["F", "BF", "BF"],
    ("encoder-decoder", ("source", "encoder", "target"), ("decoder.0", "head")): ["F", "BF", "BF"],
}


def step_with_skips(pipeline: Any, name: str, frozen: tuple[str, ...], cuts: tuple[str, ...]) -> tuple[Any, ...]:
    whole, (args, target, kwargs) = CASES[name].model(), CASES[name].batch(ROWS, 1)
    for part in frozen:
        whole.get_submodule(part).requires_grad_(False)
    example = {"example_args": args, "example_kwargs": dict(kwargs)}
    pipe = pipeline(whole, CASES[name].loss_fn, "1f1b", M, cuts=list(cuts), **example)
    loss = pipe.step(*args, target=target, **kwargs)
    kinds = SKIPS[name, frozen, cuts] if pipeline is OneProcess else kinds_of_stages(pipe)
    return loss, gradients(pipe.named_parameters()), kinds


@pytest.mark.slow
@pytest.mark.parametrize("case", SKIPS)
def test_what_skips_trained_stages_from_a_frozen_one_gets_no_gradient(case):
    everyone = cases_on_ranks(step_with_skips, 3, tuple((ps.Pipeline, *skips) for skips in SKIPS))[ps.Pipeline, *case]
    assert_as_one_process(everyone, step_with_skips(OneProcess, *case))


def rank_replicas(data_parallel: str) -> Any:
    whole, loss_fn = model("mlp", 5)
    whole = whole.double().eval()
    pipe = ps.Pipeline(whole, loss_fn, "1f1b", M, cuts=["5"], mesh=ps.comms.init_mesh(pp=2, dp=2), data_parallel=data_parallel)
    inputs, target = data("mlp", ROWS)
    rows = slice(5 * pipe.position.replica, 5 + 5 * pipe.position.replica)
    for _ in range(2):
        pipe.zero_grad()
        loss = pipe.step(inputs[rows].double(), target=target[rows])
    found = {name: grad for name, grad in gradients(pipe.named_parameters()).items() if grad is not None}
    return loss, {name: getattr(grad, "full_tensor", grad.clone)() for name, grad in found.items()}, kinds_of_stages(pipe)


@pytest.mark.slow
@pytest.mark.parametrize("data_parallel", ["ddp", "fsdp"])
def test_replicas_of_frozen_stages_average_nothing(data_parallel):
    whole, loss_fn = model("mlp", 5)
    whole = whole.double().eval()  # running statistics are those of each replica, so none are used here
    inputs, target = data("mlp", ROWS)
    accumulate(whole, loss_fn, (inputs.double(), target), 1)
    expected = {name: grad for name, grad in gradients(whole.named_parameters()).items() if grad is not None}
    found = on_ranks(rank_replicas, 4, data_parallel)
    assert [kinds for *_, kinds in found] == [["F", "BF"]] * 4
    assert {name for _, grads, _ in found for name in grads} == expected.keys()
    for _, grads, _ in found:
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-10, atol=1e-10)
