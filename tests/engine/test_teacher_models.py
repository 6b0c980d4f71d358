"""Teachers of other sizes, architectures and dtypes, cut by an example, with tied weights and skips; and with replicas."""

from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from reference import OneProcess, assert_as_one_process, gradients
from runners import cases_on_ranks, on_ranks
from slow_cases import group_of, slow_except
from torch import Tensor, nn

import penstock as ps
from penstock.mesh.data_parallel import broadcast_from_first
from penstock.mesh.fsdp import FSDPHooks
from penstock.model import GPT, GPTConfig
from penstock.stage.dtensor import local_shard

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


class T5(nn.Module):
    """An encoder and a decoder of the same tokens."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        shape = {"d_model": width, "d_kv": 4, "d_ff": 2 * width, "num_layers": layers, "num_heads": 2, "dropout_rate": 0.0}
        self.model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=VOCABULARY, **shape, use_cache=False)
        )

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"logits": self.model(input_ids=tokens, decoder_input_ids=tokens, use_cache=False).logits}


def t5(seed: int, width: int, layers: int) -> nn.Module:
    torch.manual_seed(seed)
    return T5(width, layers)


def qwen2_with_lora(seed: int) -> nn.Module:
    peft, transformers = pytest.importorskip("peft", reason="no peft: make neighbours"), pytest.importorskip("transformers")
    shape = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    torch.manual_seed(seed)
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**shape, num_key_value_heads=1, vocab_size=VOCABULARY, use_cache=False)
    )
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted: nn.Module = peft.inject_adapter_in_model(adapters, model)
    return adapted


MODELS = {
    "a larger GPT": (lambda: gpt(0, 8, 4), lambda: gpt(1, 16, 7)),
    "a smaller GPT in bfloat16": (lambda: gpt(0, 8, 4), lambda: gpt(1, 4, 3).bfloat16()),
    "skips and tied weights": (lambda: gpt(0, 8, 4), lambda: skipping(1)),
    "one llama of another": (lambda: llama(0), lambda: llama(1)),
    "a GPT of a model with skips": (lambda: skipping(0), lambda: gpt(1, 16, 4)),
    "a deep GPT of a deeper one": (lambda: gpt(0, 8, 8), lambda: gpt(1, 4, 10)),
}
WITH_ADAPTERS = {
    "adapters of qwen2 of a GPT": (lambda: qwen2_with_lora(0), lambda: gpt(1, 16, 4)),
    "a GPT of qwen2 with adapters": (lambda: gpt(0, 8, 4), lambda: qwen2_with_lora(1)),
}
LARGER_T5 = {"a larger t5": (lambda: t5(0, 8, 2), lambda: t5(1, 16, 3))}  # takes long


def logits_of(output: Any) -> Tensor:
    logits: Tensor = output if isinstance(output, Tensor) else output["logits"]
    return logits.float()


def loss_fn(output: Any, tokens: Tensor, teacher_output: Any) -> Tensor:
    logits, soft = logits_of(output).flatten(0, 1), logits_of(teacher_output).flatten(0, 1)
    likely = nn.functional.cross_entropy(logits, tokens.flatten())
    return likely + nn.functional.kl_div(logits.log_softmax(-1), soft.softmax(-1), reduction="batchmean")


def batches(rows: int = 7, steps: int = STEPS) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randint(VOCABULARY, (rows, 8)) for _ in range(steps)]


def distils(pipeline: Any, which: str, schedule: str, announces: bool, steps: int = STEPS) -> tuple[Any, ...]:
    student, teacher = (make() for make in (MODELS | WITH_ADAPTERS | LARGER_T5)[which])
    pipe = pipeline(student, loss_fn, schedule, M, teacher=teacher, example_args=(batches()[0][:2],))
    optimizer, losses, tokens = torch.optim.AdamW(pipe.parameters()), [], batches(steps=steps)
    for number, batch in enumerate(tokens):
        optimizer.zero_grad()
        following = tokens[number + 1 : number + 2] if announces else ()
        losses.append(pipe.step(batch, target=batch, next_args=following))
        optimizer.step()
    return losses, gradients(pipe.named_parameters())


def rank_distils(*case: Any) -> tuple[Any, ...]:
    return distils(ps.Pipeline, *case)


@cache
def reference(which: str, steps: int = STEPS) -> tuple[Any, ...]:
    return distils(OneProcess, which, "", False, steps)


WAYS = (("1f1b", True), ("zb-v", False))  # schedule -> whether the next batch is announced
CASES, CASES_WITH_ADAPTERS = (tuple((which, *way) for which in models for way in WAYS) for models in (MODELS, WITH_ADAPTERS))


QUICK = CASES[0], CASES[3]


@pytest.mark.parametrize(("which", "schedule", "announces"), slow_except(QUICK, CASES))
def test_a_teacher_of_any_kind_gives_the_bits_of_one_process(which: str, schedule: str, announces: bool) -> None:
    case = which, schedule, announces
    assert_as_one_process(cases_on_ranks(rank_distils, 2, group_of(case, QUICK, CASES))[case], reference(which))


LONG_CASES = {
    3: (
        *((which, schedule, schedule != "gpipe", 50) for which in MODELS for schedule in ("1f1b", "zb-h1", "gpipe")),
        ("a larger t5", "1f1b", True, 50),
    ),
    4: tuple(
        ("a deep GPT of a deeper one", schedule, announces, 50)
        for schedule, announces in (("interleaved-1f1b", True), ("interleaved-1f1b", False), ("interleaved-zb", True))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "case"), [(ranks, case) for ranks, cases in LONG_CASES.items() for case in cases])
def test_in_fifty_steps_on_three_and_four_ranks_the_bits_stay_those_of_one_process(ranks: int, case: tuple[Any, ...]) -> None:
    assert_as_one_process(cases_on_ranks(rank_distils, ranks, LONG_CASES[ranks])[case], reference(case[0], 50))


LONG_CASES_WITH_ADAPTERS = tuple((which, "zb-h1", True, 50) for which in WITH_ADAPTERS)


@pytest.mark.neighbours
@pytest.mark.parametrize("case", CASES_WITH_ADAPTERS + LONG_CASES_WITH_ADAPTERS)
def test_adapters_are_distilled_and_a_teacher_may_have_some(case: tuple[Any, ...]) -> None:
    which, _, _, *steps = case
    expected = reference(which, *steps)  # skips the test where peft is missing
    ranks, cases = (3, LONG_CASES_WITH_ADAPTERS) if steps else (2, CASES_WITH_ADAPTERS)
    assert_as_one_process(cases_on_ranks(rank_distils, ranks, cases)[case], expected)


# -- meshes --------------------------------------------------------------------------------------------------------------

MESHES = (
    ("2 x 2", "1f1b", "ddp", True),
    ("2 x 2", "interleaved-1f1b", "fsdp", True),
    ("2 x 2", "zb-h1", "a function", False),
    ("2 x 2", "zb-v", "fsdp", False),
    ("2 x 1 x 2", "1f1b", "ddp", True),
    ("1 x 2 x 2", "1f1b", "fsdp", True),
)
QUICK_MESHES = (("2 x 2", "interleaved-1f1b", "fsdp", True),)


def shard_in_layers(stage: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in stage.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(stage, mesh=mesh)


def with_outputs(output: Any, target: Any) -> Tensor:
    """`loss_fn`, where the teacher's output is a part of the target."""
    return loss_fn(output, *target)


