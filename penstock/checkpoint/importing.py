"""Import weights from safetensors files or torch's: every rank reads only those of its stages, straight into its parameters."""

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.checkpoint.collective import (
    control_group_for_call,
    copy_into_model,
    gather_state_mismatches,
    same_error_on_all_ranks,
    with_tied_names,
)
from penstock.checkpoint.dcp import DcpOptimizers, DcpWeights
from penstock.checkpoint.files.dcp_files import METADATA_FILE, DcpFiles
from penstock.checkpoint.files.disk import DamagedFileError, errors_as_damaged, open_regular_file
from penstock.checkpoint.files.manifest import MAX_MANIFEST_BYTES
from penstock.checkpoint.files.tensor_files import TensorFiles
from penstock.checkpoint.restore import check_same_counts, roll_back_on_failure
from penstock.checkpoint.training_state import check_optimizers_match, restore_optimizer
from penstock.comms.control_group import ControlGroup
from penstock.engine.model_partition import UncutModelClassAndConfig
from penstock.engine.optimizers import optimizer_list
from penstock.errors import MismatchError
from penstock.pipeline import Pipeline
from penstock.stage.rank_parameters import MISSING, UNEXPECTED, WRONG_SHAPE, describe_mismatches

WEIGHTS_FILE = "model.safetensors"  # `save_pretrained` writes this, or several files and their index
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"


class TensorRecipe(NamedTuple):
    """How to build a tensor of the model: the names of tensors in the files, and a function of these tensors."""

    stored_names: list[str]
    convert: Callable[[list[Tensor]], Tensor]

    def build(self, load: Callable[[str], Tensor]) -> Tensor:
        """Return the tensor. `load(stored_name)` returns a tensor in the files."""
        return self.convert([load(stored_name) for stored_name in self.stored_names])


def import_weights(
    pipe: Pipeline,
    path: str | Path,
    optimizer: Any = None,
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
) -> None:
    """Load the uncut model's weights from safetensors files, or from a folder of torch.distributed.checkpoint.

    All ranks call it. Each reads only the tensors of its stages; nothing is unpickled. They are copied straight into the
    parameters, one at a time, so no rank needs memory for a second copy of its stages. A tied parameter may be in the files
    under any one of its names. Weights that transformers stores in another form than in memory (a mixture's experts), or with
    or without the base model's prefix, are converted as `from_pretrained` does.

    `pipe`: its model gets the weights, converted to the model's dtypes.
    `path`: a safetensors file, a `model.safetensors.index.json`, or a folder with either, as `save_pretrained` writes it. Or a
        folder with torch's `.metadata`, written on any ranks; what comes before the weights' names (`model.`) is left out.
    `optimizer`: of this rank's `pipe.parameters()`, or a list; gets state and options from a folder with torch's `.metadata`.
    `strict`: False keeps the values of missing parameters and ignores unexpected names, with a warning that lists both.
    `rename`: returns the name in this model for a name in the files.

    Raises MismatchError, on every rank and before anything is loaded, if a file cannot be read, if names are missing or
    unexpected, if shapes differ (it lists all these names), or if the folder has no state for the optimizer. Step count,
    schedulers and random states are not among what is loaded.

        checkpoint.import_weights(pipe, "Llama-3.2-1B")  # a folder with model.safetensors
    """
    control = control_group_for_call(pipe, "checkpoint.import_weights()")
    with same_error_on_all_ranks(control, f"import {path}"):
        optimizers = optimizer_list(optimizer, "import_weights()", pipe.topology.world_size)
        check_same_counts(control, optimizers, (), "import")
        dcp_folder = _dcp_files(Path(path), bool(optimizers))
        weights = None if dcp_folder is None else DcpWeights(dcp_folder, pipe._engine.parameters.order)
        file_of_tensor = {} if weights else _files_by_tensor_name(Path(path))

        recipes = _tensor_recipes(pipe, _stored_names_by_model_name(weights.shapes if weights else file_of_tensor, rename))
        local_names = [name for name in pipe.state_dict(strict=False) if name in recipes]
        stored_names = [stored_name for name in local_names for stored_name in recipes[name].stored_names]
        files: Any = weights or _open_tensor_files(file_of_tensor, stored_names)
        on_meta = lambda stored_name: torch.empty(files.shapes[stored_name], device="meta")  # noqa: E731
        shapes = {name: recipes[name].build(on_meta).shape for name in local_names}
        _check_mismatches(
            gather_state_mismatches(control, pipe, dict.fromkeys(recipes) | shapes), path, strict, control.topology.rank == 0
        )
        if weights is not None:
            weights.verify(stored_names)
        if dcp_folder is not None and optimizers:
            _import_optimizers(control, pipe, dcp_folder, optimizers)
        control.all_gather_row((), f"to check {path}")  # nothing of it is loaded before all ranks can
        copy_into_model(pipe, ((name, recipes[name].build(files.mapped_tensor)) for name in local_names))


