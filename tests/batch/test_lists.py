"""`step_microbatches`: lists of microbatches of any rows and lengths have the bits of one process that takes the same list."""

import copy
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from error_text import error_text
from models import toy
from reference import OneProcess, assert_as_one_process
from runners import on_ranks, on_ranks_once
from torch import Tensor, nn

import penstock as ps
from penstock.commands.train.setup import token_loss
from penstock.comms.transport import channels
from penstock.comms.transport.group_transport import GroupReceiver, GroupSender

WIDTH, WORDS = 8, 13


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).split(WIDTH, -1)
        return x + self.drop(self.out(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)))


def _model(layers: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *(_Attention() for _ in range(layers)), nn.Linear(WIDTH, WORDS)).double()


def _list(seed: int, microbatches: int) -> tuple[list[Tensor], list[Tensor]]:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shapes = [(rng.randint(1, 4), rng.randint(1, 9)) for _ in range(microbatches)]
    pairs = [
        (torch.randint(WORDS, shape, generator=generator), torch.randint(WORDS, shape, generator=generator)) for shape in shapes
    ]
    return [inputs for inputs, _ in pairs], [targets for _, targets in pairs]


def _one_process(lists: Sequence[tuple[list[Tensor], list[Tensor]]], seed: int | None) -> tuple[list[Any], dict[str, Tensor]]:
    """The same lists in a world of one, whose bits are those of a plain loop: `test_a_plain_loop_has_its_bits`."""
    pipe = ps.Pipeline(_model(), token_loss, "gpipe", 4, topology=ps.Topology(), seed=seed, loss_weight=ps.tokens())
    return _losses(pipe, lists), {name: parameter.grad for name, parameter in pipe.named_parameters()}


def _losses(pipe: Any, lists: Sequence[tuple[list[Tensor], list[Tensor]]], **options: Any) -> list[Any]:
    found = []
    for inputs, targets in lists:
        losses: list[Tensor] = []
        loss = pipe.step_microbatches(inputs, targets, losses=losses, **options)
        found.append((loss.item(), [value.item() for value in losses]))
    return found


def test_a_plain_loop_has_its_bits() -> None:
    model, (inputs, targets) = _model().eval(), _list(0, 4)
    OneProcess(model, token_loss, loss_weight=ps.tokens()).step_microbatches(inputs, targets)
    pipe = ps.Pipeline(_model().eval(), token_loss, "1f1b", 2, topology=ps.Topology(), loss_weight=ps.tokens())
    pipe.train(False)
    pipe.step_microbatches(inputs, targets)
    pairs = zip(model.parameters(), pipe.parameters(), strict=True)
    assert all(torch.equal(expected.grad, parameter.grad) for expected, parameter in pairs)


def _count_descriptions() -> list[int]:
    """How many messages of each step were described: each list of known shapes, in any order and number, none."""
    from penstock.comms.transport import message_spec

    described: list[int] = []
    pack = message_spec.pack_spec
    message_spec.pack_spec = lambda spec: (described.append(1), pack(spec))[1]  # type: ignore[assignment]
    pipe = ps.Pipeline(_model(), token_loss, "1f1b", 4, loss_weight=ps.tokens())
    counts = []
    for shapes in ([(2, 3), (1, 5)], [(1, 5), (2, 3), (2, 3)], [(1, 5), (4, 4), (2, 3)], [(4, 4)] * 6):
        described.clear()
        pipe.step_microbatches(
            [torch.zeros(s, dtype=torch.long) for s in shapes], [torch.zeros(s, dtype=torch.long) for s in shapes]
        )
        counts.append(len(described))
    return counts


@pytest.mark.ranks
def test_messages_of_shapes_that_were_seen_are_not_described_again() -> None:
    assert on_ranks(_count_descriptions, 2) == [[2, 0, 1, 0], [2, 0, 1, 0]]


def _replicas(data_parallel: str) -> Any:
    mesh = ps.comms.init_mesh(pp=2, dp=2)
    pipe = ps.Pipeline(_model(), token_loss, "1f1b", 4, mesh=mesh, data_parallel=data_parallel, loss_weight=ps.tokens(), seed=7)
    inputs, targets = _list(3, 7)
    mine = slice(0, 3) if pipe.position.replica == 0 else slice(3, 7)
    loss = pipe.step_microbatches(inputs[mine], targets[mine])
    return (loss.item(), []), {name: parameter.grad for name, parameter in pipe.named_parameters()}


@pytest.mark.ranks
def test_replicas_have_lists_of_their_own() -> None:
    inputs, targets = _list(3, 7)
    losses, expected = _one_process([(inputs, targets)], 7)
    for (loss, _), grads in on_ranks(_replicas, 4, "ddp"):
        assert abs(loss - losses[0][0]) < 1e-14
        assert all(torch.allclose(grads[name], expected[name], rtol=0, atol=1e-14) for name in grads)


