"""Ranks that share the tokens of each sequence: the numbers of one process, what they send, and what is refused."""

import warnings
from pathlib import Path
from typing import Any

import context_parallel as models
import pytest
import torch
import torch.distributed as dist
from models import toy
from reference import OneProcess
from runners import on_ranks
from slow_cases import slow_except
from torch import Tensor, nn

import penstock as ps
from penstock import checkpoint
from penstock.batch.call import check_arguments_can_be_cut, first_stage_signature
from penstock.batch.pieces import count_tokens, take_tokens
from penstock.guards.loss_check import LossChecks
from penstock.mesh.context_parallel import ContextParallelAttention
from penstock.stage.dtensor import gather_full_tensor


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", slow_except([2], models.MESHES))
def test_on_every_mesh_it_has_the_numbers_of_one_process(ranks: int) -> None:
    pytest.importorskip("transformers")
    for differences in on_ranks(models.largest_differences, ranks, ranks):
        assert len(differences) == sum(len(names) for *_, names in models.MESHES[ranks])
        assert [name for name, difference in differences.items() if not difference < 1e-12] == []


# -- two ranks, one start ------------------------------------------------------------------------------------------------


def gpt(dropout: float = 0.0, heads: int = 4) -> nn.Module:
    torch.manual_seed(3)
    return ps.model.GPT(ps.model.GPTConfig(17, models.TIME, width=16, layers=2, heads=heads, dropout=dropout)).double()


def sharded(recompute: Any = None, dropout: float = 0.0) -> tuple[ps.Pipeline, torch.optim.Optimizer]:
    mesh = ps.comms.init_mesh(cp=2, pp=1)
    pipe = ps.Pipeline(
        gpt(dropout), models.loss_fn, "1f1b", 3, ps.tokens(), mesh=mesh, data_parallel="fsdp", recompute=recompute
    )
    return pipe, torch.optim.AdamW(pipe.parameters(), lr=1e-2)


def stepped(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer, steps: int) -> list[Tensor]:
    inputs, target = models.batch("gpt")
    losses = []
    for _ in range(steps):
        losses.append(pipe.step(*inputs.values(), target=target))
        pipe.clip_grad_norm_(0.1)
        optimizer.step(), optimizer.zero_grad()
    return losses


def sent_elements(pipe: ps.Pipeline) -> int:
    """What this rank sends to the other in a step."""
    counts, all_to_all = [], dist.all_to_all_single

    def counted(received: Tensor, sent: Tensor, receive_sizes: list[int], send_sizes: list[int], group: Any) -> None:
        counts.append(send_sizes[1 - pipe.position.cp_index])
        all_to_all(received, sent, receive_sizes, send_sizes, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted)
        tokens = torch.randint(17, (6, 12), generator=torch.Generator().manual_seed(0))
        pipe.step(tokens, target=tokens)
    return sum(counts)


def worked(folder: Path) -> dict[str, Any]:
    pipe, optimizer = sharded("block", dropout=0.1)
    losses = stepped(pipe, optimizer, 2)
    checkpoint.save(folder, pipe, optimizer)
    losses += stepped(pipe, optimizer, 1)
    pipe = ps.Pipeline(gpt(0.1, heads=1), models.loss_fn, "1f1b", 2, ps.tokens(), mesh=ps.comms.init_mesh(cp=2, pp=1))
    losses += stepped(pipe, torch.optim.AdamW(pipe.parameters(), lr=1e-2), 2)
    attends = lambda self, hidden: (hidden @ hidden.mT).softmax(-1) @ hidden  # noqa: E731
    other = nn.Sequential(nn.Embedding(17, 16), toy(attends, "OwnAttention"), nn.Linear(16, 17)).double()
    pipe = ps.Pipeline(other, models.loss_fn, microbatches=2, mesh=ps.comms.init_mesh(cp=2, pp=1))
    inputs, target = models.batch("gpt")
    with pytest.raises(ps.MismatchError) as error:
        pipe.step(*inputs.values(), target=target)
    return {"losses": losses, "refused": str(error.value)}


def sends() -> int:
    return sent_elements(sharded()[0])


def shifted() -> list[str]:
    """The warning of a loss that shifts by a token, and the error of a generation."""
    pipe = ps.Pipeline(
        models.model("gpt"),
        lambda output, target: models.loss_fn(output[:, :-1], target[:, 1:]),
        microbatches=2,
        mesh=ps.comms.init_mesh(cp=2, pp=1),
    )
    inputs = models.batch("gpt")[0]["tokens"]
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        pipe.step(inputs, target=inputs)
    texts = [str(warning.message) for warning in given]
    with pytest.raises(ps.MismatchError) as error:
        pipe.generate(inputs, max_new_tokens=1)
    return [*texts, str(error.value)]


