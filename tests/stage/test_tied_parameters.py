"""A tied weight on several ranks: one name on all of them, and copies that are told as soon as they are not the same."""

import pytest
import torch
from error_text import NO_ERROR, outcome
from models import CASES, RepeatedBlockModel, TiedModel, tied, token_batch
from reference import OneProcess, accumulate, assert_as_one_process, assert_same, merged, step_with
from runners import cases_on_ranks, on_ranks
from torch import nn

import penstock as ps
from penstock import checkpoint
from penstock.commands.train.setup import token_loss
from penstock.guards.equal_values import is_tied_comparison_due

pytestmark = pytest.mark.ranks

M, ROWS = 3, 8
CUTS = {"tied": ["blocks.2"], "tied three times": ["blocks.1", "again", "head"], "recurrent": ["between.1"]}


def groups(model):
    """No decay for embeddings, as scripts say it by names."""
    named = list(model.named_parameters())
    decayed = [parameter for name, parameter in named if "token" not in name]
    return [{"params": decayed}, {"params": [parameter for name, parameter in named if "token" in name], "weight_decay": 0.0}]


def trains(pipeline, case, schedule):
    """The state after four steps, the names on this rank, and the owners of those that several ranks have."""
    pipe = pipeline(CASES[case].model(), token_loss, schedule, M, cuts=CUTS[case])
    optimizer = torch.optim.AdamW(groups(pipe), lr=0.05, weight_decay=0.5)
    for step in range(4):
        step_with(pipe, token_batch(ROWS, step))
        pipe.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    names = [name for name, _ in pipe.named_parameters()]
    return dict(pipe.state_dict()), names, {} if pipeline is OneProcess else pipe._engine.tied.owners


RUNS = tuple((ps.Pipeline, *run) for run in (("tied", "1f1b"), ("tied three times", "zb-v"), ("recurrent", "gpipe")))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: ", ".join(run[1:]))
def test_groups_made_by_names_have_the_bits_of_one_process_on_all_owners(run):
    everyone, (state, uncut, _) = cases_on_ranks(trains, 2, RUNS)[run], trains(OneProcess, *run[1:])
    assert_as_one_process([part for part, *_ in everyone], state)
    assert {name for _, names, _ in everyone for name in names} == {*uncut}
    for _, names, owners in everyone:
        assert {*owners} == {name for name in uncut if name in everyone[0][1] and name in everyone[1][1]} <= {*names}
        assert list(owners.values()) == [[0, 1]] * len(owners)


def named_by(first):
    """The weight is its `first` owner's."""
    torch.manual_seed(3)
    return tied(6, 4, first)


def rank_names():
    pipe = ps.Pipeline(named_by("head"), nn.functional.cross_entropy, "1f1b", M, cuts=["head"])
    stages = [nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3))]
    stages[1][0].weight = stages[0][0].weight
    listed = ps.Pipeline(stages, nn.functional.mse_loss, "1f1b", M)
    whole = nn.Sequential(torch.compile(stages[0][0], backend="eager"), stages[1][0])
    compiled = ps.Pipeline(whole, nn.functional.mse_loss, "1f1b", M)
    compiled.step(torch.ones(M, 3), target=torch.ones(M, 3))
    compiled.clip_grad_norm_(1.0)
    return [
        [name for name, _ in value.named_parameters()] for value in (pipe, listed, compiled)
    ], pipe._engine.parameters.aliases


def test_the_name_is_the_first_of_the_uncut_models_wherever_that_runs_and_that_of_stages_given_as_a_list():
    for rank, (names, aliases) in enumerate(on_ranks(rank_names, 2)):
        assert names == [
            ["head.weight"],
            ["0.0.weight", f"{rank}.0.bias"],
            ["0.weight", f"{rank}.bias"],
        ]
        assert aliases == {"token.weight": "head.weight"}


def rank_loads(strict):
    state = dict(TiedModel().state_dict())
    state["head.weight"] = state["head.weight"] + 1  # as files have it that do not know of the tie
    if not strict:
        del state["token.weight"]
    pipe = ps.Pipeline(TiedModel(), token_loss, "1f1b", M, cuts=["blocks.2"])
    pipe.load_state_dict(state, strict)
    model = TiedModel()
    model.load_state_dict(state, strict)
    own = pipe.state_dict()
    return [name for name, value in own.items() if not torch.equal(value, model.state_dict()[name])], len(own)


