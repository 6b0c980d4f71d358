"""What a loss may be: a mean over rows, a weighted mean, a sum; and what is said of any other."""

import math
import re
import warnings
from functools import partial

import pytest
import torch
from models import has_auxiliary_loss, toy
from reference import OneProcess, assert_as_one_process, data, gradients, make, merged, stepped
from runners import on_ranks
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import penstock as ps
from penstock.engine import report
from penstock.guards.loss_check import UnequalWeightsCheck

F = nn.functional
M = 3


def model():
    return make("mlp")[0]


# ---- a sum


SUM = {"loss_fn": nn.CrossEntropyLoss(reduction="sum"), "reduction": "sum", "microbatches": M}


def steps_of_sums(pipeline, schedule):
    (inputs, target), losses = data("mlp", 8), []
    pipe = pipeline(model(), schedule=schedule, **SUM)
    loss = pipe.step(inputs, target=target, losses=losses)
    results = [loss, losses, gradients(pipe.named_parameters()), pipe.eval(inputs, target=target)[1]]
    pipe.zero_grad()
    return [*results, pipe.step(inputs, target=target, scale=0.5), gradients(pipe.named_parameters())]


@pytest.mark.ranks
def test_losses_that_are_sums_have_the_loss_and_the_gradients_of_one_process_that_sums():
    expected, batch = steps_of_sums(OneProcess, None), data("mlp", 8)
    torch.testing.assert_close(expected[0], SUM["loss_fn"](model()(batch[0]), batch[1]).detach())
    assert torch.equal(sum(expected[1]), expected[0])
    for schedule, ranks in (("1f1b", 2), ("zb-v", 2), ("gpipe", 3)):
        assert_as_one_process(on_ranks(steps_of_sums, ranks, ps.Pipeline, schedule), expected)


def balanced():
    torch.manual_seed(1)
    first = has_auxiliary_loss(lambda hidden: hidden.square().sum(), after=nn.Linear(12, 12))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(12, 3))


def auxiliary_sums(pipeline):
    return stepped(pipeline(balanced(), schedule="1f1b", **SUM), [data("mlp", 8)])


@pytest.mark.ranks
def test_auxiliary_losses_are_added_up_with_losses_that_are_sums():
    [loss], expected = auxiliary_sums(OneProcess)
    everyone = on_ranks(auxiliary_sums, 2, ps.Pipeline)
    for (ours,), _ in everyone:
        assert ours.item() == pytest.approx(loss.item(), rel=1e-6)
    found = merged([grads for _, grads in everyone])
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad)


def scaled_sum(pipeline):
    scaler = ShardedGradScaler("cpu", init_scale=2.0**7) if pipeline is ps.Pipeline else None
    pipe, (inputs, target) = pipeline(model(), schedule="1f1b", scaler=scaler, **SUM), data("mlp", 8)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    loss = pipe.step(inputs, target=target)
    if scaler:
        scaler.unscale_(optimizer)
    return loss, gradients(pipe.named_parameters())


@pytest.mark.ranks
def test_a_scaler_scales_losses_that_are_sums():
    assert_as_one_process(on_ranks(scaled_sum, 2, ps.Pipeline), scaled_sum(OneProcess))


def rank_replicas_sum(way):
    whole = model().double()
    mesh = ps.comms.init_mesh(pp=2, dp=2)
    pipe = ps.Pipeline(whole, schedule="1f1b", mesh=mesh, data_parallel=way, **SUM)
    inputs, target = data("mlp", 11)
    mine = slice(0, 7) if pipe.position.replica == 0 else slice(7, 11)  # unequal numbers of rows
    loss = pipe.step(inputs[mine].double(), target=target[mine])
    return loss, {
        name: getattr(parameter.grad, "full_tensor", lambda value=parameter: value.grad)()
        for name, parameter in pipe.named_parameters()
    }


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_sums_of_replicas_are_added_up(way):
    whole, (inputs, target) = model().double(), data("mlp", 11)
    loss = SUM["loss_fn"](whole(inputs.double()), target)
    loss.backward()
    for ours, grads in on_ranks(rank_replicas_sum, 4, way):
        assert ours.item() == pytest.approx(loss.item(), abs=1e-12)
        for name, grad in grads.items():
            assert (grad - whole.get_parameter(name).grad).abs().max() < 1e-12


