"""Random numbers that depend on what they are for."""

import os
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.randomness import (
    RandomnessByPosition,
    default_generator,
    mix_seed,
    preserve_generator_state,
    use_deterministic_algorithms,
)

CPU = torch.device("cpu")


def test_one_number_is_mixed_as_in_splitmix64():
    # the first outputs of the published generator for the seeds 0 and 1234567
    assert mix_seed(0) == 0xE220A8397B1DCDAF
    assert mix_seed(1234567) == 6457827717110365317


def test_seeds_of_neighbouring_numbers_are_all_different():
    grid = [*product(range(64)), *product(range(40), range(40)), *product(range(12), range(12), range(12))]
    assert len({mix_seed(*numbers) for numbers in grid}) == len(grid)


def test_the_order_of_the_numbers_counts():
    assert mix_seed(1, 2, 3) != mix_seed(3, 2, 1)
    assert mix_seed(1, 2) != mix_seed(2, 1)


@pytest.mark.parametrize("numbers", [(0,), (2**64 - 1,), (2**70,), (-1, 5), (2**62, 3, 7)])
def test_a_seed_has_64_bits_and_a_generator_takes_it(numbers):
    seed = mix_seed(*numbers)
    assert 0 <= seed < 2**64
    assert torch.Generator().manual_seed(seed).initial_seed() == seed


def test_half_of_the_bits_change_with_each_bit_of_the_number():
    changes = [(mix_seed(7, 1 << bit) ^ mix_seed(7, 0)).bit_count() for bit in range(64)]
    assert 28 < sum(changes) / 64 < 36
    assert min(changes) > 12


def test_the_generator_of_the_cpu_is_torchs_own():
    assert default_generator(CPU) is torch.default_generator


def test_what_is_drawn_aside_leaves_no_trace():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with preserve_generator_state(CPU) as generator:
        generator.manual_seed(99)
        inside = torch.rand(4)
    assert torch.equal(torch.rand(4), expected)
    assert torch.equal(inside, torch.rand(4, generator=torch.Generator().manual_seed(99)))


def fail_aside():
    with preserve_generator_state(CPU) as generator:
        generator.manual_seed(99)
        raise RuntimeError("inside")


def test_the_state_is_put_back_after_an_error():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="inside"):
        fail_aside()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def switches(monkeypatch):
    """What says which kernels torch takes, put back afterwards."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    fills, precision = torch.utils.deterministic.fill_uninitialized_memory, torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = cudnn


@pytest.mark.parametrize("given", [None, ":16:8"])
@pytest.mark.usefixtures("switches")
def test_one_switch_has_bits_repeat_and_leaves_the_users_workspace(monkeypatch, given):
    if given:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    use_deterministic_algorithms()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (given or ":4096:8")
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cudnn.benchmark


# ---- parts of a sequence's tokens

DRAWS = {  # (rows, tokens, width) -> what it draws
    "layer": nn.Dropout(0.3),
    "in place": lambda hidden: functional.dropout(hidden.clone(), 0.3, inplace=True),
    "of a graph": lambda hidden: torch.ops.aten.dropout.default(hidden, 0.3, True),
    "rows of tokens": lambda hidden: functional.dropout(hidden.flatten(0, 1), 0.3).view_as(hidden),
    "other order in memory": lambda hidden: functional.dropout(hidden.mT.contiguous().mT, 0.3),
    "off": lambda hidden: functional.dropout(hidden, 0.3, training=False),
    "noise": lambda hidden: hidden + torch.randn_like(hidden),
    "filled": lambda hidden: hidden * torch.empty_like(hidden).uniform_(0.9, 1.1),
    "of rows": lambda hidden: hidden * torch.rand(2, 1, 1),
    "paths of rows": lambda hidden: hidden * hidden.new_empty(2, 1, 1).bernoulli_(0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_parts_of_a_sequence_draw_the_numbers_of_the_whole_one(name):
    def drawn(hidden):
        torch.manual_seed(5)
        return torch.cat([DRAWS[name](hidden), DRAWS[name](hidden)], 2)

    hidden, lengths = torch.ones(2, 7, 4), [2, 2, 3]
    expected, parts = drawn(hidden), []
    for part, piece in enumerate(hidden.split(lengths, 1)):
        with RandomnessByPosition(lengths, part, 1):
            parts.append(drawn(piece))
    assert torch.equal(torch.cat(parts, 1), expected)


def test_a_dropout_without_the_tokens_is_refused():
    text = r"shape \(3, 5, 4\), which does not have the 4 tokens .* in dimension 1 \(sequence_dim\)"
    with RandomnessByPosition([3, 4], 1, 1), pytest.raises(ps.MismatchError, match=text):
        functional.dropout(torch.ones(3, 5, 4))
