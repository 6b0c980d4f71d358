"""Files that somebody else wrote, or that are none: a sentence, no change, nothing outside the folder touched, no wait."""

import json
import os
import shutil
import socket
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import penstock as ps
from penstock import checkpoint
from penstock.checkpoint.files import manifest, schema
from penstock.checkpoint.files.disk import DamagedFileError
from penstock.checkpoint.files.tensor_files import TensorFiles

pytestmark = pytest.mark.slow

STEPS = 1, 2
NEWEST = "step-00000002"


class CheckpointedRun:
    """A pipeline of one process with all that a checkpoint keeps."""

    def __init__(self, fill):
        torch.manual_seed(1)
        self.pipe = ps.Pipeline(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.functional.mse_loss, "gpipe", 2)
        self.optimizer = torch.optim.Adam(self.pipe.parameters())
        self.rate = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        for _ in range(2):
            self.pipe.step(torch.randn(4, 2) * fill, target=torch.zeros(4, 2))
            self.optimizer.step()
            self.rate.step()
        self.given = self.pipe, self.optimizer, self.rate

    def state(self):
        """All of it, as values that can be compared."""
        tensors = {**self.pipe.state_dict(), "random": torch.get_rng_state()}
        for number, (parameter, item) in enumerate(self.optimizer.state.items()):
            tensors |= {f"{number}.{key}": value for key, value in item.items()} | {f"{number}": parameter}
        options = [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]
        bits = {name: value.detach().clone() for name, value in tensors.items()}
        return bits, repr((options, self.rate.state_dict(), self.pipe.step_count))


