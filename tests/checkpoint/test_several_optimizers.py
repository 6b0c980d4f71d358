"""Several optimizers and schedulers, as Muon's users have them: told apart by their order, on any ranks."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from error_text import error_text
from reference import assert_same, merged
from runners import cases_on_ranks, on_ranks
from torch import nn

import penstock as ps
from penstock import checkpoint
from penstock.checkpoint.files import manifest
from penstock.commands.train.config import TrainConfig
from penstock.commands.train.job import train_rank

pytestmark = pytest.mark.ranks

STEPS, STOP = 5, 2


def build(schedule: Any, cuts: list[str] | None) -> tuple[ps.Pipeline, list[Any], list[Any]]:
    """A pipeline whose last layers have no matrix: on their rank Muon has no parameter."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4), nn.LayerNorm(4), nn.LayerNorm(4)]
    pipe = ps.Pipeline(nn.Sequential(*layers), nn.functional.mse_loss, schedule, 4, cuts=cuts)
    named = list(pipe.named_parameters())
    muon = torch.optim.Muon([{"params": [p for _, p in named if p.ndim == 2]}], lr=0.02)
    adam = torch.optim.AdamW([{"params": [p for _, p in named if p.ndim != 2]}], lr=0.01)
    rates = [torch.optim.lr_scheduler.OneCycleLR(muon, 0.02, STEPS), torch.optim.lr_scheduler.StepLR(adam, 2, 0.5)]
    return pipe, [muon, adam], rates


def train(pipe: ps.Pipeline, optimizers: list[Any], rates: list[Any], until: int) -> dict[str, Any]:
    for step in range(pipe.step_count, until):
        generator = torch.Generator().manual_seed(step)
        pipe.step(torch.randn(8, 6, generator=generator), target=torch.randn(8, 4, generator=generator))
        for item in optimizers:
            item.step()
            item.zero_grad()
        for rate in rates:
            rate.step()
    return {name: value.clone() for name, value in pipe.state_dict().items()}


def save(folder: Path) -> int:
    pipe, optimizers, rates = build("1f1b", ["4"])
    train(pipe, optimizers, rates, STOP)
    checkpoint.save(folder, pipe, tuple(optimizers), rates)
    return len(optimizers[0].param_groups[0]["params"])


