"""A model object whose parts a pipeline trains on several ranks: refused while it is outdated, on every rank alike."""

import copy
import pickle

import pytest
import torch
from runners import on_ranks
from safetensors.torch import load_file
from torch import nn

import penstock as ps

mse = nn.functional.mse_loss
X = torch.linspace(-1, 1, 32).reshape(8, 4)


class WithTable(nn.Module):
    """A layer with a table that is no part of its state, and a constant that is."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4), persistent=False)
        self.register_buffer("constant", torch.ones(4))

    def forward(self, hidden):
        return self.linear(hidden) * self.table * self.constant


def trained_model(layer):
    torch.manual_seed(0)
    model = nn.Sequential(*[layer() for _ in range(4)])
    pipe = ps.Pipeline(model, mse, "1f1b", 4)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)

    def train():
        pipe.step(X, target=X)
        optimizer.step()
        optimizer.zero_grad()

    return model, pipe, train


def load(model, pipe, path):
    ps.checkpoint.export(pipe, path)
    pipe.gather(lambda: 0)
    model.load_state_dict(load_file(path))
    return torch.cat([model(rows) for rows in X.chunk(4)])  # the microbatches, since more rows may take another kernel


def is_refused(read):
    try:
        read()
    except ps.MismatchError as error:
        assert str(error).startswith("a pipeline has trained this Sequential")  # noqa: PT017
        return True
    return False


def rank_loads_and_trains(path):
    results = []
    for number, layer in enumerate((lambda: nn.Linear(4, 4), WithTable)):
        model, pipe, train = trained_model(layer)
        train()
        results.append(is_refused(lambda model=model: model(X)))
        for turn in range(2):
            output = load(model, pipe, f"{path}/{number}{turn}.safetensors")
            results.append(is_refused(lambda model=model: model(X)))
            evaluated = pipe.gather(lambda pipe=pipe: None, "to wait") and pipe.eval(X)
            assert evaluated is None or torch.equal(output, evaluated)
            train()
            results.append(is_refused(lambda model=model: model(X)))
            results.append(is_refused(lambda model=model: [parameter.sum() for parameter in model.parameters()]))
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        train()
        results.append(is_refused(lambda model=model: model(X)))
    return results


@pytest.mark.ranks
def test_a_model_is_refused_again_after_each_step_and_can_be_read_once_it_is_loaded(tmp_path):
    expected = [True, False, True, True, False, True, True, True] * 2
    assert on_ranks(rank_loads_and_trains, 2, str(tmp_path)) == [expected] * 2


def reads_of_data(weight):
    return [
        lambda: weight.data.sum(),
        lambda: weight.data.numpy(),
        lambda: repr(weight.data),
        lambda: copy.deepcopy(weight.data),
        lambda: pickle.dumps(weight.data),
        lambda: torch.distributed.all_reduce(weight.data),
        lambda: torch.zeros(4).copy_(weight.data),
    ]


def rank_writes_data():
    results = []
    for has_optimizer_step in (False, True):
        model, pipe, train = trained_model(lambda: nn.Linear(4, 4))
        train() if has_optimizer_step else pipe.step(X, target=X)
        for layer in model:  # on rank 0 its own weights have changed before the others are written
            layer.weight.data.zero_()
            layer.bias.data.clamp_(-0.1, 0.1)
            layer.weight.data[0] = 1
        train()
        weight = model[3 - 3 * pipe.topology.rank].bias  # of the other rank
        results.append(list(map(is_refused, reads_of_data(weight))))
        weight.data.copy_(torch.arange(4.0))
        results.append([weight.data.sum().item(), type(pickle.loads(pickle.dumps(weight.data)))])
    return results


@pytest.mark.ranks
def test_data_of_all_parameters_may_be_written_on_every_rank_and_is_refused_where_it_is_read():
    assert on_ranks(rank_writes_data, 2) == [[[True] * 7, [6.0, torch.Tensor]] * 2] * 2
