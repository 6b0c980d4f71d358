"""transformers' models: the folders of `save_pretrained` come in, over any ranks, and go out, for `from_pretrained`."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import assert_same
from runners import on_ranks

import penstock as ps
from penstock import checkpoint

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers: Any = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()
pytestmark = pytest.mark.ranks

SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "vocab_size": 97, "max_position_embeddings": 12,
}  # fmt: skip


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))


def qwen2():
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE | {"num_hidden_layers": 3}, tie_word_embeddings=True))


def mixtral():
    """In files its experts have each their own tensors, in memory all of them one. Its routers' losses count."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SHAPE, **experts))


CASES = [  # model, ranks, schedule, where it is cut
    (llama, 2, "1f1b", ["model.layers.1"]),
    (mixtral, 2, "zb-v", ["model.layers.1", "model.norm", "lm_head"]),
    (qwen2, 3, "zb-v", [*[f"model.layers.{number}" for number in range(3)], "model.norm", "lm_head"]),
]
SETTINGS = ("config.json", "generation_config.json")


def of_logits(output, target):
    routers = getattr(output, "aux_loss", None)
    loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, -2), target.flatten())
    return loss if routers is None else loss + 0.02 * routers


def batch(rows):
    ids = torch.randint(1, 97, (4, 6), generator=torch.Generator().manual_seed(5))[:rows]
    mask = (torch.arange(6)[None] < 3 + torch.arange(rows)[:, None]).long()  # with one, the kernels of grouped heads are one
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False}, ids


def uncut(model):
    """The loss and the gradients of two microbatches."""
    kwargs, ids = batch(4)
    total = torch.zeros(())
    for part, mask in zip(ids.chunk(2), kwargs["attention_mask"].chunk(2), strict=True):
        loss = of_logits(model(input_ids=part, attention_mask=mask, use_cache=False), part)
        (0.5 * loss).backward()
        total += 0.5 * loss.detach()
    return total, {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}


def rank_fine_tunes(folder):
    found = []
    ranks = ps.comms.init_distributed().world_size
    for make, _, schedule, cuts in [case for case in CASES if case[1] == ranks]:
        example, _ = batch(2)
        with torch.device("meta"):
            model = make()
        pipe = ps.Pipeline(model, of_logits, schedule, 2, cuts=cuts, example_kwargs=example)
        checkpoint.import_weights(pipe, folder / make.__name__)
        kwargs, ids = batch(4)
        loss = pipe.step(**kwargs, target=ids)
        expected, gradients = uncut(type(model).from_pretrained(folder / make.__name__).train())
        equal = [torch.equal(parameter.grad, gradients[name]) for name, parameter in pipe.named_parameters()]
        checkpoint.export(pipe, folder / f"{make.__name__} of {ranks}", max_shard_size="60KB")
        checkpoint.export(pipe, folder / f"{make.__name__} of {ranks}, in one file", max_shard_size=10**6)
        found.append((torch.equal(loss, expected), equal))
    return found


def rank_generates(folder):
    """The same tokens as the uncut model's own; the example has no mask, which would have to grow with the text."""
    ids = batch(4)[1]
    with torch.device("meta"):
        model = mixtral()
    pipe = ps.Pipeline(model, None, "1f1b", 2, cuts=["model.layers.1"], example_kwargs={"input_ids": ids, "use_cache": False})
    checkpoint.import_weights(pipe, folder)
    text = pipe.generate(ids, max_new_tokens=4, use_cache=False)
    whole = transformers.MixtralForCausalLM.from_pretrained(folder)
    return torch.equal(text, whole.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0))


@pytest.mark.slow
def test_a_model_that_was_never_whole_generates_its_own_tokens(tmp_path):
    torch.manual_seed(1)
    mixtral().save_pretrained(tmp_path, max_shard_size="60KB")
    assert on_ranks(rank_generates, 2, tmp_path) == [True, True]


@pytest.mark.slow
def test_what_save_pretrained_wrote_trains_as_uncut_and_from_pretrained_loads_what_is_exported(tmp_path):
    for make in (llama, qwen2, mixtral):
        torch.manual_seed(1)
        make().save_pretrained(tmp_path / make.__name__, max_shard_size="60KB")
        assert len(list((tmp_path / make.__name__).glob("*.safetensors"))) > 1
    for ranks in (2, 3):
        for found in on_ranks(rank_fine_tunes, ranks, tmp_path):
            assert all(loss and all(gradients) for loss, gradients in found)
    for make, ranks, *_ in CASES:
        original = tmp_path / make.__name__
        out = tmp_path / f"{make.__name__} of {ranks}"
        one = tmp_path / f"{make.__name__} of {ranks}, in one file"
        assert [path.name for path in sorted(one.glob("model*"))] == ["model.safetensors"]
        index = json.loads((out / "model.safetensors.index.json").read_text())
        files = {path.name for path in out.glob("*.safetensors")}
        assert files == {f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)}
        assert files == set(index["weight_map"].values())
        assert ("lm_head.weight" in index["weight_map"]) == (make is not qwen2)
        assert all(json.loads((out / file).read_text()) == json.loads((original / file).read_text()) for file in SETTINGS)
        expected = transformers.AutoModelForCausalLM.from_pretrained(original)
        for folder in (out, one):
            again, result = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
            assert not any(result.values()), result
            assert type(again) is type(expected)
            assert_same(again.state_dict(), expected.state_dict())


@pytest.mark.slow
def test_a_model_takes_its_base_models_weights_and_a_checkpoint_is_exported_with_its_configuration(tmp_path):
    torch.manual_seed(1)
    shape = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 17, "n_positions": 6}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).bfloat16()
    model.transformer.save_pretrained(tmp_path / "base")  # whose names lack `transformer.`
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    example, _ = batch(2)
    example["input_ids"] %= 17
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    pipe = ps.Pipeline(model.float(), of_logits, microbatches=2, example_kwargs=example)
    checkpoint.import_weights(pipe, tmp_path / "base")
    assert_same(pipe.state_dict(), {name: value.float() for name, value in expected.items()})
    checkpoint.save(tmp_path / "run", pipe)
    checkpoint.export_checkpoint(tmp_path / "run", tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(again.state_dict(), pipe.state_dict())


def rank_follows_the_page(code, source, out):
    names = {"torch": torch, "ps": ps, "checkpoint": checkpoint, "token_loss": of_logits}
    names |= {name: getattr(transformers, name) for name in ("AutoConfig", "AutoModelForCausalLM")}
    exec(code, names)
    names["fine_tune"](source, out)


@pytest.mark.slow
def test_the_page_on_weights_does_what_it_says(tmp_path):
    llama().save_pretrained(tmp_path / "source")
    page = (Path(__file__).parents[2] / "docs" / "howto" / "weights.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    on_ranks(rank_follows_the_page, 2, code, tmp_path / "source", tmp_path / "out")
    before, after = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("source", "out")]
    largest = max((one - other).abs().max() for one, other in zip(before.parameters(), after.parameters(), strict=True))
    assert 0 < largest < 1e-4  # one step of AdamW
