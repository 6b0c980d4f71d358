"""`Pipeline(.., slices=)`: the numbers of whole sequences, the bits of one process that slices alike, and what is refused."""

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from error_text import error_text
from reference import assert_same
from runners import on_ranks_once
from slow_cases import slow_except
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.randomness import RandomnessByPosition

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

ROWS, TIME, VOCABULARY = 3, 13, 17


def gpt(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    return ps.model.GPT(ps.model.GPTConfig(VOCABULARY, 16, width=16, layers=3, heads=4, dropout=dropout)).double()


def from_transformers(name: str, **config: Any) -> nn.Module:
    import transformers

    import penstock.integrations.transformers  # noqa: F401 - registers the attention

    torch.manual_seed(3)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}
    made = getattr(transformers, f"{name}Config")(**shape, **config, use_cache=False)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")._from_config(made, attn_implementation="penstock")
    return model.double()


def llama(**config: Any) -> nn.Module:
    """Grouped heads, positions that all stages use, and a padding mask."""
    return from_transformers("Llama", num_key_value_heads=2, intermediate_size=24, **config)


def opt() -> nn.Module:
    """Dropout of (rows * tokens, width)."""
    return from_transformers("OPT", ffn_dim=24, word_embed_proj_dim=16, max_position_embeddings=16, dropout=0.2)


def batch() -> tuple[Tensor, Tensor]:
    """In one row the first tokens do not count, in another one the last: some slices have no loss of their own."""
    generator = torch.Generator().manual_seed(5)
    tokens, target = torch.randint(VOCABULARY, (2, ROWS, TIME), generator=generator)
    target[1, :6], target[2] = -100, -100
    target[0, 9:] = -100
    return tokens, target


def inputs(kind: str) -> dict[str, Tensor]:
    tokens, _ = batch()
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens).index_fill_(1, torch.arange(2), 0)} if kind else {}


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return cross_entropy(getattr(output, "logits", output).flatten(0, 1), target.flatten())


def pipeline(
    model: nn.Module | list[nn.Module] | None = None, schedule: str = "1f1b", slices: Any = 3, **arguments: Any
) -> ps.Pipeline:
    loss = arguments.pop("loss_fn", loss_fn)
    return ps.Pipeline(gpt() if model is None else model, loss, schedule, 2, ps.tokens(), slices=slices, **arguments)