def wrapped(inner):
    """A loss of one's own around one of torch's."""
    return toy(lambda self, output, target: self.inner(output, target), "WrappedLoss", inner=inner)


NONE, ADDED = nn.CrossEntropyLoss(reduction="none"), SUM["loss_fn"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_fn": ADDED}, "CrossEntropyLoss has reduction='sum', and the pipeline takes what it returns for a mean: "),
        ({"loss_fn": ADDED.forward}, "CrossEntropyLoss has reduction='sum', "),
        ({"loss_fn": nn.MSELoss(), "reduction": "sum"}, "MSELoss has reduction='mean', and the pipeline takes .. for a sum: "),
        ({"loss_fn": nn.L1Loss(reduction="none")}, "L1Loss has reduction='none', and a loss is one number: "),
        ({"loss_fn": NONE, "reduction": "sum"}, "reduction='none', and a loss is one number: give it reduction='sum'"),
        ({"loss_fn": partial(F.mse_loss, reduction="sum")}, "mse_loss has reduction='sum', "),
        ({"loss_fn": partial(F.mse_loss, reduction="none")}, "mse_loss has reduction='none', "),
        ({"loss_fn": partial(ADDED)}, "CrossEntropyLoss has reduction='sum', "),
        ({"loss_fn": F.mse_loss, "reduction": "none"}, "reduction is 'mean' or 'sum', what loss_fn returns of "),
        ({"loss_fn": F.mse_loss, "reduction": "sum", "loss_weight": len}, "reduction='sum' adds them: leave out one"),
    ],
)
def test_a_loss_that_says_another_reduction_of_itself_is_refused(options, message):
    pattern = " .* ".join(map(re.escape, message.split(" .. ")))
    with pytest.raises(ps.MismatchError, match=pattern):
        ps.Pipeline(model(), **options)


@pytest.mark.parametrize(
    "loss_fn", [ADDED, partial(ADDED), partial(F.cross_entropy, reduction="sum"), nn.KLDivLoss(reduction="sum")]
)
def test_a_loss_that_says_the_pipelines_reduction_is_taken(loss_fn):
    ps.Pipeline(model(), loss_fn, reduction="sum")


def test_a_mean_over_the_batch_by_any_name_is_a_mean():
    ps.Pipeline(model(), nn.KLDivLoss(reduction="batchmean"))


def test_a_sum_inside_a_loss_of_ones_own_is_a_warning_since_that_may_divide_it():
    with pytest.warns(
        UserWarning, match=r"loss_fn has a CrossEntropyLoss with reduction='sum', and .* a mean: if .* sum, pass"
    ):
        ps.Pipeline(model(), wrapped(ADDED))
    for options in (
        {"loss_fn": wrapped(ADDED), "reduction": "sum"},
        {"loss_fn": wrapped(NONE)},
        {"loss_fn": wrapped(ADDED), "loss_weight": len},
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ps.Pipeline(model(), **options)


# ---- a mean over what counts


WEIGHT = torch.tensor([0.2, 1.7, 0.6])
IGNORED = torch.tensor([0, 1, 3, 4, 7])  # rows
LOSSES = {  # loss, what `ps.tokens` is given
    "ignored": (nn.CrossEntropyLoss(), {}),
    "ignored function": (F.cross_entropy, {}),
    "another index": (nn.CrossEntropyLoss(ignore_index=2), {"ignore_index": 2}),
    "weights": (nn.CrossEntropyLoss(weight=WEIGHT), {"weight": WEIGHT}),
    "weights and smoothing": (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1), {"weight": WEIGHT}),
    "smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), {}),
    "all of it": (nn.CrossEntropyLoss(WEIGHT, ignore_index=0, label_smoothing=0.3), {"ignore_index": 0, "weight": WEIGHT}),
    "partial": (partial(F.cross_entropy, weight=WEIGHT), {"weight": WEIGHT}),
}


def batch_for(name):
    inputs, target = data("mlp", 8)
    if "ignore_index" not in LOSSES[name][1]:
        target = target.index_fill(0, IGNORED, -100)
    return inputs, target


def counted_steps(pipeline):
    return {
        name: stepped(pipeline(model(), loss_fn, "1f1b", M, loss_weight=ps.tokens(**arguments)), [batch_for(name)])
        for name, (loss_fn, arguments) in LOSSES.items()
    }


