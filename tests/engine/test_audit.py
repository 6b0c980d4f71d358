"""A rank that computes wrongly is found by another that computes the same, and named; one that does not is left alone."""

import pytest
import torch
from reference import data
from torch import nn

import penstock as ps
from penstock.comms.topology import Topology
from penstock.engine.checks import audit
from penstock.mesh.position import position_in

pytestmark = pytest.mark.ranks

FORWARD, BACKWARD, WEIGHT = "forward", "backward", "weight"


class Fault:
    """On one rank a bit is wrong in what `way` gives: `lasting`, or only in the pipeline's own modules, not when repeated."""

    rank, way, lasting = -1, "", False

    @classmethod
    def set(cls, rank, way, lasting):
        cls.rank, cls.way, cls.lasting = rank, way, lasting


class Flips(nn.Module):
    """A linear layer that has the fault."""

    def __init__(self):
        super().__init__()
        self.linear, self.own = nn.Linear(12, 12), False
        self.linear.weight.register_hook(lambda gradient: flipped(gradient) if self.strikes(WEIGHT) else None)

    def forward(self, hidden):
        output = self.linear(Back.apply(hidden, self) if hidden.requires_grad else hidden)
        return output + (flipped(output) - output).detach() if self.strikes(FORWARD) else output

    def strikes(self, way):
        return Fault.way == way and Fault.rank == torch.distributed.get_rank() and (self.own or Fault.lasting)


class Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, module):
        ctx.module = module
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        return flipped(gradient) if ctx.module.strikes(BACKWARD) else gradient, None


def flipped(tensor):
    wrong = tensor.detach().clone()
    wrong.view(torch.int32)[0] ^= 1 << 21
    return wrong


def model():
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.BatchNorm1d(12), nn.Dropout(0.2), Flips(), nn.GELU()) for _ in range(7)]
    return nn.Sequential(*blocks, nn.Linear(12, 3))


def honest(schedule):
    """Steps that are all audited, so that every stage has its turn: nothing is found, and bits are the same."""
    pipes = [ps.Pipeline(model(), nn.functional.cross_entropy, schedule, 4, audit_every=every) for every in (1, None)]
    for number in range(pipes[0].schedule.stages):
        inputs, target = data("mlp", 8, seed=number)
        assert torch.equal(*[pipe.step(inputs, target=target) for pipe in pipes])
    for one, other in zip(pipes[0].parameters(), pipes[1].parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def each_schedule_honestly():
    for name in ps.schedule.names():
        honest(name)
    return "done"


def test_an_audit_finds_nothing_where_all_ranks_compute_alike():
    assert ps.launch(each_schedule_honestly, 2) == ["done"] * 2


def caught(rank, way, lasting, schedule="1f1b", model=model, **options):
    """What is told of it when the audit comes to it, after which step, and whether gradients are as before that step."""
    Fault.set(-1, "", False)
    pipe = ps.Pipeline(model(), nn.functional.cross_entropy, schedule, 4, audit_every=1, **options)
    for each in [each for stage in pipe.stages.values() for each in stage.modules() if isinstance(each, Flips)]:
        each.own = True
    inputs, target = data("mlp", 8)
    pipe.step(inputs, target=target)
    Fault.set(rank, way, lasting)
    for _ in range(pipe.schedule.stages * pipe.position.replicas):
        before = [parameter.grad.clone() for parameter in pipe.parameters()]
        try:
            pipe.step(inputs, target=target)
        except ps.CorruptionError as error:
            return str(error), all(map(torch.equal, before, [each.grad for each in pipe.parameters()]))
    return None


def faults():
    return {
        (rank, way, lasting): caught(rank, way, lasting)
        for rank in range(3)
        for way in (FORWARD, BACKWARD, WEIGHT)
        for lasting in (False, True)
        if not (lasting and way == WEIGHT)  # a hook on a parameter is not copied
    }


MADE = {FORWARD: "output", BACKWARD: "input's gradient", WEIGHT: "weights' gradient"}


def test_a_flipped_bit_is_found_and_the_rank_that_was_wrong_named():
    results = ps.launch(faults, 3)
    assert results[0] == results[1] == results[2]
    for (rank, way, lasting), (text, clean) in results[0].items():
        assert clean
        if lasting:  # the rank is wrong in its stage, and where it checks another's
            assert f": rank {rank} is wrong, since rank " in text
            continue
        made = "loss" if (rank, way) == (2, FORWARD) else "weights' gradient" if (rank, way) == (0, BACKWARD) else MADE[way]
        place = f"the {made} of stage {rank} for microbatch {0 if rank else 1} is not the same to the bit on rank {rank}, "
        told = f"which has the stage, and rank {(rank + 1) % 3}, which did it again: rank {rank} was wrong, "
        assert place + told + "for it comes to other bits when it does so again" in text


def beside_each_other():
    """Two replicas of a pipeline of two, each rank given its own stage only; rank 3 is wrong.."""
    mesh = ps.comms.init_mesh(pp=2, dp=2)
    whole = model()
    half = Own([whole[:4], whole[4:]][mesh.get_local_rank("pp")])
    return caught(3, FORWARD, False, model=lambda: half, mesh=mesh)


def test_a_replica_audits_its_like_also_where_ranks_know_only_their_own_stage():
    for text, _ in ps.launch(beside_each_other, 4):
        assert "on rank 3, which has the stage, and rank 2, which did it again: rank 3 was wrong" in text


def refused(function):
    with pytest.raises(ps.MismatchError) as error:
        function()
    return str(error.value)


def refusals():
    parts, rank = model(), ps.comms.init_distributed().rank
    stage = Own(parts[4 * rank : 4 * rank + 4])
    return [
        refused(lambda: ps.Pipeline(stage, nn.functional.mse_loss, audit_every=1)),
        refused(lambda: ps.Pipeline(parts, nn.functional.mse_loss, audit_every=0)),
        refused(lambda: ps.Pipeline(parts, nn.functional.mse_loss, on_nonfinite="ignore")),
        refused(lambda: ps.Pipeline(parts, nn.functional.mse_loss, audit_every=1 + rank)),
        caught(1, FORWARD, True)[0],
    ]


class Own(nn.Module):
    """A rank's own stage."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, hidden):
        return self.part(hidden)


def test_what_cannot_be_audited_is_refused_in_a_sentence_and_two_ranks_cannot_decide():
    for alone, none, choice, differs, two in ps.launch(refusals, 2):
        assert "give every rank the whole model, or a list of all stages" in alone
        assert "audit_every=0: give a whole number of steps" in none
        assert "on_nonfinite='ignore': use 'raise', 'skip', 'retry' or None" in choice
        assert "audit_every=1, rank 1 has on_nonfinite=None and audit_every=2" in differs
        assert "one of the two is wrong, and there is no third rank to tell which" in two


def test_on_a_gpu_it_wants_bits_that_repeat():
    position = position_in(None, Topology(0, 2, torch.device("cuda", 0)))
    with pytest.raises(ps.MismatchError, match=r"repeat with init_distributed\(deterministic=True\) only"):
        audit.check(position, True, {})
