"""Sentences that need no ranks, and what provokes each. Those of ranks are in tests/engine/test_mistakes.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from error_text import error_text
from torch import nn

import penstock as ps
from penstock import checkpoint
from penstock.commands.plan import parse_integers
from penstock.plan import model_profile, result
from penstock.plan.search import cp_sat
from penstock.schedule import Costs, build, from_rows, schedule, simulate


def pipe(table: Any = "gpipe", microbatches: Any = 2, model: Any = None, **options: Any) -> ps.Pipeline:
    return ps.Pipeline(model or nn.Sequential(nn.Linear(2, 2)), nn.functional.mse_loss, table, microbatches, **options)


def sample(rows: int, forward: float = 1.0, name: str = "a") -> model_profile.ProfileSample:
    return model_profile.ProfileSample(rows, (ps.plan.LayerCost(name, forward, 1, 1),))


def damaged_table(path: Path) -> Path:
    path.write_text('0F0,"' + "x" * 200_000)
    return path


SENTENCES: dict[str, Callable[[Path], Any]] = {
    # tables and costs
    "far has stage 9,999,999, and so more cells than a table may have, ": lambda _: from_rows("far", [["9999999F0"]]),
    "wide has more than ": lambda _: schedule.parse_csv_cells("wide", "," * 2**22),
    "long.csv is damaged, or no CSV table: field larger than": lambda path: schedule.read_csv_cells(
        damaged_table(path / "long.csv")
    ),
    "backward_input has 2 costs on a stage, backward_weight 3: give as many": lambda _: simulate(
        build("gpipe", 1, 2), Costs(backward_input=[[1, 2]], backward_weight=[[1, 2, 3]])
    ),
    "effort='optimal' knows no microbatches that cost unlike: use 'long'": lambda _: cp_sat.check_solvable(
        Costs(microbatch_factors=[1, 2]), 1, None
    ),
    "effort='optimal' knows no slices: use 'long', or slices=1 and not 2": lambda _: cp_sat.check_solvable(Costs(), 2, None),
    # plans
    "the samples of a model's layers name the same layers, one or more": lambda _: model_profile.ModelProfile(
        (sample(1), sample(2, name="b"))
    ),
    "samples are for rising numbers of rows, 1 or more, not [2, 1]": lambda _: model_profile.ModelProfile(
        (sample(2), sample(1))
    ),
    "layer a has forward -1.0: give seconds or bytes, 0 or more": lambda _: model_profile.ModelProfile((sample(1, -1.0),)),
    "cannot read layers from": lambda path: model_profile.ModelProfile.load(path / "none"),
    "cannot read a plan from": lambda path: result.load(path / "none"),
    "--dp 8,x is no list of numbers: write them as 8,16": lambda _: parse_integers("--dp", "8,x"),
    "--dp 1.5: give whole numbers, as in 8,16": lambda _: parse_integers("--dp", "1.5"),
    # pipelines of one process
    "schedule 1f1b is for 2 ranks, but 1 are running": lambda _: pipe(build("1f1b", 2, 2)),
    "slices=3 are 3, but the table gpipe has 2": lambda _: pipe(build("gpipe", 1, 2, slices=2), slices=3),
    "recompute=['stage', 'stage'] is for 2 stages, but gpipe has 1": lambda _: pipe(recompute=["stage", "stage"]),
    "but the list has 2": lambda _: pipe(model=[nn.Linear(2, 2), nn.Linear(2, 2)]),
    "sequence_dim is the dimension that has the tokens, 0 or more, not -1": lambda _: pipe(sequence_dim=-1),
    "microbatches=3 changes nothing: the schedule is a table, which has its own number; give schedule= too": lambda _: pipe(
        build("gpipe", 1, 2)
    ).rebuild(microbatches=3),
    "settings= goes into a file as JSON": lambda path: checkpoint.DigestLog(path, pipe(), settings={"a": object()}),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_what_provokes_a_sentence_is_told_so(sentence: str, tmp_path: Path) -> None:
    text = error_text(lambda: SENTENCES[sentence](tmp_path), ps.PenstockError)
    assert sentence in text
    assert "\n" not in text