def tensor_parallel_plan() -> dict[str, Any]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {"block*.up": ColwiseParallel(), "block*.down": RowwiseParallel()}


def rank_in_mesh(shape: str, schedule: str, data_parallel: str, announces: bool) -> list[list[Any]]:
    """Return losses and this rank's parameters with a teacher, and where a whole one runs before each step."""
    sizes = dict(zip(("pp", "dp", "tp"), map(int, shape.split(" x ")), strict=False))
    mesh = ps.comms.init_mesh(**sizes)
    options = {"mesh": mesh, "data_parallel": shard_in_layers if data_parallel == "a function" else data_parallel}
    if mesh.size(mesh.mesh_dim_names.index("tp")) > 1:
        options["tensor_parallel"] = tensor_parallel_plan()
    found = []
    for has_teacher in (True, False):
        torch.manual_seed(mesh["dp"].get_local_rank())  # replica 0's values are those of all
        teacher = nn.Sequential(nn.Embedding(VOCABULARY, 6), *[nn.Linear(6, 6) for _ in range(4)], nn.Linear(6, VOCABULARY))
        pipe = ps.Pipeline(
            gpt(0, 8, 4),
            loss_fn if has_teacher else with_outputs,
            schedule,
            M,
            teacher=teacher if has_teacher else None,
            **options,
        )
        if not has_teacher:
            broadcast_from_first(teacher.parameters(), mesh["dp"].get_group())
        found.append([*train_replica(pipe, None if has_teacher else teacher, announces)])
    return found