def _wrong() -> dict[str, str]:
    """The error of each wrong call; after each the next step works."""
    pipe = ps.Pipeline(_model(), token_loss, "1f1b", 4, loss_weight=ps.tokens())
    inputs, targets = _list(0, 4)
    calls: dict[str, Any] = {
        "empty": lambda: pipe.step_microbatches([], []),
        "a tensor": lambda: pipe.step_microbatches(inputs[0], targets),
        "targets": lambda: pipe.step_microbatches(inputs, targets[:3]),
        "rows": lambda: pipe.step_microbatches(inputs, [*targets[:3], torch.zeros(9, 2, dtype=torch.long)]),
        "order": lambda: pipe.step_microbatches(inputs, targets, order=[0, 0, 1, 2]),
        "other orders": lambda: pipe.step_microbatches(inputs, targets, order=[(3, 2, 1, 0), [0, 1, 3, 2]][pipe.topology.rank]),
        "planned": lambda: pipe.step_microbatches(inputs, targets, order=["planned", "given"][pipe.topology.rank]),
        "limits": lambda: pipe.step_microbatches(inputs, targets, limit=[900, None][pipe.topology.rank]),
        "limit": lambda: pipe.step_microbatches(inputs, targets, order="planned", limit=3),
        "none": lambda: pipe.step_microbatches(None, targets),
        "no targets": lambda: pipe.step_microbatches(inputs),
        "other lists": lambda: pipe.step_microbatches(inputs, [(y + pipe.topology.rank) % WORDS for y in targets]),
        "shorter lists": lambda: pipe.step_microbatches(inputs[pipe.topology.rank :], targets[pipe.topology.rank :]),
        "other rows": lambda: pipe.step_microbatches(
            [torch.cat([entry] * (1 + pipe.topology.rank)) for entry in inputs],
            [torch.cat([entry] * (1 + pipe.topology.rank)) for entry in targets],
        ),
        "a shorter batch": lambda: pipe.step(
            torch.zeros(8 - pipe.topology.rank, 3).long(), target=torch.zeros(8 - pipe.topology.rank, 3).long()
        ),
        "another call": lambda: (
            pipe.step_microbatches(inputs, targets) if pipe.topology.rank else pipe.step(inputs[0], target=targets[0])
        ),
    }
    errors = {}
    for case, call in calls.items():
        errors[case] = error_text(call, ps.PenstockError)
        pipe.step_microbatches(inputs, targets)
    return errors


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("empty", "step_microbatches\\(\\) got an empty list"),
        ("a tensor", "takes inputs as a list with an entry for each microbatch, not a tensor of shape"),
        ("targets", "was given 4 inputs but 3 targets"),
        ("rows", "microbatch 3 has .* rows but its target has 9"),
        ("order", "order=\\[0, 0, 1, 2\\] is no order of 4 microbatches"),
        ("other orders", "order=\\[3, 2, 1, 0\\] on rank 0, order=\\[0, 1, 3, 2\\] on rank 1. Give all of them the same"),
        ("planned", "order='planned' on rank 0, order='given' on rank 1"),
        ("limits", "different limits: limit=900 on rank 0, limit=None on rank 1"),
        ("limit", "order='planned' has up to .* padded tokens in flight on rank 0, more than the limit of 3 padded tokens"),
        ("none", "takes inputs as a list"),
        ("no targets", "needs targets"),
        ("other lists", "rank 1's batch is another than rank 0's"),
        ("shorter lists", "the ranks were given different lists: 4 inputs on rank 0, 3 on rank 1. Give all of them the same"),
        ("other rows", "the ranks were given different lists: input 0 has 4 rows on rank 0, 8 on rank 1"),
        ("a shorter batch", "the ranks were given different batches: inputs have 8 rows on rank 0, 7 on rank 1"),
        ("another call", "step"),
    ],
)
def test_a_wrong_list_is_one_sentence_on_every_rank(case: str, message: str) -> None:
    for errors in on_ranks_once(_wrong, 2):
        assert re.search(message, errors[case])


def _too_many() -> str:
    table = ps.schedule.build("1f1b", ranks=2, microbatches=2)
    pipe = ps.Pipeline(_model(), token_loss, table, 2, loss_weight=ps.tokens())
    with pytest.raises(ps.MismatchError) as caught:
        pipe.step_microbatches(*_list(0, 3))
    return str(caught.value)


@pytest.mark.ranks
def test_a_table_cannot_take_more_microbatches_than_it_has() -> None:
    assert all("a list of 3 microbatches does not fit" in text for text in on_ranks(_too_many, 2))


@pytest.mark.ranks
def test_arguments_and_keywords_may_differ_from_microbatch_to_microbatch() -> None:
    on_ranks(_with_keywords, 2)


