"""Any model, cut anywhere, has the numbers of the uncut one: loss, every gradient and every buffer, to the bit."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import pytest
import torch
from error_text import error_text
from models import CASES, Batch, ModelCase, by_hand, differing
from reference import OneProcess, accumulate, assert_as_one_process, gradients, merged, same, step_with
from runners import on_ranks
from slow_cases import slow_except
from torch import nn

import penstock as ps
from penstock import partition

pytestmark = pytest.mark.ranks

STEPS = (3, 4)  # seeds of the batches of two steps, whose gradients add up


class CutRun(NamedTuple):
    """A model in a pipeline: how it is cut, and by which table it runs."""

    case: str
    cuts: tuple[str, ...] | None = None
    schedule: str = "1f1b"
    microbatches: int = 3
    rows: int = 7
    by: str = "names"  # or an "example", or "measure": an example without cuts, or by "hand": a list of stages
    stages_per_rank: int | None = None
    meta: bool = False  # whether the model is built on the meta device, and its weights loaded

    def pipeline(self, case: ModelCase) -> ps.Pipeline:
        options = {} if self.stages_per_rank is None else {"stages_per_rank": self.stages_per_rank}
        if self.by == "hand":
            count = ps.comms.init_distributed().world_size * (self.stages_per_rank or 1)
            model: Any = [by_hand(case.model(), stage, count) for stage in range(count)]
        else:
            with torch.device("meta" if self.meta else "cpu"):
                model, options["cuts"] = case.model(), self.cuts
        if self.by in ("example", "measure"):
            batch = case.batch(2, 0)
            options |= {"example_args": batch.args, "example_kwargs": batch.kwargs}
        pipe = ps.Pipeline(model, case.loss_fn, schedule=self.schedule, microbatches=self.microbatches, **options)
        if self.meta:
            pipe.load_state_dict(case.model().state_dict())
        return pipe


class PartitionResult(NamedTuple):
    losses: list[torch.Tensor]
    outputs: Any  # of an evaluation, where the last stage is
    gradients: dict[str, torch.Tensor | None]
    state: dict[str, torch.Tensor]


def result(losses: list[torch.Tensor], outputs: Any, model: Any, every_name: bool = False) -> PartitionResult:
    parameters = model.named_parameters(remove_duplicate=False) if every_name else model.named_parameters()
    gradients = {name: None if parameter.grad is None else parameter.grad.clone() for name, parameter in parameters}
    return PartitionResult(losses, outputs, gradients, {name: value.clone() for name, value in model.state_dict().items()})


def rank_runs(runs: Sequence[CutRun], cases: dict[str, ModelCase] = CASES) -> list[PartitionResult]:
    return [run_steps(run.pipeline(cases[run.case]), run, cases[run.case]) for run in runs]


def run_steps(pipe: Any, run: CutRun, case: ModelCase, every_name: bool = False) -> PartitionResult:
    losses = [step_with(pipe, case.batch(run.rows, seed)) for seed in STEPS]
    args, _, kwargs = case.batch(run.rows, 5)
    return result(losses, pipe.eval(*args, **kwargs), pipe, every_name)


def uncut(run: CutRun, cases: dict[str, ModelCase] = CASES) -> PartitionResult:
    case = cases[run.case]
    return run_steps(OneProcess(case.model(), case.loss_fn, None, run.microbatches), run, case, every_name=True)


def assert_equal(run: CutRun, ours: Sequence[PartitionResult], expected: PartitionResult) -> None:
    """Every rank has the loss; together they have every name of the state, and a gradient for every parameter."""
    for item in ours:
        assert all(map(torch.equal, item.losses, expected.losses)), (run, item.losses, expected.losses)
    outputs = [value.outputs for value in ours if value.outputs is not None]
    assert len(outputs) == 1, run
    assert not differing(outputs[0], expected.outputs), run
    state = merged([value.state for value in ours])
    assert state.keys() == expected.state.keys(), run
    assert not [name for name, value in expected.state.items() if not same(state[name], value)], run
    gradients = merged([value.gradients for value in ours])
    different = [name for name, value in gradients.items() if not _same_gradient(value, expected.gradients[name])]
    assert not different, (run, different)
    assert sum(gradient is not None for gradient in expected.gradients.values()) > 3


def _same_gradient(ours: Any, expected: Any) -> bool:
    return same(ours, expected) or (expected is None and not ours.any())  # a received value that nobody used


def check(ranks: int, runs: Sequence[CutRun]) -> None:
    everyone = on_ranks(rank_runs, ranks, runs)
    for number, run in enumerate(runs):
        assert_equal(run, [value[number] for value in everyone], uncut(run))


UNITS = ("tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3", "norm", "output")


@pytest.mark.kernels
@pytest.mark.parametrize("ranks", slow_except([2], [2, 4]))
def test_the_tutorials_transformer_is_the_same_wherever_it_is_cut(ranks):
    check(ranks, [CutRun("transformer", cuts) for cuts in combinations(UNITS[1:], ranks - 1)])
    if ranks == 2:
        inside = ("layers.1.self_attn", "layers.1.norm2", "layers.1.linear1", "layers.3.linear2")
        check(ranks, [CutRun("transformer", (cut,)) for cut in inside])


@pytest.mark.slow
def test_stages_made_by_hand_are_the_uncut_model():
    check(2, [CutRun("transformer", by="hand"), CutRun("transformer", None, "looped-bfs", by="hand", stages_per_rank=2)])
    check(4, [CutRun("transformer", None, schedule, by="hand") for schedule in ("gpipe", "1f1b", "zb-h1")])


@pytest.mark.slow
def test_an_exported_model_is_the_uncut_one_cut_by_name_or_by_measure():
    exported = [CutRun("transformer", None, "zb-v", by="measure"), CutRun("u-net", ("up2",), by="example")]
    check(2, [*exported, CutRun("wide", ("body.0", "body.2", "head"), "zb-v", by="example")])


U_NET_CUTS = "down2", "middle", "join2"


def test_skips_of_a_u_net_go_straight_to_where_they_are_used():
    check(2, [CutRun("u-net", ("middle",)), CutRun("u-net", ("middle",), "zb-h1"), CutRun("u-net", U_NET_CUTS, "zb-v")])


@pytest.mark.slow
def test_they_do_over_four_ranks():
    cuts = U_NET_CUTS
    check(4, [CutRun("u-net", cuts), CutRun("u-net", cuts, rows=3), CutRun("u-net", ("down2.3", "up1", "head"), "zb-h2")])


@pytest.mark.slow
def test_memory_and_masks_of_an_encoder_decoder_reach_every_stage_that_uses_them():
    cuts = ("encoder.1", "decoder", "decoder.2")
    check(2, [CutRun("encoder-decoder", cuts, schedule) for schedule in ("interleaved-1f1b", "zb-v", "dualpipe-v")])
    check(
        3,
        [CutRun("encoder-decoder", ("decoder.1", "head"), rows=8), CutRun("encoder-decoder", ("target", "decoder.2"), "zb-h2")],
    )


def test_tied_weights_have_the_gradient_of_the_uncut_model():
    cuts = ("blocks.1", "blocks.2", "head")
    once = [CutRun("tied", ("blocks.2",), schedule, rows=rows) for schedule, rows in (("1f1b", 2), ("zb-h1", 7))]
    check(2, [*once, CutRun("tied", cuts, "zb-v"), CutRun("tied three times", ("blocks.1", "again", "head"), "v-min")])


@pytest.mark.slow
def test_tied_weights_have_it_in_every_family_of_schedules():
    cuts = ("blocks.1", "blocks.2", "head")
    check(2, [CutRun("tied", cuts, schedule) for schedule in ("interleaved-1f1b", "interleaved-zb", "dualpipe-v")])
    check(2, [CutRun("tied", ("blocks.2",), schedule, rows=rows) for schedule, rows in (("1f1b", 7), ("zb-h1", 2))])
    check(3, [CutRun("tied three times", ("again", "head"), schedule) for schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2")])
    check(2, [CutRun("tied three times", ("blocks.1", "again", "head"), "looped-bfs")])


@pytest.mark.slow
def test_a_module_called_in_several_stages_has_the_gradient_of_the_uncut_model():
    check(3, [CutRun("recurrent", ("between.1", "between.2"), schedule) for schedule in ("1f1b", "zb-h1")])
    check(
        2,
        [
            CutRun("recurrent", ("between.0", "between.1", "between.2"), "zb-v"),
            CutRun("recurrent", ("between.1",), by="example"),
        ],
    )


@pytest.mark.slow
def test_dicts_batchnorms_frozen_parts_and_parameters_used_in_several_stages():
    check(2, [CutRun("wide", ("body",)), CutRun("wide", ("body.0", "body.2", "head"), "zb-v")])
    check(3, [CutRun("wide", ("body.1", "head"), "zb-h1", rows=12), CutRun("wide", ("inputs.words", "body.3"), rows=12)])


# -- training ---------------------------------------------------------------------------------------------------------


TRAININGS = {
    2: [CutRun("tied", ("blocks.1", "blocks.2", "head"), "zb-v"), CutRun("u-net", ("middle",), "zb-h1")],
    3: [CutRun("tied three times", ("again", "head")), CutRun("encoder-decoder", ("decoder", "decoder.2"))],
}


def train(pipe: Any, run: CutRun) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses and norms of five optimizer steps, each over two batches; the state after them."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
    results = []
    for number in range(5):
        results += [step_with(pipe, CASES[run.case].batch(run.rows, seed)) for seed in (2 * number, 2 * number + 1)]
        results.append(pipe.clip_grad_norm_(0.1))
        optimizer.step()
        optimizer.zero_grad()
    return results, dict(pipe.state_dict())


def rank_trainings(runs: Sequence[CutRun]) -> list[Any]:
    return [train(run.pipeline(CASES[run.case]), run) for run in runs]


@pytest.mark.parametrize("ranks", slow_except([2], TRAININGS))
def test_five_clipped_optimizer_steps_over_two_batches_each_end_in_the_weights_of_the_uncut_model(ranks):
    expected = []
    for run in TRAININGS[ranks]:
        case = CASES[run.case]
        expected.append(train(OneProcess(case.model(), case.loss_fn, None, run.microbatches), run))
    assert_as_one_process(on_ranks(rank_trainings, ranks, TRAININGS[ranks]), expected)


DROPOUTS = {
    1: [CutRun("transformer with dropout", ()), CutRun("encoder-decoder with dropout", ())],
    2: [
        CutRun("transformer with dropout", ("layers.0", "layers.2", "norm"), "zb-v"),
        CutRun("encoder-decoder with dropout", ("decoder",), by="example"),
    ],
    3: [
        CutRun("transformer with dropout", ("layers.1", "output")),
        CutRun("encoder-decoder with dropout", ("encoder.1", "head")),
    ],
}


@pytest.mark.slow
def test_dropout_draws_the_same_wherever_the_model_is_cut():
    [alone] = on_ranks(rank_runs, 1, DROPOUTS[1])
    for ranks in (2, 3):
        everyone = on_ranks(rank_runs, ranks, DROPOUTS[ranks])
        for number, run in enumerate(DROPOUTS[ranks]):
            assert_equal(run, [value[number] for value in everyone], alone[number])
    without = uncut(CutRun("transformer"))
    assert not torch.allclose(alone[0].losses[0], without.losses[0])


# -- keywords that every stage takes ----------------------------------------------------------------------------------


class BiasStage(nn.Module):
    """A stage of someone's own; `bias` is asked for by the third only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.embedding = nn.Linear(6, 6), nn.Embedding(4, 6)

    def forward(self, hidden, mask, ids=None, *, factor=1.0):
        return torch.tanh(self.linear(hidden) * mask[:, None] * factor + self.embedding(ids))


