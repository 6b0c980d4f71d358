"""Digests: the same for every cut, another for every flipped bit; replicas that differ are not saved; runs are audited."""

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from models import TiedModel, token_batch
from reference import data, make
from runners import on_ranks
from torch import nn

import penstock as ps
from penstock import checkpoint
from penstock.checkpoint.training_digests import RunsNotComparableError, compare_runs, value_digest
from penstock.commands.audit import AuditCommand
from penstock.commands.train.setup import token_loss
from penstock.digest import block_sums
from penstock.stage.dtensor import gather_full_tensor

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import flips

# ---- one digest


@pytest.mark.costly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64])
def test_every_flipped_bit_is_another_digest(dtype):
    tensor = torch.arange(21).view(3, 7).to(dtype)
    data = tensor.view(torch.uint8).flatten()
    for way in (value_digest, lambda tensor: block_sums(tensor).tolist()):
        before, seen = way(tensor), []
        for byte in range(len(data)):
            for bit in range(8):
                data[byte] ^= 1 << bit
                seen.append(way(tensor))
                data[byte] ^= 1 << bit
        assert before not in seen
        assert way(tensor) == before


def test_a_digest_is_the_same_in_every_process_and_release():
    assert value_digest(torch.arange(6.0).view(2, 3)) == "b70079b7"
    assert block_sums(torch.arange(6.0)).tolist() == [-5147975855063957504]
    state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "lr": 0.1, "betas": (0.9, 0.999), "foreach": None}
    assert value_digest(state) == "818f3e42"


def test_a_digest_is_of_the_values_and_not_of_how_they_lie_in_memory():
    tensor = torch.randn(4, 6)
    assert value_digest(tensor.t().contiguous().t()) == value_digest(tensor)
    assert value_digest(nn.Parameter(tensor)) == value_digest(tensor)
    others = [tensor.view(6, 4), tensor.double(), tensor.t(), tensor.clone().neg(), [tensor]]
    assert len({value_digest(value) for value in [tensor, *others]}) == len(others) + 1
    assert value_digest(torch.empty(0, 3)) != value_digest(torch.empty(3, 0))


# ---- of a pipeline


def rank_digests(name, schedule, steps=3, microbatches=4):
    """Of every step, the same on all ranks."""
    if name == "tied":
        torch.manual_seed(7)
        model, loss_fn, (args, target, _) = TiedModel(), token_loss, token_batch(8, 1)
        options = {"cuts": ["blocks.2"]} if ps.comms.init_distributed().world_size == 2 else {}
    else:
        (model, loss_fn), (inputs, target), options = make(name), data(name, 8), {}
        args = (inputs,)
    pipe = ps.Pipeline(model, loss_fn, schedule, microbatches, **options)
    optimizer = torch.optim.AdamW(pipe.parameters())
    found = []
    for _ in range(steps):
        pipe.step(*args, target=target)
        optimizer.step()
        found.append(checkpoint.digests(pipe, optimizer))
        optimizer.zero_grad()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "schedules"), [("gpt", ["zb-v", "gpipe"]), ("mixed", ["1f1b"]), ("tied", ["1f1b"])])
def test_digests_are_those_of_one_process_for_any_cut_and_schedule_tied_parameters_once(name, schedules):
    alone = rank_digests(name, "gpipe")
    assert alone[0] != alone[1]
    for schedule in schedules:
        everyone = on_ranks(rank_digests, 2, name, schedule)
        assert all(result == alone for result in everyone)
    assert ("head.weight" in alone[0]["weights"]) == (name == "gpt")
    frozen = {"1.weight", "1.bias", "3.weight"} if name == "mixed" else set()
    assert alone[0]["weights"].keys() - alone[0]["gradients"].keys() == frozen
    assert alone[0]["gradients"].keys() == alone[0]["optimizer"].keys()


# ---- replicas


def flip(tensor, byte=5, bit=2):
    tensor.detach().view(torch.uint8).flatten()[byte] ^= 1 << bit


