"""Teachers of other sizes, architectures and dtypes, cut by an example, with tied weights and skips; and with replicas."""

from functools import cache
from typing import Any

import pytest
import torch
from batched_launch import together
from reference import assert_same, gradients, merged
from torch import Tensor, nn

import penstock as ps
from penstock.model import GPT, GPTConfig

pytestmark = pytest.mark.ranks

M, VOCABULARY, STEPS = 4, 32, 3


class Skipping(nn.Module):
    """A model whose first value is needed at its end, and whose head is tied to its embedding: token numbers to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(4)])
        self.head = nn.Linear(12, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        first = hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return {"logits": self.head(hidden + first)}


def gpt(seed: int, width: int, layers: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(GPTConfig(VOCABULARY, 8, width, layers, 2))


def llama(seed: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    shape = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "vocab_size": VOCABULARY,
    }
    model: nn.Module = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**shape, max_position_embeddings=8, use_cache=False)
    )
    return model


def skipping(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Skipping()


MODELS = {
    "a larger GPT": (lambda: gpt(0, 8, 4), lambda: gpt(1, 16, 7)),
    "a smaller GPT in bfloat16": (lambda: gpt(0, 8, 4), lambda: gpt(1, 4, 3).bfloat16()),
    "skips and tied weights": (lambda: gpt(0, 8, 4), lambda: skipping(1)),
    "one llama of another": (lambda: llama(0), lambda: llama(1)),
    "a GPT of a model with skips": (lambda: skipping(0), lambda: gpt(1, 16, 4)),
}


def logits_of(output: Any) -> Tensor:
    logits: Tensor = output if isinstance(output, Tensor) else output["logits"]
    return logits.float()


def loss_fn(output: Any, tokens: Tensor, teacher_output: Any) -> Tensor:
    logits, soft = logits_of(output).flatten(0, 1), logits_of(teacher_output).flatten(0, 1)
    likely = nn.functional.cross_entropy(logits, tokens.flatten())
    return likely + nn.functional.kl_div(logits.log_softmax(-1), soft.softmax(-1), reduction="batchmean")


def batches(rows: int = 7) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randint(VOCABULARY, (rows, 8)) for _ in range(STEPS)]


def rank_distils(which: str, schedule: str, announces: bool) -> dict[str, Any]:
    student, teacher = (make() for make in MODELS[which])
    options = {"example_args": (batches()[0][:2],)}
    pipe = ps.Pipeline(student, loss_fn, schedule, M, teacher=teacher, **options)
    optimizer, losses, tokens = torch.optim.AdamW(pipe.parameters()), [], batches()
    for number, batch in enumerate(tokens):
        optimizer.zero_grad()
        following = tokens[number + 1 : number + 2] if announces else ()
        losses.append(pipe.step(batch, target=batch, next_args=following))
        optimizer.step()
    return {"losses": losses, "gradients": gradients(pipe.named_parameters())}


@cache
def reference(which: str) -> dict[str, Any]:
    student, teacher = (make() for make in MODELS[which])
    teacher.eval()
    optimizer, losses = torch.optim.AdamW(student.parameters()), []
    for batch in batches():
        optimizer.zero_grad()
        terms = []
        for tokens in batch.tensor_split(M):
            with torch.no_grad():
                teacher_output = teacher(tokens)
            loss = loss_fn(student(tokens), tokens, teacher_output)
            loss.backward(torch.full_like(loss, len(tokens) / len(batch)))
            terms.append(loss.detach() * (len(tokens) / len(batch)))
        losses.append(sum(terms))
        optimizer.step()
    return {"losses": losses, "gradients": gradients(student.named_parameters())}


CASES = tuple((which, schedule, announces) for which in MODELS for schedule, announces in (("1f1b", True), ("zb-v", False)))


@pytest.mark.parametrize("case", CASES)
def test_a_teacher_of_any_kind_gives_the_bits_of_one_process(case: tuple[Any, ...]) -> None:
    results, expected = together(rank_distils, 2, CASES)[case], reference(case[0])
    for result in results:
        assert all(map(torch.equal, result["losses"], expected["losses"]))
    assert_same(merged([result["gradients"] for result in results]), expected["gradients"])


def rank_replica(data_parallel: str) -> list[float]:
    mesh = ps.comms.init_mesh(pp=2, dp=2)
    pipe = ps.Pipeline(gpt(0, 8, 4), loss_fn, "1f1b", 2, teacher=gpt(1, 16, 4), mesh=mesh, data_parallel=data_parallel)
    halves = [tokens.chunk(2)[pipe.position.replica] for tokens in batches(8)]
    pairs = [(tokens, halves[number + 1 : number + 2]) for number, tokens in enumerate(halves)]
    return [pipe.step(tokens, target=tokens, next_args=following).item() for tokens, following in pairs]


@pytest.mark.slow
@pytest.mark.parametrize("data_parallel", ["ddp", "fsdp"])
def test_each_replica_has_the_whole_teacher(data_parallel: str) -> None:
    student, teacher = gpt(0, 8, 4), gpt(1, 16, 4).eval()
    with torch.no_grad():
        expected = [loss_fn(student(tokens), tokens, teacher(tokens)).item() for tokens in batches(8)]
    for losses in together(rank_replica, 4, (("ddp",), ("fsdp",)))[data_parallel,]:
        assert losses == pytest.approx(expected)
