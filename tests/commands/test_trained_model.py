"""`penstock generate` and `penstock eval`: what a run has trained, put to use over several ranks."""

import json
import math
import os
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.commands import cli, trained_model
from penstock.commands.train.config import TrainConfig
from penstock.commands.train.setup import gpt, token_loss
from penstock.launcher.launch import launch
from penstock.model import GPT

pytestmark = pytest.mark.ranks

CONFIG = TrainConfig(context=16, width=16, layers=3)


def model() -> GPT:
    torch.manual_seed(0)
    return gpt(CONFIG)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `penstock train` leaves it."""
    folder = tmp_path_factory.mktemp("run")
    pipe = ps.Pipeline(model(), token_loss)
    ps.checkpoint.save(folder, pipe, torch.optim.SGD(pipe.parameters()))
    (folder / "run.json").write_text(json.dumps({"config": CONFIG.to_json()}))
    return folder


def penstock(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock", *map(str, words)])
    cli.main()


def printed(function: Any, *args: Any) -> str:
    """What a rank prints; its process may have another's standard output."""
    with redirect_stdout(StringIO()) as out:
        function(*args)
    return out.getvalue()


@pytest.mark.slow
def test_a_prompt_of_any_bytes_is_continued_where_the_terminal_has_no_letters_for_them(run, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    words = ["generate", os.fspath(run), "--prompt", b"\xff \xc3\xbc", "--max-new-tokens", "1", "--ranks", "1"]
    done = subprocess.run([sys.executable, "-m", "penstock", *words], capture_output=True)
    assert (done.returncode, done.stderr, done.stdout[:3]) == (0, b"", b"? ?")


def test_a_run_that_was_trained_on_a_gpu_is_used_where_there_is_none(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"config": replace(CONFIG, device="cuda").to_json()}))
    assert trained_model._run_config(tmp_path).device == "auto"


def test_generate_prints_the_prompt_and_what_the_uncut_model_makes_of_it(run, monkeypatch):
    expected = ps.Pipeline(model()).generate(torch.tensor([list(b"def f")]), max_new_tokens=20, temperature=0.7, seed=1)
    text = bytes(expected[0].tolist()).decode(errors="replace")
    results: list[str] = []

    def rank_texts(work: Any, ranks: int, *args: Any) -> list[None]:
        results.extend(launch(printed, ranks, work, *args))
        return [None] * ranks

    monkeypatch.setattr("penstock.launcher.launch.launch", rank_texts)
    penstock(monkeypatch, "generate", next(run.glob("step-*")), "--prompt", "def f", "--max-new-tokens", 20, "--seed", 1)
    assert results == [
        "".join(character if character.isprintable() or character in "\n\t" else "?" for character in text) + "\n",
        "",
    ]


def test_eval_tells_the_mean_loss_over_every_byte(run, monkeypatch, capfd, tmp_path):
    text = ("to be or not to be " * 30).encode()
    (tmp_path / "a.txt").write_bytes(text[:300])
    (tmp_path / "b.txt").write_bytes(text[300:])
    data, losses = torch.tensor(list(text)), []
    with torch.no_grad():
        for start in range(0, len(data) - 1, CONFIG.context):
            piece = data[start : start + CONFIG.context + 1]
            losses.append(nn.functional.cross_entropy(model()(piece[None, :-1])[0], piece[1:], reduction="sum").item())
    mean = sum(losses) / (len(data) - 1)
    penstock(monkeypatch, "eval", run, "--data", tmp_path, "--batch", 5)
    assert capfd.readouterr().out == (
        f"loss {mean:.4f}, perplexity {math.exp(mean):.3f} ({mean / math.log(2):.3f} bits a byte), "
        f"over {len(data)} bytes of {tmp_path}\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "{run}", "--prompt", ""], "--prompt is empty: give it a letter or more"),
        (["generate", "{run}", "--ranks", "9"], "--ranks 9 are more than the model's 6 layers: use 6 or fewer"),
        (["generate", "{run}", "--temperature", "-1"], "--temperature -1.0 is too small: use 0 or more"),
        (["generate", "{run}", "--temperature", "nan"], "--temperature nan is too small: use 0 or more"),
        (["generate", "{run}", "--max-new-tokens", "0"], "--max-new-tokens 0 is too small: use 1 or more"),
        (["generate", "{run}", "--top-k", "0"], "--top-k 0 is too small: use 1 or more"),
        (["generate", "tests"], "tests is no run, it has no run.json: give the folder of a run"),
        (["eval", "{run}", "--data", "READM.md"], "--data READM.md does not exist (did you mean README.md?)"),
        (["eval", "test", "--data", "README.md"], "test is no run, it has no run.json (did you mean tests?)"),
    ],
)
def test_a_wrong_option_is_told_before_any_rank_starts(run, monkeypatch, words, message):
    monkeypatch.setattr("penstock.commands.trained_model.start_forkserver_early", lambda: pytest.fail("ranks were started"))
    with pytest.raises(SystemExit) as end:
        penstock(monkeypatch, *[word.format(run=run) for word in words])
    assert end.value.code == f"penstock: {message}"