def rank_replicas(folder, shape, what, schedule="1f1b"):
    """Save, flip a bit on the last rank, save again: what is said then."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    model, loss_fn = make("gpt")
    pp, dp, tp = shape
    mesh = ps.comms.init_mesh(pp=pp, dp=dp, tp=tp)
    plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()} if tp > 1 else None
    pipe = ps.Pipeline(model, loss_fn, schedule, 2, mesh=mesh, tensor_parallel=plan)
    optimizer = torch.optim.AdamW(pipe.parameters())
    inputs, target = (batch.tensor_split(dp)[pipe.position.replica] for batch in data("gpt", 8))
    pipe.step(inputs, target=target)
    optimizer.step()
    checkpoint.save(folder, pipe, optimizer)
    before = checkpoint.digests(pipe, optimizer)
    if pipe.position.world.rank == pp * dp * tp - 1:
        parameter = next(parameter for name, parameter in pipe.named_parameters() if name.endswith("norm2.weight"))
        flip(parameter if what == "weight" else optimizer.state[parameter]["exp_avg"])
    after = checkpoint.digests(pipe, optimizer)
    pipe.step_count += 1
    with pytest.raises(ps.MismatchError) as error:
        checkpoint.save(folder, pipe, optimizer, wait=what != "weight")
    return before, after, str(error.value)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("shape", "what"), [((2, 2, 1), "weight"), ((1, 2, 1), "optimizer"), ((1, 1, 2), "weight")], ids=["dp", "optimizer", "tp"]
)
def test_replicas_that_differ_in_one_bit_are_not_saved_and_named(tmp_path, shape, what):
    everyone = on_ranks(rank_replicas, shape[0] * shape[1] * shape[2], tmp_path, shape, what)
    before, after, result = everyone[0]
    assert all(result == everyone[0] for result in everyone)
    assert not any(isinstance(parameter, dict) for named in before.values() for parameter in named.values())
    kind = "weights" if what == "weight" else what
    ((name, by_rank),) = [(name, value) for name, value in after[kind].items() if isinstance(value, dict)]
    assert name.endswith("norm2.weight")
    assert len(by_rank) == 2
    whose = name if what == "weight" else f"the optimizer's state of {name}"
    ranks = ", ".join(f"rank {rank} {value}" for rank, value in by_rank.items())
    assert f"{whose} is not the same on all ranks that have it: {ranks}" in result
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-00000001"]


def rank_sharded():
    """Digests before and after a step of parameters that two replicas have shards of; and of the whole, as it is gathered."""
    pipe = ps.Pipeline(*make("gpt"), "1f1b", 2, mesh=ps.comms.init_mesh(pp=1, dp=2), data_parallel="fsdp")
    optimizer = torch.optim.AdamW(pipe.parameters())
    inputs, target = (batch.tensor_split(2)[pipe.position.replica] for batch in data("gpt", 8))
    before = checkpoint.digests(pipe, optimizer)
    pipe.step(inputs, target=target)
    optimizer.step()
    whole = {name: value_digest(gather_full_tensor(value)) for name, value in pipe.state_dict().items()}
    return before, checkpoint.digests(pipe, optimizer), whole


@pytest.mark.ranks
def test_what_replicas_have_shards_of_has_the_digest_of_the_whole():
    model, loss_fn = make("gpt")
    before, after, whole = on_ranks(rank_sharded, 2)[0]
    assert before == {"weights": checkpoint.digests(ps.Pipeline(model, loss_fn, "gpipe", 2))["weights"]}
    assert after["weights"] == whole != before["weights"]
    assert all(len(after[kind]) == len(whole) for kind in ("gradients", "optimizer"))


# ---- bit flips, and runs audited


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_flipped_bit_is_found_at_its_step_and_traced_to_kind_and_name(tmp_path, ranks):
    found, missed = on_ranks(flips.rank_flips, ranks, tmp_path, 20, random.randrange(2**32))[0]
    assert missed == []
    assert found.total() == 20


def recorded(folder, seed=0, steps=4, every=2, begin=0, **changed):
    """A run of one process, as a program of one's own keeps it; its conditions can be said to be others."""
    (model, loss_fn), (inputs, target) = make("mlp"), data("mlp", 8, seed)
    pipe = ps.Pipeline(model, loss_fn, "gpipe", 2)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    trail = checkpoint.DigestLog(folder, pipe, optimizer, every, {"learning_rate": 0.1} | changed)
    for number in range(steps):
        pipe.step(inputs, target=target)
        optimizer.step()
        if number >= begin:
            trail.record_step()
        optimizer.zero_grad()
    return folder


