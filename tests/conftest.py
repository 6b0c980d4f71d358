"""How all tests run: on one thread, since bits depend on how many there are. Their tiers are marks (see pyproject.toml)."""

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from shared_ranks import end_shared_ranks

import penstock as ps
from penstock.commands import cli
from penstock.launcher import forkserver

GPIPE_FILE = """
def schedule(rank, ranks, microbatches):
    yield from (f"{rank}F{m}" for m in range(microbatches))
    yield from (f"{rank}B{m}" for m in range(microbatches))
"""
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of ranks, and of interpreters that tests start
sys.path.append(str(Path(__file__).parent / "interpreters"))  # which some tests hand on to interpreters that they start
paths = [sys.path[-1], os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # an empty one would stand for the folder each starts in
# what ranks would import each time, with the file of their test
forkserver.PRELOAD += [
    "pytest",
    "penstock.commands.train.train_command",
    "penstock.commands.train.job",
    "penstock.partition.export",
]
forkserver.PRELOAD += ["torch.utils.tensorboard", "sympy.tensor.tensor", "transformers.models.llama.modeling_llama"]
forkserver.PRELOAD += ["exported_once"]  # and what they would set up each time
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines may be busy
settings.register_profile("quick", settings.get_profile("patient"), max_examples=20)  # of `make quick`
settings.load_profile("patient")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected is here to stay: looking through it for garbage would take longer than some tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no GPU here"))


def pytest_addoption(parser):
    message = "have ranks use emulated NCCL (emulated_nccl.py): lazy, eager or ahead"
    parser.addoption("--over-nccl", metavar="MODE", help=message)


def pytest_configure(config):
    if mode := config.getoption("--over-nccl"):
        from emulated_nccl import over_nccl

        launch = ps.launch
        ps.launch = lambda function, ranks, *args, **how: launch(over_nccl, ranks, mode, function, *args, **how)


@pytest.fixture(scope="module", autouse=True)
def ranks_of_file_end():
    """Those that `on_ranks` has started for the tests of a file end with it."""
    yield
    end_shared_ranks()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folder")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, folder: Path) -> list[Any]:
    """What the module's `rank_trainings` returns on each of two ranks."""
    return ps.launch(request.module.rank_trainings, 2, folder)


@pytest.fixture
def penstock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command beside `mine.py`, GPipe as a rule in a file; returns what it prints, or its error if it has one."""
    (tmp_path / "mine.py").write_text(GPIPE_FILE)
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["penstock", *words])
        try:
            cli.main()
        except SystemExit as ended:
            return str(ended)
        return capsys.readouterr().out

    return run
