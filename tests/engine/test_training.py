"""Training as people do it: autocast, loss scaling, recomputation, compiled stages, auxiliary losses, any optimizer."""

import math
from types import SimpleNamespace

import pytest
import torch
from reference import OneProcess, assert_as_one_process, assert_same, data, gradients, make, merged, stepped
from runners import cases_on_ranks, on_ranks
from slow_cases import slow_except
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import penstock as ps
from penstock import checkpoint
from penstock.commands.train.setup import token_loss

pytestmark = pytest.mark.ranks

SCHEDULES = (("1f1b", 3), ("zb-h1", 2), ("zb-v", 2))  # and ranks
M = 3


def as_one(results):
    """What the ranks return, (something that is the same everywhere, a dict that is not), put together."""
    return results[0][0], merged([part for _, part in results])


# ---- autocast


def autocast_step(pipeline, schedule):
    pipe = pipeline(*make("gpt"), schedule, M)
    with torch.autocast("cpu", torch.bfloat16):
        return stepped(pipe, [data("gpt", 7)])


@pytest.mark.parametrize(("schedule", "ranks"), SCHEDULES)
def test_bfloat16_autocast_has_the_bits_of_one_process(schedule, ranks):
    expected = autocast_step(OneProcess, schedule)
    assert_as_one_process(on_ranks(autocast_step, ranks, ps.Pipeline, schedule), expected)
    assert any(not torch.equal(grad, grad.bfloat16().float()) for grad in expected[1].values())


# ---- loss scaling


OVERFLOWS = 2  # the step whose gradients are infinite


def rows_of_step(step):
    inputs, target = data("mlp", 7, seed=step)
    return (inputs * 1e38 if step == OVERFLOWS else inputs), target


def scaled_steps(pipeline, scaler_class, schedule, fused):
    scaler = scaler_class("cpu", init_scale=2.0**10, growth_interval=2)
    pipe = pipeline(*make("mlp"), schedule, M, scaler=scaler)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9, fused=fused)
    scales, losses, norms = [], [], []
    for step in range(6):
        inputs, target = rows_of_step(step)
        loss = pipe.step(inputs, target=target).item()
        scaler.unscale_(optimizer)
        norm = pipe.clip_grad_norm_(1.0).item()
        if step != OVERFLOWS:
            losses.append(loss), norms.append(norm)
        assert math.isfinite(norm) == (step != OVERFLOWS)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return losses, norms, scales, dict(pipe.state_dict())


@pytest.mark.parametrize(
    ("schedule", "ranks", "fused"),
    slow_except([("1f1b", 3, False), ("zb-h1", 2, True)], [(*how, fused) for how in SCHEDULES for fused in (False, True)]),
)
def test_a_scaler_skips_the_same_step_on_all_ranks_and_leaves_the_weights_of_one_process(schedule, ranks, fused):
    expected = scaled_steps(OneProcess, torch.amp.GradScaler, schedule, fused)
    assert_as_one_process(on_ranks(scaled_steps, ranks, ps.Pipeline, ShardedGradScaler, schedule, fused), expected)
    assert expected[0][0] < 10  # not scaled
    assert expected[2] == [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11, 2.0**11]


def rank_with_plain_scaler():
    model, loss_fn = make("mlp")
    with pytest.raises(ps.MismatchError, match=r"each of 2 ranks skip steps by itself: use .*ShardedGradScaler"):
        ps.Pipeline(model, loss_fn, "gpipe", M, scaler=torch.amp.GradScaler("cpu"))


def test_a_scaler_that_judges_each_rank_by_itself_is_refused_when_the_pipeline_is_made():
    on_ranks(rank_with_plain_scaler, 2)


# ---- recomputation


