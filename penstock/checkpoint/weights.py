"""Export the model's weights from any cut: one safetensors file, or a folder as `save_pretrained` writes it."""

import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor

from penstock.checkpoint import dcp
from penstock.checkpoint.collective import (
    MODEL_PREFIX,
    check_same_path,
    control_group_for_call,
    open_newest_complete_checkpoint,
    rank_state_to_write,
    same_error_on_all_ranks,
    temporary_shards,
)
from penstock.checkpoint.files import manifest
from penstock.checkpoint.files.disk import fsync
from penstock.checkpoint.files.tensor_files import TensorFiles, write_safetensors
from penstock.checkpoint.importing import WEIGHTS_FILE, WEIGHTS_INDEX_FILE
from penstock.checkpoint.restore import check_same_counts
from penstock.checkpoint.training_digests import check_replicas_equal
from penstock.comms.control_group import ControlGroup
from penstock.comms.topology import Topology
from penstock.engine.optimizers import optimizer_list
from penstock.errors import MismatchError
from penstock.pipeline import Pipeline
from penstock.schedule.memory import parse_bytes

Format = Literal["safetensors", "dcp"]
_WEIGHTS_FILE_PATTERN = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")  # files of a folder of weights


def export(
    pipe: Pipeline,
    path: str | Path,
    optimizer: Any = None,
    format: Format = "safetensors",
    max_shard_size: int | str = "5GB",
) -> None:
    """Write the whole model's weights and buffers: to a safetensors file, to a folder for `from_pretrained`, or for torch.

    All ranks call it. Each writes its part into a temporary folder beside `path`, which all ranks must see, so no rank needs
    memory for more than its part. Rank 0 joins the parts and renames them to `path` at the end.

    `pipe`: its model is exported; state that is no tensor is left out, with a warning.
    `path`: if it ends in `.safetensors`, one file, which loads into the uncut model: it has a tied parameter under each of its
        names. Any other path is a folder with `model.safetensors`, or with several files and `model.safetensors.index.json`.
        There a tied parameter has its first name, and a model of transformers has its `config.json`. Other files in the folder
        stay.
    `optimizer`: with `format="dcp"`, one or a list whose state and options are written too.
    `format`: "dcp" writes a folder that `torch.distributed.checkpoint.load` reads, with flat names: a weight's in the uncut
        model, `state.<name>.exp_avg`, `param_groups.<name>.lr`.
    `max_shard_size`: the most bytes of a safetensors file in a folder, as a number or as `"5GB"`; one tensor may be larger.

    Raises, on every rank: PenstockError if a rank cannot write; MismatchError for ranks that differ in a bit of a parameter,
    buffer or optimizer state that all of them have, or in `path` or the number of their optimizers.

        checkpoint.export(pipe, "model.safetensors")
        model.load_state_dict(safetensors.torch.load_file("model.safetensors"))  # elsewhere, without ranks
        checkpoint.export(pipe, "fine-tuned")
        model = AutoModelForCausalLM.from_pretrained("fine-tuned")  # the same folder
    """
    path, control = Path(path), control_group_for_call(pipe, "checkpoint.export()")
    with same_error_on_all_ranks(control, f"export to {path}"):
        check_same_path(control, "checkpoint.export", path)
        optimizers = optimizer_list(optimizer, "export()", pipe.topology.world_size)
        if problem := _format_problem(path, format, bool(optimizers)):
            raise MismatchError(problem)
        check_same_counts(control, optimizers, (), "export")
        check_replicas_equal(control, pipe, optimizers)
        if format == "dcp":
            dcp.write_folder(control, path, pipe, optimizers)
            return
        _write_weights(
            control,
            path,
            rank_state_to_write(pipe),
            pipe._engine.parameters.aliases,
            transformers_configs(pipe),
            max_shard_size,
        )


def _format_problem(path: Path, format: str, with_optimizer: bool) -> str:
    """Return why this path, format and optimizer cannot be; "" if they can."""
    if format not in get_args(Format):
        return f"format={format!r} is no format: use {' or '.join(map(repr, get_args(Format)))}"
    if format == "dcp" and path.is_file():
        return f"{path} is a file, and torch.distributed.checkpoint has folders: give another path"
    if format == "safetensors" and with_optimizer:
        return "files of safetensors hold no optimizer: give format='dcp', or save a checkpoint"
    return ""


