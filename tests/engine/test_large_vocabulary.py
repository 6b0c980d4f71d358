"""The loss of a large vocabulary as docs/howto/loss.md writes it: the last rank never holds all logits."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import accumulate, merged
from runners import on_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import penstock as ps

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "loss.md").read_text(encoding="utf-8")
(CODE,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "HeadWithLoss" in block]
WORDS, WIDTH, ROWS, TIME, MICROBATCHES = 4000, 32, 4, 64, 2
LOGITS_BYTES = ROWS // MICROBATCHES * TIME * WORDS * 4  # of a microbatch, in float32
ROUNDING = 2e-5  # of the largest element of a gradient, as the page says
LARGEST_SHARE = 0.30  # of the logits, that a tensor may have

needs_chunks = pytest.mark.skipif(
    not hasattr(nn, "LinearCrossEntropyOptions"), reason="torch has no linear_cross_entropy in chunks before 2.13"
)


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest tensor that an operation makes, besides those of the shapes in `known`."""

    def __init__(self, known: set[torch.Size]) -> None:
        super().__init__()
        self.known, self.bytes = known, 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.shape not in self.known:
                self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
        return result


def page() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "a page", "torch": torch, "nn": nn, "ps": ps}
    exec(compile(CODE, "loss.md", "exec"), names)
    return names


def model(names: dict[str, Any], tied: bool) -> nn.Module:
    torch.manual_seed(0)
    whole = names["model_of_words"](WORDS, WIDTH)
    if not tied:
        whole[-1].weight = nn.Parameter(whole[0].weight.detach().clone())
    return whole


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    tokens, target = torch.randint(WORDS, (2, ROWS, TIME))
    target[:, ::5] = -100
    return tokens, target


def train(kind: str, tied: bool) -> Any:
    """Loss, gradients, and the bytes of the largest tensor besides weights."""
    names = page()
    whole = model(names, tied)
    if kind == "plain":
        whole[-1].forward = lambda hidden: nn.functional.linear(hidden, whole[-1].weight)
    tokens, target = batch()
    pipe = ps.Pipeline(whole, names["loss_in_chunks"], "1f1b", MICROBATCHES, ps.tokens())
    with LargestTensor({torch.Size((WORDS, WIDTH))}) as largest:
        loss = pipe.step(tokens, target=target)
    return loss.item(), {name: p.grad for name, p in pipe.named_parameters()}, largest.bytes


@needs_chunks
@pytest.mark.ranks
@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow, id="own weight"), pytest.param(True, id="tied")])
def test_no_tensor_has_the_size_of_all_logits_and_the_numbers_are_rounded_alike(tied: bool) -> None:
    plain, chunks = (on_ranks(train, 2, kind, tied) for kind in ("plain", "chunks"))
    assert plain[1][2] >= LOGITS_BYTES
    assert chunks[1][2] <= LARGEST_SHARE * LOGITS_BYTES
    assert chunks[0][0] == pytest.approx(plain[0][0], rel=1e-6)
    expected = merged([gradients for _, gradients, _ in plain])
    for name, gradient in merged([gradients for _, gradients, _ in chunks]).items():
        assert (gradient - expected[name]).abs().max() <= ROUNDING * expected[name].abs().max(), name


@needs_chunks
@pytest.mark.slow
@pytest.mark.ranks
def test_the_numbers_are_those_of_one_process_in_chunks() -> None:
    names = page()
    whole = model(names, True)
    accumulate(whole, names["loss_in_chunks"], batch(), 2, ps.tokens())
    found = merged([gradients for _, gradients, _ in on_ranks(train, 2, "chunks", True)])
    for name, parameter in whole.named_parameters():
        assert torch.equal(found[name], parameter.grad), name


@needs_chunks
@pytest.mark.parametrize("kind", ["smoothing", "probabilities"])
def test_where_torch_falls_back_to_all_logits_it_warns(kind: str) -> None:
    """So the page says: the numbers are plain, the memory too."""
    hidden, weight, target = torch.randn(8, 4), torch.randn(16, 4), torch.randint(16, (8,))
    options = {"options": nn.LinearCrossEntropyOptions(), **({"label_smoothing": 0.1} if kind == "smoothing" else {})}
    wanted = torch.rand(8, 16).softmax(-1) if kind == "probabilities" else target
    with pytest.warns(UserWarning, match="``options`` ignored"):
        loss = nn.functional.linear_cross_entropy(hidden, weight, wanted, **options)
    smoothing = 0.1 if kind == "smoothing" else 0.0
    assert torch.equal(loss, nn.functional.cross_entropy(hidden @ weight.T, wanted, label_smoothing=smoothing))
