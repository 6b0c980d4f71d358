"""Scripts that keep everything at the top of the module end without a word of ours on the error output."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from prompt import torchrun
from slow_cases import slow_except

import penstock as ps

pytestmark = pytest.mark.fresh

SCRIPT = Path(__file__).parent / "exit_script.py"
WAYS = {  # how it ends: the exit status, and how many ranks tell of an error of theirs
    "end": (0, 0),
    "exit": (1, 0),
    "raise": (1, 2),
    "one raises": (1, 2),
    "one saves": (1, 1),
}
QUICK = ("end",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exits")


@pytest.fixture(scope="module")
def ended(folder: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Run the script, once for each way."""
    paths = os.pathsep.join([str(Path(ps.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])

    @cache
    def run(how: str) -> subprocess.CompletedProcess[str]:
        if how != "alone":
            return torchrun(2, SCRIPT, how, folder / how, PYTHONPATH=paths)
        alone = [sys.executable, SCRIPT, "end", folder / "alone"]
        return subprocess.run(alone, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)

    return run


@pytest.mark.parametrize("how", slow_except(QUICK, WAYS))
def test_a_script_under_torchrun_ends_without_noise_of_ours(ended: Any, how: str) -> None:
    done, (status, tracebacks) = ended(how), WAYS[how]
    results = [line for line in done.stderr.splitlines() if line.startswith("[rank")]
    ours = [line for line in results if line.endswith("Traceback (most recent call last):")]
    assert done.returncode == status, done.stderr
    assert len({line.split(":")[0] for line in ours}) == tracebacks, done.stderr
    assert not [word for word in NOISE if word in done.stderr], done.stderr
    assert done.stdout == ""
    if how == "end":
        assert done.stderr == ""


NOISE = ("Exception ignored", "leaked", "destroy_process_group", "terminate called", "FATAL", "exitcode  : -6", "Warning")


@pytest.mark.slow
def test_a_save_that_the_others_do_not_come_to_since_they_have_ended_is_an_error(ended: Any) -> None:
    why = "rank 0 waited for rank 1 to call checkpoint.save(), but rank 1 has finished: every rank must make the same calls"
    assert f"penstock.errors.LostRankError: {why}" in ended("one saves").stderr


@pytest.mark.slow
def test_a_script_without_ranks_ends_without_a_word(ended: Any) -> None:
    done = ended("alone")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("how", slow_except(QUICK, ["end", "exit", "raise", "alone"]))
def test_a_save_that_nobody_waited_for_is_whole(ended: Any, folder: Path, how: str) -> None:
    ended(how)
    assert [path.name for path in (folder / how).glob("step-*")] == ["step-00000002"]
