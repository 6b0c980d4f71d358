"""A value that is not finite is named where it first was, in every schedule; a step is skipped without a trace."""

import re
import warnings

import pytest
import torch
from reference import data, same
from runners import on_ranks, on_ranks_once
from slow_cases import slow_except
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

import penstock as ps
from penstock.stage.dtensor import gather_full_tensor

pytestmark = pytest.mark.ranks

NAN, INF = float("nan"), float("inf")
BLOCKS, MICROBATCHES, ROWS = 7, 4, 8


class NonFiniteFault:
    """Something that goes wrong in microbatch 2 of one step."""

    def __init__(self):
        self.kind, self.calls = "", 0

    def set(self, kind):
        self.kind, self.calls = kind, 0

    def strikes(self, *kinds):
        self.calls += self.kind in kinds
        return self.kind in kinds and self.calls == 3


class Spoiled(torch.autograd.Function):
    """Its input; NaN goes back."""

    @staticmethod
    def forward(ctx, hidden):
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * NAN


class Inner(nn.Module):
    """A linear layer that may go wrong."""

    def __init__(self):
        super().__init__()
        self.linear, self.fault = nn.Linear(12, 12), NonFiniteFault()
        self.linear.bias.register_hook(lambda gradient: gradient * NAN if self.fault.strikes("gradient") else None)

    def forward(self, hidden):
        output = self.linear(hidden)
        if self.fault.strikes("forward", "inf"):
            return output * (NAN if self.fault.kind == "forward" else INF)
        return Spoiled.apply(output) if self.fault.strikes("backward") else output


