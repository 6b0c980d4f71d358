"""Weights that were trained elsewhere: every rank reads only those of its stages, straight into its parameters."""

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
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
from penstock.checkpoint.files.disk import DamagedFileError, errors_as_damaged, open_regular_file
from penstock.checkpoint.files.manifest import MAX_MANIFEST_BYTES
from penstock.checkpoint.files.tensor_files import TensorFiles
from penstock.engine.model_partition import UncutModelClassAndConfig
from penstock.errors import MismatchError
from penstock.pipeline import Pipeline
from penstock.stage.rank_parameters import MISSING, UNEXPECTED, WRONG_SHAPE, describe_mismatches

WEIGHTS_FILE, WEIGHTS_INDEX_FILE = (
    "model.safetensors",
    "model.safetensors.index.json",
)  # either is in a folder that `save_pretrained` wrote


class TensorRecipe(NamedTuple):
    """What a tensor is made of: the names of tensors in the files, and how it is made of those."""

    stored_names: list[str]
    convert: Callable[[list[Tensor]], Tensor]

    def build(self, load: Callable[[str], Tensor]) -> Tensor:
        """The tensor, where those in the files are `load`."""
        return self.convert([load(place) for place in self.stored_names])


def import_weights(pipe: Pipeline, path: str | Path, strict: bool = True, rename: Callable[[str], str] | None = None) -> None:
    """Load the uncut model's weights from safetensors files; every rank reads its own part of them and no more.

    All ranks call it. The values go straight into place, one tensor after the other, so no rank needs more memory than its
    stages have. Of a tied parameter the files need one of its names. What transformers keeps in files in another form than
    in memory (a mixture's experts), or with or without its base model's prefix, is taken as `from_pretrained` does.

    `pipe`: whose model; values are converted to its types.
    `path`: of one file, of a `model.safetensors.index.json`, or the folder of either, as `save_pretrained` writes it.
    `strict`: False leaves what is missing as it is, and what is left over aside, with a warning that names both.
    `rename`: gives a name in this model for each of the files'.

    Raises MismatchError, on every rank and before anything is loaded, for files that cannot be read, and one that lists all
    names that are missing or left over and shapes that differ.

        checkpoint.import_weights(pipe, "Llama-3.2-1B")  # a folder with model.safetensors
    """
    control = control_group_for_call(pipe, "checkpoint.import_weights()")
    with same_error_on_all_ranks(control, f"import {path}"):
        homes = _files_by_tensor_name(Path(path))
        sources = _tensor_recipes(pipe, _stored_names_by_model_name(homes, rename))
        local_names = [name for name in pipe.state_dict(strict=False) if name in sources]
        files = _open_tensor_files(homes, [place for name in local_names for place in sources[name].stored_names])
        on_meta = lambda place: torch.empty(files.shapes[place], device="meta")  # noqa: E731
        shapes = {name: sources[name].build(on_meta).shape for name in local_names}
        _check_mismatches(
            gather_state_mismatches(control, pipe, dict.fromkeys(sources) | shapes), path, strict, control.topology.rank == 0
        )
        copy_into_model(pipe, ((name, sources[name].build(files.mapped_tensor)) for name in local_names))


def _stored_names_by_model_name(stored_names: Iterable[str], rename: Callable[[str], str] | None) -> dict[str, str]:
    """Return the stored name by model name. Raises MismatchError for two that would be one."""
    stored_name_of: dict[str, str] = {}
    for name in stored_names:
        model_name = rename(name) if rename else name
        if stored_name_of.setdefault(model_name, name) != name:
            raise MismatchError(
                f"rename= gives {stored_name_of[model_name]} and {name} one name, {model_name!r}: leave one of them as it is"
            )
    return stored_name_of


def _files_by_tensor_name(path: Path) -> dict[str, Path]:
    """Return for each tensor's name the file that it is in."""
    if path.is_dir():
        inside = [path / name for name in (WEIGHTS_FILE, WEIGHTS_INDEX_FILE) if (path / name).exists()]
        if not inside:
            raise MismatchError(
                f"{path} has neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX_FILE} in it: give a folder of save_pretrained or export"
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
    """Return a recipe for each of the model's tensors. `stored_name_of`: a name in this model -> the name in the files."""
    recipes = None
    if (
        pipe._engine.parameters.origin is not None
        and pipe._engine.parameters.state_mismatches(dict.fromkeys(stored_name_of))[UNEXPECTED]
    ):
        recipes = _transformers_recipes(pipe._engine.parameters.origin, stored_name_of)
    if recipes is None:
        recipes = {name: TensorRecipe([name], _single_tensor) for name in stored_name_of}
    sources = {
        name: TensorRecipe([stored_name_of[place] for place in places], build) for name, (places, build) in recipes.items()
    }
    return with_tied_names(sources, pipe._engine.parameters.aliases)


def _open_tensor_files(file_of_tensor: Mapping[str, Path], stored_names: Sequence[str]) -> TensorFiles:
    """Open the files of these tensors. Raise DamagedFileError if one is not where the index says."""
    files = TensorFiles(*dict.fromkeys(file_of_tensor[place] for place in stored_names))
    for place in stored_names:
        if place not in files:
            raise DamagedFileError(f"{file_of_tensor[place]} does not have {place}, which is in it by its index")
    return files


def _check_mismatches(mismatches: Mapping[str, Sequence[str]], path: str | Path, strict: bool, warn: bool) -> None:
    """Raises MismatchError for what does not fit, or has rank 0 `warn` of it."""
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


# -- what transformers keeps in files in another form than in memory, made as `from_pretrained` makes it -----------------


def _transformers_recipes(origin: UncutModelClassAndConfig, stored_names: Iterable[str]) -> dict[str, TensorRecipe] | None:
    """What each tensor of the model is made of, if transformers says so; `stored_names`: of the files' tensors."""
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
    pieces: dict[str, dict[str, str | None]] = {}  # a tensor, the first of those made together -> names, and what they match
    for name in sorted(stored_names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = name, None
        pieces.setdefault(target, {})[name] = pattern
    recipes: dict[str, TensorRecipe] = {}
    for target_name, patterns in pieces.items():
        converter = converter_of.get(next(iter(patterns.values())) or "")
        if converter is None:
            recipes[target_name] = TensorRecipe(list(patterns), _single_tensor)
            continue
        for target in converter.target_patterns:
            name = target_name.replace(converter.target_patterns[0], target)
            recipes[name] = TensorRecipe(
                list(patterns), partial(_convert_with_transformers, converter, model, target_name, patterns, name)
            )
    return recipes


def _single_tensor(tensors: list[Tensor]) -> Tensor:
    """The one tensor that there is."""
    return tensors[0]


def _convert_with_transformers(
    converter: Any, model: Any, first_name: str, patterns: Mapping[str, str | None], name: str, tensors: list[Tensor]
) -> Tensor:
    """The tensor `name`, one of those that `converter` makes."""
    converter = deepcopy(converter)  # it keeps what it is given until it converts that
    for (place, pattern), tensor in zip(patterns.items(), tensors, strict=True):
        converter.add_tensor(first_name, place, pattern, tensor)
    converted = converter.convert(first_name, model=model, config=model.config)[name]
    return converted[0] if isinstance(converted, list) else converted