@pytest.mark.ranks
def test_tokens_makes_of_microbatches_the_mean_of_the_whole_batch():
    results = counted_steps(OneProcess)
    assert_as_one_process(on_ranks(counted_steps, 2, ps.Pipeline), results)
    for name, ([loss], expected) in results.items():
        whole, (inputs, target) = model(), batch_for(name)
        at_once = LOSSES[name][0](whole(inputs), target)
        at_once.backward()
        torch.testing.assert_close(loss, at_once.detach())
        for key, grad in gradients(whole.named_parameters()).items():
            torch.testing.assert_close(expected[key], grad)


def test_tokens_counts_images_bytes_and_nothing():
    target = torch.tensor([[[0, 255], [2, 2]]], dtype=torch.uint8)
    assert ps.tokens(255)(target) == 3
    assert ps.tokens()(torch.tensor([156], dtype=torch.uint8)) == 1  # which is -100 in a byte
    assert ps.tokens(255, torch.tensor([1.0, 10.0, 100.0]))(target) == 201
    assert ps.tokens()(torch.tensor([-100, -100])) == 0


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda: ps.tokens(None), "a whole number as ignore_index, got None"),
        (lambda: ps.tokens(torch.ones(3)), "a whole number as ignore_index, got tensor"),
        (lambda: ps.tokens(weight=torch.ones(3, 1)), "one weight for each class as weight, got one of shape (3, 1)"),
        (lambda: ps.tokens(weight=[1.0]), "as weight, got a list"),
        (lambda: ps.tokens()({"labels": torch.ones(3)}), "a tensor of class numbers, got a dict: of a tree"),
        (lambda: ps.tokens()(torch.ones(3)), "a tensor of class numbers, got one of torch.float32"),
    ],
)
def test_what_tokens_cannot_count_is_told(work, message):
    with pytest.raises(ps.MismatchError, match=re.escape(message)):
        work()


# ---- a mean over what counts, without a loss_weight


def looked(loss_fn, *targets, microbatches=M, rows_dim=0):
    """What is warned of where each of `targets` is that of a step."""
    check = UnequalWeightsCheck(loss_fn, microbatches, rows_dim)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for target in targets:
            check.check_target(target)
    return [str(warning.message) for warning in caught]


UNEQUAL = torch.tensor([[1, 2], [1, -100], [-100, -100]])
EQUAL = torch.tensor([[1, 2, -100], [1, -100, 2], [-100, 0, 0]])


BOTH = partial(F.cross_entropy, weight=WEIGHT, ignore_index=2)
WARNED = [  # loss, target, what is said
    (F.cross_entropy, UNEQUAL, "2, 1, 0 values that are not -100, .. loss_weight=ps.tokens())"),
    (nn.CrossEntropyLoss(), {"labels": UNEQUAL, "name": "a"}, "loss_weight=ps.tokens())"),
    (wrapped(nn.CrossEntropyLoss(ignore_index=1)), UNEQUAL, "1, 1, 2 values that are not 1, .. ps.tokens(ignore_index=1))"),
    (nn.NLLLoss(WEIGHT), torch.tensor([0, 1, 1]), "class weights .. 0.2, 1.7, 1.7, .. ps.tokens(weight=class_weights))"),
    (BOTH, torch.tensor([0, 1, 2]), "(ignore_index=2, weight=class_weights))"),
    (wrapped(nn.NLLLoss(WEIGHT)), torch.tensor([-7, 9, -100]), "1, 1, 0 values that are not -100"),
]


@pytest.mark.parametrize(("loss_fn", "target", "message"), WARNED)
def test_microbatches_that_count_unequally_are_a_warning_with_the_line_to_add(loss_fn, target, message):
    (said,) = looked(loss_fn, target)
    assert re.search(" .*".join(map(re.escape, message.split(" .. "))), said), said


@pytest.mark.parametrize(
    ("loss_fn", "target"),
    [
        (F.cross_entropy, EQUAL),  # as many in each
        (F.cross_entropy, torch.tensor([[1], [1], [2]])),
        (nn.CrossEntropyLoss(ignore_index=5), UNEQUAL.abs()),
        (F.cross_entropy, UNEQUAL[:1]),  # one microbatch
        (F.cross_entropy, torch.tensor([[1, -100]] * 5)),  # more rows in some, and as many more that count
        (nn.NLLLoss(torch.ones(3)), torch.tensor([0, 1, 2])),
        (nn.MultiMarginLoss(weight=WEIGHT), torch.tensor([0, 1, 2])),  # divides by the rows
        (nn.CrossEntropyLoss(WEIGHT), torch.ones(3, 3)),  # probabilities: likewise
        (nn.BCEWithLogitsLoss(weight=WEIGHT), torch.ones(3, 3)),
    ],
)
def test_microbatches_that_count_as_their_rows_do_are_no_warning(loss_fn, target):
    assert looked(loss_fn, target) == []