def _dcp_files(path: Path, with_optimizer: bool) -> DcpFiles | None:
    """Return the content of torch's folder at `path`; None for safetensors. Raises MismatchError for those `with_optimizer`."""
    has_safetensors = any((path / name).exists() for name in (WEIGHTS_FILE, WEIGHTS_INDEX_FILE))
    if (path / METADATA_FILE).exists() and (with_optimizer or not has_safetensors):
        return DcpFiles(path)
    if with_optimizer:
        raise MismatchError(
            f"{path} has no optimizer: give a folder of torch.distributed.checkpoint, or resume from a checkpoint of Penstock"
        )
    return None


def _import_optimizers(control: ControlGroup, pipe: Pipeline, files: DcpFiles, optimizers: Sequence[Any]) -> None:
    """Load state and options of all optimizers, or of none."""
    names = {id(parameter): name for name, parameter in pipe.named_parameters()}
    stored = DcpOptimizers(files, set(pipe._engine.parameters.order))
    saved = stored.saved_optimizers(control, optimizers, names)
    check_optimizers_match(optimizers, saved, names)
    stored.verify(names.values())
    with roll_back_on_failure(files.folder, pipe, optimizers, ()):
        for optimizer, saved_optimizer in zip(optimizers, saved, strict=True):
            restore_optimizer(optimizer, saved_optimizer, names, stored)
        control.all_gather_row((), f"to check {files.folder}")


def _stored_names_by_model_name(stored_names: Iterable[str], rename: Callable[[str], str] | None) -> dict[str, str]:
    """Return model name -> stored name. Raises MismatchError if `rename` gives two stored names the same model name."""
    stored_name_of: dict[str, str] = {}
    for name in stored_names:
        model_name = rename(name) if rename else name
        if stored_name_of.setdefault(model_name, name) != name:
            raise MismatchError(
                f"rename= gives {stored_name_of[model_name]} and {name} one name, {model_name!r}: leave one of them as it is"
            )
    return stored_name_of


def _files_by_tensor_name(path: Path) -> dict[str, Path]:
    """Return stored name -> file, for all tensors at `path`."""
    if path.is_dir():
        inside = [path / name for name in (WEIGHTS_FILE, WEIGHTS_INDEX_FILE) if (path / name).exists()]
        if not inside:
            raise MismatchError(
                f"{path} has neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX_FILE} nor {METADATA_FILE} in it: give a folder of "
                "save_pretrained, export or torch.distributed.checkpoint"
            )
        path = inside[0]
    if path.suffix != ".json":
        return dict.fromkeys(TensorFiles(path), path)
    with (
        errors_as_damaged(path, "is no index of safetensors files, or is damaged"),
        open_regular_file(path, follow=True) as index,
    ):
        file_of_tensor = {name: str(file) for name, file in json.loads(index.read(MAX_MANIFEST_BYTES))["weight_map"].items()}
    for file in file_of_tensor.values():
        if Path(file).name != file or "\0" in file or not file.endswith(".safetensors"):
            raise MismatchError(f"{path} names {file!r}, but an index may only name safetensors files beside it")
    return {name: path.parent / file for name, file in file_of_tensor.items()}


def _tensor_recipes(pipe: Pipeline, stored_name_of: Mapping[str, str]) -> dict[str, TensorRecipe]:
    """Return model name -> recipe. `stored_name_of`: name after `rename` -> stored name."""
    recipes = None
    if (
        pipe._engine.parameters.origin is not None
        and pipe._engine.parameters.state_mismatches(dict.fromkeys(stored_name_of))[UNEXPECTED]
    ):
        recipes = _transformers_recipes(pipe._engine.parameters.origin, stored_name_of)
    if recipes is None:
        recipes = {name: TensorRecipe([name], itemgetter(0)) for name in stored_name_of}
    recipes = {
        name: TensorRecipe([stored_name_of[renamed] for renamed in recipe.stored_names], recipe.convert)
        for name, recipe in recipes.items()
    }
    return with_tied_names(recipes, pipe._engine.parameters.aliases)


