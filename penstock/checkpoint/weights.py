"""The model's weights for others: one safetensors file, or a folder as `save_pretrained` writes it, out of any cut."""

import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.checkpoint.audit import check_replicas
from penstock.checkpoint.files import manifest
from penstock.checkpoint.files.disk import sync
from penstock.checkpoint.files.tensor_files import TensorFiles, write_file
from penstock.checkpoint.importing import INDEX, SINGLE
from penstock.checkpoint.together import MODEL, as_one, newest_whole, own_state, settled, written
from penstock.comms.control_group import ControlGroup
from penstock.comms.topology import Topology
from penstock.errors import MismatchError
from penstock.pipeline import Pipeline
from penstock.schedule.timing.explanation import bytes_meant

_OURS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")  # what a folder of weights is made of


def export(pipe: Pipeline, path: str | Path, max_shard_size: int | str = "5GB") -> None:
    """Write the whole model's weights and buffers to one safetensors file, or to a folder that `from_pretrained` loads.

    All ranks call it. Each writes its part beside `path`, where all ranks must see it, and no rank needs memory for more
    than that; rank 0 puts all of it in place last, so it is there whole or not at all.

    `pipe`: whose model; what is no tensor is left out, with a warning.
    `path`: of the file, if it ends in `.safetensors`: it loads into the uncut model, with a tied parameter under each of its
        names. Any other path is a folder of `model.safetensors`, or of several files and `model.safetensors.index.json`; a
        tied parameter has its first name, and a model of transformers its `config.json`. What else is there stays.
    `max_shard_size`: bytes of a file in the folder, as a number or as `"5GB"`; a single tensor may be larger.

    Raises, on every rank: PenstockError if a rank cannot write; MismatchError for ranks that differ in a bit of a parameter or
    buffer that all of them have.

        checkpoint.export(pipe, "model.safetensors")
        model.load_state_dict(safetensors.torch.load_file("model.safetensors"))  # elsewhere, without ranks
        checkpoint.export(pipe, "fine-tuned")
        model = AutoModelForCausalLM.from_pretrained("fine-tuned")  # likewise
    """
    path, control = Path(path), settled(pipe, "checkpoint.export()")
    with as_one(control, f"export to {path}"):
        check_replicas(control, pipe)
        _write(control, path, own_state(pipe), pipe._engine.parameters.aliases, settings(pipe), max_shard_size)


def export_folder(folder: str | Path, path: str | Path, max_shard_size: int | str = "5GB") -> Path:
    """Write the weights in the newest whole checkpoint of `folder` (or in the checkpoint `folder`), as `export` does.

    For a program without ranks. Returns the checkpoint taken; raises MismatchError if none is whole, PenstockError if
    `path` cannot be written.
    """
    control = ControlGroup(Topology(), "alone")
    with as_one(control, f"export {folder} to {path}"):
        chosen, content, files = newest_whole(control, Path(folder))
        state = {name.removeprefix(MODEL): files.mapped(name) for name in files if name.startswith(MODEL)}
        _write(control, Path(path), state | content["model"], content["aliases"], content["settings"], max_shard_size)
    return chosen


def settings(pipe: Pipeline) -> dict[str, Any]:
    """The files that transformers keeps beside a model's weights -> what is in them, as JSON."""
    origin = pipe._engine.parameters.origin
    if origin is None or not hasattr(origin.config, "to_json_string"):
        return {}
    files = {"config.json": origin.config, "generation_config.json": origin.generation_config}
    contents = {file: json.loads(each.to_json_string()) for file, each in files.items() if each is not None}
    dtypes = [parameter.dtype for parameter in pipe.parameters() if parameter.is_floating_point()]
    contents["config.json"] |= {"architectures": [origin.kind.__name__], "dtype": str(dtypes[0]).removeprefix("torch.")}
    return contents


def _write(
    control: ControlGroup,
    path: Path,
    state: Mapping[str, Any],
    aliases: Mapping[str, str],
    contents: dict[str, Any],
    max_shard_size: int | str,
) -> None:
    """Write all ranks' parts of the state to `path`."""
    one_file, most = path.suffix == ".safetensors", bytes_meant(str(max_shard_size))
    if most is None:
        told = f"max_shard_size={max_shard_size!r} is no size"
        raise MismatchError(f"{told}: give a number of bytes, or one with a unit, like '5GB'")
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    no_tensors = [name for name in state if name not in tensors]
    if one_file:
        tensors |= {name: tensors[first] for name, first in aliases.items() if first in tensors}
    parts = path.absolute().with_name(f".{path.name}.parts")
    with written(control, parts, tensors, no_tensors, float("inf") if one_file else most) as everyone:
        left_out = [name for _, names in everyone for name in names]
        if control.topology.rank != 0:
            return
        if left_out:
            warnings.warn(f"{path} holds tensors only: {', '.join(left_out)} left out", stacklevel=3)
        files = TensorFiles(parts)
        if one_file or files.nbytes <= most:
            files = _joined(files, parts / SINGLE)
        if one_file:
            os.replace(parts / SINGLE, path)
            sync(path.parent)
        else:
            _put_folder(files, parts, path, contents)


def _joined(files: TensorFiles, path: Path) -> TensorFiles:
    """The tensors of `files` in one, `path`."""
    shards = {stored.file for stored in files.stored.values()}
    if len(shards) == 1:
        os.rename(shards.pop(), path)
    else:
        write_file(path, {name: files.mapped(name) for name in files})
    return TensorFiles(path)


def _put_folder(files: TensorFiles, parts: Path, path: Path, contents: Mapping[str, Any]) -> None:
    """Make `files`, which are in `parts`, what `from_pretrained` expects in `path`, and put them there, the index last."""
    shards = sorted({stored.file for stored in files.stored.values()})
    names = {file: f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number, file in enumerate(shards, 1)}
    if shards == [parts / SINGLE]:
        names = {parts / SINGLE: SINGLE}
    else:
        homes = {name: names[stored.file] for name, stored in sorted(files.stored.items())}
        contents = {**contents, INDEX: {"metadata": {"total_size": files.nbytes}, "weight_map": homes}}
    for file, name in names.items():
        os.rename(file, parts / name)
    for name, content in contents.items():
        with manifest.replaced(parts / name) as beside:
            beside.write_text(json.dumps(content, indent=2) + "\n")
    path.mkdir(exist_ok=True)
    for old in sorted(path.iterdir(), reverse=True):  # the index first: no file of one export stands beside that of another
        if _OURS.fullmatch(old.name):
            old.unlink()
    for name in sorted([*names.values(), *contents]):
        os.replace(parts / name, path / name)
    sync(path)