class ResidualBlock(nn.Module):
    """A residual block with statistics and random numbers in it."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.drop = nn.BatchNorm1d(12), Inner(), nn.Dropout(0.1)

    def forward(self, hidden):
        return hidden + self.drop(torch.tanh(self.inner(self.norm(hidden))))


class NonFiniteLoss:
    """Cross entropy that may go wrong."""

    def __init__(self):
        self.fault = NonFiniteFault()

    def __call__(self, output, target):
        loss = nn.functional.cross_entropy(output, target)
        return loss * NAN if self.fault.strikes("loss") else loss


class NonFiniteRun:
    """A pipeline in training, with faults on demand in block 3 and in the loss."""

    def __init__(self, schedule, **options):
        torch.manual_seed(3)
        self.model = nn.Sequential(*[ResidualBlock() for _ in range(BLOCKS)], nn.Linear(12, 3))
        self.loss_fn = NonFiniteLoss()
        self.pipe = ps.Pipeline(self.model, self.loss_fn, schedule=schedule, microbatches=MICROBATCHES, **options)
        self.optimizer = torch.optim.Adam(self.pipe.parameters(), lr=1e-2)

    def spoil(self, kind):
        """Every rank does it, to its copy of the model; the one that runs block 3 will see it."""
        for fault in (self.loss_fn.fault, self.model[3].inner.fault):
            fault.set(kind)
        if kind == "optimizer":
            with torch.no_grad():
                self.model[3].inner.linear.weight[0, 0] = NAN

    def step(self, number, bad=""):
        inputs, target = data("mlp", ROWS, seed=number)
        if bad == "inputs":
            inputs[5, 3] = NAN
        loss = self.pipe.step(inputs, target=target)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def state(self):
        return {name: value.clone() for name, value in self.pipe.state_dict().items()}


BLAME = {  # rank R and stage S are those of block 3, L and Z those of the loss
    "forward": r"came up in the step: rank R, stage S, action SF2, microbatch 2: 3.inner gave nan",
    "inf": r"came up in the step: rank R, stage S, action SF2, microbatch 2: 3.inner gave inf",
    "backward": r"came up in the step: rank R, stage S, action S[BI]2, .*: the backward of 3.inner gave nan to 3.inner.linear",
    "gradient": r"came up in the step: rank R, stage S, action S[BIW]2, .*: the gradient of 3.inner.linear.bias has nan",
    "loss": r"came up in the step: rank L, stage Z, action ZF2, microbatch 2: the loss gave nan",
    "inputs": r"came with the batch: rank 0: the batch's inputs in microbatch 2 have nan; first seen in rank 0, stage 0, .*",
    "optimizer": r"was before the step began: rank R: 3.inner.linear.weight has nan since the last optimizer step, .*",
}


def raised(schedule):
    """What each kind of fault is told as, and whether all is as it was before the step; and the pattern it should have."""
    run, expected_message = NonFiniteRun(schedule, on_nonfinite="raise"), {}
    run.step(0)
    table = run.pipe.schedule
    stage = next((s for s, module in run.pipe.stages.items() if any(name == "3" for name, _ in module.named_children())), -1)
    for kind in BLAME:
        run.spoil(kind)
        before = run.state()
        with pytest.raises(ps.NonFiniteError) as caught:
            run.step(1, kind)
        kept = all(torch.equal(value.nan_to_num(), before[name].nan_to_num()) for name, value in run.state().items())
        expected_message[kind] = str(caught.value), kept and all(parameter.grad is None for parameter in run.pipe.parameters())
    return expected_message, stage, table.placement


def skipped(schedule):
    """Whether weights and statistics are those of a run without the batch, and what the report says of it."""
    run, without = NonFiniteRun(schedule, on_nonfinite="skip"), NonFiniteRun(schedule)
    alike, losses = [], []
    for kind in ("backward", "inputs"):
        for item in (run, without):
            item.step(0)
        run.spoil(kind)
        losses.append(run.step(1, kind).isfinite().item())
        skip = run.pipe.report.skipped, run.pipe.metrics()["skipped"], "nan" in run.pipe.report.nonfinite
        without.pipe.step_count += 1  # random numbers depend on it
        alike.append(
            skip == (True, 1.0, True) and all(same(value, without.state()[name]) for name, value in run.state().items())
        )
    return alike, losses


UNDONE = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v")  # whole and split backwards, loop and V, pairs
QUICK = ("1f1b", "zb-v")


def rank_run(schedule):
    warnings.simplefilter("ignore", RuntimeWarning)
    return raised(schedule), *([skipped(schedule)] if schedule in UNDONE else [])


def results_of(schedule):
    return on_ranks_once(rank_run, 2, schedule)


@pytest.mark.parametrize("schedule", slow_except(QUICK, ps.schedule.names()))
def test_each_kind_of_fault_is_named_on_all_ranks_and_the_step_leaves_nothing(schedule):
    (result, *first), (others, *second) = (faults for faults, *_ in results_of(schedule))
    (stage,), placement = {first[0], second[0]} - {-1}, first[1]
    for kind, pattern in BLAME.items():
        text, clean = result[kind]
        expected = pattern
        for letter, number in {"R": placement[stage], "S": stage, "L": placement[-1], "Z": len(placement) - 1}.items():
            expected = re.sub(rf"(?<= ){letter}", str(number), expected)
        assert re.fullmatch(f"step 1: something is not finite, (and|which) {expected}", text), (text, expected)
        assert (text, True) == (text, clean) == others[kind]


@pytest.mark.parametrize("schedule", slow_except(QUICK, UNDONE))
def test_a_skipped_step_is_as_if_its_batch_had_not_been(schedule):
    for _, skips in results_of(schedule):
        assert skips == ([True] * 2, [True, False])


def on_a_mesh(data_parallel, tensor_parallel):
    """A fault on one rank of two pipelines side by side: skipped, raised; and the next step has its bits."""
    mesh = ps.comms.init_mesh(pp=2, tp=2) if tensor_parallel else ps.comms.init_mesh(pp=2, dp=2)
    expected_message, rank = [], torch.distributed.get_rank()
    for choice in ("skip", "raise"):
        runs = []
        for on_nonfinite in (choice, None):
            options = (
                {"tensor_parallel": {"*.inner.linear": ColwiseParallel(output_layouts=Replicate())}} if tensor_parallel else {}
            )
            runs.append(NonFiniteRun("1f1b", mesh=mesh, data_parallel=data_parallel, on_nonfinite=on_nonfinite, **options))
        run, undisturbed = runs
        for item in runs:
            item.step(0)
        if rank in ((0, 1) if tensor_parallel else (1,)):
            run.spoil("backward")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            if choice == "raise":
                with pytest.raises(ps.NonFiniteError) as caught:
                    run.step(1)
                expected_message.append(str(caught.value))
            else:
                run.step(1)
        undisturbed.pipe.step_count = run.pipe.step_count
        losses = [run.step(2) for run in runs]
        states = [{name: gather_full_tensor(value) for name, value in run.state().items()} for run in runs]
        expected_message.append(same(*losses) and all(same(value, states[1][name]) for name, value in states[0].items()))
    return expected_message


def meshes():
    return [on_a_mesh("ddp", False), on_a_mesh("fsdp", False), on_a_mesh("ddp", True)]


@pytest.mark.slow
def test_replicas_and_shards_skip_and_raise_together():
    for result in on_ranks(meshes, 4):
        for skipped, text, after in result:
            assert (skipped, after) == (True, True)
            assert re.search(
                r"rank [01], stage 0, action 0B2, microbatch 2: the backward of 3.inner gave nan to 3.inner.linear", text
            )
