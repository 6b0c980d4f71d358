"""The pipeline in one file: the bits of the engine."""

from itertools import product
from pathlib import Path

import pytest
from prompt import torchrun
from reference import OneProcess, assert_as_one_process, data, gradients, make, stepped
from slow_cases import slow_except

import penstock as ps
from penstock.learn import mini

pytestmark = pytest.mark.ranks

MICROBATCHES, ROWS = 6, 13  # uneven pieces


def rank_mini(ranks, kind):
    """Loss and gradients of every schedule, as the file makes them; two steps without an optimizer between."""
    rank, results = ps.comms.init_distributed().rank, {}
    for name in ps.schedule.names():
        model, loss_fn = make(kind, depth=2 * ranks)
        table = ps.schedule.build(name, ranks=ranks, microbatches=MICROBATCHES)
        mine = mini.Rank(list(model), loss_fn, table, rank)
        losses = [mine.step(*data(kind, ROWS, seed)) for seed in (3, 4)]
        own = {id(parameter) for parameter in mine.parameters()}
        named = [(at, parameter) for at, parameter in model.named_parameters() if id(parameter) in own]
        results[name] = losses, gradients(named)
    return results


@pytest.mark.parametrize(("ranks", "kind"), slow_except([(1, "mlp"), (2, "gpt")], product([1, 2, 3, 4], ["mlp", "gpt"])))
def test_the_pipeline_in_one_file_has_the_bits_of_one_process_for_every_schedule(ranks, kind):
    batches = [data(kind, ROWS, seed) for seed in (3, 4)]
    expected = stepped(OneProcess(*make(kind, depth=2 * ranks), None, MICROBATCHES), batches)
    assert_as_one_process(ps.launch(rank_mini, ranks, ranks, kind), dict.fromkeys(ps.schedule.names(), expected))


def test_its_own_rule_is_the_catalogues_1f1b():
    for ranks in range(1, 6):
        for microbatches in range(1, 9):
            rows = [list(mini.one_forward_one_backward(rank, ranks, microbatches)) for rank in range(ranks)]
            assert rows == ps.schedule.build("1f1b", ranks=ranks, microbatches=microbatches).csv_rows()


def test_it_can_be_read_in_one_go():
    assert len(Path(mini.__file__).read_text().splitlines()) <= 250


@pytest.mark.slow
@pytest.mark.fresh
@pytest.mark.parametrize("table", ["mine", "csv"])
def test_it_trains_under_torchrun_and_the_loss_falls(table, tmp_path):
    file = tmp_path / "mine.csv"
    ps.schedule.build("zb-h1", ranks=2, microbatches=6).to_csv(file)
    ended = torchrun(2, "-m", "penstock.learn.mini", str(file) if table == "csv" else table)
    lines = ended.stdout.splitlines()
    assert len(lines) == 10, ended.stderr
    assert all(line.endswith("the same bits: True") for line in lines)
    losses = [float(line.split()[3].rstrip(",")) for line in lines]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2
