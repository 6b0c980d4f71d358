"""Folders of torch.distributed.checkpoint that are damaged or hostile: refused in a sentence, and nothing of them is run."""

import io
import os
import pickle
import pickletools
import random
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import penstock as ps
from penstock import checkpoint
from penstock.checkpoint.files.dcp_files import DcpFiles
from penstock.checkpoint.files.pickled import parse_pickle


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that torch has written."""
    folder = tmp_path_factory.mktemp("saved") / "torch"
    model, optimizer = make()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture(autouse=True)
def nothing_is_unpickled(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    """Fail if anything is unpickled, by whatever name."""

    def fail(*_: Any, **__: Any) -> Any:
        raise SystemExit("something was unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, fail)


def read_all(folder: Path) -> dict[str, Any]:
    files = DcpFiles(folder)
    return {name: files.tensor(name) for name in files.tensors} | {name: files.value(name) for name in files.values}


def refused(folder: Path, *texts: str) -> None:
    """Importing `folder` raises one sentence with all `texts`, and changes nothing."""
    model, _ = make()
    pipe = ps.Pipeline(model, nn.functional.mse_loss, microbatches=1)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.5)
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    with pytest.raises(ps.MismatchError) as error:
        checkpoint.import_weights(pipe, folder, optimizer)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    assert all(text in str(error.value) for text in texts), str(error.value)
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.5


class Call:
    """Pickled, it is a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def test_what_torch_wrote_is_read_to_the_bit(saved: Path) -> None:
    found = read_all(saved)
    model, _ = make()
    assert found["optimizer.param_groups.0.weight.betas"] == (0.9, 0.999)
    assert found["optimizer.param_groups.2.bias.foreach"] is None
    assert found["optimizer.state.0.weight.step"] == 1
    assert {name for name in found if name.startswith("model.")} == {f"model.{name}" for name, _ in model.named_parameters()}
    assert all(isinstance(value, torch.Tensor) for name, value in found.items() if ".exp_avg" in name)