def _with_keywords() -> None:
    def scale(self: Any, x: Tensor, factor: Tensor | None = None) -> Tensor:
        return self.linear(x if factor is None else x * factor)

    torch.manual_seed(0)
    scales = toy(scale, linear=nn.Linear(WIDTH, WIDTH))
    model, rank = nn.Sequential(scales, nn.Linear(WIDTH, WIDTH)), ps.comms.init_distributed().rank
    uncut = copy.deepcopy(model)
    x, factor = torch.randn(2, WIDTH), torch.tensor(2.0)
    pipe = ps.Pipeline({rank: model[rank]}, nn.functional.mse_loss, "1f1b", 2)
    pipe.step_microbatches([x, {"x": x, "factor": factor}, (x, factor)], [x, x, x])

    OneProcess(uncut, nn.functional.mse_loss).step_microbatches([x, x * factor, x * factor], [x, x, x])
    expected = dict(uncut.named_parameters())
    assert all(torch.equal(parameter.grad, expected[f"{rank}.{name}"].grad) for name, parameter in pipe.named_parameters())


def _over_gloo(lists: Any) -> Any:
    """Without shared memory, as between machines: receives are posted ahead, but never past a message that is not known."""
    channels.open_memory_sender = channels.open_memory_receiver = lambda *_: None  # type: ignore[assignment]
    pipe = ps.Pipeline(_model(), token_loss, "1f1b", 6, loss_weight=ps.tokens(), seed=7)
    losses = _losses(pipe, lists)
    assert all(isinstance(line, GroupSender | GroupReceiver) for line in pipe._engine.open_channels().transports.values())
    return losses, {name: parameter.grad for name, parameter in pipe.named_parameters()}


@pytest.mark.ranks
def test_known_and_unknown_messages_take_turns_over_process_groups() -> None:
    rng = random.Random(1)
    known = [_list(seed, 1) for seed in range(4)]
    lists = []
    for seed in range(12):
        pairs = [_list(100 + 10 * seed + number, 1) if rng.random() < 0.4 else rng.choice(known) for number in range(6)]
        lists.append(([inputs[0] for inputs, _ in pairs], [targets[0] for _, targets in pairs]))
    assert_as_one_process(on_ranks(_over_gloo, 3, lists), _one_process(lists, 7))


def test_each_microbatch_is_evaluated_as_it_is() -> None:
    model, (inputs, targets) = _model().eval(), _list(0, 4)
    expected = [model(entry).detach() for entry in inputs]
    pipe = ps.Pipeline(_model(), token_loss, "1f1b", 2, topology=ps.Topology(), loss_weight=ps.tokens())
    outputs, (same_outputs, loss) = pipe.eval_microbatches(inputs), pipe.eval_microbatches(inputs, targets)
    assert all(torch.equal(*pair) for pair in (*zip(outputs, expected, strict=True), *zip(same_outputs, expected, strict=True)))
    tokens = [target.numel() for target in targets]
    mean = sum(token_loss(*pair) * n for pair, n in zip(zip(expected, targets, strict=True), tokens, strict=True)) / sum(tokens)
    assert torch.allclose(loss, mean, rtol=0, atol=1e-14)


def _cut_along_tokens(**options: Any) -> Any:
    """A list of sequences of other lengths, with tokens cut into slices or over ranks, dropout, attention and positions."""
    torch.manual_seed(3)
    model = ps.model.GPT(ps.model.GPTConfig(WORDS, 16, width=16, layers=2, heads=4, dropout=0.2)).double()
    pipe = ps.Pipeline(model, token_loss, "1f1b", 2, loss_weight=ps.tokens(), seed=7, **options)
    generator = torch.Generator().manual_seed(5)
    entries = [torch.randint(WORDS, shape, generator=generator) for shape in ((2, 7), (1, 12), (3, 4))]
    losses: list[Tensor] = []
    loss, outputs = pipe.step_microbatches(entries, entries, order=[2, 0, 1], losses=losses, return_outputs=True)
    numbers = [loss.item(), *(value.item() for value in losses)]
    return numbers, {name: parameter.grad for name, parameter in pipe.named_parameters()}, outputs


def _cut_over_cp() -> Any:
    return _cut_along_tokens(mesh=ps.comms.init_mesh(pp=1, cp=2))[:2]


def _assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], rtol=0, atol=1e-12) for name in expected)


def test_lists_are_cut_into_slices_with_the_numbers_of_whole_entries() -> None:
    whole_numbers, whole, whole_outputs = _cut_along_tokens(topology=ps.Topology())
    numbers, found, outputs = _cut_along_tokens(topology=ps.Topology(), slices=3)
    assert numbers == pytest.approx(whole_numbers, abs=1e-12)
    _assert_near(found, whole)
    assert all(torch.allclose(*pair, rtol=0, atol=1e-12) for pair in zip(outputs, whole_outputs, strict=True))


@pytest.mark.ranks
def test_ranks_along_cp_share_the_tokens_of_each_entry() -> None:
    whole_numbers, whole, _ = _cut_along_tokens(topology=ps.Topology())
    for numbers, gradients in on_ranks(_cut_over_cp, 2):
        assert numbers == pytest.approx(whole_numbers, abs=1e-12)
        _assert_near(gradients, whole)
