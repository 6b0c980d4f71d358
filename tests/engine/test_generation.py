"""Generation: the tokens of the uncut model, whatever the ranks, the schedule and the microbatches."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from error_text import error_text
from models import toy
from runners import on_ranks
from torch import Tensor, nn

import penstock as ps
from penstock import checkpoint
from penstock.commands.train.setup import token_loss
from penstock.model import GPT, GPTConfig

pytestmark = pytest.mark.ranks

CONTEXT, PROMPT, NEW = 12, 5, 14  # the text becomes longer than the context
RUNS = [("1f1b", 3, {}), ("interleaved-1f1b", 1, {"stages_per_rank": 3})]  # others: tests/batch/test_bits_of_any_pieces.py
DRAWN = {"max_new_tokens": 6, "temperature": 1.5, "top_k": 9, "seed": 3}


def gpt() -> GPT:
    torch.manual_seed(7)
    model = GPT(GPTConfig(vocabulary=17, context=CONTEXT, width=16, layers=4, heads=2, dropout=0.5))
    for parameter in model.parameters():
        parameter.data.mul_(4)  # so that logits are apart
    return model


def prompts(rows: int = 5) -> Tensor:
    return torch.randint(17, (rows, PROMPT), generator=torch.Generator().manual_seed(1))


def uncut(model: nn.Module, tokens: Tensor, new: int, context: int = 1000) -> Tensor:
    """The plain loop: all of the text that the model can see goes in, the likeliest token comes out."""
    model.eval()
    with torch.no_grad():
        for _ in range(new):
            tokens = torch.cat([tokens, model(tokens[:, -context:])[:, -1].argmax(-1, keepdim=True)], 1)
    return tokens


class RunningMean(nn.Module):
    """A layer of the user's own: a running mean over the tokens before, by the cache if it is told to use it."""

    def __init__(self, cached: bool) -> None:
        super().__init__()
        self.uses_cache, self.mixed, self.times = cached, nn.Linear(8, 8), []

    def forward(self, hidden: Tensor) -> Tensor:
        self.times.append(hidden.shape[1])
        first = ps.cache.first_position()
        (everything,) = ps.cache.extended(self.mixed(hidden))
        counts = torch.arange(1, everything.shape[1] + 1)[None, :, None]
        return hidden + (everything.cumsum(1) / counts)[:, first:]


def own(cached: bool) -> nn.Sequential:
    torch.manual_seed(7)
    layers = [RunningMean(cached), nn.Tanh(), RunningMean(cached)]
    return nn.Sequential(nn.Embedding(17, 8), *layers, nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 17)))


def rank_remembered() -> list[int]:
    """How many signatures of microbatches' messages are known: after a step, and after texts with a cache and without."""
    counts = []
    for cached in (True, False):
        pipe = ps.Pipeline(own(cached), token_loss, "1f1b", 2)
        for call in (
            lambda: pipe.step(prompts(4), target=prompts(4)),  # noqa: B023
            lambda: [pipe.generate(prompts(4)[:, :length], max_new_tokens=5) for length in (2, 3)],  # noqa: B023
        ):
            call()
            counts.append(len(pipe._engine.open_channels()._specs._by_signature))
    return counts


def test_passes_of_a_text_that_grows_are_not_remembered_in_the_place_of_training_steps() -> None:
    assert on_ranks(rank_remembered, 2) == [[1, 2, 1, 1]] * 2


