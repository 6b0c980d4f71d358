"""The table of architectures, docs/reference/architectures.md, says what is so: some of its rows, made again."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import penstock as ps

pytest.importorskip("transformers")

TOOL = Path(__file__).resolve().parents[2] / "tools" / "architectures.py"
AGAIN = ["falcon"]  # mixtral with its routers' losses is in tests/checkpoint/test_transformers_weights.py


def tool() -> Any:
    spec = importlib.util.spec_from_file_location("architectures", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rank_again() -> list[float | str]:
    return tool().rank_differences(AGAIN, "meta", "1f1b")


def test_the_table_is_of_architectures_that_can_be_tried_again():
    rows = tool().written()
    assert len(rows) >= 20
    assert set(AGAIN) <= rows.keys() <= tool().ARCHITECTURES.keys()


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.kernels
def test_models_from_the_meta_device_have_the_bits_that_the_table_says():
    rows = tool().written()
    for name, *found in zip(AGAIN, *ps.launch(rank_again, 2), strict=True):
        assert found == [0, 0], name
        assert rows[name].split(" | ")[2] == "bits"
