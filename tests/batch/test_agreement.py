"""What ranks agree on before a step: alike in every interpreter, remembered for the last kinds of batch, cheap for new ones."""

import os
import random
import subprocess
import sys
from collections import Counter

import pytest
import torch
from models import toy
from reference import accumulate, assert_same, gradients
from runners import on_ranks
from torch import nn

import penstock as ps
from penstock.batch.agreement import MAX_KINDS, Description, _check_same_batch, _Replica
from penstock.batch.pieces import Shape, batch_signature
from penstock.comms.control_group import ControlGroup
from penstock.comms.transport import message_spec
from penstock.comms.transport.channels import SendChannel
from penstock.digest import hash_values
from penstock.engine import activation_memory

BATCHES = """
import torch
from penstock.digest import hash_values
from penstock.batch.pieces import batch_signature
keywords = {"mask": torch.ones(4, dtype=torch.bool), "n": 3, "name": "x", "none": None, "list": [torch.ones(1)]}
batch = ((torch.zeros(2, 3), torch.zeros(1)), keywords)
print(hash_values(batch_signature(batch)))
"""


@pytest.mark.slow
@pytest.mark.fresh
def test_a_batch_has_the_same_fingerprint_in_every_interpreter():
    output = {
        subprocess.run(
            [sys.executable, "-c", BATCHES],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    exec(BATCHES, {"print": lambda number: output.add(f"{number}\n")})  # here it is a random one
    assert len(output) == 1
    assert output.pop().strip().isdecimal()


def test_a_signature_tells_structures_shapes_and_dtypes_apart_but_not_values():
    x = torch.zeros(2, 3)
    batches = [x, x[:1], x.double(), (x,), [x], {"a": x}, {"b": x}, (x, 1), (x, None), (x, "1"), ()]
    assert len({hash_values(batch_signature(batch)) for batch in batches}) == len(batches)
    assert batch_signature({"a": x, "n": 1}) == batch_signature({"a": x + 1, "n": 2})


def test_equal_values_of_different_types_have_different_hashes_in_either_order():
    assert hash_values("limit", 8) != hash_values("limit", 8.0)
    assert hash_values("scale", 9.0) != hash_values("scale", 9)


def model():
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())])


def rank_kinds():
    pipe = ps.Pipeline(model(), nn.functional.mse_loss, "1f1b", 2)
    known, specs = [], 0
    for length in [
        *range(1, MAX_KINDS + 20),
        1,
        MAX_KINDS + 19,
    ]:  # the first is forgotten by then, the last is not
        inputs = torch.ones(2, length, 8)
        pipe.step(inputs, target=inputs)
        known.append(len(pipe._engine.agreement._kinds))
        specs = max(specs, pipe._engine.programs._cached_program.cache_info().currsize)
    return known, specs, gradients(pipe.named_parameters())


@pytest.mark.ranks
def test_the_last_kinds_of_batch_are_remembered_and_no_more():
    everyone = on_ranks(rank_kinds, 2)
    whole = model()
    for length in [*range(1, MAX_KINDS + 20), 1, MAX_KINDS + 19]:
        inputs = torch.ones(2, length, 8)
        accumulate(whole, nn.functional.mse_loss, (inputs, inputs), 2)
    expected = gradients(whole.named_parameters())
    for known, programs, mine in everyone:
        assert max(known) == MAX_KINDS == known[-1]
        assert programs <= MAX_KINDS
        assert_same(mine, {name: expected[name] for name in mine})


def rank_noted():
    noted = []
    activation_memory._OutputRecorder.__enter__ = lambda self, enter=activation_memory._OutputRecorder.__enter__: (
        noted.append(1) or enter(self)
    )
    pipe = ps.Pipeline(model(), nn.functional.mse_loss, "interleaved-1f1b", 6)
    counts = []
    for rows in (12, 12, 18):
        pipe.step(torch.ones(rows, 8), target=torch.ones(rows, 8))
        counts.append(len(noted))
    return counts


@pytest.mark.ranks
def test_a_new_kind_of_batch_is_measured_by_one_microbatch_a_stage():
    assert on_ranks(rank_noted, 2) == [[2, 2, 4]] * 2  # two stages a rank


