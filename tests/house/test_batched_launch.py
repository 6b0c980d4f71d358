"""Launches that several tests share."""

from pathlib import Path

import pytest
from batched_launch import together

pytestmark = pytest.mark.ranks


def rank_fails(path: Path) -> None:
    path.write_text(path.read_text() + "started ")
    raise ValueError("of these ranks")


def test_a_launch_that_fails_is_made_once_and_fails_each_of_its_tests(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    starts.write_text("")
    for _ in range(3):
        with pytest.raises(ValueError, match="of these ranks"):
            together(rank_fails, 1, ((starts,),))
    assert starts.read_text() == "started "