def rank_gpt() -> dict[str, Any]:
    found: dict[str, Any] = {"greedy": [], "drawn": [], "ended": []}
    for schedule, microbatches, options in RUNS:
        pipe = ps.Pipeline(gpt(), token_loss, schedule, microbatches, **options)
        columns: list[Tensor] = []
        found["greedy"].append(pipe.generate(prompts(), max_new_tokens=NEW, on_token=columns.append))
        assert torch.equal(torch.stack(columns, 1), found["greedy"][-1][:, PROMPT:])
        drawn = pipe.generate(prompts(), **DRAWN)
        found["drawn"].append(drawn)
        found["ended"].append(pipe.generate(prompts()[:1], eos=int(drawn[0, PROMPT + 2]), **DRAWN))
    first = pipe.step(prompts(), target=prompts())
    fresh = ps.Pipeline(gpt(), token_loss, schedule, microbatches, **options)
    found["step"] = torch.equal(first, fresh.step(prompts(), target=prompts()))
    for cached in (True, False):
        model = own(cached)
        pipe = ps.Pipeline(model, microbatches=2)
        text = pipe.generate(prompts(), max_new_tokens=4)
        found[f"own, {cached}"] = text, [layer.times[::2] for layer in model if isinstance(layer, RunningMean) and layer.times]
    return found


@pytest.fixture(scope="module")
def everyone() -> list[dict[str, Any]]:
    return on_ranks(rank_gpt, 2)


def test_greedy_tokens_are_those_of_the_uncut_model_beyond_its_context_too(everyone):
    expected = uncut(gpt(), prompts(), NEW, CONTEXT)
    assert len(expected[:, PROMPT:].unique()) > 3
    assert [torch.equal(text, expected) for result in everyone for text in result["greedy"]] == [True] * 2 * len(RUNS)


def test_drawn_tokens_depend_on_the_seed_alone(everyone):
    alone = ps.Pipeline(gpt(), microbatches=2)
    expected = alone.generate(prompts(), **DRAWN)
    assert [torch.equal(text, expected) for result in everyone for text in result["drawn"]] == [True] * 2 * len(RUNS)
    row = alone.generate(prompts()[:1], **DRAWN)
    assert torch.equal(row, expected[:1])


def test_a_row_that_has_ended_is_filled_up_and_generation_ends_with_the_last_row(everyone):
    for result in everyone:
        for drawn, ended in zip(result["drawn"], result["ended"], strict=True):
            new = drawn[0, PROMPT:].tolist()
            assert ended.tolist() == [drawn[0, : PROMPT + new.index(new[2]) + 1].tolist()]
    eos = int(everyone[0]["drawn"][0][0, PROMPT])  # of the first row, at once
    for expected, got in zip(
        everyone[0]["drawn"][0].tolist(), ps.Pipeline(gpt()).generate(prompts(), eos=eos, **DRAWN).tolist(), strict=True
    ):
        new = expected[PROMPT:]
        kept = new.index(eos) if eos in new else len(new)
        assert got == (expected[:PROMPT] + new[:kept] + [eos] * len(new))[: len(got)]


def test_training_goes_on_as_if_nothing_had_been_generated(everyone):
    assert all(result["step"] for result in everyone)


def test_layers_that_use_the_cache_are_given_new_tokens_only_and_others_the_whole_text(everyone):
    expected = uncut(own(False), prompts(), 4)
    for cached, times in ((True, [PROMPT, 1, 1, 1]), (False, [PROMPT, PROMPT + 1, PROMPT + 2, PROMPT + 3])):
        for text, layers in (result[f"own, {cached}"] for result in everyone):
            assert torch.equal(text, expected)
            assert layers == [times] * len(layers)
        assert sum(len(result[f"own, {cached}"][1]) for result in everyone) == 2


# -- mistakes --------------------------------------------------------------------------------------------------------

WRONG = [
    (
        (torch.zeros(2, 3),),
        {},
        "generate() takes tokens as (batch, time) int64, one or more of each, got torch.float32",
    ),
    ((torch.zeros(3, dtype=torch.int64),), {}, "got torch.int64 of shape (3,)"),
    ((prompts()[:0],), {}, "got torch.int64 of shape (0, 5)"),
    ((None,), {}, "got NoneType"),
    ((prompts(),), {"max_new_tokens": 0}, "generate() takes a whole number of 1 or more as max_new_tokens, got 0"),
    ((prompts(),), {"temperature": -1.0}, "0 (always the likeliest token) or more as temperature, got -1.0"),
    ((prompts(),), {"top_k": 0}, "generate() takes a whole number of 1 or more or None as top_k, got 0"),
    ((prompts(),), {"eos": -1}, "generate() takes a whole number of 0 or more or None as eos, got -1"),
    ((prompts(),), {"seed": 0.5}, "generate() takes a whole number of 0 or more as seed, got 0.5"),
]