def with_conditions(folder, **changed):
    path = folder / "digests.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[0]["run"]["conditions"] |= changed
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_runs_that_are_the_same_are_told_so_and_others_by_their_first_step(tmp_path):
    a, b, c = recorded(tmp_path / "a"), recorded(tmp_path / "b", every=1), recorded(tmp_path / "c", seed=9)
    same, result = compare_runs(a, b)
    assert same
    assert result.startswith("the same to the bit in 2 steps, 2 to 4: ")
    same, result = compare_runs(a, c)
    assert not same
    assert result.splitlines()[0] == "step 2 is the first that differs: the gradient of 10.bias"
    assert [line.endswith(f" in {folder}") for line, folder in zip(result.splitlines()[1:3], (a, c), strict=True)] == [
        True,
        True,
    ]
    assert "it began in one of the 2 steps up to that" in result


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dp": 2}, "dp 1 and 2)"),
        ({"threads": 99}, "threads "),
        ({"deterministic": False}, "deterministic True and False)"),
    ],
)
def test_where_bits_are_not_promised_a_difference_is_no_verdict(tmp_path, changed, message):
    a = recorded(tmp_path / "a")
    recorded(tmp_path / "b", seed=9)
    recorded(tmp_path / "same")
    with pytest.raises(RunsNotComparableError) as error:
        compare_runs(a, with_conditions(tmp_path / "b", **changed))
    assert f"no bits are promised between these runs ({message}" in str(error.value)
    assert compare_runs(a, with_conditions(tmp_path / "same", **changed))[0]  # if they are the same, they are


def test_runs_of_other_settings_or_steps_are_not_compared(tmp_path):
    a = recorded(tmp_path / "a")
    for folder, options, result in [
        ("rate", {"learning_rate": 0.2}, "the runs cannot be compared, they have learning_rate 0.1 and 0.2"),
        ("steps", {"steps": 3, "every": 3}, "the runs have no step in common: 2 steps, 2 to 4 in "),
    ]:
        with pytest.raises(RunsNotComparableError) as error:
            compare_runs(a, recorded(tmp_path / folder, **options))
        assert result in str(error.value)


def test_a_run_that_goes_on_keeps_the_lines_up_to_there(tmp_path):
    recorded(tmp_path, steps=6)
    with (tmp_path / "digests.jsonl").open("a") as file:
        file.write('{"step": 8, "wei')  # as a kill leaves it
    pipe = ps.Pipeline(*make("mlp"), "gpipe", 2)
    pipe.step_count = 4
    checkpoint.DigestLog(tmp_path, pipe)
    lines = [json.loads(line) for line in (tmp_path / "digests.jsonl").read_text().splitlines()]
    assert [(line["step"], "run" in line) for line in lines] == [(0, True), (2, False), (4, False), (4, True)]


def rank_has_no_room(folder):
    pipe = ps.Pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.functional.mse_loss, microbatches=2)
    trail = checkpoint.DigestLog(folder, pipe, every=1)
    pipe.step(torch.ones(2, 2), target=torch.ones(2, 2))
    if pipe.topology.rank == 0:
        trail.path.unlink()
        trail.path.symlink_to("/dev/full")
    with pytest.raises(ps.PenstockError) as error:
        trail.record_step()
    return str(error.value)


@pytest.mark.ranks
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a full disk at hand")
def test_a_full_disk_is_told_on_every_rank(tmp_path):
    message = (
        f"digests cannot be written to {tmp_path}/digests.jsonl: No space left on device; make room there, or train without"
    )
    assert [result.startswith(message) for result in on_ranks(rank_has_no_room, 2, tmp_path)] == [True, True]


def test_the_command_ends_with_0_if_runs_are_the_same_1_if_not_2_if_that_cannot_be_said(tmp_path, capsys):
    for folder, options in {"a": {}, "b": {}, "c": {"seed": 9}, "d": {"learning_rate": 0.2}}.items():
        recorded(tmp_path / folder, **options)
    codes = []
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "digests.jsonl").write_text('{"step": 2, "weights": {"0.weight": "00000000"}}\n')
    for other in ("a", "b", "c", "d", "", "nowhere", "broken"):
        with pytest.raises(SystemExit) as ended:
            AuditCommand(tmp_path / "a", tmp_path / other).run()
        codes.append(ended.value.code)
    assert codes == [0, 0, 1, 2, 2, 2, 2]
    output = capsys.readouterr()
    assert "step 2 is the first that differs" in output.out
    assert output.err.splitlines()[0] == "penstock: the runs cannot be compared, they have learning_rate 0.1 and 0.2"
    assert "has no digests.jsonl: give the folder of a run that keeps digests" in output.err
    assert "nowhere does not exist" in output.err
    assert "digests.jsonl is damaged, it is not what this Penstock writes there" in output.err
