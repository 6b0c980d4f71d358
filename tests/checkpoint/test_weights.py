"""One safetensors file: the uncut model's, out of any cut and into any."""

import pytest
import torch
from reference import assert_same, merged
from runners import on_ranks
from safetensors.torch import load_file, save_file
from test_saving import holds, pipeline
from torch import nn

import penstock as ps
from penstock import checkpoint
from penstock.checkpoint.files.tensor_files import TensorFiles

pytestmark = pytest.mark.ranks


def rank_export(path):
    pipe = pipeline()
    for number, parameter in enumerate(pipe.parameters()):
        nn.init.normal_(parameter, std=1 + number + 10 * pipe.topology.rank)
    checkpoint.export(pipe, path)
    return pipe.state_dict()


def rank_import(path):
    names, mapped = [], TensorFiles.mapped_tensor
    TensorFiles.mapped_tensor = lambda self, name: [names.append(name), mapped(self, name)][1]
    pipe = pipeline()
    checkpoint.import_weights(pipe, path)
    TensorFiles.mapped_tensor = mapped
    return pipe.state_dict(), names


def test_one_file_holds_the_uncut_model_and_each_rank_reads_its_own_part_of_one(tmp_path):
    path = tmp_path / "deep" / "model.safetensors"
    path.parent.mkdir()
    whole = merged(on_ranks(rank_export, 2, path))
    assert [value.name for value in path.parent.iterdir()] == ["model.safetensors"]
    loaded = load_file(path)
    assert_same(loaded, whole)
    nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2)).load_state_dict(loaded)
    parts = on_ranks(rank_import, 3, path)
    assert_same(merged([state for state, _ in parts]), whole)
    assert [names for _, names in parts] == [list(state) for state, _ in parts]
    assert sum(len(names) for _, names in parts) == len(whole)

    save_file({"0.weight": torch.zeros(2), "surplus": torch.zeros(1)}, path)
    pipe = pipeline(0.5)
    with pytest.raises(ps.MismatchError, match=r"10 missing .*1 unknown \(surplus\); 1 of another shape \(0\.weight\)"):
        checkpoint.import_weights(pipe, path)
    assert holds(pipe, 0.5)
    with pytest.raises(ps.MismatchError, match="nowhere"):
        checkpoint.import_weights(pipe, tmp_path / "nowhere.safetensors")