def test_rows_are_looked_for_where_they_are():
    (result,) = looked(F.cross_entropy, UNEQUAL.T, rows_dim=1)
    assert "2, 1, 0 values" in result
    assert "loss_weight=lambda target: target.shape[1] if rows are right" in result
    assert len(looked(F.cross_entropy, {"labels": ps.Rows(UNEQUAL.T, 1)})) == 1
    assert looked(F.cross_entropy, {"labels": torch.zeros(4).long(), "table": ps.Replicated(UNEQUAL)}) == []


def test_the_target_is_looked_at_in_steps_1_2_4_and_8_and_one_warning_is_enough():
    assert looked(F.cross_entropy, *[EQUAL, EQUAL, UNEQUAL], microbatches=3) == []
    assert len(looked(F.cross_entropy, *[EQUAL, EQUAL, UNEQUAL, UNEQUAL], microbatches=3)) == 1
    assert len(looked(F.cross_entropy, *[UNEQUAL] * 9)) == 1


def rank_warned():
    said = []
    for options in ({}, {"loss_weight": ps.tokens()}, {"loss_weight": len}):
        pipe = ps.Pipeline(model(), F.cross_entropy, "1f1b", M, **options)
        inputs, target = batch_for("ignored")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                pipe.step(inputs, target=target)
            pipe.eval(inputs, target=target)
        said.append([warning.filename for warning in caught])
    return said


@pytest.mark.ranks
def test_a_pipeline_without_loss_weight_warns_where_it_was_called_once_and_on_its_last_rank():
    assert on_ranks(rank_warned, 2) == [[[], [], []], [[__file__], [], []]]


# ---- a loss that its rows' losses do not make up


def root_mean_square(output, target):
    return F.mse_loss(output, target).sqrt()


def contrastive(output, target):
    return F.cross_entropy(output @ target.T, torch.arange(len(output)))


def over_mask(output, target):
    return ((output - target).square() * (target > 0)).sum() / (target > 0).sum()


def counted_mask(target):
    return (target > 0).sum()


def over_rows_of_step(output, target):
    return (output - target).square().sum() / 12


def drawn(output, target):
    return F.mse_loss(output, target) * torch.rand(())


BY_ROWS = {  # loss, options of the pipeline, what is told
    "a mean": (F.mse_loss, {}, ""),
    "half a mean": (lambda output, target: F.mse_loss(output.bfloat16(), target.bfloat16()), {}, ""),
    "a sum": (lambda output, target: (output - target).square().sum(), {"reduction": "sum"}, ""),
    "a weighted mean": (over_mask, {"loss_weight": counted_mask}, ""),
    "random numbers": (drawn, {}, ""),
    "a sum for a mean": (
        lambda output, target: (output - target).square().sum(),
        {},
        "a sum, or a sum divided by one number of the whole batch, pass Pipeline(.., reduction='sum')",
    ),
    "a sum over a number of the step": (over_rows_of_step, {}, "which adds up: if the loss is a sum, or a sum divided by one"),
    "that sum as a sum": (over_rows_of_step, {"reduction": "sum"}, ""),
    "a mean for a sum": (lambda output, target: F.mse_loss(output, target), {"reduction": "sum"}, "leave out reduction='sum'"),
    "a root": (root_mean_square, {}, "which is no mean over rows: give loss_weight="),
    "all rows": (contrastive, {}, "which is no mean over rows: give loss_weight="),
    "a mask": (over_mask, {}, "which is no mean over rows: give loss_weight="),
    "another weight": (
        F.mse_loss,
        {"loss_weight": counted_mask},
        "which is no mean weighted by loss_weight: give loss_weight=",
    ),
}