@pytest.mark.parametrize("strict", [True, False])
def test_all_owners_load_the_value_that_the_uncut_model_would_have_of_several(strict):
    for different, count in cases_on_ranks(rank_loads, 2, ((True,), (False,)))[strict,]:
        assert not different
        assert count > 10


# ---- copies that part


def by_kind(pipe):
    """Groups by the kinds of modules: the weight is an embedding's on one rank, a linear layer's on the other."""
    embeddings = [
        p for stage in pipe.stages.values() for m in stage.modules() if isinstance(m, nn.Embedding) for p in m.parameters()
    ]
    others = [p for p in pipe.parameters() if not any(p is embedding for embedding in embeddings)]
    return torch.optim.AdamW([{"params": others}, {"params": embeddings, "weight_decay": 0.0}], lr=0.05, weight_decay=0.5)


def own_rate(pipe):
    return torch.optim.SGD(pipe.parameters(), lr=0.1 * (1 + pipe.topology.rank))


def own_clip(pipe):
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
    optimizer.register_step_pre_hook(lambda *_: scale_gradients(pipe, 0.5 if pipe.topology.rank else 1.0))
    return optimizer


def scale_gradients(pipe, factor):
    for parameter in pipe.parameters():
        parameter.grad.mul_(factor)


PARTS = {"by kind": by_kind, "own rate": own_rate, "own clip": own_clip}


def rank_parts(part, folder):
    """What steps, a save and an export raise; and the loss of a step after the checkpoint before has been resumed."""
    args, target, _ = token_batch(ROWS, 0)
    pipe = ps.Pipeline(CASES["tied"].model(), token_loss, "1f1b", M, cuts=["blocks.1", "head"])  # the middle rank has no copy
    checkpoint.save(folder, pipe)
    optimizer = PARTS[part](pipe)
    steps = [outcome(lambda: pipe.step(*args, target=target))]
    optimizer.step()
    steps += [outcome(lambda: pipe.step(*args, target=target)) for _ in range(2)]
    refused = [
        outcome(lambda: checkpoint.save(folder, pipe)),
        outcome(lambda: checkpoint.export(pipe, folder / "out.safetensors")),
    ]
    optimizer.zero_grad()
    checkpoint.resume(folder, pipe)
    again = pipe.step(*args, target=target)
    return steps, refused, again, pipe.step_count, sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def parted(tmp_path_factory):
    cases = tuple((part, tmp_path_factory.mktemp("parted")) for part in PARTS)
    return {case[0]: results for case, results in cases_on_ranks(rank_parts, 3, cases).items()}


@pytest.mark.parametrize("part", PARTS)
def test_copies_that_part_are_told_at_the_next_step_by_name_and_with_the_usual_causes(parted, part):
    for steps, *_ in parted[part]:
        assert steps == [NO_ERROR, *parted[part][0][0][1:]]
        assert steps[1] == steps[2]
        assert steps[1].startswith("after 1 steps token.weight is not the same on the ranks that share it (rank 0 ")
        assert ", rank 2 " in steps[1]
        for cause in ("kinds of modules", "norm of a list", "learning rate", "loaded on one rank only", "resume"):
            assert cause in steps[1]


@pytest.mark.parametrize("part", PARTS)
def test_neither_save_nor_export_writes_copies_that_have_parted_and_resuming_makes_them_one_again(parted, part):
    model = CASES["tied"].model()
    expected = accumulate(model, token_loss, token_batch(ROWS, 0), M)
    for _, refused, again, done, files in parted[part]:
        for result in refused:
            assert result.startswith("token.weight is not the same on all ranks that have it: rank 0 ")
            assert "usual causes are" in result
        assert torch.equal(again, expected)
        assert (done, files) == (1, [".writer", "step-00000000"])


COMPARISON = "to compare tied parameters"


def rank_looks(case):
    """In which of 130 steps copies are looked at, and what else ranks exchange besides rows of numbers."""
    pipe = ps.Pipeline(CASES[case].model(), token_loss, "1f1b", 1, **({"cuts": CUTS[case]} if case in CUTS else {}))
    looked, gathered, gather = [], [], pipe._control.all_gather_value
    pipe._control.all_gather_value = lambda value, what: gathered.append(what) or gather(value, what)
    args, target, _ = token_batch(2, 0)
    for step in range(130):
        pipe.step_count = step
        before = len(gathered)
        pipe.step(*args, target=target)
        looked += [step] * gathered[before:].count(COMPARISON)
    return looked, [what for what in gathered if what != COMPARISON]


