"""How all tests run: on one thread, since bits depend on how many there are. Their tiers are marks (see pyproject.toml)."""

import gc
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest
from fork_server import server_address, use_server
from hypothesis import HealthCheck, settings

from penstock.launcher import forkserver

GPIPE_FILE = """
def schedule(rank, ranks, microbatches):
    yield from (f"{rank}F{m}" for m in range(microbatches))
    yield from (f"{rank}B{m}" for m in range(microbatches))
"""
os.environ["OMP_NUM_THREADS"] = "1"  # here, of ranks, and of interpreters that tests start
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # where pytest keeps the folders of its last runs
TEMPORARY = tempfile.mkdtemp(prefix="pt-")  # a short path, since sockets lie there
Finalize(None, shutil.rmtree, (TEMPORARY, True), exitpriority=-200)  # after that of multiprocessing's folder, which is in it
tempfile.tempdir = os.environ["TMPDIR"] = TEMPORARY  # of everything that tests start
os.environ["PET_LOG_DIR"] = f"{TEMPORARY}/torchrun"  # else each torchrun leaves a folder with the logs of its ranks
# For the session: logs, those of accelerate's launcher, a cache, sockets of processes that may be killed.
STAY = ("torchrun", "torchelastic_", "torchinductor", "pymp-")
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


def pytest_configure(config: pytest.Config) -> None:
    """Set up a process that runs tests. One that has workers run them does not import torch, for which they would wait."""
    if hasattr(config, "workerinput"):
        use_server(config.workerinput["fork_server"])
    elif config.getoption("numprocesses", None):
        return
    import torch

    import penstock as ps

    torch.set_num_threads(1)
    if mode := config.getoption("--over-nccl"):
        from emulated_nccl import over_nccl

        launch = ps.launch
        ps.launch = lambda function, ranks, *args, **how: launch(over_nccl, ranks, mode, function, *args, **how)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Have the workers fork ranks from one server, which imports what ranks need once; what ranks print goes nowhere."""
    outputs = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    with open(os.devnull, "wb") as nowhere:
        for descriptor in outputs:
            os.dup2(nowhere.fileno(), descriptor)
    node.workerinput["fork_server"] = server_address()
    for descriptor, output in outputs.items():
        os.dup2(output, descriptor)
        os.close(output)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files whose tests are all `neighbours`, unless these are selected: to import their libraries takes seconds."""
    if collection_path.suffix != ".py" or not re.search(r"not \(.*neighbours", config.getoption("markexpr")):
        return None
    marks_of_all = r"^pytestmark = .*\bneighbours\b|^    pytest\.mark\.neighbours"
    return True if re.search(marks_of_all, collection_path.read_text(), re.MULTILINE) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected is here to stay: looking through it for garbage would take longer than some tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have files that start processes, which take longest, run first: so that workers end together."""
    import torch

    long = {item.path for item in items if any(map(item.get_closest_marker, ("ranks", "fresh")))}
    items.sort(key=lambda item: item.path not in long)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no GPU here"))


def pytest_addoption(parser):
    message = "have ranks use emulated NCCL (emulated_nccl.py): lazy, eager or ahead"
    parser.addoption("--over-nccl", metavar="MODE", help=message)


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_of_a_file():
    """Ranks that `on_ranks` has started for the tests of a file end with it, and no temporary file of them stays."""
    from runners import end_shared_ranks

    before = temporary_files()
    yield
    end_shared_ranks()
    deadline = time.monotonic() + 60
    while (left := temporary_files() - before) and time.monotonic() < deadline:
        time.sleep(0.05)  # what a test has killed may have a process that tidies up
    assert not left


def temporary_files() -> set[str]:
    return {name for name in os.listdir(TEMPORARY) if not name.startswith(STAY)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folder")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, folder: Path) -> list[Any]:
    """What the module's `rank_trainings` returns on each of two ranks."""
    import penstock as ps

    return ps.launch(request.module.rank_trainings, 2, folder)


@pytest.fixture
def penstock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command beside `mine.py`, GPipe as a rule in a file; returns what it prints, or its error if it has one."""
    from penstock.commands import cli

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
