"""The examples with other libraries, run as their first lines say. `make neighbours` installs what they need."""

import importlib.util
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "comms"))
from hosts import Host, hosts, why_not  # noqa: E402

pytestmark = [pytest.mark.ranks, pytest.mark.neighbours]

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
STEP = re.compile(r"step \d+  loss ([\d.]+)")


def here(*command: str) -> list[str]:
    return [*command]


def example(*words: str, start: tuple[str, ...] = (), within: Callable[..., list[str]] = here, **environment: str) -> str:
    """What an example prints."""
    name, *more = words
    command = within(sys.executable, *start, str(ROOT / "examples" / name), *more)
    variables = {**os.environ, **environment, "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


def falls(losses: list[str]) -> bool:
    return float(losses[-1]) < float(losses[0])


def needs(library: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"no {library}: make neighbours")


@needs("transformers")
@pytest.mark.parametrize("start", [(), TORCHRUN])
def test_fine_tuning_has_the_losses_of_one_process_for_three_lines_more(start):
    losses = STEP.findall(example("finetune.py", "--epochs", "2", start=start))
    assert losses == STEP.findall(example("finetune.py", "--epochs", "2", "--plain"))
    assert len(losses) == 8
    assert falls(losses)
    assert (ROOT / "examples" / "finetune.py").read_text().count("  # +") == 3


@needs("accelerate")
def test_the_example_of_trainer_logs_what_plain_trainer_does(tmp_path):
    printed = (
        example("trainer.py", str(tmp_path / "ours"), start=TORCHRUN),
        example("trainer.py", str(tmp_path / "plain"), "--plain"),
    )
    ours, plain = (re.findall("^step .*", line, re.MULTILINE) for line in printed)
    assert ours == plain
    assert falls(re.findall(r"eval_loss ([\d.]+)", " ".join(ours)))
    assert (ROOT / "examples" / "trainer.py").read_text().count("  # +") == 2


@needs("peft")
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_lora_trains_its_adapters_and_then_what_they_were_merged_into(schedule, tmp_path):
    path = str(tmp_path / "trained.safetensors")
    printed = example("lora.py", path, "--schedule", schedule)
    for what in ("adapters", "merged, all weights"):
        (losses,) = re.findall(rf"^{what}: (.*)", printed, re.MULTILINE)
        assert len(losses.split()) == 5
        assert falls(losses.split())
    assert printed == example("lora.py", path, "--schedule", "1f1b", start=TORCHRUN)
    assert not [name for name in safetensors.torch.load_file(path) if "lora" in name]


@needs("lightning")
def test_lightning_runs_the_loop_around_a_pipeline():
    losses = STEP.findall(example("lightning_loop.py"))
    assert len(losses) == 12
    assert falls(losses)
    assert losses == STEP.findall(example("lightning_loop.py", start=TORCHRUN))


@needs("accelerate")
def test_accelerate_starts_prints_and_tracks(tmp_path):
    launch = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")
    alone, *losses = example("accelerate_loop.py").splitlines()
    several, *printed = example("accelerate_loop.py", str(tmp_path), start=launch).splitlines()
    assert (alone, several) == ("processes 1", "processes 2")
    assert printed == losses
    assert [line.split()[:2] for line in printed] == [["epoch", str(number)] for number in range(3)]
    assert list(tmp_path.glob("losses/events.out.tfevents.*"))


@pytest.fixture(scope="module")
def ray_cluster():
    """What runs an example on a cluster of two machines, from the first of them."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}

    def start(host: Host, *words: str) -> None:
        network = {"GLOO_SOCKET_IFNAME": "cable" if host.number else "eth0"}
        command = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            f"--node-ip-address={host.address}",
            "--num-cpus=1",
            *words,
        ]
        done = subprocess.run(host.within(*command), env={**os.environ, **token, **network}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    with tempfile.TemporaryDirectory(prefix="ray-") as folder, hosts(2) as (first, second):
        start(first, "--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={folder}")
        start(second, f"--address={first.address}:6379")
        yield lambda *words: example(*words, within=first.within, RAY_ADDRESS=f"{first.address}:6379", **token)


@needs("ray")
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize(("name", "steps"), [("ray_train", 6), ("ray_trainer", 4)])
def test_ray_runs_a_pipeline_on_two_machines_and_goes_on_from_its_checkpoint_when_a_rank_is_killed(
    name, steps, ray_cluster, tmp_path
):
    words = f"{name}.py", "--steps", str(steps), "--storage", str(tmp_path), "--die-at", str(steps // 2)
    printed = ray_cluster(*words)
    assert (tmp_path / "died").exists()
    assert re.findall(r"^step \d  loss (.*)", printed, re.MULTILINE) == undisturbed(name, steps)


def undisturbed(name: str, steps: int) -> list[str]:
    """The losses of the same function on two ranks of this machine."""
    code = f"""
import sys, tempfile, pathlib
sys.path.append({str(ROOT / "examples")!r})
import penstock as ps, {name}
if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        ps.launch({name}.train, 2, {{"storage": folder, "steps": {steps}, "die_at": 0}})
        print((pathlib.Path(folder) / "losses.txt").read_text())
"""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "undisturbed.py"
        script.write_text(code)
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return re.findall(r"^step \d  loss (.*)", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("name", ["kubeflow.yaml", "kubernetes.yaml"])
def test_manifests_can_be_read(name):
    yaml = pytest.importorskip("yaml")
    assert all(document["kind"] for document in yaml.safe_load_all((ROOT / "examples" / name).read_text()))