class Biased(BiasStage):
    def forward(self, hidden, *, bias, **others):
        return super().forward(hidden, **others) + bias


def stages_with_keywords() -> list[nn.Module]:
    torch.manual_seed(8)
    return [BiasStage(), nn.Linear(6, 6), Biased(), BiasStage()]


KEYWORDS = {
    "mask": torch.arange(7) % 2 == 0,
    "ids": torch.arange(7) % 4,
    "factor": 2.0,
    "bias": torch.linspace(-1, 1, 7)[:, None],
}


def keyword_loss(output, target):
    return (output - target).square().mean()


def rank_keywords(schedule):
    pipe = ps.Pipeline(stages_with_keywords(), keyword_loss, schedule, microbatches=3)
    hidden, target = torch.linspace(-1, 1, 42).view(7, 6), torch.ones(7, 6)
    losses = [pipe.step(hidden, target=target, **KEYWORDS) for _ in STEPS]
    message = error_text(lambda: pipe.step(hidden, target=target, **KEYWORDS, maks=1), ps.PenstockError)
    losses.append(pipe.step(hidden, target=target, **KEYWORDS))
    return losses, gradients(pipe.named_parameters()), message


@pytest.mark.parametrize(("ranks", "schedule"), slow_except([(2, "zb-v")], [(4, "1f1b"), (2, "zb-v"), (2, "interleaved-1f1b")]))
def test_keywords_reach_every_stage_of_a_list_that_takes_them(ranks, schedule):
    stages = stages_with_keywords()
    hidden, target, losses = torch.linspace(-1, 1, 42).view(7, 6), torch.ones(7, 6), []

    def forward(hidden, mask, ids, factor, bias):
        hidden = stages[1](stages[0](hidden, mask, ids, factor=factor))
        return stages[3](stages[2](hidden, mask=mask, ids=ids, factor=factor, bias=bias), mask, ids, factor=factor)

    for _ in range(3):
        losses.append(accumulate(forward, keyword_loss, Batch((hidden,), target, KEYWORDS), 3))
    everyone = on_ranks(rank_keywords, ranks, schedule)
    for value in everyone:
        assert all(map(torch.equal, value[0], losses))
        assert "no stage's forward takes maks=: the first takes hidden, mask, ids, factor" in value[2]
    assert_as_one_process([value[1] for value in everyone], gradients(nn.Sequential(*stages).named_parameters()))


class OneOfTwoOrders(nn.Module):
    """Computes two values of one shape in the order of `names`, as a forward does that goes through a set of names."""

    def __init__(self, names: str) -> None:
        super().__init__()
        self.names, self.layers = names, nn.ModuleList([nn.Bilinear(4, 4, 4) for _ in range(3)])

    def forward(self, hidden):
        ways = {"a": torch.sin, "b": torch.cos}
        turned = {name: ways[name](hidden) for name in self.names}
        hidden = self.layers[0](hidden, hidden)
        return self.layers[2](self.layers[1](hidden, turned["b"]), turned["a"])


def test_stages_fit_together_whatever_the_order_in_which_each_rank_computes_what_crosses_a_cut() -> None:
    example = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    models = []
    for names in ("ab", "ba"):
        torch.manual_seed(0)
        models.append(OneOfTwoOrders(names))
    for way in ({"example_args": (example,)}, {}):
        (first, _), (_, second) = (partition.split(model, 2, cuts=["layers.1"], **way) for model in models)
        assert torch.equal(partition.run([first, second], example), models[0](example))
