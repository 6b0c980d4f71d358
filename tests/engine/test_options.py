"""The options of a pipeline say which of them all ranks must have equal, and which `rebuild` changes."""

import inspect
import re
from dataclasses import fields
from typing import Any

import pytest
from torch import nn

import penstock as ps
from penstock.options import STAYS, PipelineOptions


def test_every_argument_of_a_pipeline_is_an_option_in_the_same_order() -> None:
    arguments = list(inspect.signature(ps.Pipeline).parameters)
    assert [option.name for option in fields(PipelineOptions)] == [*arguments[:-1], "family_options"]


@pytest.mark.parametrize("name", STAYS)
def test_rebuild_refuses_what_stays_and_says_why(name: str) -> None:
    pipe = ps.Pipeline(nn.Sequential(nn.Linear(2, 2)), nn.functional.mse_loss)
    with pytest.raises(ps.MismatchError, match=re.escape(f"rebuild() takes no {name}=: {STAYS[name]}. Make a new Pipeline")):
        pipe.rebuild(**{name: None})
    with pytest.raises(AttributeError, match=re.escape(f"cannot be set once it is built: make a new Pipeline(.., {name}=..)")):
        setattr(pipe, name, None)


def test_ranks_must_agree_on_what_changes_the_numbers() -> None:
    values: dict[str, Any] = {option.name: option.name for option in fields(PipelineOptions)}
    assert {*PipelineOptions(**values).equal_values()} == {
        *("seed", "data_parallel", "tensor_parallel", "on_nonfinite", "rows_dim", "sequence_dim", "slices", "reduction"),
        "rows_per_sample",
    }