def trained(pipe: ps.Pipeline, kind: str = "") -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradients of the second of two steps, and the loss of an evaluation."""
    tokens, target = batch()
    args, kwargs = ((), inputs(kind)) if kind else ((tokens,), {})
    for _ in range(2):
        pipe.zero_grad()
        losses: list[Tensor] = []
        loss = pipe.step(*args, target=target, losses=losses, **kwargs)
    _, evaluated = pipe.eval(*args, target=target, **kwargs)
    return [*map(float, (loss, evaluated, *losses))], {name: parameter.grad for name, parameter in pipe.named_parameters()}


def refusals() -> dict[str, str]:
    """The error of each wrong use, by a word for it."""
    tokens, target = batch()

    class UncutAttention(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)

    def uncut(hidden: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)

    class CallsHelper(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return uncut(hidden)

    class LooksAhead(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return ps.attention(hidden[:, None], hidden[:, None], hidden[:, None], causal=False)[:, 0]

    class MayLookAhead(nn.Module):
        causal = False

        def forward(self, hidden: Tensor) -> Tensor:
            return ps.attention(hidden[:, None], hidden[:, None], hidden[:, None], causal=self.causal)[:, 0]

    class HasCheckpoint(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            query = hidden[:, None]
            return hidden + checkpoint(lambda: ps.attention(query, query, query)[:, 0], use_reentrant=False)

    class OwnMask(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            mask = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool)[None, None].tril()
            return ps.attention(hidden[:, None], hidden[:, None], hidden[:, None], mask=mask)[:, 0]

    def around(layer: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Embedding(VOCABULARY, 8), layer, nn.Linear(8, VOCABULARY)).double()

    def checkpointed() -> nn.Module:
        model = gpt()
        block: Any = model.get_submodule("block1")
        forward = block.forward
        block.forward = lambda hidden: checkpoint(forward, hidden, use_reentrant=False)
        return model

    uses: dict[str, Callable[[], Any]] = {
        "many": lambda: pipeline(slices=14).step(tokens, target=target),
        "lengths": lambda: pipeline(slices=[3, 4]).step(tokens, target=target),
        "target": lambda: pipeline().step(tokens, target=target[:, 1:]),
        "no number": lambda: pipeline(slices=[3, 0]),
        "family": lambda: pipeline(schedule="naive"),
        "cp": lambda: pipeline(mesh=ps.comms.init_mesh(pp=1, cp=2)),
        "own": lambda: pipeline(around(UncutAttention())).step(tokens, target=target),
        "helper": lambda: pipeline(around(CallsHelper())).step(tokens, target=target),
        "ahead": lambda: pipeline(around(LooksAhead())).step(tokens, target=target),
        "may be ahead": lambda: pipeline(around(MayLookAhead())).step(tokens, target=target),
        "mask": lambda: pipeline(around(OwnMask())).step(tokens, target=target),
        "checkpoint in a layer": lambda: pipeline(around(HasCheckpoint())).step(tokens, target=target),
        "convolution": lambda: pipeline(around(nn.Conv1d(4, 4, 3))),
        "checkpoint": lambda: pipeline(checkpointed()).step(tokens, target=target),
    }
    return {name: error_text(use, ps.PenstockError) for name, use in uses.items()}


def worked() -> dict[str, Any]:
    torch.set_num_threads(1)
    tokens, target = batch()
    results: dict[str, Any] = {}
    results["rebuilt"] = trained(pipeline(slices=1).rebuild("zb-h1", slices=4))

    pipe = pipeline()
    outputs = pipe.step(tokens, target=target, return_outputs=True)[1]
    results["outputs"] = None if outputs is None else [outputs.shape, (outputs - gpt()(tokens)).abs().max().item()]
    timeline = pipe.timeline()
    results["cells"] = " ".join(str(event.action) for event in timeline.rows[1]), timeline.peak_in_flight
    whole = pipeline(slices=1)
    whole.step(tokens, target=target)
    sizes, whole_sizes = timeline.activation_sizes, whole.timeline().activation_sizes
    results["kept"] = [(size.keep, whole_size.act) for size, whole_size in zip(sizes, whole_sizes, strict=True)]
    results["left to earlier slices"] = [size.act - size.keep for size in sizes]
    results["text"] = [p.generate(tokens[:, :8], max_new_tokens=3).tolist() for p in (pipe, whole)]

    shifts = pipeline(loss_fn=lambda output, target: loss_fn(output[:, :-1], target[:, 1:]))
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        shifts.step(tokens, target=tokens)
    results["warned"] = [str(warning.message) for warning in given]
    results["refused"] = refusals()
    return results


def everyone() -> list[dict[str, Any]]:
    return on_ranks_once(worked, 2)


def assert_near(found: tuple[list[float], dict[str, Tensor]], model: nn.Module, output: Any) -> None:
    loss = loss_fn(output, batch()[1])
    loss.backward()
    assert max(abs(found[0][0] - loss), abs(found[0][1] - loss)) < 1e-12
    assert max((found[1][name] - p.grad).abs().max() for name, p in model.named_parameters()) < 1e-12


@pytest.mark.ranks
def test_a_rebuilt_pipeline_slices_with_the_bits_of_one_process_that_slices_alike() -> None:
    (losses, first), (_, second) = (results["rebuilt"] for results in everyone())
    expected_losses, expected = trained(pipeline(gpt(), "gpipe", 4, topology=ps.Topology()))
    assert losses == pytest.approx(expected_losses, abs=0, nan_ok=True)
    assert_same(first | second, expected)


def test_gradients_are_those_of_whole_sequences() -> None:
    model = gpt()
    assert_near(trained(pipeline(topology=ps.Topology())), model, model(batch()[0]))


@pytest.mark.costly
@pytest.mark.parametrize("kind", slow_except(["gpt"], ["gpt", "llama", "opt"]))
def test_slices_of_any_lengths_drop_what_whole_sequences_drop(kind: str) -> None:
    arguments: dict[str, Any] = {"topology": ps.Topology(), "recompute": "block"}
    if kind != "gpt":
        pytest.importorskip("transformers")
        arguments["example_kwargs"] = {"input_ids": batch()[0][:2]}

    def trained_in(slices: Any) -> tuple[list[float], dict[str, Tensor]]:
        model = gpt(0.2) if kind == "gpt" else opt() if kind == "opt" else llama(attention_dropout=0.3)
        pipe, (tokens, target) = pipeline(model, slices=slices, **arguments), batch()
        args, kwargs = ((tokens,), {}) if kind == "gpt" else ((), {"input_ids": tokens})
        losses = [float(pipe.step(*args, target=target, **kwargs)) for _ in range(2)]
        return losses, {name: parameter.grad for name, parameter in pipe.named_parameters()}

    losses, gradients = trained_in(1)
    for slices in (2, [5, 2, 6], 4, [2, 3, 3, 2, 3]):
        found, found_gradients = trained_in(slices)
        assert found == pytest.approx(losses, abs=1e-12, rel=0), slices
        assert max((found_gradients[name] - gradients[name]).abs().max() for name in gradients) < 1e-12, slices


def test_the_attention_of_a_slice_is_not_watched_for_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It draws those of its part itself; to ask for each of its functions would take as long as some of them."""
    names, ask = set[str](), RandomnessByPosition.__torch_function__

    def record(self: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        names.add(function.__name__)
        return ask(self, function, *arguments)

    pipe, (tokens, target) = pipeline(gpt(0.2), topology=ps.Topology()), batch()
    pipe.step(tokens, target=target)  # the first step also checks that tokens meet in attention alone
    monkeypatch.setattr(RandomnessByPosition, "__torch_function__", record)
    pipe.step(tokens, target=target)
    assert {"dropout", "linear"} <= names
    assert not {"cat", "native_dropout", "scaled_dot_product_attention"} & names


def test_the_mask_of_a_gpu_which_is_no_tensor_of_numbers_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    model, tokens, target = gpt(), *batch()
    found = pipeline(gpt(), "gpipe", topology=ps.Topology()).step(tokens, target=target)
    assert abs(found - loss_fn(model(tokens), target)) < 1e-12


@pytest.mark.slow
def test_a_compiled_layer_runs_in_slices() -> None:
    model, tokens, target = gpt(), *batch()
    model.get_submodule("block1").compile(backend="aot_eager")
    found = pipeline(model, "gpipe", topology=ps.Topology()).step(tokens, target=target)
    assert abs(found - loss_fn(gpt()(tokens), target)) < 1e-12


def test_the_rows_of_a_mask_are_cut_as_of_packed_documents() -> None:
    class PackedAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

        def forward(self, tokens: Tensor, same_document: Tensor) -> Tensor:
            hidden = self.embedding(tokens)[:, None]
            return self.head(ps.attention(hidden, hidden, hidden, mask=same_document[:, None])[:, 0])

    tokens, target = batch()
    documents = tokens.new_tensor([0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2]).expand(ROWS, -1)
    same_document = documents[:, :, None] == documents[:, None]  # (rows, time, time)
    torch.manual_seed(3)
    model = PackedAttention().double()
    loss_fn(model(tokens, same_document), target).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    pipe = pipeline([model], "gpipe", [5, 2, 6], topology=ps.Topology())
    pipe.step(tokens, same_document, target=target)
    assert max((parameter.grad - expected[name]).abs().max() for name, parameter in pipe.named_parameters()) < 1e-12


@pytest.mark.costly
def test_a_model_of_transformers_is_given_positions_and_its_padding_mask_is_cut() -> None:
    pytest.importorskip("transformers")
    example = {name: value[:2] for name, value in inputs("llama").items()}
    pipe = pipeline(llama(), "zb-h1", [2, 6, 5], topology=ps.Topology(), example_kwargs=example, recompute="block")
    model = llama()
    assert_near(trained(pipe, "llama"), model, model(**inputs("llama")))

    # Beside a mask transformers takes no document's border from positions that begin anew.
    packed = {**inputs("llama"), "position_ids": torch.arange(TIME).remainder(5).expand(ROWS, -1).contiguous()}
    one_stage = pipeline([llama()], "gpipe", [2, 6, 5], topology=ps.Topology())
    assert abs(one_stage.step(**packed, target=batch()[1]) - loss_fn(model(**packed), batch()[1])) < 1e-12
    checkpointed: Any = model
    checkpointed.gradient_checkpointing_enable()
    with pytest.raises(ps.MismatchError, match="a LlamaModel, is run again in the backward by a checkpoint"):
        pipeline([model], "gpipe", topology=ps.Topology()).step(**inputs("llama"), target=batch()[1])
    eager: Any = llama()
    eager.set_attn_implementation("eager")
    with pytest.raises(ps.MismatchError, match='whose config has attn_implementation="eager": make the model with'):
        pipeline([eager], "gpipe", topology=ps.Topology()).step(**inputs("llama"), target=batch()[1])
    with pytest.raises(ps.MismatchError, match="labels= are shifted by a token inside the model"):
        pipe.eval(**inputs("llama"), labels=batch()[0])


@pytest.mark.ranks
def test_outputs_are_whole_and_what_is_measured_has_the_cells_of_the_table() -> None:
    assert everyone()[0]["outputs"] is None
    shape, difference = everyone()[1]["outputs"]
    assert (shape, difference < 1e-12) == ((ROWS, TIME, VOCABULARY), True)
    cells, in_flight = everyone()[0]["cells"]
    assert cells == "1F0 1F0.1 1F0.2 1B0.2 1F1 1B0.1 1F1.1 1B0 1F1.2"  # microbatch 1 does not count
    assert in_flight == (4 / 3, 1)
    assert everyone()[0]["text"][0] == everyone()[0]["text"][1]


@pytest.mark.ranks
def test_measured_memory_is_that_of_whole_sequences_and_of_the_gradients_of_keys_and_values() -> None:
    assert all(0.95 * whole < kept < 1.05 * whole for kept, whole in everyone()[0]["kept"]), everyone()[0]["kept"]
    of_block = 2 * 2 * 9 * 16 * 8  # gradients of keys and values: 2 rows, 9 tokens before the last slice, 16 numbers of 8 bytes
    assert everyone()[0]["left to earlier slices"] == [of_block, 2 * of_block]


@pytest.mark.ranks
def test_wrong_uses_are_one_sentence_and_a_loss_that_shifts_inside_is_a_warning() -> None:
    assert any("loss_fn of 4 tokens is" in text for text in everyone()[1]["warned"])
    refused = everyone()[0]["refused"]
    for name, text in {
        "many": "13 tokens cannot be cut into 14 slices: each needs one",
        "lengths": "slices=[3, 4] have 7 tokens, but the sequences have 13",
        "target": "inputs and target have 12 and 13 tokens a row: give as many",
        "no number": "slices is a number of slices, 1 or more, or a list of their lengths in tokens, not [3, 0]",
        "family": "naive has no option slices: it has none; gpipe, 1f1b, interleaved-1f1b, zb-h1 have it",
        "cp": "slices and an axis cp cut the same tokens: use slices=1, or a mesh without cp",
        "own": "before 1, a UncutAttention, which calls scaled_dot_product_attention: call ps.attention there instead",
        "helper": "before 1, a CallsHelper, which calls scaled_dot_product_attention: call ps.attention there instead",
        "may be ahead": "1, a MayLookAhead, looks at later tokens too (causal=False)",
        "mask": "1, a OwnMask, has a mask of (1, 1, 4, 4) over queries and keys, which are 9 with those of earlier slices",
        "checkpoint in a layer": "action 0F0, microbatch 0: tokens cannot be cut into slices: 1, a HasCheckpoint, is run again",
        "ahead": "1, a LooksAhead, looks at later tokens too (causal=False)",
        "convolution": "cannot be cut before 1, a Conv1d, which mixes them",
        "checkpoint": "block1, a GPTBlock, is run again in the backward by a checkpoint inside of the model",
    }.items():
        assert text in refused[name], name
