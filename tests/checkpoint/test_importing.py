"""Weights from elsewhere: one file, an index or a folder; what does not fit is told before anything changes."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_saving import holds, pipeline
from torch import nn

import penstock as ps
from penstock import checkpoint
from penstock.checkpoint.files.tensor_files import TensorFiles

FIRST, SECOND, INDEX = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"


def write(folder, first, second):
    """Two files of tensors, and their index."""
    save_file(first, folder / FIRST)
    save_file(second, folder / SECOND)
    homes = dict.fromkeys(first, FIRST) | dict.fromkeys(second, SECOND)
    (folder / INDEX).write_text(json.dumps({"weight_map": homes}))


def halves(value):
    state = pipeline(value).state_dict()
    return [{name: value for name, value in state.items() if (name[0] in "01") == first} for first in (True, False)]


def rank_imports(folder, unfit):
    opened, begin = [], TensorFiles.__init__
    TensorFiles.__init__ = lambda self, *paths: [opened.extend(path.name for path in paths), begin(self, *paths)][1]
    pipe = pipeline()
    checkpoint.import_weights(pipe, folder)
    TensorFiles.__init__ = begin
    errors = []
    for strict in (True, False):
        with pytest.raises(ps.MismatchError) as caught:
            checkpoint.import_weights(pipe, unfit, strict=strict)
        errors.append(str(caught.value))
    assert holds(pipe, 3)
    return opened, errors


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_open_the_files_of_their_own_tensors_and_all_tell_what_does_not_fit_on_any(tmp_path):
    unfit = tmp_path / "unfit"
    unfit.mkdir()
    first, second = halves(3)
    write(tmp_path, first, second)
    write(unfit, {"0.weight": torch.zeros(2, 2)}, {"surplus": torch.zeros(1), **second})
    everyone = ps.launch(rank_imports, 3, tmp_path, unfit)
    assert [opened for opened, _ in everyone] == [[FIRST], [SECOND], [SECOND]]
    message = "6 missing (0.bias, 1.weight, 1.bias, ..); 1 unknown (surplus); 1 of another shape (0.weight)"
    assert [errors for _, errors in everyone] == [[f"{unfit} does not fit this model: {message}"] * 2] * 3


def test_without_strict_what_is_missing_stays_and_is_told(tmp_path):
    first, second = halves(3)
    write(tmp_path, first, {"surplus": torch.zeros(1)})
    pipe = pipeline(1)
    with pytest.warns(UserWarning, match=r"4 missing \(3\.weight, .*1 unknown \(surplus\); what is missing stays"):
        checkpoint.import_weights(pipe, tmp_path / INDEX, strict=False)
    state = pipe.state_dict()
    assert all(bool((state[name] == 3).all()) for name in ("0.weight", "1.bias"))
    assert all(bool((state[name] == 1).all()) for name in second)


@pytest.mark.parametrize("ours", ["model.", ""])
def test_names_that_differ_in_front_are_told_with_what_to_do(tmp_path, ours):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state = {f"{'' if ours else 'model.'}{name}": value + 1 for name, value in model.state_dict().items()}
    save_file(state, tmp_path / "it.safetensors")
    wrapped = nn.Sequential()
    wrapped.add_module("model", model)
    pipe = ps.Pipeline(wrapped if ours else model, nn.functional.mse_loss)
    way = "'model.' + name" if ours else "name.removeprefix('model.')"
    with pytest.raises(ps.MismatchError, match=rf"4 missing .*give rename=lambda name: {re.escape(way)}"):
        checkpoint.import_weights(pipe, tmp_path / "it.safetensors")
    rename = (lambda name: "model." + name) if ours else (lambda name: name.removeprefix("model."))
    checkpoint.import_weights(pipe, tmp_path / "it.safetensors", rename=rename)
    assert all(torch.equal(pipe.state_dict()[rename(name)], value) for name, value in state.items())


def header(text, data=b""):
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no safetensors file"),
        (b"PK\x03\x04 a pickle of torch", "is no safetensors file"),
        (header(b"not JSON"), "is no safetensors file"),
        (header(b'{"0.weight": {"dtype": "F32", "shape": [8, 8], "data_offsets": [0, 256]}}', bytes(255)), "is no safetensors"),
        (
            header(b'{"0.weight": {"dtype": "F32", "shape": [-8, -8], "data_offsets": [0, 256]}}', bytes(256)),
            "is no safetensors",
        ),
        (
            header(b'{"0.weight": {"dtype": "F32", "shape": [8, 8], "data_offsets": [-4, 252]}}', bytes(256)),
            "is no safetensors",
        ),
        (header(b'{"0.weight": 3}'), "is no safetensors file"),
    ],
)
def test_a_file_that_is_damaged_or_none_is_refused_in_a_sentence(tmp_path, content, message):
    (tmp_path / "it.safetensors").write_bytes(content)
    with pytest.raises(ps.MismatchError, match=rf"it\.safetensors {message}"):
        checkpoint.import_weights(pipeline(), tmp_path / "it.safetensors")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"0.weight": "../secret.safetensors"}}, "names '../secret.safetensors', but an index may only name"),
        ({"weight_map": {"0.weight": "/etc/passwd"}}, "names '/etc/passwd', but an index may only name"),
        ({"weight_map": {"0.weight": ".."}}, r"names '\.\.', but an index may only name"),
        ({"weight_map": {"0.weight": FIRST, "4.bias": FIRST}}, "does not have 4.bias, which is in it by its index"),
        ({"weight_map": {"0.weight": "gone.safetensors"}}, "gone.safetensors cannot be read: No such file"),
        ({}, "is no index of safetensors files, or is damaged"),
        ([], "is no index of safetensors files, or is damaged"),
        (None, "has neither model.safetensors nor model.safetensors.index.json nor .metadata in it"),
    ],
)
def test_an_index_that_is_not_to_be_trusted_is_refused_in_a_sentence(tmp_path, index, message):
    write(tmp_path, *halves(3))
    (tmp_path / INDEX).unlink()
    if index is not None:
        (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ps.MismatchError, match=message):
        checkpoint.import_weights(pipeline(), tmp_path)


def test_a_folder_is_exported_over_what_was_there_and_leaves_other_files_alone(tmp_path):
    out = tmp_path / "out"
    pipe = pipeline(3)
    checkpoint.export(pipe, out, max_shard_size=300)
    assert len(list(out.glob("model-*"))) > 1
    (out / "tokenizer.json").write_text("{}")
    set_files = {path.name for path in out.iterdir()}
    checkpoint.export(pipe, out, max_shard_size="0.3 KB")
    assert {path.name for path in out.iterdir()} == set_files
    checkpoint.export(pipe, out)
    assert sorted(path.name for path in out.iterdir()) == ["model.safetensors", "tokenizer.json"]
    assert load_file(out / "model.safetensors").keys() == pipe.state_dict().keys()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    for size in ("5 apples", "1.2.3GB"):
        with pytest.raises(ps.PenstockError, match=f"max_shard_size='{size}' is no size: give a number of bytes"):
            checkpoint.export(pipe, out, max_shard_size=size)


def test_two_names_that_would_be_one_are_refused(tmp_path):
    state, file = pipeline(1).state_dict(), tmp_path / "both.safetensors"
    save_file({f"{copy}.{name}": value.clone() for copy in ("model", "average") for name, value in state.items()}, file)
    with pytest.raises(ps.MismatchError, match=r"rename= gives \w+\.\S+ and \w+\.\S+ one name"):
        checkpoint.import_weights(pipeline(), file, rename=lambda name: name.partition(".")[2])