class Counted(nn.Module):
    """A Linear, a BatchNorm and dropout that count how often they run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.2)
        self.counter = SimpleNamespace(runs=0)  # a number of the layer itself would begin as before in a recomputation

    def forward(self, hidden: Tensor) -> Tensor:
        self.counter.runs += 1
        return hidden + self.dropout(torch.tanh(self.norm(self.linear(hidden))))


def counted_model():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(12, 6), *[Counted(6) for _ in range(4)], nn.Linear(6, 3))


def rank_recomputing(schedule, recompute):
    pipe = ps.Pipeline(counted_model(), nn.functional.cross_entropy, schedule, M, recompute=recompute)
    inputs, target = data("mlp", 7)
    saved = 0

    def pack(tensor):
        nonlocal saved
        saved += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = [pipe.step(inputs, target=target) for _ in range(2)]
    pipe.eval(inputs)
    state = gradients(pipe.named_parameters()) | {f"{name} now": value for name, value in pipe.state_dict().items()}
    runs = {
        f"{stage}.{name}": torch.tensor(module.counter.runs)
        for stage, whole in pipe.stages.items()
        for name, module in whole.named_modules()
        if isinstance(module, Counted)
    }
    return (losses, saved), state | runs


@pytest.mark.parametrize("recompute", ["stage", "block"])
@pytest.mark.parametrize(("schedule", "ranks"), SCHEDULES)
def test_recomputation_runs_each_block_once_more_and_changes_no_bit(schedule, ranks, recompute):
    runs_of = cases_on_ranks(rank_recomputing, ranks, tuple((schedule, value) for value in (None, "stage", "block")))
    (losses, _), plain = as_one(runs_of[schedule, None])
    (again, _), found = as_one(runs_of[schedule, recompute])
    assert all(map(torch.equal, losses, again))
    runs = [name for name in plain if plain[name].dtype == torch.int64 and not name.endswith("now")]
    assert [int(plain[name]) for name in runs] == [3 * M] * 4  # two steps and an evaluation
    assert [int(found[name]) for name in runs] == [5 * M] * 4
    assert_same({n: v for n, v in found.items() if n not in runs}, {n: v for n, v in plain.items() if n not in runs})
    assert int(plain["1.norm.num_batches_tracked now"]) == 2 * M


def test_recompute_has_two_values():
    with pytest.raises(ps.MismatchError, match="recompute='layer': use 'stage', 'block' or None"):
        ps.Pipeline(counted_model(), nn.functional.cross_entropy, "gpipe", M, recompute="layer")


# ---- compiled stages


def compiled_steps(pipeline, how):
    model, loss_fn = make("gpt")
    if how == "function" and pipeline is ps.Pipeline:
        model = [torch.compile(stage, backend="aot_eager") for stage in ps.partition.split(model, 2)]
    pipe = pipeline(model, loss_fn, "1f1b", M)
    if how == "method" and pipeline is ps.Pipeline:
        for stage in pipe.stages.values():
            stage.compile(backend="aot_eager")
    return stepped(pipe, [data("gpt", 6)] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["function", "method"])
def test_compiled_stages_train_under_the_names_of_the_uncut_model(how):
    assert_as_one_process(on_ranks(compiled_steps, 2, ps.Pipeline, how), compiled_steps(OneProcess, how))


# ---- auxiliary losses


class Routed(nn.Module):
    """A block that wants its two experts used alike, and says so by a loss of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, 2), nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        shares = self.router(hidden).softmax(-1)  # (rows, 2)
        ps.auxiliary_loss(0.1 * (shares.mean(0) - 0.5).square().sum())
        return hidden + sum(shares[:, [n]] * expert(hidden) for n, expert in enumerate(self.experts))


def routed_step(pipeline, schedule, recompute):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(12, 6), *[Routed(6) for _ in range(4)], nn.Linear(6, 3)).double()
    pipe = pipeline(model, nn.functional.cross_entropy, schedule, M, recompute=recompute)
    inputs, target = data("mlp", 7)
    [loss], found = stepped(pipe, [(inputs.double(), target)])
    _, evaluated = pipe.eval(inputs.double(), target=target)
    return (loss.item(), evaluated.item()), found


def test_auxiliary_losses_of_middle_stages_count_in_loss_and_gradients_as_in_one_process():
    (expected, _), grads = routed_step(OneProcess, None, None)
    results = {}
    for schedule, ranks, recompute in (("1f1b", 3, None), ("zb-h1", 2, "block"), ("zb-v", 2, None), ("gpipe", 1, "block")):
        results[schedule, recompute], found = as_one(on_ranks(routed_step, ranks, ps.Pipeline, schedule, recompute))
        assert_same(found, grads)
    assert len({loss for loss, _ in results.values()}) == 1  # not a bit depends on schedule or ranks
    loss, evaluated = results["1f1b", None]
    assert loss == pytest.approx(expected, abs=1e-14)
    assert evaluated == pytest.approx(loss, abs=1e-14)


def test_an_auxiliary_loss_is_a_scalar():
    with pytest.raises(ps.MismatchError, match=r"a floating-point scalar, got torch.float32 of shape \(2,\)"):
        ps.auxiliary_loss(torch.ones(2))


# ---- optimizers and schedules of the learning rate


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "foreach adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "fused adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
    "muon": lambda p: torch.optim.Muon([parameter for parameter in p if parameter.dim() == 2], lr=0.02),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}