def rank_mistakes() -> dict[str, Any]:
    pipe, rank = ps.Pipeline(gpt(), token_loss, microbatches=2), ps.comms.init_distributed().rank
    new = {"max_new_tokens": 2}
    found: dict[str, Any] = {"wrong": [error_text(partial(pipe.generate, *args, **new | kwargs)) for args, kwargs, _ in WRONG]}
    found["apart"] = error_text(lambda: pipe.generate(prompts(), temperature=rank / 2, **new))
    found["others"] = error_text(lambda: pipe.generate(prompts() + rank, **new))
    found["one"] = error_text(lambda: pipe.generate(prompts(), top_k=-rank or None, **new))
    found["step"] = error_text(lambda: pipe.generate(prompts(), **new) if rank else pipe.step(prompts(), target=prompts()))
    found["clip"] = error_text(lambda: pipe.generate(prompts(), **new) if rank else pipe.eval(prompts()))
    no_logits = ps.Pipeline(nn.Sequential(nn.Embedding(17, 8), nn.Linear(8, 3), nn.Flatten()))
    found["logits"] = error_text(lambda: no_logits.generate(prompts(), **new))
    found["works"] = pipe.generate(prompts(), **new)
    return found


@pytest.fixture(scope="module")
def mistakes() -> list[dict[str, Any]]:
    return on_ranks(rank_mistakes, 2)


def test_arguments_that_cannot_be_are_told_on_every_rank(mistakes):
    for mistake in mistakes:
        assert [got for got, (*_, expected) in zip(mistake["wrong"], WRONG, strict=True) if expected not in got] == []


def test_ranks_that_are_asked_for_different_things_say_so_on_every_rank(mistakes):
    for mistake in mistakes:
        assert mistake["apart"] == (
            "the ranks do not generate alike: rank 0 has temperature=0.0, rank 1 has temperature=0.5; give the same"
        )
        assert mistake["others"] == "generate() has other tokens on rank 1 than on rank 0: give the same"
        assert mistake["one"] == "generate() takes a whole number of 1 or more or None as top_k, got -1"
        assert "rank 0 calls step(), rank 1 calls generate(): " in mistake["step"]
        assert "rank 0 calls eval(), rank 1 calls generate(): " in mistake["clip"]


def test_a_model_without_logits_is_told_on_every_rank_and_the_next_call_works(mistakes):
    for mistake in mistakes:
        assert (
            "generate() needs a model that gives logits, (batch, time, vocabulary), itself or as `logits`" in mistake["logits"]
        )
        assert mistake["logits"].endswith("got torch.float32 of shape (1, 15)")
        assert torch.equal(mistake["works"], uncut(gpt(), prompts(), 2))


# -- several axes ----------------------------------------------------------------------------------------------------


def rank_mesh() -> list[Any]:
    found = []
    for sizes, way in (((2, 2, 1), "ddp"), ((2, 2, 1), "fsdp"), ((2, 1, 2), "ddp")):
        mesh, model = ps.comms.init_mesh(*sizes), gpt()
        plan = model.tensor_parallel() if sizes[2] > 1 else None
        pipe = ps.Pipeline(model, token_loss, microbatches=2, mesh=mesh, data_parallel=way, tensor_parallel=plan)
        rows = prompts(5).tensor_split(sizes[1])[mesh.get_local_rank("dp")]
        found.append((mesh.get_local_rank("dp"), pipe.generate(rows, max_new_tokens=4), pipe.generate(rows, **DRAWN)))
        pipe.step(rows, target=rows)
    return found


