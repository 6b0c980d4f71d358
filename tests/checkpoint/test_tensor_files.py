"""Tensors in safetensors files: every dtype and layout, by whomever the files were written, and without numpy."""

import resource
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from test_saving import holds, pipeline
from torch import nn

import penstock as ps
from penstock import checkpoint
from penstock.checkpoint.files import manifest, tensor_files


def bits(tensor):
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def tensors():
    torch.manual_seed(0)
    base, wave = torch.randn(10), torch.randn(4, dtype=torch.complex64)
    each_dtype = {name: torch.randint(0, 2, (3, 5)).to(dtype) for dtype, name in tensor_files.DTYPES.items()}
    views = {"transposed": torch.randn(3, 4).T, "expanded": base.expand(3, 10), "every other": base[::2]}
    shared = {"a": base[:5], "b": base[3:], "conjugate": wave.conj(), "negative": wave.conj().imag}
    return each_dtype | views | shared | {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5), "1": nn.Parameter(base)}


def test_every_dtype_and_layout_comes_back_and_the_library_reads_it_too(tmp_path):
    (name,) = tensor_files.write_shards(tmp_path, 0, tensors())
    files, theirs = tensor_files.TensorFiles(tmp_path), load_file(tmp_path / name)
    assert set(files) == files.shapes.keys() == tensors().keys()
    for name, expected in tensors().items():
        for ours in (files[name], files.mapped_tensor(name), theirs.get(name, files[name])):
            assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape), name
            assert torch.equal(bits(ours), bits(expected)), name
        assert files.mapped_tensor(name).data_ptr() % expected.itemsize == 0, name
    assert len(theirs) == len(files)


def test_what_the_format_does_not_know_is_refused(tmp_path):
    with pytest.raises(ps.MismatchError, match=r"wave is torch\.complex128, which safetensors files cannot hold"):
        tensor_files.write_shards(tmp_path, 0, {"wave": torch.zeros(2, dtype=torch.complex128)})


def test_files_are_not_much_larger_than_they_should_be(tmp_path):
    many = {str(number): torch.full((10,), float(number)) for number in range(5)} | {"large": torch.zeros(100)}
    names = list(tensor_files.write_shards(tmp_path, 2, many, max_shard_bytes=100))
    assert names == [f"shard-00003-model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    assert [len(load_file(tmp_path / name)) for name in names] == [2, 2, 1, 1]
    files = tensor_files.TensorFiles(tmp_path)
    assert all(torch.equal(files[name], value) for name, value in many.items())
    assert tensor_files.write_shards(tmp_path, 3, {}) == {}


def test_what_is_read_stays_when_the_file_goes(tmp_path):
    tensor_files.write_shards(tmp_path, 0, {"it": torch.ones(3)})
    ours = tensor_files.TensorFiles(tmp_path)["it"]
    for path in tmp_path.iterdir():
        path.write_bytes(b"\xff" * path.stat().st_size)
    assert ours.tolist() == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_whose_files_torch_has_written_is_resumed(tmp_path):
    """As Penstock had it do until this year: the same names, and a note of torch's own in every header."""
    from torch.distributed import checkpoint as theirs

    pipe = pipeline(3)
    optimizer = torch.optim.Adam(pipe.parameters())
    pipe.step(torch.randn(4, 8), target=torch.zeros(4, 2))
    optimizer.step()
    kept = {name: value.clone() for name, value in pipe.state_dict().items()}
    folder = checkpoint.save(tmp_path, pipe, optimizer, extra={"position": 1}).wait()
    content = manifest.read(folder)
    ((name, _),) = content["files"].items()
    state = load_file(folder / name)
    (folder / name).unlink()
    writer = theirs.HuggingFaceStorageWriter(str(folder), dict.fromkeys(state, 1), save_distributed=True)
    theirs.save(state, storage_writer=writer, no_dist=True)
    (folder / ".metadata").unlink(missing_ok=True)
    files = {path.name: manifest.file_entry(path) for path in folder.glob("*.safetensors")}
    del content["format"]
    manifest.write(folder, {**content, "files": files})
    again = pipeline()
    assert checkpoint.resume(folder, again, torch.optim.Adam(again.parameters())) == {"position": 1}
    assert all(torch.equal(value, kept[name]) for name, value in again.state_dict().items())
    assert not holds(again, 0)


WITHOUT_NUMPY = """
import sys


class WithoutNumpy:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] == "numpy" else self.finder.find_spec(name, *rest)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = map(WithoutNumpy, sys.meta_path)
import torch
from torch import nn

import penstock as ps
from penstock import checkpoint

pipe = ps.Pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.functional.mse_loss, microbatches=2)
optimizer = torch.optim.Adam(pipe.parameters())
pipe.step(torch.ones(4, 2), target=torch.zeros(4, 2))
optimizer.step()
checkpoint.save(sys.argv[1], pipe, optimizer, wait=False).wait()
checkpoint.resume(sys.argv[1], pipe, optimizer)
checkpoint.export(pipe, sys.argv[1] + "/model.safetensors")
checkpoint.import_weights(pipe, sys.argv[1] + "/model.safetensors")
assert "numpy" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_checkpoints_need_no_numpy(tmp_path):
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMPY, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(load_file(tmp_path / "model.safetensors")) == 4


def test_a_folder_of_more_files_than_descriptors_is_read(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for number in range(80):
        tensor_files.write_safetensors(tmp_path / f"{number:03d}.safetensors", {f"t{number}": torch.full((3,), float(number))})
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        files = tensor_files.TensorFiles(tmp_path)
        found = [files.mapped_tensor(f"t{number}").clone() for number in range(80)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [result[0].item() for result in found] == list(range(80))


def test_a_rank_whose_first_tensor_is_empty_writes_it(tmp_path):
    module = nn.Linear(4, 4)
    module.register_buffer("nothing", torch.empty(0))
    checkpoint.export(ps.Pipeline(nn.Sequential(module)), tmp_path / "model.safetensors")
    assert tensor_files.write_shards(tmp_path / "parts", 0, {"nothing": torch.empty(0), "more": torch.ones(2)})
    assert {*load_file(tmp_path / "model.safetensors")} == {"0.weight", "0.bias", "0.nothing"}