def resume(folder: Path, schedule: Any, cuts: list[str] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    pipe, optimizers, rates = build(schedule, cuts)
    checkpoint.resume(folder, pipe, optimizers, rates)
    state = train(pipe, optimizers, rates, STEPS)
    return state, checkpoint.digests(pipe, optimizers)["optimizer"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    assert on_ranks(save, 2, folder) == [3, 0]
    return folder


def test_a_training_with_two_optimizers_goes_on_to_the_bit_on_other_ranks_and_cuts(saved: Path) -> None:
    pipe, optimizers, rates = build("gpipe", None)
    expected, whole = train(pipe, optimizers, rates, STEPS), checkpoint.digests(pipe, optimizers)["optimizer"]
    assert len(whole) == 10
    for ranks, schedule, cuts in ((1, "1f1b", None), (2, "zb-v", ["1", "2", "3"]), (3, "gpipe", ["2", "5"])):
        everyone = on_ranks(resume, ranks, saved, schedule, cuts)
        assert_same(merged([state for state, _ in everyone]), expected)
        assert all(digests == whole for _, digests in everyone)


def test_a_checkpoint_of_one_optimizer_from_before_there_were_lists_is_read(saved: Path, tmp_path: Path) -> None:
    pipe = ps.Pipeline(nn.Linear(2, 2), nn.functional.mse_loss, microbatches=1)
    adam = torch.optim.Adam(pipe.parameters(), lr=0.5)
    rate = torch.optim.lr_scheduler.StepLR(adam, 3)
    batch = torch.ones(2, 2)
    train_once = lambda: (pipe.step(batch, target=batch), adam.step(), adam.zero_grad(), rate.step())  # noqa: E731
    train_once()
    path = checkpoint.save(tmp_path, pipe, adam, rate).path / manifest.MANIFEST_FILE
    content = json.loads(path.read_text())
    (content["optimizer"],), (content["scheduler"],) = content.pop("optimizers"), content.pop("schedulers")
    del content["sha256"]
    path.write_bytes(manifest._encode({**content, "format": "penstock checkpoint 1"}))
    train_once()
    expected = pipe.state_dict()["weight"].clone()

    checkpoint.resume(tmp_path, pipe, [adam], rate)
    assert (pipe.step_count, rate.last_epoch) == (1, 1)
    train_once()
    assert torch.equal(pipe.state_dict()["weight"], expected)


def errors_of_ranks(folder: Path, saved: Path) -> list[str]:
    pipe, (muon, adam), rates = build("1f1b", ["4"])
    rank = pipe.position.world.rank
    calls = [
        lambda: checkpoint.save(folder, pipe, [muon, adam][: 2 - rank]),
        lambda: checkpoint.save(folder, pipe, [[muon, adam], [adam, muon]][rank]),
        lambda: checkpoint.save(folder, pipe, {"muon": muon, "adam": adam}),
        lambda: checkpoint.save(folder, pipe, [adam, adam]),
        lambda: checkpoint.save(folder, pipe, [muon, torch.optim.LBFGS(list(pipe.parameters()))]),
        lambda: checkpoint.resume(saved, pipe, [muon, adam][: 2 - rank]),
        lambda: checkpoint.resume(saved, pipe, adam),
        lambda: checkpoint.resume(saved, pipe, [adam, muon]),
        lambda: checkpoint.resume(saved, pipe, [muon, adam], rates[:1]),
    ]
    return [error_text(call, ps.PenstockError) for call in calls]


def test_other_optimizers_on_a_rank_or_in_the_checkpoint_are_one_sentence_on_every_rank(saved: Path, tmp_path: Path) -> None:
    everyone = on_ranks(errors_of_ranks, 2, tmp_path, saved)
    assert everyone[0] == everyone[1]
    expected = [
        "by optimizer: rank 0 gives 2, rank 1 gives one; give all of them the same",
        "the ranks have different optimizers: rank 0 has Muon, AdamW, rank 1 has AdamW, Muon; give the same, in the same order",
        "takes one optimizer or a list, not a dict: their order tells them apart, on every rank and in a later run; give "
        "optimizer=[muon, adam]",
        "is given the same optimizer twice, a AdamW",
        "LBFGS decides by all parameters at once",
        "rank 0 gives 2 optimizers, rank 1 gives 1 optimizer; give all of them as many, in the same order",
        "holds the state of Muon, AdamW, not of AdamW: give them all, in the order in which they were saved",
        "holds the state of Muon, AdamW, not of AdamW, Muon: give them all",
        "holds the state of 2 learning-rate schedules, not 1",
    ]
    for text, error in zip(expected, everyone[0], strict=True):
        assert text in error, (text, error)


def rebuild(mode: str) -> tuple[list[str], dict[str, Any]]:
    pipe, optimizers, rates = build("1f1b", ["4"])
    if mode != "new":
        train(pipe, optimizers, rates, STOP)
    given = optimizers if mode == "list" else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made: Any = pipe.rebuild(cuts=["2"], optimizer=given)
    pipe = made[0] if given else made
    return [str(warning.message) for warning in caught], train(pipe, optimizers, rates, STEPS) if given else {}


def test_rebuild_takes_several_and_warns_that_an_optimizer_it_was_not_given_trains_only_what_stayed() -> None:
    everyone = cases_on_ranks(rebuild, 2, (("list",), ("none",), ("new",)))
    whole = build("1f1b", None)
    assert_same(merged([state for _, state in everyone["list",]]), train(*whole, STEPS))
    assert [texts for texts, _ in everyone["list",]] == [[], []]
    (warning,), nothing = (texts for texts, _ in everyone["none",])
    assert "moves 4 trained parameters between ranks (2.weight, ..) and was given no optimizer" in warning
    assert nothing == []
    assert [texts for texts, _ in everyone["new",]] == [[], []]


def test_penstock_train_has_muon_for_inner_matrices_and_the_losses_of_one_process(tmp_path: Path) -> None:
    config = TrainConfig(
        ranks=2, schedule="gpipe", microbatches=2, optimizer="muon", steps=3, batch=4, layers=2, width=16, context=8,
        checkpoint_every=2, data=Path(__file__),
    )  # fmt: skip
    losses = [on_ranks(train_rank, ranks, config, tmp_path / str(ranks))[0].losses for ranks in (1, 2)]
    assert losses[0] == losses[1]
    content = manifest.read(tmp_path / "2" / "step-00000003")
    assert [part["kind"] for part in content["optimizers"]] == ["Muon", "AdamW"]
    assert not any("embedding" in name for name in content["optimizers"][0]["state"])
    with pytest.raises(ps.PenstockError, match="--optimizer muon takes whole matrices"):
        TrainConfig(optimizer="muon", tp=2).check()