@pytest.mark.parametrize(
    "function", [os.system, eval, exec, os.mkdir, torch.load, getattr, __import__], ids=lambda f: f.__name__
)
def test_a_metadata_file_that_calls_is_refused_by_the_name_and_not_run(copy: Path, function: Any, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    for protocol in (2, 4, 5):
        metadata = pickle.dumps(Call(function, f"touch {trace}"), protocol)
        (copy / ".metadata").write_bytes(metadata)
        refused(copy, ".metadata is no file of torch.distributed.checkpoint, or is damaged: it names ", function.__name__)
    assert not trace.exists()


def test_a_tensor_file_that_calls_is_refused_and_not_run(copy: Path, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    metadata = DcpFiles(copy)
    location = metadata.tensors["model.0.weight"].chunks[0][2]
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as entries:
        entries.writestr("archive/data.pkl", pickle.dumps(Call(os.mkdir, str(trace)), 2))
    replace(location.file, location, archive.getvalue())
    refused(copy, "it names 'posix.mkdir', which has no place there: nothing of it was run")
    assert not trace.exists()


def replace(path: Path, location: Any, archive: bytes) -> None:
    """Put `archive` in the place of another one, which is not shorter; a zip archive is found from its end."""
    data = bytearray(path.read_bytes())
    data[location.offset : location.offset + location.length] = archive.rjust(location.length, b"\0")
    path.write_bytes(data)


BOMBS: dict[str, tuple[bytes, str]] = {
    "a memo of 2^32": (b"\x80\x04Nr\xff\xff\xff\xff.", "something else where a Metadata belongs"),
    "a text of 2^60 bytes": (b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"x.", "it ends in the middle of a value"),
    "bytes of 2^60": (b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"x.", "which no plain value needs"),
    "a list of lists": (b"\x80\x04" + b"]" * 100_000 + b".", "more objects than it has room to describe"),
    "tuples of tuples of tuples": (b"\x80\x04)" + b"2\x86" * 90 + b".", "which no plain value needs"),
    "the same twice, 90 times": (
        b"\x80\x04K\x01" + b"".join(b"q%c0h%ch%c\x86" % (n, n, n) for n in range(90)) + b".",
        "something else where a Metadata belongs",
    ),
    "keys that take for ever to hash": (
        b"\x80\x04}K\x01" + b"".join(b"q%c0h%ch%c\x86" % (n, n, n) for n in range(90)) + b"K\x02s.",
        "something else where a Metadata belongs",
    ),
    "no end": (b"\x80\x04" + b"K\x01", "it has no end"),
    "nothing": (b"", "it has no end"),
    "marks": (b"\x80\x04" + b"(" * 1000 + b"0.", "it takes a value that is not there"),
    "a persistent id": (b"\x80\x04K\x01Q.", "something else where a Metadata belongs"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_that_would_take_memory_or_time_is_refused_at_once(copy: Path, name: str) -> None:
    data, reason = BOMBS[name]
    (copy / ".metadata").write_bytes(data)
    refused(copy, reason)


def changed_metadata(copy: Path, change: Callable[[Any], None]) -> None:
    metadata = UNPICKLE((copy / ".metadata").read_bytes())
    change(metadata)
    (copy / ".metadata").write_bytes(pickle.dumps(metadata, 4))


UNPICKLE = pickle.loads  # before it is forbidden


def set_location(**values: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == "model.0.weight")
        for name, value in values.items():
            setattr(metadata.storage_data[index], name, value)

    return change


def set_chunks(*chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["model.0.weight"]
        index = next(index for index in metadata.storage_data if index.fqn == "model.0.weight")
        entry.chunks = [dcp.metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
        for offsets, _ in chunks:
            metadata.storage_data[dcp.metadata.MetadataIndex(index.fqn, offsets)] = metadata.storage_data[index]

    return change


def set_size(name: str, *size: int) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata[name]
        entry.size = entry.chunks[0].sizes = torch.Size(size)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_location(relative_path="../outside"), "it names a file that is not beside it"),
        (set_location(relative_path="/etc/passwd"), "it names a file that is not beside it"),
        (set_location(relative_path="gone.distcp"), "gone.distcp cannot be read: No such file"),
        (set_location(transform_descriptors=["zstd"]), "compressed or encrypted by an extension"),
        (set_location(offset=10**9), "it ends before what is in it"),
        (set_location(offset=-1), "something else where a size belongs"),
        (set_location(length=8), "a chunk that is larger than its place"),
        (set_location(offset=3), "is no file of torch.distributed.checkpoint, or is damaged"),
        (set_chunks(((0, 0), (4, 4))), "chunks that are not the whole of their tensor"),
        (set_chunks(((0, 0), (4, 4)), ((2, 0), (4, 4))), "chunks that overlap"),
        (set_chunks(((6, 0), (8, 4))), "a chunk outside of its tensor"),
        (set_chunks(((0, 0), (4, 4)), ((4, 0), (4, 4))), "where .metadata has another"),
        (set_size("model.0.weight", 8, 5), "1 of another shape (0.weight)"),
        (set_size("optimizer.state.0.weight.exp_avg", 2**20, 2**20), "a chunk that is larger than its place"),
        (set_size("optimizer.state.0.weight.exp_avg", 1), "a chunk outside of its tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_metadata_that_contradicts_its_files_is_refused(copy: Path, change: Any, reason: str) -> None:
    changed_metadata(copy, change)
    refused(copy, reason)


def test_links_pipes_and_folders_in_place_of_files_are_refused(copy: Path, tmp_path: Path) -> None:
    (file,) = copy.glob("*.distcp")
    moved = file.rename(tmp_path / "elsewhere")
    file.symlink_to(moved)
    refused(copy, "it is a link, not a file")
    file.unlink()
    os.mkfifo(file)
    refused(copy, "it is a pipe, not a file")
    (copy / ".metadata").unlink()
    (copy / ".metadata").mkdir()
    refused(copy, "it is a folder, not a file")


def test_a_compressed_entry_is_refused(copy: Path) -> None:
    location = DcpFiles(copy).values["optimizer.param_groups.0.weight.lr"]
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as entries:
        entries.writestr("archive/data.pkl", b"\x80\x02" + b"0" * 100_000)
    replace(location.file, location, archive.getvalue())
    refused(copy, "an entry that is compressed")


def mutations(data: bytes, seed: int) -> bytes:
    """Return `data` with a few bytes, or a piece, changed."""
    draw, changed = random.Random(seed), bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        place = draw.randrange(len(changed))
        kind = draw.randrange(5)
        if kind == 0:
            changed[place] = draw.randrange(256)
        elif kind == 1:
            changed[place] ^= 1 << draw.randrange(8)
        elif kind == 2:
            del changed[place : place + draw.choice((1, 4, 100))]
        elif kind == 3:
            other = draw.randrange(len(changed))
            changed[place:place] = changed[other : other + draw.choice((1, 4, 40))]
        else:
            changed[place : place + 1] = draw.choice(OPCODES)
        if not changed:
            return b""
    return bytes(changed)


OPCODES = [code.code.encode("latin-1") for code in pickletools.opcodes]


@pytest.mark.costly
@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=pytest.mark.slow)])
def test_changed_bytes_are_a_sentence_or_other_values_and_nothing_else(copy: Path, count: int) -> None:
    sentences = 0
    (tensors,) = copy.glob("*.distcp")
    originals = {path: path.read_bytes() for path in (copy / ".metadata", tensors)}
    for seed in range(count):
        path = (copy / ".metadata", tensors)[seed % 3 == 2]
        path.write_bytes(mutations(originals[path], seed))
        try:
            read_all(copy)
        except ps.MismatchError as error:
            sentences += str(error).startswith(str(copy))
        path.write_bytes(originals[path])
    assert sentences > count / 3


def random_pickles(seed: int) -> Iterator[bytes]:
    draw = random.Random(seed)
    for _ in range(20):
        yield b"".join(draw.choice(OPCODES) + draw.randbytes(draw.randrange(3)) for _ in range(draw.randrange(60))) + b"."


@pytest.mark.parametrize("count", [50, pytest.param(2_000, marks=pytest.mark.slow)])
def test_random_programs_end_in_a_value_or_a_sentence(count: int) -> None:
    for seed in range(count):
        for data in random_pickles(seed):
            try:
                parse_pickle(data, {"torch.Size"})
            except ValueError:
                continue
