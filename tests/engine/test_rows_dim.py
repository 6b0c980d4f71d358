"""Rows in another dimension than the first, and tensors without rows: the numbers of one process that cuts them likewise."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from error_text import error_text
from models import toy
from reference import OneProcess, assert_same, gradients, merged, same
from runners import on_ranks, on_ranks_once
from slow_cases import slow_except
from torch import Tensor, nn

import penstock as ps

pytestmark = pytest.mark.ranks

TIME, WIDTH, ROWS, M, VOCABULARY = 6, 4, 7, 3, 11


class RecurrentLayer(nn.Module):
    """(time, batch, width) -> the same; `last`: -> (batch, width)."""

    def __init__(self, last: bool = False) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(WIDTH, WIDTH), last

    def forward(self, hidden: Tensor) -> Tensor:
        output, _ = self.lstm(hidden)
        return output[-1] if self.last else output


def folds() -> nn.Module:
    """One product over all times and rows, by `view`, which takes only what is contiguous."""
    return toy(lambda self, x: self.linear(x.view(-1, WIDTH)).view(x.shape), linear=nn.Linear(WIDTH, WIDTH))


class MaskedPositions(nn.Module):
    """Tokens with a table of positions (1, time) and a mask (time, time), which are the same for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TIME, WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.places(positions)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return self.head(hidden)


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def sequences() -> nn.Sequential:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0)
    return nn.Sequential(folds(), RecurrentLayer(), layer, nn.Linear(WIDTH, WIDTH))


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(folds(), RecurrentLayer(), RecurrentLayer(last=True), nn.Linear(WIDTH, 3))


def masked() -> MaskedPositions:
    torch.manual_seed(0)
    return MaskedPositions()


