"""A clean machine: the wheel, what it declares, and nothing else."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
import venv
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import penstock

pytestmark = pytest.mark.fresh

ROOT = Path(__file__).parents[2]
SMALL = ("--ranks=2", "--batch=4", "--width=16", "--context=16", "--layers=2", "--microbatches=2", "--checkpoint-every=1")
PROGRAM = """
import torch, penstock as ps
from penstock import checkpoint

def train():
    mesh = ps.comms.init_mesh(dp=2)
    torch.manual_seed(0)
    pipe = ps.Pipeline(torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.functional.mse_loss, microbatches=2, mesh=mesh)
    optimizer = torch.optim.Adam(pipe.parameters())
    if checkpoint.exists("saved"):
        checkpoint.resume("saved", pipe, optimizer)
    pipe.step(torch.ones(4, 2), target=torch.zeros(4, 2))
    optimizer.step()
    checkpoint.save("saved", pipe, optimizer)
    return pipe.step_count

if __name__ == "__main__":
    print(ps.launch(train, 2), ps.launch(train, 2))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, so that nothing is left in the checkout."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("penstock", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run([*pip, "--wheel-dir", built, source], check=True)
    return next(built.glob("*.whl"))


class Machine:
    """An environment with the wheel in it, and of the packages here only those that it declares."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder, self.bin = folder, folder / "bin"
        venv.create(folder, symlinks=True)
        packages = next(folder.glob("lib/python*/site-packages"))
        pip = (sys.executable, "-m", "pip", "--python", self.bin / "python", "install", "--quiet", "--no-deps", "--no-index")
        subprocess.run([*pip, wheel], check=True)
        [installed] = (Distribution.at(info) for info in packages.glob("penstock_pipeline-*.dist-info"))
        bring(packages, declared(installed))
        self.extra = folder / "extra"  # on the path of those who ask for it
        self.extra.mkdir()
        bring(self.extra, declared(installed, "studio"))

    def start(self, *words: str | Path, extra: bool = False) -> "subprocess.Popen[str]":
        """A program of this environment, in its folder."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment |= {"PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1"}
        environment |= {"PYTHONPATH": str(self.extra)} if extra else {}
        command = [self.bin / words[0], *words[1:]]
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background it is ignored
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, cwd=self.folder, env=environment, text=True, stdout=pipe, stderr=pipe)
        signal.signal(signal.SIGINT, before)
        return process

    def run(self, *words: str | Path) -> str:
        """What it prints."""
        with self.start(*words) as process:
            said, noise = process.communicate()
        assert process.returncode == 0, noise
        assert not noise, noise
        return said


def declared(root: Distribution, *extras: str) -> dict[str, Distribution]:
    """By name, the distributions that `root` asks for, those that these ask for, and so on; of its extras, `extras`."""
    found: dict[str, Distribution] = {}
    asked = [(root, extras)]
    while asked:
        asking, wanted = asked.pop()
        for requirement in map(Requirement, asking.requires or ()):
            holds = [requirement.marker is None or requirement.marker.evaluate({"extra": extra}) for extra in ("", *wanted)]
            if any(holds) and requirement.name not in found:
                found[requirement.name] = distribution(requirement.name)
                assert found[requirement.name].version in requirement.specifier, requirement
                asked.append((found[requirement.name], tuple(requirement.extras)))
    return found


def bring(packages: Path, distributions: dict[str, Distribution]) -> None:
    """Put the files of these into `packages`, as links."""
    for value in distributions.values():
        for name in {path.parts[0] for path in value.files or ()} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(Path(str(value.locate_file(name))).resolve())


@pytest.fixture(scope="module")
def machine(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("machine"), wheel)


def test_the_wheel_has_the_package_its_types_and_its_licence_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    here = {path.relative_to(ROOT).as_posix() for path in (ROOT / "penstock").rglob("*") if path.is_file()}
    assert names == {name for name in here if "__pycache__" not in name}
    assert "penstock/py.typed" in names
    assert [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/licenses/LICENSE")]


def test_what_is_not_declared_is_not_there(machine: Machine) -> None:
    program = (
        "from importlib.util import find_spec as find; print(*[name for name in 'torch rich pytest PIL'.split() if find(name)])"
    )
    assert machine.run("python", "-c", program) == "torch rich\n"


@pytest.mark.slow
def test_the_main_job_runs_and_goes_on_and_its_weights_and_timeline_are_there(machine: Machine) -> None:
    text = machine.folder / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 100)
    assert "2 ranks  step 2/2" in machine.run("penstock", "train", "--steps=2", "--data", text, "--out=runs", *SMALL)
    [run] = (machine.folder / "runs").iterdir()
    assert "2 ranks  step 3/3" in machine.run("penstock", "train", "--steps=3", "--resume", run)
    assert {"model.safetensors", "step-00000003", "timeline.html"} <= {path.name for path in run.iterdir()}


@pytest.mark.slow
def test_a_program_trains_on_a_mesh_saves_and_goes_on(machine: Machine) -> None:
    (machine.folder / "program.py").write_text(PROGRAM)
    assert machine.run("python", "program.py") == "[1, 1] [2, 2]\n"


@pytest.mark.slow
def test_a_schedule_is_drawn_and_a_lab_checks_itself(machine: Machine) -> None:
    assert machine.run("penstock", "--version") == f"penstock {penstock.__version__}\n"
    assert "bubble 27.3%" in machine.run("penstock", "show", "1f1b", "--html", "page.html", "--perfetto", "trace.json")
    assert "</html>" in (machine.folder / "page.html").read_text()
    assert json.loads((machine.folder / "trace.json").read_text())
    assert "checked" in machine.run("penstock", "lab", "1")


def test_the_studio_says_what_it_needs_and_serves_where_that_is(machine: Machine) -> None:
    with machine.start("penstock", "studio", "--no-browser") as refused:
        message = (
            "penstock: the studio is served with Werkzeug, which is not installed: pip install 'penstock-pipeline[studio]'\n"
        )
        assert refused.communicate() == ("", message)
    with machine.start("penstock", "studio", "--no-browser", extra=True) as serving:
        assert serving.stdout is not None
        said = serving.stdout.readline()
        try:
            address = re.findall(r"http://\S+", said)[0]
            assert b"studio.js" in urllib.request.urlopen(address).read()
        finally:
            serving.send_signal(signal.SIGINT)
        assert serving.communicate() == ("", "")
    assert serving.returncode == 0