@pytest.mark.ranks
def test_recomputed_sharded_clipped_and_with_dropout_it_trains_as_one_process_which_goes_on_with_its_checkpoint(
    tmp_path: Path,
) -> None:
    everyone = on_ranks(worked, 2, tmp_path)
    alone = ps.Pipeline(gpt(0.1), models.loss_fn, "1f1b", 3, ps.tokens())
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    expected = stepped(alone, optimizer, 3)
    alone = ps.Pipeline(gpt(0.1, heads=1), models.loss_fn, "1f1b", 2, ps.tokens())
    expected += stepped(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2), 2)
    for result in everyone:
        assert all(abs(ours - loss) < 1e-12 for ours, loss in zip(result["losses"], expected, strict=True))
        assert "the tokens of a sequence cannot be cut before 1, a OwnAttention, which mixes them" in result["refused"]

    resumed = ps.Pipeline(gpt(0.1), models.loss_fn, "1f1b", 3, ps.tokens())
    optimizer = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
    checkpoint.resume(tmp_path, resumed, optimizer)
    assert resumed.step_count == 2
    assert abs(stepped(resumed, optimizer, 1)[0] - expected[2]) < 1e-12


@pytest.mark.ranks
def test_a_rank_sends_half_of_its_queries_keys_values_and_outputs_and_as_much_in_the_backward() -> None:
    rows, tokens, width, layers = 6, 12 // 2, 16, 2
    assert on_ranks(sends, 2) == [2 * layers * 4 * rows * tokens * width // 2] * 2


@pytest.mark.ranks
def test_a_loss_that_shifts_inside_is_a_warning_and_text_is_not_generated() -> None:
    first, _ = on_ranks(shifted, 2)
    assert any("tokens is" in text and "which is no mean over tokens" in text for text in first)
    assert "generate() does not cut tokens along cp" in first[-1]


def test_parts_of_the_tokens_that_count_unequally_are_a_warning() -> None:
    target = torch.ones(4, 6, dtype=torch.int64)
    target[:, 4:] = -100
    loss_fn = nn.CrossEntropyLoss()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LossChecks(loss_fn, "mean", None, 2, 0).check_after_step(target)
        LossChecks(loss_fn, "mean", ps.tokens(), 2, 0, 1, 2).check_after_step(target)
    with pytest.warns(
        UserWarning, match=r"of the parts of the sequences has 12, 4 values .* weighed by their tokens.*ps.tokens\(\)"
    ):
        LossChecks(loss_fn, "mean", None, 2, 0, 1, 2).check_after_step(target)


# -- a teacher -------------------------------------------------------------------------------------------------------------


def distilled(output: Tensor, target: Tensor, teacher_output: Tensor) -> Tensor:
    soft, counts = -(teacher_output.softmax(-1) * output.log_softmax(-1)).sum(-1), target != -100
    return models.loss_fn(output, target) + (soft * counts).sum() / counts.sum()


def teacher() -> nn.Module:
    torch.manual_seed(7)
    return ps.model.GPT(ps.model.GPTConfig(models.VOCABULARY, models.TIME, width=32, layers=3, heads=4)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    """Three batches, the second with fewer tokens."""
    inputs, target = models.batch("gpt")
    [tokens] = inputs.values()
    return [(tokens, target), (tokens[:, 2:], target[:, 2:]), (tokens.flip(0), target.flip(0))]


def taught(schedule: str, data_parallel: str, announces: bool) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of three steps, and the gradients of the last."""
    options = {"mesh": ps.comms.init_mesh(pp=2, cp=2), "cuts": ["block1"], "data_parallel": data_parallel}
    pipe = ps.Pipeline(models.model("gpt"), distilled, schedule, 3, ps.tokens(), teacher=teacher(), **options)
    return taught_steps(pipe, announces)


def taught_steps(pipe: Any, announces: bool) -> tuple[list[float], dict[str, Tensor]]:
    optimizer, losses, steps = torch.optim.SGD(pipe.parameters(), lr=0.1), [], batches()
    for (tokens, target), following in zip(steps, [*steps[1:], ()], strict=True):
        optimizer.zero_grad()
        losses.append(pipe.step(tokens, target=target, next_args=following[:1] if announces else ()).item())
        optimizer.step()
    return losses, {name: gather_full_tensor(parameter.grad) for name, parameter in pipe.named_parameters()}


def teacher_that_mixes_tokens(announces: bool) -> str:
    """The error of a step."""
    mixing = toy(lambda self, hidden: hidden + hidden.mean(1, keepdim=True), "MeanOfTokens")
    mixed = nn.Sequential(nn.Embedding(17, 16), mixing, nn.Linear(16, 17)).double()
    mesh = ps.comms.init_mesh(pp=2, cp=2)
    pipe = ps.Pipeline(models.model("gpt"), distilled, "1f1b", 3, mesh=mesh, cuts=["block1"], teacher=mixed)
    (tokens, target), *_ = batches()
    with pytest.raises(ps.MismatchError) as error:
        pipe.step(tokens, target=target, next_args=(tokens,) if announces else ())
    return str(error.value)


TAUGHT = [("1f1b", "ddp", False), ("1f1b", "ddp", True), ("zb-h1", "fsdp", True)]


def with_teachers() -> tuple[list[Any], list[str]]:
    return [taught(*case) for case in TAUGHT], [teacher_that_mixes_tokens(announces) for announces in (False, True)]


@pytest.mark.slow
@pytest.mark.ranks
def test_a_teacher_has_the_tokens_of_its_rank_in_this_step_and_ahead_and_one_that_mixes_them_is_refused() -> None:
    losses, gradients = taught_steps(OneProcess(models.model("gpt"), distilled, teacher=teacher()), False)
    for cases, errors in on_ranks(with_teachers, 4):
        for ours, own_gradients in cases:
            assert all(abs(value - loss) < 1e-12 for value, loss in zip(ours, losses, strict=True))
            assert own_gradients
            assert all((gradient - gradients[name]).abs().max() < 1e-12 for name, gradient in own_gradients.items())
        assert all("cannot be cut before" in error and "MeanOfTokens, which mixes them" in error for error in errors)


# -- what is refused before data flows ------------------------------------------------------------------------------------


def test_what_cannot_be_cut_is_one_sentence() -> None:
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    assert count_tokens((tokens, {"embeddings": torch.zeros(2, 6, 8), "scale": 1.0}), "the batch", 1) == 6
    for other in (torch.zeros(2, 1, 6, 6), torch.zeros(2, 5)):
        with pytest.raises(ps.MismatchError, match="a mask over queries and keys cannot be cut"):
            count_tokens((tokens, other), "the batch", 1)
    with pytest.raises(ps.MismatchError, match=r"the target is cut along dimension 1 .* it has \(2,\)"):
        count_tokens(torch.zeros(2), "the target", 1)

    context = ContextParallelAttention(dist.group.WORLD, 1)
    context.begin_action([4, 3], 1)
    assert context.first_position == 4
    heads = torch.zeros(2, 4, 3, 8)
    with pytest.raises(ps.MismatchError, match=r"of shape \(2, 1, 3, 3\), cannot be cut along cp"):
        context.attend(heads, heads, heads, True, torch.ones(2, 1, 3, 3), None, 0.0)
    with pytest.raises(ps.MismatchError, match="attention of 3 tokens to 5, but this rank has 3"):
        context.attend(heads, torch.zeros(2, 4, 5, 8), heads, True, None, None, 0.0)


def test_arguments_that_mean_another_thing_once_cut_are_refused() -> None:
    class ForwardSignatureModel(nn.Module):
        def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, labels: Any = None) -> None:
            pass

    signature, tokens = first_stage_signature(ForwardSignatureModel()), torch.zeros(2, 6, dtype=torch.int64)
    check_arguments_can_be_cut(signature, (tokens, None, torch.arange(6)[None]), {})
    with pytest.raises(ps.MismatchError, match="labels= are shifted by a token inside"):
        check_arguments_can_be_cut(signature, (tokens,), {"labels": tokens})
    with pytest.raises(ps.MismatchError, match="as for packed documents"):
        check_arguments_can_be_cut(signature, (tokens,), {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])})

    part = take_tokens((tokens, ps.Replicated(torch.arange(6)[None]), ps.Rows(torch.zeros(6, 6, 2), 2), None, 3), 1, 2, 3)
    assert [tuple(part[0].shape), tuple(part[1].tensor.shape), part[1].tensor[0, 0].item()] == [(2, 3), (1, 3), 2]
    assert [tuple(part[2].tensor.shape), part[2].dim, part[3], part[4]] == [(6, 3, 2), 2, None, 3]


def half_ignored() -> tuple[Tensor, Tensor]:
    """The loss of a batch whose first half of tokens, all that the first rank has, does not count; and one process's."""

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1).float(), target.flatten())

    torch.manual_seed(0)
    layer, inputs, target = nn.Linear(8, 5), torch.randn(2, 6, 8), torch.zeros(2, 6, dtype=torch.long)
    target[:, :3] = -100
    pipe = ps.Pipeline(layer, loss_fn, microbatches=1, mesh=ps.comms.init_mesh(cp=2), loss_weight=ps.tokens())
    with torch.autocast("cpu", torch.bfloat16):
        return pipe.step(inputs, target=target), loss_fn(layer(inputs), target).detach()


@pytest.mark.costly
def test_a_loss_has_the_dtype_of_the_parts_that_count() -> None:
    for loss, expected in on_ranks(half_ignored, 2):
        torch.testing.assert_close(loss, expected)  # its dtype too; in bfloat16 the third digit would differ