def time_first(first: bool = True) -> nn.Sequential:
    """A language model; its parameters do not depend on the layout."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=not first)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), layer, nn.Linear(WIDTH, VOCABULARY))


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.reshape(-1, VOCABULARY), target.reshape(-1))


def mask() -> Tensor:
    return torch.ones(TIME, TIME, dtype=torch.bool).triu(1)


def numbers(pipe: Any, call: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """What `call`, a step, returns."""
    losses: list[Tensor] = []
    loss, outputs = call(*args, losses=losses, return_outputs=True)
    return {"loss": loss, "losses": losses, "outputs": outputs, "gradients": gradients(pipe.named_parameters())}


def stepped(pipe: ps.Pipeline, *args: Any, target: Any, **kwargs: Any) -> dict[str, Any]:
    found = numbers(pipe, partial(pipe.step, *args, target=target, **kwargs))
    return {**found, "evaluated": pipe.eval(*args, target=target, **kwargs)}


def alone(model: nn.Module, loss_fn: Any, inputs: list[Any], targets: list[Tensor], dim: int = 0) -> dict[str, Any]:
    """What one process makes of these microbatches."""
    pipe = OneProcess(model.train(), loss_fn, rows_dim=dim)
    return numbers(pipe, pipe.step_microbatches, inputs, targets)


def rank_layouts() -> dict[str, Any]:
    rank = ps.comms.init_distributed().rank
    frames, table = random(TIME, ROWS, WIDTH), torch.arange(TIME)[None]
    found: dict[str, Any] = {}
    for name in ("1f1b", "zb-v"):
        pipe = ps.Pipeline(sequences(), nn.functional.mse_loss, name, M, rows_dim=1)
        found[f"sequences, {name}"] = stepped(pipe, frames, target=random(TIME, ROWS, WIDTH, seed=2))
        found[f"few, {name}"] = pipe.eval(frames[:, :2])
    pipe = ps.Pipeline(classifier(), nn.functional.cross_entropy, "1f1b", M, rows_dim=0)
    found["classifier"] = stepped(pipe, ps.Rows(frames, 1), target=torch.arange(ROWS) % 3)
    pipe = ps.Pipeline(masked(), token_loss, "1f1b", M, cuts=["layers.1"])
    shared = {"positions": ps.Replicated(table), "mask": ps.Replicated(mask())}
    found["replicated"] = stepped(pipe, tokens(ROWS, TIME), target=tokens(ROWS, TIME, seed=2), **shared)

    example = ps.Replicated(table), ps.Replicated(mask())
    pipe = ps.Pipeline(masked(), token_loss, "1f1b", M, cuts=["layers.1"], example_args=(tokens(1, TIME), *example))
    found["replicated in an example of one row"] = stepped(
        pipe, tokens(ROWS, TIME), *example, target=tokens(ROWS, TIME, seed=2)
    )
    pipe = ps.Pipeline(
        sequences(), nn.functional.mse_loss, "1f1b", ROWS - 1, example_args=(frames[:, :3],), cuts=["2"], rows_dim=1
    )
    found["pieces of one row"] = pipe.eval(frames)

    pipe = ps.Pipeline(time_first(), schedule="1f1b", microbatches=M, rows_dim=1)
    found["generated"] = pipe.generate(tokens(5, 2), max_new_tokens=4)
    pipe = ps.Pipeline(nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Flatten(1)), microbatches=M, rows_dim=1)
    found["told of logits"] = error_text(lambda: pipe.generate(tokens(5, 2), max_new_tokens=1))

    shapes = random(TIME, ROWS, WIDTH), torch.arange(ROWS) % 3
    found["told of a default layout"] = error_text(lambda: ps.Pipeline(classifier(), nn.functional.cross_entropy))
    stages = [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2))]
    found["told of one of two stages"] = error_text(lambda: ps.Pipeline(stages, nn.functional.mse_loss))
    found["told of no dimension"] = error_text(lambda: ps.Pipeline(sequences(), rows_dim="batch"))
    pipe = ps.Pipeline(classifier(), nn.functional.cross_entropy, microbatches=M, rows_dim=0)
    found["told of a target"] = error_text(lambda: pipe.step(shapes[0], target=shapes[1]))
    pipe = ps.Pipeline(masked(), token_loss, microbatches=M, cuts=["layers.1"])
    text = tokens(ROWS, TIME)
    found["told of a table"] = error_text(lambda: pipe.step(text, target=text, positions=table, mask=ps.Replicated(mask())))
    pipe = ps.Pipeline(classifier(), nn.functional.cross_entropy, "1f1b", M, rows_dim=1)
    found["told of an output"] = error_text(lambda: pipe.eval(frames))
    target = ps.Rows(shapes[1], 0)
    found["works after that"] = pipe.step(frames if rank == 0 else None, target=target if rank else None)
    found["told of other rows"] = error_text(lambda: pipe.step(ps.Rows(frames + rank, 1), target=None if rank == 0 else target))
    return found


def everyone() -> list[dict[str, Any]]:
    return on_ranks_once(rank_layouts, 2)


def assert_as_alone(name: str, expected: dict[str, Any], evaluated: list[Tensor], dim: int) -> None:
    first, last = (result[name] for result in everyone())
    if "zb-v" in name:
        first, last = last, first
    assert_same(merged([first["gradients"], last["gradients"]]), expected["gradients"])
    assert same(first["loss"], expected["loss"])
    assert all(map(same, last["losses"], expected["losses"]))
    assert same(last["outputs"], expected["outputs"])
    assert same(last["evaluated"][0], torch.cat(evaluated, dim))
    assert first["outputs"] is None


def pieces(tensor: Tensor, dim: int = 0) -> list[Tensor]:
    return [part.contiguous() for part in tensor.split([3, 2, 2], dim)]


def evaluated(model: nn.Module, inputs: list[Any]) -> list[Tensor]:
    with torch.no_grad():
        return [model.eval()(*tensor) for tensor in inputs]


@pytest.mark.parametrize("schedule", slow_except(["zb-v"], ["1f1b", "zb-v"]))
def test_rows_of_the_second_dimension_have_the_bits_of_one_process(schedule):
    model, frames = sequences(), pieces(random(TIME, ROWS, WIDTH), 1)
    inputs = [(frame,) for frame in frames]
    expected = alone(model, nn.functional.mse_loss, inputs, pieces(random(TIME, ROWS, WIDTH, seed=2), 1), 1)
    assert_as_alone(f"sequences, {schedule}", expected, evaluated(model, inputs), 1)
    few = [result[f"few, {schedule}"] for result in everyone()][schedule == "1f1b"]
    rows = random(TIME, ROWS, WIDTH)[:, :2].split(1, 1)
    assert same(few, torch.cat(evaluated(model, [(row.contiguous(),) for row in rows]), 1))


def test_an_argument_may_have_its_rows_elsewhere_than_target_and_outputs():
    model, inputs = classifier(), [(piece,) for piece in pieces(random(TIME, ROWS, WIDTH), 1)]
    expected = alone(model, nn.functional.cross_entropy, inputs, pieces(torch.arange(ROWS) % 3))
    assert_as_alone("classifier", expected, evaluated(model, inputs), 0)


@pytest.mark.parametrize("name", ["replicated", "replicated in an example of one row"])
def test_what_is_replicated_goes_whole_to_every_microbatch(name):
    model = masked()
    inputs = [(piece, torch.arange(TIME)[None], mask()) for piece in pieces(tokens(ROWS, TIME))]
    expected = alone(model, token_loss, inputs, pieces(tokens(ROWS, TIME, seed=2)))
    assert_as_alone(name, expected, evaluated(model, inputs), 0)


def test_an_example_with_rows_in_another_dimension_speaks_for_pieces_of_one_row():
    rows = random(TIME, ROWS, WIDTH).split([2, 1, 1, 1, 1, 1], 1)
    expected = torch.cat(evaluated(sequences(), [(row.contiguous(),) for row in rows]), 1)
    assert same(everyone()[1]["pieces of one row"], expected)


def test_a_model_that_takes_time_first_generates_the_tokens_of_one_that_takes_rows_first():
    expected = ps.Pipeline(time_first(first=False), microbatches=1, topology=ps.Topology()).generate(
        tokens(5, 2), max_new_tokens=4
    )
    for result in everyone():
        assert same(result["generated"], expected)


LAYOUTS = (
    "give Pipeline(.., rows_dim=) if they are another one in all tensors, ps.Rows(tensor, dim) if in one, "
    "ps.Replicated(tensor) for a tensor without rows"
)
FALSE = (
    "has batch_first=False: it takes (time, batch, ..), while a batch is cut along its first dimension. Make it with "
    "batch_first=True, or give rows_dim=1 for batches of (time, batch, ..), or rows_dim=0 if the model transposes what this "
    "module takes"
)
TOLD = {
    "a default layout": f"LSTM 1.lstm {FALSE}",
    "one of two stages": f"GRU 1 {FALSE}",
    "no dimension": "rows_dim='batch': give the number of the dimension that has a batch's rows, 0 or more",
    "a target": f"the batch has {TIME} rows but the target has {ROWS} (the batch has shape ({TIME}, {ROWS}, {WIDTH}), the "
    f"target has shape ({ROWS},)); rows are the first dimension: {LAYOUTS}",
    "a table": "the tensors of a batch must have the same number of rows: the batch[0][0] has shape (7, 6), the "
    f"batch[1]['positions'] has shape (1, 6); rows are the first dimension: {LAYOUTS}",
    "an output": "rank 1, stage 1, action 1F1, microbatch 1: outputs are joined along dimension 1 (rows_dim=1), but output of "
    "shape (2, 3) does not",
    "logits": "rank 1, stage 1, action 1F0, microbatch 0: generate() needs a model that gives logits, (time, batch, ",
    "other rows": "rank 1's batch is another than rank 0's: they were given different values as inputs.",
}


@pytest.mark.parametrize("what", TOLD)
def test_a_layout_that_does_not_fit_is_told_alike_on_all_ranks(what):
    results = [result[f"told of {what}"] for result in everyone()]
    assert results[0].startswith(TOLD[what])
    assert results[1] == results[0]


def test_a_step_works_after_a_layout_was_refused():
    first, last = (result["works after that"] for result in everyone())
    assert same(first, last)


def rank_replica(frames: Tensor, target: Tensor) -> Any:
    pipe = ps.Pipeline(sequences().double(), nn.functional.mse_loss, "1f1b", 2, mesh=ps.comms.init_mesh(pp=1, dp=2), rows_dim=1)
    mine = slice(0, 3) if pipe.position.replica == 0 else slice(3, ROWS)
    loss = pipe.step(frames[:, mine], target=target[:, mine])
    return loss, gradients(pipe.named_parameters())


def test_replicas_share_the_rows_of_another_dimension():
    frames, target = random(TIME, ROWS, WIDTH).double(), random(TIME, ROWS, WIDTH, seed=2).double()
    model = sequences().double()
    expected = alone(model, nn.functional.mse_loss, [(frames,)], [target], 1)
    for loss, found in on_ranks(rank_replica, 2, frames, target):
        torch.testing.assert_close(loss, expected["loss"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, expected["gradients"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "model", [nn.MultiheadAttention(4, 2), nn.Transformer(4, 2, 1, 1), nn.TransformerDecoderLayer(4, 2, 8)]
)
def test_every_module_that_says_so_is_found(model):
    with pytest.raises(ps.MismatchError, match="has batch_first=False: it takes"):
        ps.Pipeline([nn.Sequential(model)], topology=ps.Topology())


def test_a_plan_is_measured_along_the_rows_of_its_example():
    layers = ps.plan.measure(
        classifier(), (ps.Rows(random(TIME, 4, WIDTH), 1),), loss_fn=nn.functional.cross_entropy, target=torch.arange(4) % 3,
        rounds=1, seconds=0.0,
    )  # fmt: skip
    assert [sample.rows for sample in layers.samples] == [1, 4]
