"""A table, a plan and a run have their own numbers of ranks and microbatches: others beside them are refused."""

import pytest
from error_text import error_text

from penstock.commands.compare import CompareCommand
from penstock.commands.machine.machine_commands import BenchStepsCommand
from penstock.commands.show import ShowCommand
from penstock.commands.train.config import TrainConfig
from penstock.commands.train.train_command import TrainCommand
from penstock.errors import PenstockError
from penstock.schedule import build


@pytest.fixture
def table(tmp_path):
    path = str(tmp_path / "table.csv")
    build("1f1b", 2, 3).to_csv(path)
    return path


def test_show_bench_and_compare_refuse_other_numbers_than_a_tables(table):
    for option, own in (("ranks", 2), ("microbatches", 3)):
        said = f"--{option} 5, but {table} has {own} {option}: leave out --{option}, or give {own}"
        commands = (
            ShowCommand(schedule=table, **{option: 5}),
            BenchStepsCommand(schedule=table, **{option: 5}),
            CompareCommand((table, "1f1b"), **{option: "5"}),
        )
        for command in commands:
            with pytest.raises(PenstockError) as error:
                command.run()
            assert str(error.value) == said


def test_a_table_is_shown_and_compared_with_its_own_numbers(table, capsys):
    ShowCommand(schedule=table).run()
    ShowCommand(schedule=table, ranks=2, microbatches=3).run()
    CompareCommand((table, "1f1b"), ranks="2", microbatches="3,6").run()
    printed = capsys.readouterr().out
    assert printed.count("rank 1 |") == 2


def test_show_refuses_other_numbers_than_a_timelines(table, tmp_path, capsys):
    path = tmp_path / "timeline.json"
    ShowCommand(schedule=table, json=path).run()
    with pytest.raises(PenstockError, match=f"--ranks 4, but {path} has 2 ranks"):
        ShowCommand(schedule=str(path), ranks=4).run()


def test_train_takes_a_tables_numbers_and_refuses_others(table):
    config = TrainCommand.defaults_for(["train", "--schedule", table])
    assert (config.ranks, config.microbatches) == (2, 3)
    assert TrainCommand.defaults_for(["train", f"--schedule={table}"]).ranks == 2
    with pytest.raises(PenstockError, match=f"--microbatches 8, but {table} has 3 microbatches"):
        TrainConfig(schedule=table, ranks=2, microbatches=8).check()


WIDE = {"layers": 1, "schedule": "interleaved-1f1b"}  # a GPT of one block has 4 layers to cut


def refusal(**options):
    return error_text(TrainConfig(**options).check, PenstockError)


def test_advice_on_ranks_names_fewer_than_were_typed(tmp_path):
    assert refusal(ranks=2, stages_per_rank=3, **WIDE).endswith("use --ranks 1 or fewer, or --layers 3 or more")
    assert refusal(ranks=1, stages_per_rank=5, **WIDE).endswith("use --stages-per-rank 4 or fewer, or --layers 2 or more")
    path = str(tmp_path / "wide.csv")
    build("interleaved-1f1b", 2, 2, 4).to_csv(path)
    assert refusal(ranks=2, microbatches=2, layers=1, schedule=path).endswith("model's 4: use --layers 5 or more")