def rank_counts():
    """What each step exchanges: of a new kind of batch, the same again, another new kind and again; of a long list."""
    pipe = ps.Pipeline(model(), nn.functional.mse_loss, "1f1b", 4)
    counts = Counter()

    def counted(owner, name):
        method = getattr(owner, name)

        def call(*args, **kwargs):
            counts[name] += 1
            return method(*args, **kwargs)

        setattr(owner, name, call)

    for owner, name in [
        (ControlGroup, "finish_all_gather_row"),
        (ControlGroup, "all_gather_value"),
        (ControlGroup, "_transfer"),
        (SendChannel, "send"),
        (message_spec, "pack_spec"),
        (activation_memory._OutputRecorder, "__enter__"),
    ]:
        counted(owner, name)
    results = []
    for length in (1, 2, 2, 3, 3):
        batch = torch.ones(16, length, 8)
        pipe.step(batch, target=batch)
        results.append(dict(counts))
        counts.clear()

    batches = [torch.ones(1, length, 8) for length in random.Random(0).sample(range(1, 2000), 200)]
    pipe.step_microbatches(batches, batches)
    return results[1:], {name: count for name, count in counts.items() if name.endswith(("row", "value"))}


@pytest.mark.ranks
def test_a_new_kind_of_step_takes_no_exchange_more_unless_its_description_does_not_fit_into_a_row():
    known = {"finish_all_gather_row": 2, "send": 4}
    new = {**known, "pack_spec": 4, "__enter__": 1}  # each message is described, one microbatch measured
    long_list = {"finish_all_gather_row": 3, "all_gather_value": 1}
    assert on_ranks(rank_counts, 2) == [([new, known, new, known], long_list)] * 2


def replica_kinds():
    """The kinds of steps that this rank remembers; in the second step one replica has a microbatch that counts nothing."""
    mesh = ps.comms.init_mesh(dp=2)
    torch.manual_seed(0)
    pipe = ps.Pipeline(nn.Linear(2, 2), nn.functional.cross_entropy, "gpipe", 2, loss_weight=ps.tokens(), mesh=mesh)
    for masked_rows in (0, 2 * mesh.get_local_rank("dp")):
        target = torch.zeros(4, dtype=torch.long)
        target[:masked_rows] = -100
        pipe.step(torch.ones(4, 2), target=target)
    return [*pipe._engine.agreement._kinds]


@pytest.mark.ranks
def test_a_step_is_the_first_of_its_kind_on_all_replicas_or_on_none():
    first, second = on_ranks(replica_kinds, 2)
    assert first == second
    assert len(first) == 2


SHAPE = Shape(8, 32, "(8, 4)")
FULL_BATCH = Description(
    "step()", True, True, "training mode", "no autocast", "", False, False, 2, "given", None, [SHAPE], (0,), [8], ()
)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"inputs": [SHAPE._replace(rows=4)] * 2, "target_rows": [4, 4]},
            "it has 1 microbatch on rank 0, 2 microbatches on rank 2",
        ),
        ({"inputs": [SHAPE._replace(rows=7)]}, "it has 8 rows on rank 0, 7 rows on rank 2"),
        ({"target_rows": [4, 4]}, "its tensors or targets differ in rows, shape or dtype on ranks 0 and 2"),
        ({"inputs": [SHAPE._replace(signature="(8, 2, 2)")]}, "its tensors or targets differ in rows, shape or dtype on"),
    ],
)
def test_ranks_that_share_a_batch_say_what_differs_in_it(change, text):
    first, other = (_Replica.merge([batch]) for batch in (FULL_BATCH, FULL_BATCH._replace(**change)))
    with pytest.raises(ps.MismatchError) as caught:
        _check_same_batch(first, other, "", (0, 2))
    assert str(caught.value).startswith("ranks along tp and cp are given one batch")
    assert text in str(caught.value)


def test_tokens_of_inputs_and_target_are_compared_on_a_rank_that_reads_both_and_in_every_list():
    def loss(output, target):
        return output.square().sum() + target.sum()

    def attend(self, hidden):
        query = self.linear(hidden)[:, None]
        return ps.attention(query, query, query)[:, 0]

    pipe = ps.Pipeline(toy(attend, linear=nn.Linear(4, 4)), loss, "1f1b", 2, slices=2, reduction="sum")
    message = "inputs and target have 4 and 6 tokens a row: give as many"
    with pytest.raises(ps.MismatchError, match=message):
        pipe.step(torch.ones(2, 4, 4), target=torch.ones(2, 6))
    with pytest.raises(ps.MismatchError, match="the batch has 4 rows but the target has 3"):
        pipe.step(torch.ones(4, 4, 4), target=torch.ones(3, 4))
    inputs = [torch.ones(1, 4, 4), torch.ones(1, 4, 4)]
    with pytest.raises(ps.MismatchError, match="was given 2 inputs but 1 targets"):
        pipe.step_microbatches(inputs, [torch.ones(1, 4)])
    pipe.step_microbatches(inputs, [torch.ones(1, 4), torch.ones(1, 4)])
    with pytest.raises(ps.MismatchError, match="inputs and target have"):
        pipe.step_microbatches(inputs, [torch.ones(1, 6), torch.ones(1, 6)])