def export_checkpoint(folder: str | Path, path: str | Path, max_shard_size: int | str = "5GB") -> Path:
    """Write the weights of the newest complete checkpoint in `folder` (or of the checkpoint `folder`), as `export` does.

    For a program without ranks. Returns the path of the checkpoint. Raises MismatchError if none is complete, PenstockError
    if `path` cannot be written.
    """
    control = ControlGroup(Topology(), "alone")
    with same_error_on_all_ranks(control, f"export {folder} to {path}"):
        checkpoint, content, files = open_newest_complete_checkpoint(control, Path(folder))
        state = {name.removeprefix(MODEL_PREFIX): files.mapped_tensor(name) for name in files if name.startswith(MODEL_PREFIX)}
        _write_weights(control, Path(path), state | content["model"], content["aliases"], content["settings"], max_shard_size)
    return checkpoint


def transformers_configs(pipe: Pipeline) -> dict[str, Any]:
    """Return file name -> content (JSON) of the configuration files of a model of transformers; {} for other models."""
    origin = pipe._engine.parameters.origin
    if origin is None or not hasattr(origin.config, "to_json_string"):
        return {}
    files = {"config.json": origin.config, "generation_config.json": origin.generation_config}
    contents = {file: json.loads(value.to_json_string()) for file, value in files.items() if value is not None}
    dtypes = [parameter.dtype for parameter in pipe.parameters() if parameter.is_floating_point()]
    contents["config.json"] |= {"architectures": [origin.model_class.__name__], "dtype": str(dtypes[0]).removeprefix("torch.")}
    return contents


def _write_weights(
    control: ControlGroup,
    path: Path,
    state: Mapping[str, Any],
    aliases: Mapping[str, str],
    config_files: dict[str, Any],
    max_shard_size: int | str,
) -> None:
    """Write all ranks' parts of the `state` to `path`. `config_files`: from `transformers_configs`."""
    one_file, max_shard_bytes = path.suffix == ".safetensors", parse_bytes(str(max_shard_size))
    if max_shard_bytes is None:
        problem = f"max_shard_size={max_shard_size!r} is no size"
        raise MismatchError(f"{problem}: give a number of bytes, or one with a unit, like '5GB'")
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    no_tensors = [name for name in state if name not in tensors]
    if one_file:
        tensors |= {name: tensors[owner_name] for name, owner_name in aliases.items() if owner_name in tensors}
    parts = path.absolute().with_name(f".{path.name}.parts")
    with temporary_shards(control, parts, tensors, no_tensors, float("inf") if one_file else max_shard_bytes) as everyone:
        left_out = [name for _, names in everyone for name in names]
        if control.topology.rank != 0:
            return
        if left_out:
            warnings.warn(f"{path} holds tensors only: {', '.join(left_out)} left out", stacklevel=3)
        files = TensorFiles(parts)
        if one_file or files.nbytes <= max_shard_bytes:
            files = _join_shards_into_file(files, parts / WEIGHTS_FILE)
        if one_file:
            os.replace(parts / WEIGHTS_FILE, path)
            fsync(path.parent)
        else:
            _install_pretrained_folder(files, parts, path, config_files)


def _join_shards_into_file(files: TensorFiles, path: Path) -> TensorFiles:
    """Join `files` into one file at `path`, and return it."""
    shard_files = {stored.file for stored in files.locations.values()}
    if len(shard_files) == 1:
        os.rename(shard_files.pop(), path)
    else:
        write_safetensors(path, {name: files.mapped_tensor(name) for name in files})
    return TensorFiles(path)


def _install_pretrained_folder(files: TensorFiles, shards_folder: Path, path: Path, config_files: Mapping[str, Any]) -> None:
    """Move the shards into `path`, named as `from_pretrained` expects them, the index last."""
    shards = sorted({stored.file for stored in files.locations.values()})
    names = {file: f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number, file in enumerate(shards, 1)}
    if shards == [shards_folder / WEIGHTS_FILE]:
        names = {shards_folder / WEIGHTS_FILE: WEIGHTS_FILE}
    else:
        file_of_tensor = {name: names[stored.file] for name, stored in sorted(files.locations.items())}
        config_files = {
            **config_files,
            WEIGHTS_INDEX_FILE: {"metadata": {"total_size": files.nbytes}, "weight_map": file_of_tensor},
        }
    for file, name in names.items():
        os.rename(file, shards_folder / name)
    for name, content in config_files.items():
        with manifest.atomic_replacement(shards_folder / name) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n")
    path.mkdir(exist_ok=True)
    for old in sorted(path.iterdir(), reverse=True):  # the index first, so that it never names files of two exports
        if _WEIGHTS_FILE_PATTERN.fullmatch(old.name):
            old.unlink()
    for name in sorted([*names.values(), *config_files]):
        os.replace(shards_folder / name, path / name)
    fsync(path)