def train_replica(pipe: Any, teacher: nn.Module | None, announces: bool) -> Iterator[Any]:
    """Yield losses, then parameters. A `teacher` given here runs before each step."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    steps = [tokens.tensor_split(pipe.position.replicas)[pipe.position.replica] for tokens in batches(14)]
    for number, tokens in enumerate(steps):
        target: Any = tokens
        if teacher is not None:
            with torch.no_grad():
                target = tokens, torch.cat([teacher(rows) for rows in tokens.tensor_split(M)])
        following = steps[number + 1 : number + 2] if announces and teacher is None else ()
        if number == 1:
            pipe.eval(tokens)  # in between, without a teacher
        yield pipe.step(tokens, target=target, next_args=following)
        optimizer.step(), optimizer.zero_grad()
    for _, parameter in pipe.named_parameters():
        yield local_shard(parameter.detach())


def rank_shards() -> list[str]:
    """Return in which order a step gathers parameters and averages gradients, with a teacher in shards."""
    order, prefetch, average = list[str](), FSDPHooks.prefetch_parameters, FSDPHooks._reduce_scatter_gradients

    def recorded_prefetch(hooks: FSDPHooks) -> None:
        order.extend([] if hooks._unshard_handles else ["gather"])
        prefetch(hooks)

    def recorded_average(hooks: FSDPHooks) -> None:
        order.append("average")
        average(hooks)

    mesh, tokens = ps.comms.init_mesh(pp=2, dp=2), batches(8)
    table = ps.schedule.with_teacher(ps.schedule.build("interleaved-1f1b", 2, M))
    table = table.with_cells(sorted(table.cells(rank), key=lambda action: action.stage >= table.teacher) for rank in range(2))
    pipe = ps.Pipeline(gpt(0, 8, 4), loss_fn, table, teacher=gpt(1, 16, 4), mesh=mesh, data_parallel="fsdp")
    for stage in pipe._engine.stages.values():
        assert all(hasattr(parameter, "placements") for parameter in stage.module.parameters())
    pipe.step(tokens[0], target=tokens[0], next_args=tokens[1:2])
    with mock.patch.multiple(FSDPHooks, prefetch_parameters=recorded_prefetch, _reduce_scatter_gradients=recorded_average):
        pipe.step(tokens[1], target=tokens[1], next_args=tokens[2:])
    return order


def rank_divides(tp: int) -> tuple[list[float], bool]:
    """Return losses of a teacher that has all parts of the plan, and whether its parameters are divided."""
    options = {"mesh": ps.comms.init_mesh(pp=1, tp=tp), "tensor_parallel": tensor_parallel_plan()} if tp > 1 else {}
    pipe = ps.Pipeline(gpt(0, 8, 4), loss_fn, "1f1b", M, teacher=gpt(1, 16, 4), **options)
    losses = [pipe.step(tokens, target=tokens).item() for tokens in batches(8)]
    return losses, any(hasattr(parameter, "placements") for parameter in pipe._engine.stages[1].module.parameters())


@pytest.mark.slow
def test_along_tp_a_teacher_with_all_parts_of_the_plan_is_divided() -> None:
    [(expected, _)] = on_ranks(rank_divides, 1, 1)
    for losses, is_divided in on_ranks(rank_divides, 2, 2):
        assert is_divided
        assert losses == pytest.approx(expected)  # products are added in another order


@pytest.mark.slow
def test_all_stages_are_gathered_before_any_gradient_is_averaged() -> None:
    for order in on_ranks(rank_shards, 4):
        assert order == ["gather"] * 4 + ["average"] * 2


@pytest.mark.parametrize(("shape", "schedule", "data_parallel", "announces"), slow_except(QUICK_MESHES, MESHES))
def test_in_a_mesh_a_teacher_gives_the_bits_of_one_that_runs_whole_before_each_step(
    shape: str, schedule: str, data_parallel: str, announces: bool
) -> None:
    case = shape, schedule, data_parallel, announces
    for with_teacher, with_whole in cases_on_ranks(rank_in_mesh, 4, group_of(case, QUICK_MESHES, MESHES))[case]:
        assert len(with_teacher) == len(with_whole) > STEPS
        assert all(map(torch.equal, with_teacher, with_whole))