def _open_tensor_files(file_of_tensor: Mapping[str, Path], stored_names: Sequence[str]) -> TensorFiles:
    """Open the files that have these tensors. Raises DamagedFileError if a file lacks one that the index says is there."""
    files = TensorFiles(*dict.fromkeys(file_of_tensor[name] for name in stored_names))
    for name in stored_names:
        if name not in files:
            raise DamagedFileError(f"{file_of_tensor[name]} does not have {name}, which is in it by its index")
    return files


def _check_mismatches(mismatches: Mapping[str, Sequence[str]], path: str | Path, strict: bool, warn: bool) -> None:
    """Raise MismatchError for shapes that differ and, if `strict`, for any mismatch; else print a warning if `warn`."""
    if mismatches[WRONG_SHAPE] or (strict and any(mismatches.values())):
        raise MismatchError(
            f"{path} does not fit this model: {describe_mismatches(mismatches)}"
            f"{_prefix_hint(mismatches[MISSING], mismatches[UNEXPECTED])}"
        )
    if any(mismatches.values()) and warn:
        warnings.warn(
            f"{path}: {describe_mismatches(mismatches)}; what is missing stays as it was, what is unknown is left aside",
            stacklevel=4,
        )


def _prefix_hint(missing_keys: Sequence[str], unexpected_keys: Sequence[str]) -> str:
    """Return advice if names in the files differ from the model's by a prefix, else an empty string."""
    pairs = [(key, file_key) for key in missing_keys for file_key in unexpected_keys]
    prefixes_in_files = Counter(file_key.removesuffix(key) for key, file_key in pairs if file_key.endswith(f".{key}"))
    prefixes_in_model = Counter(key.removesuffix(file_key) for key, file_key in pairs if key.endswith(f".{file_key}"))
    if not prefixes_in_files and not prefixes_in_model:
        return ""

    most_common = prefixes_in_files.most_common(1), prefixes_in_model.most_common(1)
    ((prefix, _),) = max(most_common, key=lambda counts: counts[0][1] if counts else 0)
    if prefix in prefixes_in_files:
        return f": the files' names begin with {prefix!r}, give rename=lambda name: name.removeprefix({prefix!r})"
    return f": the model's names begin with {prefix!r}, give rename=lambda name: {prefix!r} + name"


# -- transformers' weights that are stored in another form than in memory, converted as in `from_pretrained` -------------


def _transformers_recipes(origin: UncutModelClassAndConfig, stored_names: Iterable[str]) -> dict[str, TensorRecipe] | None:
    """Return model name -> recipe by transformers' conversion rules; None if the model or the installed release has none."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key
        from transformers.modeling_utils import PreTrainedModel
    except ImportError:  # not installed, or too old to have these converters
        return None
    if not issubclass(origin.model_class, PreTrainedModel):
        return None
    with torch.device("meta"):
        model: Any = origin.model_class(origin.config)
    rules, state = get_model_conversion_mapping(model), model.state_dict()
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings: list[Any] = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    pieces: dict[str, dict[str, str | None]] = {}  # first tensor of a conversion -> stored name -> pattern
    for name in sorted(stored_names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = name, None
        pieces.setdefault(target, {})[name] = pattern
    recipes: dict[str, TensorRecipe] = {}
    for target_name, patterns in pieces.items():
        converter = converter_of.get(next(iter(patterns.values())) or "")
        if converter is None:
            recipes[target_name] = TensorRecipe(list(patterns), itemgetter(0))
            continue
        for target in converter.target_patterns:
            name = target_name.replace(converter.target_patterns[0], target)
            recipes[name] = TensorRecipe(
                list(patterns), partial(_convert_with_transformers, converter, model, target_name, patterns, name)
            )
    return recipes


def _convert_with_transformers(
    converter: Any, model: Any, first_name: str, patterns: Mapping[str, str | None], name: str, tensors: list[Tensor]
) -> Tensor:
    """Return the tensor `name`, one of those that `converter` makes of the stored `tensors`."""
    converter = deepcopy(converter)  # `add_tensor` changes it
    for (stored_name, pattern), tensor in zip(patterns.items(), tensors, strict=True):
        converter.add_tensor(first_name, stored_name, pattern, tensor)
    converted = converter.convert(first_name, model=model, config=model.config)[name]
    return converted[0] if isinstance(converted, list) else converted
