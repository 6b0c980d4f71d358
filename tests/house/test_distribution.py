"""The distribution's name: PyPI has another project named `penstock`."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.distribution import other_distribution_problem

ROOT = Path(__file__).parents[2]
OTHER_PROJECT = re.compile(r"pip3? install\b[^\n`]*[\s'\"]penstock(?![\w-])(?!/)")


def test_the_pattern_finds_lines_that_install_the_other_project() -> None:
    for line in (
        "pip install penstock",
        "pip install 'penstock[optimal]'",
        "pip install -U penstock",
        'pip install "penstock>=0.3"',
    ):
        assert OTHER_PROJECT.search(line), line
    for line in ("pip install .", "pip install penstock-pipeline", "pip install 'penstock-pipeline[optimal]'"):
        assert not OTHER_PROJECT.search(line), line


def test_no_page_and_no_message_installs_the_other_project() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    texts = [
        path for name in files if (path := ROOT / name).suffix in {".md", ".py", ".toml", ".js", ".html", ".yml", ".ipynb"}
    ]
    assert len(texts) > 300
    for path in texts:
        if path != Path(__file__):
            assert not OTHER_PROJECT.search(path.read_text()), path


@pytest.mark.fresh
def test_the_import_and_the_doctor_tell_of_the_other_project_beside_them(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "penstock", tmp_path / "penstock", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "penstock_pipeline-0.2.0.dist-info").mkdir()

    def said() -> str:
        code = "import penstock, penstock.distribution as d; print(d.other_distribution_problem())"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env={})
        return done.stdout + done.stderr

    assert said() == "None\n"
    (tmp_path / "penstock-0.1.0.dist-info").mkdir()
    assert said().count("PyPI's penstock is another project") == 2  # the warning, and what `penstock doctor` prints


def test_nothing_is_told_where_it_is_not() -> None:
    assert other_distribution_problem() is None, penstock.__file__


USER = """
import torch
from torch import nn

import penstock as ps
from penstock import checkpoint


def train() -> float:
    topology = ps.comms.init_distributed()
    print(topology.get_next_rank(), ps.comms.get_prev_rank())
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    pipe = ps.Pipeline(model, nn.functional.mse_loss, "1f1b", microbatches=2, mesh=ps.comms.init_mesh(pp=2))
    optimizer = torch.optim.Adam(pipe.parameters())
    loss = pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    optimizer.step()
    checkpoint.save("folder", pipe, optimizer)
    return float(loss.item())


schedule = ps.schedule.build("1f1b", ranks=2, microbatches=4)
print(ps.schedule.verify(schedule), ps.schedule.simulate(schedule, ps.schedule.Costs(forward=1)).bubble)
print(ps.launch(train, 2), ps.model.mlp(4), ps.ShardedMLP(4), ps.partition.split(nn.Sequential(nn.Linear(1, 1)), 1))
"""


@pytest.mark.slow
def test_a_users_program_is_typed_by_mypy_in_strict_mode_from_outside(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    environment = {"MYPYPATH": "", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.stdout == "Success: no issues found in 1 source file\n", done.stdout + done.stderr
