"""A rank that gives its own stages only, `{stage: module}`; and modules that are neither stages nor can be cut unasked."""

import os
import warnings
from collections import OrderedDict

import pytest
import torch
from error_text import error_text
from models import toy
from reference import accumulate, assert_as_one_process, assert_same, gradients
from runners import on_ranks
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from penstock import checkpoint
from penstock.stage.dtensor import local_shard

pytestmark = pytest.mark.ranks

M, WIDTH = 3, 8
mse = nn.functional.mse_loss


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(7, WIDTH, generator=generator), torch.randn(7, WIDTH, generator=generator)


class Layer(nn.Module):
    def __init__(self, dropout=0.5):
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, hidden):
        return hidden + self.dropout(torch.tanh(self.linear(hidden)))


def chain(count, dropout=0.5):
    """Stages of one to three layers each, with dropout."""
    torch.manual_seed(3)
    return [nn.Sequential(*[Layer(dropout) for _ in range(1 + number % 3)]) for number in range(count)]


def ends_tied(count):
    """The first and the last stage, which a V places on one rank, share their weight."""
    torch.manual_seed(3)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]
    stages[-1][0].weight = stages[0][0].weight
    return stages


def split_with_skips(count):
    """The first layer's output goes past the others to the last."""

    def forward(self, hidden):
        first = self.first(hidden)
        return self.last(self.third(torch.tanh(self.second(first))) + first)

    torch.manual_seed(3)
    skips = toy(forward, **{name: nn.Linear(WIDTH, WIDTH) for name in ("first", "second", "third", "last")})
    return ps.partition.split(skips, count, cuts=["second", "third", "last"][: count - 1])


def described(count):
    with torch.device("meta"):
        return chain(count)


def alone():
    groups = [torch.distributed.new_group([rank]) for rank in range(2)]
    return groups[torch.distributed.get_rank()]


def in_ddp(count):
    return [DistributedDataParallel(stage, process_group=GROUP[0]) for stage in chain(count)]


def in_fsdp(count):
    mesh = torch.distributed.init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
    return [fully_shard(stage, mesh=mesh) for stage in chain(count)]


GROUP = []
CASES = {  # how the stages are made, schedule, stages
    "one a rank": (chain, "1f1b", 2),
    "interleaved": (chain, "interleaved-1f1b", 4),
    "a V": (chain, "zb-v", 4),
    "tied on one rank": (ends_tied, "zb-v", 4),
    "split with values that skip": (split_with_skips, "zb-v", 4),
    "from meta": (described, "interleaved-1f1b", 4),
    "in DistributedDataParallel": (in_ddp, "1f1b", 2),
    "in fully_shard": (in_fsdp, "1f1b", 2),
}


def stepped(model, schedule, **options):
    pipe = ps.Pipeline(model, mse, schedule, M, **options)
    inputs, target = batch()
    loss = pipe.step(inputs, target=target)
    return loss, {name: local_shard(parameter.grad) for name, parameter in pipe.named_parameters()}, list(pipe.state_dict())


def rank_gives_its_own():
    rank = ps.comms.init_distributed().rank
    GROUP[:] = [alone()]
    results = {}
    for case, (make, schedule, count) in CASES.items():
        mine = ps.schedule.build(schedule, 2, M).stages_of(rank)
        stages = make(count)
        results[case] = stepped({stage: stages[stage] for stage in mine}, schedule), stepped(make(count), schedule)
    return results


@pytest.fixture(scope="module")
def given():
    return on_ranks(rank_gives_its_own, 2)


@pytest.mark.parametrize("case", CASES)
def test_own_stages_have_the_bits_and_names_of_all_stages_in_a_list(given, case):
    for results in given:
        (loss, own, names), (expected_loss, listed, expected_names) = results[case]
        assert torch.equal(loss, expected_loss)
        assert_same(own, listed)
        assert names == expected_names


def test_own_stages_have_the_bits_of_one_process():
    model = nn.Sequential(*[layer for stage in chain(4, dropout=0.0) for layer in stage])
    expected = accumulate(model, mse, batch(), M), gradients(model.named_parameters())
    assert_as_one_process(on_ranks(rank_gives_its_own_slices, 2), expected)


def rank_gives_its_own_slices():
    topology = ps.comms.init_distributed()
    model = nn.Sequential(*[layer for stage in chain(4, dropout=0.0) for layer in stage])
    stages = ps.partition.split(model, 4)
    table = ps.schedule.build("zb-v", 2, M)
    return stepped({stage: stages[stage] for stage in table.stages_of(topology.rank)}, table)[:2]