@pytest.mark.slow
def test_replicas_generate_for_rows_of_their_own_and_ranks_that_share_products_for_the_same():
    alone = ps.Pipeline(gpt())
    expected = alone.generate(prompts(), max_new_tokens=4), alone.generate(prompts(), **DRAWN)
    for result in on_ranks(rank_mesh, 4):
        for (replica, *texts), replicas in zip(result, (2, 2, 1), strict=True):
            for text, whole in zip(texts, expected, strict=True):
                assert torch.equal(text, whole.tensor_split(replicas)[replica])


def test_the_page_on_inference_runs_as_it_stands():
    text = (Path(__file__).parents[2] / "docs" / "howto" / "inference.md").read_text(encoding="utf-8")
    page: dict[str, Any] = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(code, page)
    likeliest, drawn = page["write"]()
    assert likeliest.shape == drawn.shape == (4, 18)
    model = page["model"]()
    assert torch.equal(ps.Pipeline(model).generate(prompts(), max_new_tokens=6), uncut(model, prompts(), 6))


def test_a_layer_that_was_given_another_forward_or_a_hook_takes_no_part_in_the_cache():
    tokens = prompts()
    for change in ("forward", "hook"):
        torch.manual_seed(7)
        layer = nn.Linear(8, 8)
        if change == "forward":
            layer.forward = lambda hidden, layer=layer: nn.functional.linear(hidden.cumsum(1), layer.weight)
        else:
            layer.register_forward_hook(lambda layer, given, made: made.cumsum(1))
        model = nn.Sequential(nn.Embedding(17, 8), layer, nn.Linear(8, 17))
        assert torch.equal(ps.Pipeline(model).generate(tokens, max_new_tokens=4), uncut(model, tokens, 4))


def test_a_model_without_values_generates_nothing():
    with torch.device("meta"):
        head = nn.Linear(8, 17)
        head.weight = nn.Parameter(torch.empty(17, 8))
        head.reset_parameters = None
    pipe = ps.Pipeline(nn.Sequential(nn.Embedding(17, 8), head))
    with pytest.raises(ps.MismatchError, match="what has no value yet"):
        pipe.generate(prompts(), max_new_tokens=1)
    values = {name: torch.ones(value.shape) for name, value in pipe.state_dict(strict=False).items()}
    pipe.stages[0].load_state_dict(values, assign=True)
    assert pipe.generate(prompts(), max_new_tokens=1).shape == (5, PROMPT + 1)


def test_the_prompts_mask_grows_with_the_text():
    def logits_of_what_is_seen(self: Any, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head((self.embedding(tokens) * attention_mask[..., None]).cumsum(1))

    torch.manual_seed(7)
    model = toy(logits_of_what_is_seen, embedding=nn.Embedding(17, 8), head=nn.Linear(8, 17))
    text = prompts()
    mask = (torch.arange(PROMPT) >= torch.arange(5)[:, None] % 3).long()
    made = ps.Pipeline([model]).generate(text, max_new_tokens=4, attention_mask=mask)
    for _ in range(4):
        whole = torch.cat([mask, torch.ones(5, text.shape[1] - PROMPT, dtype=torch.int64)], 1)
        text = torch.cat([text, model(text, whole)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(made, text)


def rank_asks_in_numpys_numbers(folder):
    torch.manual_seed(0)
    pipe = ps.Pipeline(GPT(GPTConfig()), token_loss, microbatches=2, seed=numpy.int64(5))
    checkpoint.DigestLog(folder, pipe, every=numpy.int64(2))
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    drawn = [
        pipe.generate(tokens, max_new_tokens=number(4), temperature=1.0, top_k=number(3), seed=number(7))
        for number in (int, numpy.int64)
    ]
    return type(pipe.seed), torch.equal(*drawn)


def test_numbers_of_numpy_are_taken_as_whole_numbers(tmp_path):
    assert on_ranks(rank_asks_in_numpys_numbers, 2, tmp_path) == [(int, True)] * 2
