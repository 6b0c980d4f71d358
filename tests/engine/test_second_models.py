"""The examples with a second model, or with sampled text: their numbers are those of one process over the same microbatches."""

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import accumulate, assert_as_one_process
from runners import on_ranks
from slow_cases import slow_except
from torch import Tensor, nn

import penstock as ps

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # ranks import what they run from there
import distil
import grpo

pytestmark = pytest.mark.ranks


def evaluated(model: nn.Module, inputs: Tensor, sizes: Sequence[int]) -> Any:
    """The model's outputs, without gradients and drop-out."""
    with torch.no_grad():
        return torch.cat([model(rows) for rows in inputs.split(sizes)])


def stepped(model: Any, optimizer: Any, loss_fn: Any, inputs: Tensor, target: Any, sizes: Sequence[int]) -> float:
    """The loss of a step of the optimizer over microbatches of these rows."""
    loss = accumulate(model, loss_fn, (inputs, target), sizes)
    optimizer.step(), optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize(
    ("divergence", "schedule"),
    slow_except(
        [("forward", "1f1b")], [(name, table) for name in ("forward", "reverse", "top_k") for table in ("1f1b", "zb-v")]
    ),
)
def test_distillation_has_the_numbers_of_one_process(divergence, schedule):
    student, teacher, sizes = distil.gpt(4, 32, seed=1), distil.gpt(6, 64, seed=0), [3, 3, 2, 2]
    optimizer, expected = torch.optim.AdamW(student.parameters(), lr=3e-3), []
    for step in range(5):
        tokens = torch.randint(64, (10, 16), generator=torch.Generator().manual_seed(step))
        target = evaluated(teacher, tokens, sizes)
        expected.append(stepped(student, optimizer, vars(distil)[divergence], tokens, target, sizes))

    found = on_ranks(distil.train, 2, divergence, schedule)
    assert_as_one_process(found, (expected, dict(student.state_dict())))


@pytest.mark.parametrize("schedule", slow_except(["1f1b"], ["1f1b", "zb-v"]))
def test_the_first_update_of_grpo_has_importance_ratios_of_exactly_1(schedule):
    torch.manual_seed(0)
    shape = grpo.GPTConfig(vocabulary=64, context=grpo.PROMPT + grpo.ANSWER, width=32, layers=4, heads=4)
    model, loss_fn, sizes = grpo.GPT(shape), grpo.GRPOLoss(), [8] * 4
    alone = ps.Pipeline(copy.deepcopy(model), microbatches=4, topology=ps.Topology())
    optimizer, expected = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for number in range(3):
        prompts = torch.randint(64, (4, grpo.PROMPT), generator=torch.Generator().manual_seed(number))
        alone.load_state_dict(model.state_dict())
        text = alone.generate(
            prompts.repeat_interleave(grpo.GROUP, 0), max_new_tokens=grpo.ANSWER, temperature=1.0, seed=number
        )
        groups = (text[:, grpo.PROMPT :] % 2 == 0).float().mean(1).unflatten(0, (-1, grpo.GROUP))
        advantages = (groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-4)
        expected.append(groups.mean().item())
        target = text, advantages.view(-1, 1), grpo.log_probs(evaluated(model, text, sizes), text)
        for _ in range(2):
            stepped(model, optimizer, loss_fn, text, target, sizes)

    found = on_ranks(grpo.train, 2, schedule)
    assert_as_one_process([(rewards, weights) for rewards, _, weights in found], (expected, dict(model.state_dict())))
    ratios = next(ratios for _, ratios, _ in found if ratios)
    assert all(map(torch.equal, ratios, loss_fn.ratios))
    for update in range(0, len(ratios), 4):
        has_moved = update // 4 % 2 == 1
        assert all(bool((ratio == 1).all()) != has_moved for ratio in ratios[update : update + 4])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_dpo_has_losses_rewards_and_weights_of_one_process(schedule):
    transformers = pytest.importorskip("transformers")
    import dpo

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, vocab_size=256, use_cache=False))
    tokens, counts = torch.randint(256, (20, 16)), torch.arange(16).expand(20, 16) >= 6
    sizes, loss_fn = [6, 6, 4, 4], dpo.DPOLoss()
    reference = dpo.log_probs(evaluated(lambda rows: model(rows).logits, tokens, sizes), tokens, counts)
    optimizer, target = torch.optim.AdamW(model.parameters(), lr=1e-3), (tokens, counts, reference)
    expected = [stepped(model, optimizer, loss_fn, tokens, target, sizes) for _ in range(5)]

    found = on_ranks(dpo.train, 2, schedule)
    assert_as_one_process([(losses, weights) for losses, _, weights in found], (expected, dict(model.state_dict())))
    rewards = next(rewards for _, rewards, _ in found if rewards)
    assert all(map(torch.equal, rewards, loss_fn.rewards))
    assert [len(pairs) for pairs in rewards] == [3, 3, 2, 2] * 5
    assert expected[0] == pytest.approx(torch.tensor(2.0).log().item())