def rank_has_replicas():
    mesh = ps.comms.init_mesh(pp=2, dp=2)
    stage = mesh.get_local_rank("pp")
    results = [stepped(value, "1f1b", mesh=mesh)[:2] for value in ({stage: chain(2)[stage]}, chain(2))]
    wrong = error_text(lambda: ps.Pipeline({mesh.get_local_rank("dp"): Layer()}, mse, mesh=mesh))
    another = ps.comms.init_mesh(pp=2, dp=2)  # the first one ended with that error
    return results, error_text(lambda: ps.Pipeline(Layer(), mse, mesh=another)), wrong


def test_replicas_give_their_own_stages_too():
    for ((loss, own), (expected, listed)), bare, wrong in on_ranks(rank_has_replicas, 4):
        assert torch.equal(loss, expected)
        assert_same(own, listed)
        assert bare.startswith("1f1b has 2 stages, and Layer is no nn.Sequential")
        assert wrong == "1f1b places stage 0 of 2 on rank 1, which gives stage 1: give {0: module} there"


# -- what is refused ----------------------------------------------------------------------------------------------------

THREE_WAYS = (
    "{} has {} stages, and {} is no nn.Sequential, cut between its layers: give cuts=[..], the names of {} that stages begin "
    "with; or example_args=(..), a microbatch to trace and measure it with; or {{stage: module}}, if it is a stage of this "
    "rank's own"
)


def tied_over_ranks(rank):
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    model[3].weight = model[0].weight
    return {rank: ps.partition.split(model, 2)[rank]}


REFUSED = {  # what is given on rank r, to which schedule; what all are told
    "a bare module": (
        lambda rank: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2), 2),
        "1f1b",
        THREE_WAYS.format("1f1b", 2, "TransformerEncoder", "1 submodule"),
    ),
    "a bare module for stages of a V": (lambda rank: Layer(), "zb-v", THREE_WAYS.format("zb-v", 4, "Layer", "3 submodules")),
    "a slice of the MLP": (
        lambda rank: ps.ShardedMLP(WIDTH, 4, rank, 2),
        "1f1b",
        THREE_WAYS.format("1f1b", 2, "ShardedMLP", "1 submodule"),
    ),
    "a module dict": (
        lambda rank: nn.ModuleDict({str(rank): Layer()}),
        "1f1b",
        THREE_WAYS.format("1f1b", 2, "ModuleDict", "1 submodule"),
    ),
    "a bare module on one rank": (
        lambda rank: Layer() if rank else {0: Layer()},
        "1f1b",
        THREE_WAYS.format("1f1b", 2, "Layer", "1 submodule"),
    ),
    "the other's stage": (
        lambda rank: {1 - rank: Layer()},
        "1f1b",
        "1f1b places stage 0 of 2 on rank 0, which gives stage 1: give {0: module} there",
    ),
    "one stage of two": (
        lambda rank: {rank: Layer()},
        "zb-v",
        "zb-v places stages 0 and 3 of 4 on rank 0, which gives stage 0: give {0: module, 3: module} there",
    ),
    "all stages": (
        lambda rank: dict(enumerate(chain(2))),
        "1f1b",
        "1f1b places stage 0 of 2 on rank 0, which gives stages 0 and 1: give {0: module} there",
    ),
    "none": (
        lambda rank: {0: Layer()} if rank == 0 else {},
        "1f1b",
        "1f1b places stage 1 of 2 on rank 1, which gives no stage: give {1: module} there",
    ),
    "names": (
        lambda rank: OrderedDict(first=Layer(), second=Layer()),
        "1f1b",
        "the keys of {stage: module} are the stages' numbers in 1f1b, whole numbers from 0 to 1, not of class str",
    ),
    "two forms": (
        lambda rank: {1: Layer()} if rank else nn.Sequential(*chain(2)),
        "1f1b",
        "the ranks do not give the same: rank 0 gives a model to be cut, rank 1 gives stages of its own, {stage: module}",
    ),
    "a weight tied over ranks": (
        tied_over_ranks,
        "1f1b",
        "0.weight of stage 0 is a parameter of stage 1 too, and would be trained there as another: "
        "give every rank all stages that split() made, as a list",
    ),
    "PipelineStages": (
        lambda rank: [PipelineStage(Layer(), rank, 2, torch.device("cpu"))],
        "1f1b",
        "the model is nn.Modules, not a PipelineStages: give {stage.stage_index: stage.submod for stage in stages}",
    ),
    "tensors": (
        lambda rank: {rank: torch.ones(3)},
        "1f1b",
        "the model is an nn.Module, a list with one for each stage, or {stage: module}, not a Tensor",
    ),
}


def rank_gives_what_is_refused():
    rank = ps.comms.init_distributed().rank
    return {
        name: error_text(lambda: ps.Pipeline(make(rank), mse, schedule, M))  # noqa: B023
        for name, (make, schedule, _) in REFUSED.items()
    }