def test_copies_are_looked_at_after_few_steps_and_then_every_64():
    for looked, what in on_ranks(rank_looks, 2, "tied"):
        assert looked == [0, 1, 2, 4, 8, 16, 32, 64, 128]
        assert what == []
    assert [step for step in range(300) if is_tied_comparison_due(step)] == [0, 1, 2, 4, 8, 16, 32, 64, 128, 192, 256]


def rank_loads_alone(folder):
    pipe = ps.Pipeline(TiedModel(), token_loss, "1f1b", M, cuts=["blocks.2"])
    args, target, _ = token_batch(ROWS, 0)
    if pipe.topology.rank == 0:
        pipe.load_state_dict(dict(TiedModel().state_dict()))
    other = ps.Pipeline(RepeatedBlockModel(), token_loss, "1f1b", M, cuts=["between.1"])
    if other.topology.rank == 0:
        with torch.no_grad():
            next(p for name, p in other.named_parameters() if name == "block.linear1.weight").add_(1)
    return outcome(lambda: pipe.step(*args, target=target)), outcome(lambda: checkpoint.save(folder, other))


def test_weights_loaded_on_one_rank_only_are_told_by_the_first_step(tmp_path):
    for result, saved in on_ranks(rank_loads_alone, 2, tmp_path):
        assert result.startswith("after 0 steps token.weight is not the same")
        assert saved.startswith("block.linear1.weight is not the same on all ranks that have it: rank 0 ")


def rank_in_replicas():
    model = CASES["tied"].model()
    pipe = ps.Pipeline(model, token_loss, "1f1b", M, cuts=["blocks.2"], mesh=ps.comms.init_mesh(2, 2))
    (inputs,), target, _ = token_batch(ROWS, 0)
    rows = slice(pipe.position.replica, None, 2)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1 + pipe.position.replica)  # each replica its own
    pipe.step(inputs[rows], target=target[rows])
    optimizer.step()
    return outcome(lambda: pipe.step(inputs[rows], target=target[rows]))


def test_copies_in_replicas_are_compared_too():
    result = on_ranks(rank_in_replicas, 4)
    assert len({*result}) == 1
    assert "token.weight is not the same on the ranks that share it (ranks 0/2 " in result[0]


def rank_in_two_groups(folder):
    pipe = ps.Pipeline(TiedModel(), token_loss, "1f1b", M, cuts=["blocks.2"])
    named = list(pipe.named_parameters())
    first = [p for name, p in named if ("token" in name) != bool(pipe.topology.rank)]
    optimizer = torch.optim.SGD(
        [{"params": first}, {"params": [p for _, p in named if not any(p is q for q in first)]}], lr=0.1
    )
    return outcome(lambda: checkpoint.save(folder, pipe, optimizer))


def test_a_tied_weight_in_another_group_on_another_rank_is_not_saved(tmp_path):
    for result in on_ranks(rank_in_two_groups, 2, tmp_path):
        assert result == (
            "token.weight is in the optimizer's group 1 on rank 1, but in group 0 on a rank before: make groups by the names "
            "of pipe.named_parameters()"
        )


def rank_resumes(folder):
    model = named_by("head")
    pipe = ps.Pipeline(model, nn.functional.cross_entropy, "1f1b", M, cuts=["head"])
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    checkpoint.resume(folder, pipe, optimizer)
    tokens, target = torch.arange(6), torch.arange(6).flip(0)
    pipe.step(tokens, target=target)
    optimizer.step()
    return pipe.state_dict()


def test_a_checkpoint_that_keeps_it_under_another_of_its_names_is_resumed_with_the_optimizers_state(tmp_path):
    tokens, target, states = torch.arange(6), torch.arange(6).flip(0), []
    pipe = ps.Pipeline(named_by("token"), nn.functional.cross_entropy, "gpipe", M, cuts=[])
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    for step in range(2):
        pipe.step(tokens, target=target)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            checkpoint.save(tmp_path, pipe, optimizer)
        states.append(dict(pipe.state_dict()))
    assert_same(merged(on_ranks(rank_resumes, 2, tmp_path)), states[1])