def rank_by_rows():
    inputs, target = torch.randn(12, 8, generator=torch.manual_seed(3)), torch.randn(12, 8)
    results = []
    for loss_fn, options, _ in BY_ROWS.values():
        layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        pipe = ps.Pipeline(layers, loss_fn, microbatches=2, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                pipe.step(inputs, target=target)
        results.append([(str(warning.message), warning.filename) for warning in caught])
    return results


@pytest.mark.ranks
def test_a_loss_that_microbatches_cannot_be_added_up_to_is_a_warning_in_the_first_step():
    first, last = on_ranks(rank_by_rows, 2)
    assert first == [[]] * len(BY_ROWS)
    for (name, (_, _, result)), found in zip(BY_ROWS.items(), last, strict=True):
        if result:
            ((text, file),) = found
            assert text.startswith("loss_fn of 4 rows is "), name
            assert result in text, name
            assert file == __file__
        else:
            assert not found, name


class Encoder(nn.Linear):
    kl = 0.0

    def forward(self, inputs):
        output = super().forward(inputs)
        self.note(output)
        return output

    def note(self, output):
        self.kl = output.square().mean()


def rank_reads(place):
    torch.manual_seed(0)
    layers = nn.Sequential(*[Encoder(8, 8) for _ in range(2)])
    read = layers[place]

    def loss_fn(output, target):
        return F.mse_loss(output, target) + sum(value.kl for value in [read])

    def other(output, target):
        return F.mse_loss(output, target) * read.in_features

    ps.Pipeline(layers, other, microbatches=2)
    return ps.Pipeline(layers, loss_fn, microbatches=2).step(torch.ones(4, 8), target=torch.zeros(4, 8))


@pytest.mark.ranks
def test_a_loss_that_reads_what_the_forward_of_another_stage_sets_is_told():
    with pytest.raises(ps.MismatchError, match=r"^loss_fn reads kl, which the forward of Encoder 0 sets, but that runs"):
        ps.launch(rank_reads, 2, 0)
    assert ps.launch(rank_reads, 2, 1)[0] == rank_reads(1)


class Unchanging(dict):
    """A dict that refuses an update, as transformers' outputs do."""

    update = None


class WarmUp(nn.Module):
    """A loss that counts its calls, and keeps what it saw."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen, self.settings = 0, [], Unchanging(weight=1)

    def forward(self, output, target):
        self.calls += 1
        self.seen.append(len(target))
        return nn.functional.mse_loss(output, target) * min(1, self.calls / 10)


@pytest.mark.parametrize("form", ["module", "method"])
def test_a_loss_that_counts_its_calls_is_called_as_often_as_by_one_process(form):
    loss = WarmUp()
    pipe = ps.Pipeline(nn.Sequential(nn.Linear(2, 2)), loss if form == "module" else loss.forward, "gpipe", 2)
    for _ in range(3):
        pipe.step(torch.ones(8, 2), target=torch.zeros(8, 2))
    assert (loss.calls, loss.seen, loss.settings) == (6, [4] * 6, {"weight": 1})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_sum_of_losses_has_the_bits_of_tensors_that_are_multiplied_and_added_in_order(dtype):
    generator = torch.Generator().manual_seed(1)
    for exponent in (0, 4, -30, 30):
        for count in (1, 2, 7, 40):
            values = torch.randn(count, generator=generator, dtype=torch.float64) * 10.0**exponent
            losses = list(values.to(dtype))
            shares = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
            expected = losses[0] * shares[0]
            for loss, share in zip(losses[1:], shares[1:], strict=True):
                expected = expected + loss * share
            total, found = report.weighted_sum(losses, shares)
            assert found == dtype
            assert torch.equal(torch.tensor(total, dtype=dtype), expected) or expected.isnan()
    for losses in ([torch.ones(1), torch.ones(())], [torch.ones(()), torch.ones((), dtype=torch.float64)]):
        assert report.weighted_sum(losses, [0.5, 0.25]) == (0.75, losses[1].dtype)


def test_a_sum_of_losses_that_overflows_or_is_no_number_is_so_in_its_dtype():
    largest = torch.finfo(torch.float32).max
    assert report.weighted_sum([torch.tensor(largest)] * 2, [1.0, 1.0]) == (math.inf, torch.float32)
    assert math.isnan(report.weighted_sum([torch.tensor(math.nan), torch.ones(())], [0.5, 0.5])[0])
    assert report.weighted_sum([torch.tensor(math.inf), torch.ones(())], [0.5, 0.5])[0] == math.inf