def same(one, other):
    return (
        one[1] == other[1]
        and one[0].keys() == other[0].keys()
        and all(torch.equal(one[0][key], other[0][key]) for key in one[0])
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "run"
    run = CheckpointedRun(1.0)
    for step in STEPS:
        run.pipe.step_count = step
        checkpoint.save(folder, *run.given, extra={"epoch": step, "seen": {1: torch.ones(2)}, "betas": (1, 2.5)})
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def rewritten(folder, change):
    """The manifest of `folder` changed as by somebody who knows how its hash is made."""
    content = json.loads((folder / "manifest.json").read_bytes())
    del content["sha256"]
    content = change(content) or content
    (folder / "manifest.json").write_bytes(manifest._encode(content))


def passed_over(folder, *message):
    """`resume` takes the checkpoint before, and says why in a sentence."""
    run = CheckpointedRun(2.0)
    with pytest.warns(UserWarning, match="is passed over") as caught:
        checkpoint.resume(folder, *run.given)
    assert run.pipe.step_count == 1
    (text,) = {str(warning.message) for warning in caught}
    assert all(value in text for value in message), text
    assert "\n" not in text
    refused(folder / NEWEST, *message)


def refused(folder, *message):
    run = CheckpointedRun(2.0)
    before = run.state()
    with pytest.raises(ps.MismatchError) as caught:
        checkpoint.resume(folder, *run.given)
    assert all(value in str(caught.value) for value in message), str(caught.value)
    assert same(run.state(), before)


# ---- manifests


def without(*path):
    def change(content):
        *before, last = path
        for key in before:
            content = content[key]
        del content[last]

    return change


def with_(value, *path):
    def change(content):
        *before, last = path
        for key in before:
            content = content[key]
        content[last] = value

    return change


FILE = {"bytes": 5, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("step"), "it has no 'step'"),
        (with_("2", "step"), "it.step is '2', not a whole number"),
        (with_(-2, "step"), "it.step is -2"),
        (with_(True, "step"), "it.step is True"),
        (with_({"kind": 1}, "optimizers", 0), "it.optimizers.0.kind is 1, not a text"),
        (with_({"pickle": "gASV"}, "extra"), "it.extra is no dict or items"),
        (with_({"dict": {"epoch": {"pickle": "gASV"}}}, "extra"), "it.extra.epoch is an object of a kind that is not known"),
        (with_({"dict": {"epoch": {"tensor": "nowhere"}}}, "extra"), "has no tensor 'nowhere'"),
        (with_({"items": [[["a list"], 1]]}, "extra"), "it.extra is no list of pairs"),
        (with_({"0.weight": "1.nothing"}, "aliases"), "has no '1.nothing'"),
        (with_(FILE, "files", "../../outside.safetensors"), "'../../outside.safetensors', not the plain name"),
        (with_(FILE, "files", "/etc/passwd.safetensors"), "'/etc/passwd.safetensors', not the plain name"),
        (with_(FILE, "files", "a\0b.safetensors"), "not the plain name"),
        (with_(FILE, "files", "manifest.json"), "not the plain name"),
        (with_({"../../outside.json": {}}, "settings"), "not config.json or generation_config.json"),
        (with_([], "random"), "no generator takes"),
        (with_([{"dict": {}}], "random"), "no generator takes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_manifest_that_says_something_else_is_passed_over_and_its_place_named(copy, change, message):
    rewritten(copy / NEWEST, change)
    passed_over(copy, NEWEST, message)


def nested(depth):
    value = {"dict": {"epoch": 2}}
    for _ in range(depth):
        value = {"dict": {"next": value}}
    return value


def test_a_manifest_that_is_deep_or_long_is_refused(copy, monkeypatch):
    rewritten(copy / NEWEST, with_(nested(150), "extra"))
    passed_over(copy, "more than 100 lists or dicts deep")
    (copy / NEWEST / "manifest.json").write_bytes(b"[" * 10**6)
    passed_over(copy, "manifest.json is damaged")
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 100)
    refused(copy, "manifest.json is damaged")


def test_state_that_could_not_be_read_again_is_not_saved(tmp_path):
    deep = {}
    for _ in range(150):
        deep = {"next": deep}
    with pytest.raises(ps.MismatchError, match=r"cannot keep this state: .* more than 100 lists or dicts deep"):
        checkpoint.save(tmp_path, CheckpointedRun(1.0).pipe, extra=deep)
    assert [path.name for path in tmp_path.iterdir()] == [".writer"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_("fast", "optimizers", 0, "groups", 0, "options", "dict", "lr"), "has lr 0.001, but 'fast' in the checkpoint"),
        (with_([], "optimizers", 0, "groups", 0, "options", "dict", "params"), "cannot have params"),
        (with_("many", "schedulers", 0, "dict", "last_epoch"), "has last_epoch 2, but 'many'"),
        (with_(3, "schedulers", 0, "dict", "step"), "has step, which are no state of a StepLR"),
        (with_(3, "schedulers", 0, "dict", "optimizer"), "has optimizer, which are no state"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_state_that_this_training_cannot_take_is_refused_before_anything_changes(copy, change, message):
    rewritten(copy / NEWEST, change)
    refused(copy / NEWEST, message)


class Stubborn(torch.optim.Adam):
    def load_state_dict(self, state):
        super().load_state_dict(state)
        raise KeyError("not this")


def test_an_optimizer_that_refuses_its_state_has_what_it_had(saved):
    run = CheckpointedRun(2.0)
    run.optimizer = Stubborn(run.pipe.parameters())
    run.optimizer.__class__.__name__ = "Adam"
    before = run.state()
    with pytest.raises(ps.MismatchError, match="holds a state that cannot be loaded: KeyError: 'not this'"):
        checkpoint.resume(saved, run.pipe, run.optimizer)
    assert same(run.state(), before)


# ---- what is no file


def fifo(path, outside):
    os.mkfifo(path)


def folder(path, outside):
    path.mkdir()


def link(path, outside):
    path.symlink_to(outside)


def a_socket(path, outside):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


KINDS = [(fifo, "it is a pipe, not a file"), (folder, "it is a folder, not a file"), (link, "it is a link, not a file")]
KINDS += [(a_socket, "it is a socket, not a file")]


@pytest.mark.parametrize("name", ["manifest.json", "shard-00001-model-00001-of-00001.safetensors"])
@pytest.mark.parametrize(("make", "message"), KINDS)
def test_what_is_no_file_is_passed_over_without_waiting(copy, name, make, message, monkeypatch):
    path, outside = copy / NEWEST / name, copy.parent / "outside"
    path.rename(outside)  # right in every byte
    monkeypatch.chdir(copy)
    make(path, outside)
    passed_over(copy, str(path), message)


@pytest.mark.parametrize(("make", "expected_message"), [kind for kind in KINDS if kind[0] is not link])
def test_weights_of_others_may_be_links_but_must_be_files(copy, make, expected_message, monkeypatch):
    pipe = CheckpointedRun(1.0).pipe
    checkpoint.export(pipe, copy / "blob.safetensors")
    (copy / "model.safetensors").symlink_to("blob.safetensors")
    checkpoint.import_weights(pipe, copy)
    monkeypatch.chdir(copy)
    (copy / "hub").mkdir()
    for name in ("model.safetensors", "model.safetensors.index.json"):
        make(copy / "hub" / name, copy)
        expected_message = "has neither" if make is folder else expected_message
        with pytest.raises(ps.MismatchError, match=expected_message):
            checkpoint.import_weights(pipe, copy / "hub" / name)
    (copy / "index.json").write_text(json.dumps({"weight_map": {"0.weight": "../blob.safetensors"}}))
    with pytest.raises(ps.MismatchError, match="may only name safetensors files beside it"):
        checkpoint.import_weights(pipe, copy / "index.json")


def test_a_link_among_the_steps_is_passed_over(copy):
    (copy / NEWEST).rename(copy.parent / "elsewhere")
    (copy / NEWEST).symlink_to(copy.parent / "elsewhere")
    run = CheckpointedRun(2.0)
    with pytest.warns(UserWarning, match="step-00000002 is a link, and a checkpoint is a folder"):
        checkpoint.resume(copy, *run.given)
    assert run.pipe.step_count == 1
    checkpoint.resume(copy / NEWEST, *run.given)  # who gives the link means it
    assert run.pipe.step_count == 2


def test_left_overs_that_are_links_or_files_are_deleted_and_not_what_they_lead_to(copy):
    outside = copy.parent / "precious"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    (copy / ".step-00000001.part").symlink_to(outside)
    (copy / ".step-00000003.part").symlink_to(outside)
    (copy / ".step-00000002.old").symlink_to(outside)
    (copy / ".step-00000004.part").write_text("a file")
    os.mkfifo(copy / ".step-00000005.part")
    (copy / "step-00000003").symlink_to(outside)
    (copy / "step-00000000").symlink_to(outside)
    run = CheckpointedRun(2.0)
    run.pipe.step_count = 3
    checkpoint.save(copy, *run.given, keep=2)
    assert sorted(path.name for path in copy.iterdir()) == [".writer", NEWEST, "step-00000003"]
    assert [path.read_text() for path in outside.iterdir()] == ["kept"]


# ---- fuzz

KEYS = st.sampled_from(["tensor", "tuple", "dict", "items", "x"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda value: st.lists(value, max_size=3) | st.dictionaries(KEYS, value, max_size=2),
    max_leaves=5,
)


def places(value, path=()):
    """Every place in a manifest."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*path, key)
        yield from places(part, (*path, key))


def outcome(run, folder):
    """Resume: done, or refused in a sentence with every bit as it was."""
    before = run.state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            checkpoint.resume(folder, *run.given)
            CheckpointedRun.__init__(run, 2.0)  # it may hold anything now: a hash is no signature
            return
        except ps.MismatchError:
            pass
    assert same(run.state(), before)


@pytest.fixture(scope="module")
def fuzzed(saved, tmp_path_factory):
    """A checkpoint to spoil, what its files held, and a run to resume; what is beside it must stay as it is."""
    around = tmp_path_factory.mktemp("fuzz")
    shutil.copytree(saved / NEWEST, around / "run" / NEWEST)
    (around / "outside.safetensors").write_text("outside")
    content = json.loads((around / "run" / NEWEST / "manifest.json").read_bytes())
    del content["sha256"]
    (tensors,) = (around / "run" / NEWEST).glob("*.safetensors")
    yield around / "run" / NEWEST, content, tensors, tensors.read_bytes(), CheckpointedRun(2.0)
    assert sorted(path.name for path in around.iterdir()) == ["outside.safetensors", "run"]
    assert (around / "outside.safetensors").read_text() == "outside"


BOUNDED = settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@BOUNDED
@given(data=st.data())
def test_no_manifest_makes_resume_raise_anything_else_or_change_anything(fuzzed, data):
    folder, content, tensors, whole, run = fuzzed
    tensors.write_bytes(whole)
    content = json.loads(json.dumps(content))
    every = list(places(content))
    top = [path for path in every if len(path) < 3]
    for _ in range(data.draw(st.integers(1, 2))):
        *before, last = data.draw(st.sampled_from(top) | st.sampled_from(every))
        part = content
        try:
            for key in before:
                part = part[key]
            if data.draw(st.booleans()):
                del part[last]
            else:
                part[last] = data.draw(JSON)
        except (KeyError, IndexError, TypeError):  # the first change took it away
            continue
    try:
        (folder / "manifest.json").write_bytes(manifest._encode(content))
    except UnicodeEncodeError:
        return
    outcome(run, folder)


@BOUNDED
@given(data=st.data())
def test_no_tensor_file_makes_resume_raise_anything_else_or_change_anything(fuzzed, data):
    folder, content, tensors, whole, run = fuzzed
    spoilt = bytearray(whole)
    end = 8 + int.from_bytes(spoilt[:8], "little")
    how = data.draw(st.sampled_from(["header", "bytes", "cut"]))
    if how == "header":
        header = json.loads(spoilt[8:end])
        *before, last = data.draw(st.sampled_from(list(places(header))))
        part = header
        for key in before:
            part = part[key]
        part[last] = data.draw(JSON)
        text = json.dumps(header).encode()
        spoilt[:end] = len(text).to_bytes(8, "little") + text
    elif how == "bytes":
        for at in data.draw(st.lists(st.integers(0, end - 1), min_size=1, max_size=4)):
            spoilt[at] = data.draw(st.integers(0, 255))
    else:
        spoilt = spoilt[: data.draw(st.integers(0, len(spoilt)))]
    tensors.write_bytes(spoilt)
    files = {tensors.name: manifest.file_entry(tensors)}
    (folder / "manifest.json").write_bytes(manifest._encode({**content, "files": files}))
    outcome(run, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for file in TensorFiles(tensors).values():
                file.numel()
        except DamagedFileError:
            pass


def test_what_a_checkpoint_of_ours_says_is_what_a_manifest_may_say(saved):
    content = json.loads((saved / NEWEST / "manifest.json").read_bytes())
    assert {"optimizer.0.weight.exp_avg", "random.0.torch"} <= set(schema.validate_and_list_tensors(content))