SPARSE, AT_ONCE = torch.optim.SparseAdam, torch.optim.LBFGS  # has its own test; is refused


def test_all_optimizers_of_torch_are_tried():
    tried = {type(make([nn.Parameter(torch.ones(2, 2))])) for make in OPTIMIZERS.values()}
    kinds = {var for var in vars(torch.optim).values() if isinstance(var, type) and issubclass(var, torch.optim.Optimizer)}
    assert kinds - {torch.optim.Optimizer} == tried | {SPARSE, AT_ONCE}


def trains(pipeline, schedule, name):
    pipe = pipeline(*make("gpt"), schedule, M)
    optimizer = OPTIMIZERS[name](list(pipe.parameters()))
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8, cycle_momentum=False)
    for step in range(6):
        inputs, target = data("gpt", 7, step)
        pipe.step(inputs, target=target)
        pipe.clip_grad_norm_(0.5)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
    return dict(pipe.state_dict())


@pytest.mark.parametrize(("schedule", "ranks"), slow_except([("zb-h1", 2)], SCHEDULES))
def test_any_optimizer_and_learning_rate_schedule_leaves_the_weights_of_one_process(schedule, ranks):
    cases = tuple((ps.Pipeline, schedule, name) for name in list(OPTIMIZERS)[SCHEDULES.index((schedule, ranks)) :: 3])
    for case, everyone in cases_on_ranks(trains, ranks, cases).items():
        assert_as_one_process(everyone, trains(OneProcess, *case[1:]))


def sparse_steps(pipeline):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(17, 8, sparse=True), nn.Linear(8, 17).requires_grad_(False))
    pipe = pipeline(model, token_loss, "1f1b", M)
    trained = [parameter for parameter in pipe.parameters() if parameter.requires_grad and parameter.dim() == 2]
    optimizer = SPARSE(trained) if trained else None  # the second rank has none
    for step in range(4):
        tokens, target = data("gpt", 7, step)
        pipe.step(tokens, target=target)
        if optimizer:
            optimizer.step()
            optimizer.zero_grad()
    return dict(pipe.state_dict())


def test_sparse_gradients_and_their_optimizer_leave_the_weights_of_one_process():
    assert_as_one_process(on_ranks(sparse_steps, 2, ps.Pipeline), sparse_steps(OneProcess))


def steps_by_closure(pipeline):
    pipe = pipeline(*make("gpt"), "1f1b", M)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        tokens, target = data("gpt", 7, step)

        def closure(tokens=tokens, target=target):
            optimizer.zero_grad()
            return pipe.step(tokens, target=target)

        losses.append(optimizer.step(closure).item())
    return losses, dict(pipe.state_dict())


def test_an_optimizer_may_call_the_step_as_its_closure():
    assert_as_one_process(on_ranks(steps_by_closure, 2, ps.Pipeline), steps_by_closure(OneProcess))


class Prodigy(torch.optim.SGD):
    """Not torch's: known by its name."""


def rank_at_once(folder):
    model, loss_fn = make("mlp")
    pipe = ps.Pipeline(model, loss_fn, "1f1b", M)
    own = list(pipe.parameters())
    results = []
    for work in (
        lambda: AT_ONCE(pipe.parameters()),
        lambda: Prodigy(pipe.parameters()),
        lambda: AT_ONCE(parameter for parameter in pipe.parameters() if parameter.requires_grad),
        lambda: checkpoint.save(folder, pipe, AT_ONCE(own)),
        lambda: checkpoint.resume(folder, pipe, AT_ONCE(own)),
    ):
        with pytest.raises(ps.MismatchError) as caught:
            work()
        results.append(str(caught.value))
    return results


def test_an_optimizer_that_decides_by_all_parameters_at_once_is_refused_where_there_are_several_ranks(tmp_path):
    first, second = on_ranks(rank_at_once, 2, tmp_path)
    assert first == second
    for result, kind in zip(first, ("LBFGS", "Prodigy", "LBFGS", "LBFGS", "LBFGS"), strict=True):
        assert f"{kind} decides by all parameters at once, and each of 2 ranks has its own: use an optimizer that" in result


def test_in_one_process_it_is_not():
    model, loss_fn = make("mlp")
    pipe = ps.Pipeline(model, loss_fn, "1f1b", M)
    optimizer = AT_ONCE(pipe.parameters())
    inputs, target = data("mlp", 7)

    def closure():
        pipe.zero_grad()
        return pipe.step(inputs, target=target)

    first = pipe.step(inputs, target=target)
    optimizer.step(closure)
    assert pipe.step(inputs, target=target) < first
