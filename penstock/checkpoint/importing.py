"""Weights that were trained elsewhere: every rank reads those of its own stages, straight into place, and no others."""

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from penstock.checkpoint.files import transformers_form
from penstock.checkpoint.files.manifest import LARGEST
from penstock.checkpoint.files.reading import Damaged, opened, reading
from penstock.checkpoint.files.tensor_files import TensorFiles
from penstock.checkpoint.files.transformers_form import Source
from penstock.checkpoint.together import as_one, differences, put, settled, under_all_names
from penstock.errors import MismatchError
from penstock.pipeline import Pipeline
from penstock.stage.parameters import MISSING, SHAPE, UNKNOWN, told

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # either is in a folder that `save_pretrained` wrote


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
    control = settled(pipe, "checkpoint.import_weights()")
    with as_one(control, f"import {path}"):
        homes = _homes(Path(path))
        sources = _sources(pipe, _renamed(homes, rename))
        mine = [name for name in pipe.state_dict(strict=False) if name in sources]
        files = _opened(homes, [place for name in mine for place in sources[name].places])
        shapes = {name: sources[name].of(lambda place: torch.empty(files.shapes[place], device="meta")).shape for name in mine}
        _check(differences(control, pipe, dict.fromkeys(sources) | shapes), path, strict, control.topology.rank == 0)
        put(pipe, ((name, sources[name].of(files.mapped)) for name in mine))


def _renamed(names: Iterable[str], rename: Callable[[str], str] | None) -> dict[str, str]:
    """Each name here -> the one in the files. Raises MismatchError for two that would be one."""
    found: dict[str, str] = {}
    for name in names:
        here = rename(name) if rename else name
        if found.setdefault(here, name) != name:
            raise MismatchError(f"rename= gives {found[here]} and {name} one name, {here!r}: leave one of them as it is")
    return found


def _homes(path: Path) -> dict[str, Path]:
    """The file that each tensor is in."""
    if path.is_dir():
        inside = [path / name for name in (SINGLE, INDEX) if (path / name).exists()]
        if not inside:
            raise MismatchError(
                f"{path} has neither {SINGLE} nor {INDEX} in it: give what save_pretrained or export has written"
            )
        path = inside[0]
    if path.suffix != ".json":
        return dict.fromkeys(TensorFiles(path), path)
    with reading(path, "is no index of safetensors files, or is damaged"), opened(path, follow=True) as index:
        homes = {name: str(file) for name, file in json.loads(index.read(LARGEST))["weight_map"].items()}
    for file in homes.values():
        if Path(file).name != file or "\0" in file or not file.endswith(".safetensors"):
            raise MismatchError(f"{path} names {file!r}, but an index may only name safetensors files beside it")
    return {name: path.parent / file for name, file in homes.items()}


def _sources(pipe: Pipeline, names: Mapping[str, str]) -> dict[str, Source]:
    """What each of the model's tensors is made of; `names`: those of the files' tensors as they are here -> in the files."""
    found = None
    if pipe._engine.parameters.origin is not None and pipe._engine.parameters.unfit(dict.fromkeys(names))[UNKNOWN]:
        found = transformers_form.sources(pipe._engine.parameters.origin, names)
    if found is None:
        found = {name: Source([name], transformers_form.same) for name in names}
    sources = {name: Source([names[place] for place in places], made) for name, (places, made) in found.items()}
    return under_all_names(sources, pipe._engine.parameters.aliases)


def _opened(homes: Mapping[str, Path], places: Sequence[str]) -> TensorFiles:
    """The files of these tensors."""
    files = TensorFiles(*dict.fromkeys(homes[place] for place in places))
    for place in places:
        if place not in files:
            raise Damaged(f"{homes[place]} does not have {place}, which is in it by its index")
    return files


def _check(unfit: Mapping[str, Sequence[str]], path: str | Path, strict: bool, tell: bool) -> None:
    """Raises MismatchError for what does not fit, or has rank 0 `tell` of it."""
    if unfit[SHAPE] or (strict and any(unfit.values())):
        raise MismatchError(f"{path} does not fit this model: {told(unfit)}{_prefix(unfit[MISSING], unfit[UNKNOWN])}")
    if any(unfit.values()) and tell:
        warnings.warn(f"{path}: {told(unfit)}; what is missing stays as it was, what is unknown is left aside", stacklevel=4)


def _prefix(missing: Sequence[str], unknown: Sequence[str]) -> str:
    """What to do if names in the files differ from the model's by what is in front of them."""
    pairs = [(ours, theirs) for ours in missing for theirs in unknown]
    more = Counter(theirs.removesuffix(ours) for ours, theirs in pairs if theirs.endswith(f".{ours}"))
    less = Counter(ours.removesuffix(theirs) for ours, theirs in pairs if ours.endswith(f".{theirs}"))
    if not more and not less:
        return ""
    ((prefix, _),) = max(more.most_common(1), less.most_common(1), key=lambda most: most[0][1] if most else 0)
    if prefix in more:
        return f": the files' names begin with {prefix!r}, give rename=lambda name: name.removeprefix({prefix!r})"
    return f": the model's names begin with {prefix!r}, give rename=lambda name: {prefix!r} + name"
