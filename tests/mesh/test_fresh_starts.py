"""Ranks that start as users start them, by torchrun or spawn: nothing in one of them holds only because another was like it."""

import importlib.util
import json
import multiprocessing
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fresh_ranks
import pytest
import torch
from prompt import python, torchrun
from reference import OneProcess, accumulate, assert_as_one_process, assert_same, merged
from torch import nn

import penstock as ps
from penstock import checkpoint
from penstock.commands.train.config import TrainConfig
from penstock.commands.train.job import train_rank

pytestmark = [pytest.mark.fresh, pytest.mark.slow]

HERE = Path(__file__).parent
ALIKE = ["tp", "fsdp", "split backward", "own stages", "resume", "errors", "sum", "counted", "clipped", "different calls"]
STARTS = {  # who starts how many ranks, for what
    "torchrun": (2, [*ALIKE, "transformers", "tied", "train", "train with tp"]),
    "spawn": (2, ALIKE),
    "torchrun, 4 ranks": (4, ["pp and tp", "tutorial"]),
}


def by_torchrun(folder: Path, ranks: int, cases: list[str]) -> None:
    paths = os.pathsep.join([str(HERE), str(HERE.parent), str(Path(ps.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    words = HERE / "own_hash_seed.py", HERE / "fresh_ranks.py", folder, *cases
    done = torchrun(ranks, *words, PYTHONPATH=paths, COLUMNS="120", NO_COLOR="1")
    assert done.returncode == 0, done.stdout + done.stderr


def by_spawn(folder: Path, ranks: int, cases: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context("spawn")
    store = folder / "store"
    everyone = [context.Process(target=fresh_ranks.spawned, args=(rank, ranks, store, folder, cases)) for rank in range(ranks)]
    for rank, process in enumerate(everyone):
        monkeypatch.setenv("PYTHONHASHSEED", str(rank))
        process.start()
    for process in everyone:
        process.join(500)
    codes = [process.exitcode for process in everyone]
    for process in everyone:
        process.kill()
    assert codes == [0] * ranks


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What every rank came to, by who started it; and the folder of torchrun's ranks."""
    base = tmp_path_factory.mktemp("fresh")
    pipe = ps.Pipeline(fresh_ranks.model(), nn.functional.mse_loss, microbatches=4)
    optimizer = fresh_ranks.adam(pipe)
    fresh_ranks.trained(pipe, optimizer, 2)
    checkpoint.save(base / "saved", pipe, optimizer, extra={"told": ["text", 1]})
    for name in STARTS:
        (base / name).mkdir()
    text = base / "torchrun" / "text"
    text.mkdir()
    (text / "a.txt").write_text("to be or not to be, " * 200)
    (text / "b.txt").write_text("that is the question. " * 200)
    with ThreadPoolExecutor() as threads, pytest.MonkeyPatch.context() as monkeypatch:
        others = [threads.submit(by_torchrun, base / name, *STARTS[name]) for name in STARTS if name != "spawn"]
        by_spawn(base / "spawn", *STARTS["spawn"], monkeypatch)
        for other in others:
            other.result()
    everyone = {
        name: [torch.load(base / name / f"rank-{rank}.pt", weights_only=False) for rank in range(ranks)]
        for name, (ranks, _) in STARTS.items()
    }
    return everyone, base / "torchrun"


def results(started: Any, case: str) -> list[list[Any]]:
    """What the ranks of every start that has the case came to."""
    return [[result[case] for result in everyone] for everyone in started[0].values() if case in everyone[0]]


def expected(microbatches: int = 4) -> tuple[Any, dict[str, Any]]:
    whole = fresh_ranks.model()
    loss = accumulate(whole, nn.functional.mse_loss, fresh_ranks.batch(0), microbatches)
    return loss, {name: parameter.grad for name, parameter in whole.named_parameters()}


def test_every_rank_has_hashes_of_its_own(started: Any) -> None:
    for everyone in started[0].values():
        assert len({result["hash"] for result in everyone}) == len(everyone)


@pytest.mark.parametrize("case", ["tp", "pp and tp"])
def test_tensor_parallel_has_the_numbers_of_one_process(started: Any, case: str) -> None:
    loss, gradients = expected()
    assert results(started, case)
    for everyone in results(started, case):
        for ours, mine in everyone:
            assert abs(ours - loss) < 1e-12
            assert all((value - gradients[name]).abs().max() < 1e-12 for name, value in mine.items())
        assert {name for _, mine in everyone for name in mine} == gradients.keys()


@pytest.mark.parametrize(("case", "microbatches"), [("fsdp", 2), ("split backward", 4)])
def test_fsdp_and_a_split_backward_have_the_bits_of_one_process(started: Any, case: str, microbatches: int) -> None:
    for everyone in results(started, case):
        assert_as_one_process(everyone, expected(microbatches))


def test_own_stages_have_the_bits_of_one_process_and_a_bare_one_is_refused(started: Any) -> None:
    message = "MismatchError: zb-v has 4 stages, and MLPBlock is no nn.Sequential, cut between its layers: give cuts="
    for everyone in results(started, "own stages"):
        assert_as_one_process([numbers for *numbers, _ in everyone], expected())
        assert all(bare == everyone[0][2] and bare.startswith(message) for _, _, bare in everyone)


def test_a_checkpoint_of_other_processes_is_resumed_to_the_bit(started: Any) -> None:
    pipe = ps.Pipeline(fresh_ranks.model(), nn.functional.mse_loss, microbatches=4)
    never_stopped = fresh_ranks.trained(pipe, fresh_ranks.adam(pipe), 3)
    for everyone in results(started, "resume"):
        assert_same(merged(everyone), never_stopped)


def test_an_exported_transformers_model_has_the_bits_of_one_process(started: Any) -> None:
    ((*everyone,),) = results(started, "transformers")
    assert_as_one_process(everyone, fresh_ranks.exported(OneProcess))


def test_a_tied_weight_has_one_name_and_groups_made_by_names_have_the_bits_of_one_process(started: Any) -> None:
    ((*everyone,),), (uncut, state) = results(started, "tied"), fresh_ranks.tied(OneProcess)
    assert all("shared.weight" in names for names, _ in everyone)
    assert {name for names, _ in everyone for name in names} == {*uncut}
    assert_as_one_process([part for _, part in everyone], state)


def test_an_error_on_one_rank_is_the_same_on_all_and_so_are_tables_that_differ(started: Any) -> None:
    for everyone in results(started, "errors"):
        assert everyone[0] == everyone[1]
        raised, mismatch = everyone[0]
        assert raised.startswith("StageError: rank 1, stage 1, ")
        assert raised.endswith("ZeroDivisionError: division by zero")
        assert mismatch.startswith(
            "MismatchError: the ranks do not build the same pipeline: rank 0 has gpipe with 4 microbatches"
        )


def test_a_loss_that_is_a_sum_has_the_bits_of_one_process(started: Any) -> None:
    words = "MismatchError: MSELoss has reduction='sum', and the pipeline takes what it returns for a mean"
    for everyone in results(started, "sum"):
        assert_as_one_process([numbers for numbers, _ in everyone], fresh_ranks.summed(OneProcess))
        assert all(refused.startswith(words) for _, refused in everyone)


def test_class_weights_and_ignored_labels_have_the_bits_of_one_process(started: Any) -> None:
    whole, loss_fn = fresh_ranks.model(), nn.CrossEntropyLoss(fresh_ranks.CLASS_WEIGHTS)
    loss = accumulate(
        whole, loss_fn, (fresh_ranks.batch(0)[0], fresh_ranks.LABELS), 4, ps.tokens(weight=fresh_ranks.CLASS_WEIGHTS)
    )
    at_once = loss_fn(whole(fresh_ranks.batch(0)[0]), fresh_ranks.LABELS)
    torch.testing.assert_close(loss, at_once.detach())
    for everyone in results(started, "counted"):
        assert_as_one_process([numbers for *numbers, _ in everyone], (loss, fresh_ranks.gradients(whole)))
        first, (expected_message,) = [warned for _, _, warned in everyone]
        assert first == []
        assert "has 1, 1, 0, 2 values that are not -100" in expected_message
        assert "pass Pipeline(.., loss_weight=ps.tokens())" in expected_message


def test_torchs_clipping_has_the_bits_of_one_process_and_of_a_list_is_told(started: Any) -> None:
    expected = fresh_ranks.clipped_steps(OneProcess(fresh_ranks.model(), nn.functional.mse_loss, None, 4))
    for everyone in results(started, "clipped"):
        assert_as_one_process([numbers for numbers, *_ in everyone], expected)
        (warned,), second = [warned for _, warned, _ in everyone]
        assert "clip with pipe.clip_grad_norm_(max_norm)" in warned
        assert second == []
        assert {refused.partition(" by all")[0] for *_, refused in everyone} == {"MismatchError: LBFGS decides"}


def test_a_rank_that_saves_alone_or_leaves_the_loop_early_to_save_is_told_to_all(started: Any) -> None:
    for everyone in results(started, "different calls"):
        assert everyone[0] == everyone[1]
        alone, early = everyone[0]
        words = "MismatchError: the ranks do different things: rank 0 calls"
        assert alone.startswith(f"{words} checkpoint.save(), rank 1 calls step(): all ranks must make the same calls")
        assert early.startswith(f"{words} step(), rank 1 calls checkpoint.save(): all ranks must make the same calls")


def test_penstock_train_runs_on_a_folder_of_ones_own_text(started: Any) -> None:
    ((first, _),) = results(started, "train")
    assert "2 ranks  step 3/3" in first
    assert "cut by measured times of a microbatch:\nstage 0  embedding" in first
    assert "timeline.html for a browser" in first
    (run,) = (started[1] / "own").iterdir()
    assert "1f1b, 2 ranks, 2 stages, 4 microbatches: " in (run / "report.txt").read_text()  # where the time went
    files = sorted(path.name for path in run.iterdir() if path.name != "better_plan.json")  # if the times of the run gave one
    assert files == [
        ".writer",
        "costs.json",
        "digests.jsonl",
        "metrics.jsonl",
        "model.safetensors",
        "report.txt",
        "run.json",
        "step-00000003",
        *(["tensorboard"] if importlib.util.find_spec("tensorboard") else []),
        "timeline.html",
        "timeline.json",
    ]


def test_penstock_train_shares_products(started: Any) -> None:
    _, folder = started
    (run,) = (folder / "shared").iterdir()
    losses = json.loads((run / "run.json").read_text())["losses"]
    alone = train_rank(TrainConfig(ranks=1, data=folder / "text" / "a.txt", **fresh_ranks.SMALL), None).losses
    assert len(losses) == 3
    assert losses == pytest.approx(alone, abs=1e-5)  # float32


def test_the_tutorials_program_prints_the_same_losses_cut_by_hand_under_torchrun_and_traced_alone(started: Any) -> None:
    ((by_hand, *_),) = results(started, "tutorial")
    traced = python(fresh_ranks.TUTORIAL, "--cut", "traced", "--schedule", "gpipe", *fresh_ranks.FEW)
    assert traced.returncode == 0, traced.stderr
    assert "1f1b over 4 stages" in by_hand
    assert "gpipe over 4 stages" in traced.stdout
    losses = [re.findall(r"step \d  loss ([\d.]+)", result) for result in (by_hand, traced.stdout)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    assert float(losses[0][0]) > float(losses[0][-1])
