"""Rows, lists, orders, slices, evaluations and texts are pieces of a batch: on any ranks each has the bits of one process."""

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from reference import assert_same, gradients, merged
from runners import cases_on_ranks
from slow_cases import group_of, slow_except
from torch import Tensor, nn

import penstock as ps
from penstock.commands.train.setup import token_loss
from penstock.plan.microbatch_order import plan_order
from penstock.schedule.catalog import family_options

pytestmark = pytest.mark.ranks

M, WORDS, TIME = 4, 13, 12
ORDER = [6, 0, 1, 5, 2, 4, 3]  # in which a list of 7 runs


def gpt(layers: int) -> nn.Module:
    torch.manual_seed(3)
    return ps.model.GPT(ps.model.GPTConfig(WORDS, 16, width=8, layers=layers, heads=2, dropout=0.2)).double()


def sequences(rows: int, time: int = TIME) -> tuple[Tensor, Tensor]:
    """Inputs and targets, of which some do not count: of the first row those at both ends, of the last of several all."""
    inputs, target = torch.randint(WORDS, (2, rows, time), generator=torch.Generator().manual_seed(rows * 100 + time))
    target[0, : time // 4], target[0, time - time // 3 :], target[1:][-1:] = -100, -100, -100
    return inputs, target


def entries(count: int) -> tuple[list[Tensor], list[Tensor]]:
    """A list of microbatches of other rows and lengths."""
    pairs = [sequences(1 + number % 3, 4 + (number * 5) % 9) for number in range(count)]
    return [inputs for inputs, _ in pairs], [target for _, target in pairs]


class Way(NamedTuple):
    """How a batch becomes pieces: options of the pipeline, and a call that returns its loss or None, its losses and outputs."""

    options: dict[str, Any]
    call: Callable[[ps.Pipeline], tuple[Tensor | None, list[Tensor], Any]]


def step(rows: int) -> Callable[[ps.Pipeline], Any]:
    def call(pipe: ps.Pipeline) -> Any:
        (inputs, target), losses = where_read(pipe, sequences(rows)), list[Tensor]()
        loss, outputs = pipe.step(inputs, target=target, losses=losses, return_outputs=True)
        return loss, losses, outputs

    return call


def step_list(count: int, order: Any = "given") -> Callable[[ps.Pipeline], Any]:
    def call(pipe: ps.Pipeline) -> Any:
        (inputs, targets), losses = where_read(pipe, entries(count)), list[Tensor]()
        loss, outputs = pipe.step_microbatches(inputs, targets, order=order, losses=losses, return_outputs=True)
        return loss, losses, outputs

    return call


def step_lists(pipe: ps.Pipeline) -> Any:
    """As many microbatches as the table has, fewer, and more."""
    results = [step_list(count)(pipe) for count in (M, 1, 3, 7)]
    return results[-1][0], [loss for _, losses, _ in results for loss in losses], [outputs for *_, outputs in results]


def where_read(pipe: ps.Pipeline, batch: tuple[Any, Any]) -> tuple[Any, Any]:
    """The inputs on the first rank only, the targets on the last only."""
    rank = pipe.topology.rank
    return batch[0] if rank == pipe.first_rank else None, batch[1] if rank == pipe.last_rank else None


def evaluate(pipe: ps.Pipeline) -> Any:
    outputs, loss = pipe.eval(sequences(5)[0], target=sequences(5)[1])
    return loss, [], outputs


def evaluate_list(pipe: ps.Pipeline) -> Any:
    outputs, loss = pipe.eval_microbatches(*entries(3))
    return loss, [], outputs


def generate(pipe: ps.Pipeline) -> Any:
    return None, [], pipe.generate(sequences(5, 5)[0], max_new_tokens=4, temperature=1.5, seed=3)


WAYS = {
    "rows": Way({}, step(7)),
    "fewer rows than microbatches": Way({}, step(3)),
    "lists": Way({}, step_lists),
    "a planned order": Way({}, step_list(7, "planned")),
    "an order": Way({}, step_list(7, ORDER)),
    "an evaluation": Way({}, evaluate),
    "an evaluation of a list": Way({}, evaluate_list),
    "a text": Way({}, generate),
    "slices": Way({"slices": 3, "recompute": "stage"}, step(7)),
    "slices of some lengths": Way({"slices": [5, 1, 6], "recompute": "block"}, step(3)),
    "slices of a list": Way({"slices": 3}, step_list(4, [2, 0, 3, 1])),
}
SLICED = tuple(name for name in ps.schedule.names() if "slices" in family_options(name))
SEARCHED = ps.schedule.Costs(3, 4, 2, act=0.5), (0, 1, 1, 0), M, 2  # costs, placement, microbatches, limit


def table(schedule: str, slices: Any = 1) -> Any:
    count = len(slices) if isinstance(slices, list) else slices
    return ps.schedule.search(*SEARCHED, effort="quick", slices=count).schedule if schedule == "searched" else schedule


def rank_runs(way: str, schedule: str, layers: int) -> dict[str, Any]:
    """Return what the second of two calls gives, and gradients, which sum both."""
    return results_of(WAYS[way], table(schedule, WAYS[way].options.get("slices", 1)), layers)


def results_of(way: Way, schedule: Any, layers: int, topology: ps.Topology | None = None) -> dict[str, Any]:
    pipe = ps.Pipeline(gpt(layers), token_loss, schedule, M, ps.tokens(), seed=7, topology=topology, **way.options)
    way.call(pipe)
    loss, losses, outputs = way.call(pipe)
    return {"losses": [loss, *losses], "outputs": outputs, "gradients": gradients(pipe.named_parameters())}


@cache
def one_process(way: str, layers: int, order: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return results of a world of one; `order` is the one that ranks have planned."""
    run = Way({}, step_list(7, order)) if order else WAYS[way]
    return results_of(run, "gpipe", layers, ps.Topology())


def planned_order(schedule: str) -> tuple[int, ...]:
    return tuple(plan_order([entry.numel() for entry in entries(7)[0]], ps.schedule.build(schedule, 2, 7)))


QUICK = (
    ("rows", "interleaved-1f1b"),
    ("fewer rows than microbatches", "zb-h1"),
    *(("lists", schedule) for schedule in ("1f1b", "interleaved-1f1b", "zb-v")),
    ("a planned order", "1f1b"),
    ("an order", "zb-v"),
    ("an evaluation", "dualpipe-v"),
    ("an evaluation of a list", "1f1b"),
    ("a text", "interleaved-1f1b"),
    ("slices", "searched"),
    ("slices of some lengths", "gpipe"),
    ("slices of a list", "1f1b"),
)
CASES = {  # of any number of ranks
    (way, schedule): None
    for way, schedule in (*product(WAYS, ps.schedule.names()), ("slices", "searched"))
    if schedule in (*SLICED, "searched") or not way.startswith("slices")
}
FOUR = tuple(product(("lists", "an order"), ps.schedule.names()))


def tensors(tree: Any) -> list[Tensor]:
    """All tensors of `tree`; the loss of a microbatch that does not count, NaN, becomes a number that equals itself."""
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [leaf.nan_to_num(-1.0) for leaf in leaves if isinstance(leaf, Tensor)]


def assert_as_one_process(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for result in results:
        assert_equal(tensors(result["losses"]), tensors(expected["losses"]))
    outputs = [made for result in results if (made := tensors(result["outputs"]))]
    assert outputs
    for made in outputs:
        assert_equal(made, tensors(expected["outputs"]))
    assert_same(merged([result["gradients"] for result in results]), expected["gradients"])


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize(("way", "schedule"), slow_except(QUICK, CASES))
def test_on_two_ranks_any_pieces_have_the_bits_of_one_process(way: str, schedule: str) -> None:
    group = group_of((way, schedule), QUICK, CASES)
    results = cases_on_ranks(rank_runs, 2, tuple((*case, 2) for case in group))[way, schedule, 2]
    assert_as_one_process(results, one_process(way, 2, planned_order(schedule) if way == "a planned order" else ()))


@pytest.mark.slow
@pytest.mark.parametrize(("way", "schedule"), FOUR)
def test_on_four_ranks_too(way: str, schedule: str) -> None:
    results = cases_on_ranks(rank_runs, 4, tuple((*case, 6) for case in FOUR))[way, schedule, 6]
    assert_as_one_process(results, one_process(way, 6))


def test_losses_and_outputs_of_a_list_are_in_the_given_order_whatever_order_runs() -> None:
    given, other = (results_of(Way({}, step_list(7, order)), "gpipe", 2, ps.Topology()) for order in ("given", ORDER))
    assert_equal(tensors(given["losses"]), tensors(other["losses"]))
    assert_equal(tensors(given["outputs"]), tensors(other["outputs"]))