@pytest.fixture(scope="module")
def refusals():
    return on_ranks(rank_gives_what_is_refused, 2)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_model_and_not_the_ranks_own_stages_is_refused_alike_on_every_rank(refusals, name):
    assert [everyone[name] for everyone in refusals] == [REFUSED[name][2]] * 2


def test_a_bare_module_is_the_whole_model_where_there_is_one_stage_only():
    torch.manual_seed(0)
    model = Layer(dropout=0.0)
    loss, own, names = stepped(model, "1f1b")
    again = Layer(dropout=0.0)
    again.load_state_dict(model.state_dict())
    assert torch.equal(loss, accumulate(again, mse, batch(), M))
    assert_same(own, gradients(again.named_parameters()))
    assert names == ["linear.weight", "linear.bias"]
    for keyed in ({0: model}, [model]):
        assert torch.equal(stepped(keyed, "1f1b")[0], loss)
    assert error_text(lambda: ps.Pipeline(model, mse, "zb-v", M)) == THREE_WAYS.format("zb-v", 2, "Layer", "1 submodule")
    assert torch.equal(stepped(dict(enumerate(chain(2))), "zb-v")[0], stepped(chain(2), "zb-v")[0])


def rank_has_a_replica_of_all():
    mesh = ps.comms.init_mesh(pp=1, dp=2)
    torch.manual_seed(0)
    return stepped(Layer(dropout=0.0), "1f1b", mesh=mesh)[:2]


def test_a_bare_module_is_the_whole_model_of_replicas_of_one_stage():
    (loss, own), (other, same) = on_ranks(rank_has_a_replica_of_all, 2)
    assert torch.equal(loss, other)
    assert_same(own, same)


def rank_keeps_what_is_tied(folder):
    rank = ps.comms.init_distributed().rank
    kept = {}
    for name in ("own", "list"):
        stages = ends_tied(4)
        given = {stage: stages[stage] for stage in ((0, 3) if rank == 0 else (1, 2))} if name == "own" else stages
        pipe = ps.Pipeline(given, mse, "zb-v", M)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        inputs, target = batch()
        pipe.step(inputs, target=target)
        norm = pipe.clip_grad_norm_(0.01)
        optimizer.step()
        checkpoint.save(folder / name, pipe, optimizer)
        checkpoint.export(pipe, folder / f"{name}.safetensors")
        kept[name] = norm, checkpoint.digests(pipe)["weights"]
    checkpoint.resume(folder / "list", pipe := ps.Pipeline(given, mse, "zb-v", M))
    kept["resumed"] = kept["own"][0], checkpoint.digests(pipe)["weights"]
    return kept


def test_a_weight_tied_within_a_ranks_own_stages_is_one_in_norms_checkpoints_and_exports(tmp_path):
    for kept in on_ranks(rank_keeps_what_is_tied, 2, tmp_path):
        assert torch.equal(kept["own"][0], kept["list"][0])
        assert kept["own"][1] == kept["list"][1] == kept["resumed"][1]
    own, listed = (load_file(tmp_path / f"{name}.safetensors") for name in ("own", "list"))
    assert_same(own, listed)


def rank_wraps():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    results = []
    for wrapped in (nn.DataParallel(model), torch.compile(model)):
        with pytest.raises(ps.MismatchError) as raised:
            ps.Pipeline(wrapped, nn.functional.mse_loss, microbatches=2, example_args=(torch.ones(2, 4),))
        results.append(str(raised.value))
    return results


@pytest.mark.slow
def test_a_wrapper_of_a_model_is_told_to_be_left_out():
    result = on_ranks(rank_wraps, 2)[0]
    assert [text.split(":")[0] for text in result] == [
        f"{name} is a wrapper of a model" for name in ("DataParallel", "OptimizedModule")
    ]


def rank_has_its_own_model(how):
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank if how == "seed" else 0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if how == "load" and rank == 0:
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = ps.Pipeline(model, nn.functional.mse_loss, microbatches=2)
        pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
        with torch.no_grad():
            [parameter.add_(1) for parameter in pipe.parameters()]
        ps.Pipeline(model, nn.functional.mse_loss, microbatches=2)  # the ranks' copies differ now, rightly
    return [(str(warning.message).split(":")[0], warning.filename) for warning in caught]


@pytest.mark.parametrize("how", ["seed", "load", "alike"])
def test_a_model_with_other_values_on_another_rank_is_a_warning(how):
    message = "rank 1 has built another model than rank 0"
    first, second = on_ranks(rank_has_its_own_model, 2, how)
    assert [text for text, _ in first] == ([] if how == "alike" else [message])
    assert all(file == __file__ for _, file in first)
    assert not second
