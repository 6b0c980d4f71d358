"""Weights and optimizers in the format of torch.distributed.checkpoint: for its `load`, and from its `save`.

Names are flat, as `get_state_dict(.., flatten_optimizer_state_dict=True)` has them: a weight has its name in the uncut model,
its optimizer's state is `state.<name>.exp_avg`, its group's options are `param_groups.<name>.lr`. Others put a prefix before
these: `model.` and `optimizer.`, or what a program calls its parts. A prefix is found by the names behind it.
"""

import os
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.checkpoint.collective import rank_state_to_write, temporary_files
from penstock.checkpoint.files import dcp_files
from penstock.checkpoint.files.dcp_files import DcpFiles
from penstock.checkpoint.files.disk import fsync
from penstock.checkpoint.files.packing import pack
from penstock.comms.control_group import ControlGroup
from penstock.engine.optimizers import PARAMETER_KEYS, check_has_no_remote_parameters
from penstock.errors import MismatchError
from penstock.pipeline import Pipeline
from penstock.stage.dtensor import gather_full_tensor

STATE, GROUPS = "state.", "param_groups."
USUAL_PREFIXES = ("", "model.", "app.model.")  # of weights: torchtitan's, and those of PyTorch's pages
_OPTIMIZER_NAME = re.compile(r"(^|\.)(state|param_groups)\.")


# -- writing --------------------------------------------------------------------------------------------------------------


def write_folder(control: ControlGroup, path: Path, pipe: Pipeline, optimizers: Sequence[Any]) -> None:
    """Write all ranks' weights and optimizers to the folder `path`. All ranks call it."""
    aliases, rank = pipe._engine.parameters.aliases, control.topology.rank
    state = rank_state_to_write(pipe)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    values = dict[str, Any]()
    for optimizer in optimizers:
        for name, value in _flat_optimizer(pipe, optimizer, state):
            if name in tensors or name in values:
                raise MismatchError(f"two optimizers have the same parameter, and {path} has one state of each: give it to one")
            (tensors if isinstance(value, Tensor) else values)[name] = value

    temporary = path.absolute().with_name(f".{path.name}.parts")
    write = partial(dcp_files.write_rank_file, temporary, rank, tensors, values)
    left_out = [name for name, value in state.items() if not isinstance(value, Tensor)]
    with temporary_files(control, temporary, write, lambda _: [dcp_files.file_name(rank)], left_out) as everyone:
        if rank == 0:
            if names := [name for _, names in everyone for name in names]:
                warnings.warn(f"{path} holds tensors only: {', '.join(names)} left out", stacklevel=3)
            dcp_files.write_metadata(temporary, [entries for entries, _ in everyone], aliases)
            _install_folder(temporary, path, len(everyone))


def _flat_optimizer(pipe: Pipeline, optimizer: Any, names_to_write: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield the flat names and values of an optimizer that this rank writes. All ranks that have a shard of them call it."""
    names = {id(parameter): name for name, parameter in pipe.named_parameters()}
    check_has_no_remote_parameters(optimizer, names, pipe.position.world.rank)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:  # the empty one of a rank whose parameters are frozen
                continue
            state = _flat_state(f"{STATE}{name}", optimizer.state.get(parameter, {}))  # a collective of those with a shard
            if name in names_to_write:
                yield from state.items()
                yield from ((f"{GROUPS}{name}.{key}", value) for key, value in group.items() if key not in PARAMETER_KEYS)


def _flat_state(prefix: str, state: Mapping[Any, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in state.items():
        name = f"{prefix}.{key}"
        if isinstance(value, Mapping):
            flat |= _flat_state(name, value)
        elif isinstance(value, Tensor):
            flat[name] = gather_full_tensor(value.detach())
        elif value is None or isinstance(value, int | float):
            flat[name] = value
        else:
            raise MismatchError(
                f"{name} is a {type(value).__name__}, and torch's flat optimizer state has tensors and numbers only"
            )
    return flat


def _install_folder(temporary: Path, path: Path, num_ranks: int) -> None:
    """Move the files into `path`, the metadata last, and delete those of an earlier export."""
    path.mkdir(parents=True, exist_ok=True)
    (path / dcp_files.METADATA_FILE).unlink(missing_ok=True)
    for old in path.glob("__*_*.distcp"):
        old.unlink()
    for name in [*map(dcp_files.file_name, range(num_ranks)), dcp_files.METADATA_FILE]:
        os.replace(temporary / name, path / name)
    fsync(path)


# -- reading: weights -----------------------------------------------------------------------------------------------------


class DcpWeights:
    """The weights in a folder, under their names without prefix. `model_names`: of the uncut model, to find the prefix by."""

    def __init__(self, files: DcpFiles, model_names: Collection[str]) -> None:
        self._files, wanted = files, set(model_names)
        prefix = _weights_prefix(files, wanted)
        names = {name.removeprefix(prefix): name for name in files.tensors if name.startswith(prefix)}
        self._stored_names = names if prefix else {name: names[name] for name in _without_other_parts(names, wanted)}
        self.shapes = {name: files.tensors[stored_name].shape for name, stored_name in self._stored_names.items()}

    def verify(self, names: Iterable[str]) -> None:
        """Raise DamagedFileError unless `mapped_tensor` can return these."""
        self._files.verify(self._stored_names[name] for name in names)

    def mapped_tensor(self, name: str) -> Tensor:
        """Return a tensor, read from the disk."""
        return self._files.tensor(self._stored_names[name])


def _without_other_parts(names: Collection[str], model_names: Collection[str]) -> list[str]:
    """Return the names without those of an optimizer and other parts of a program, as torchtitan's `train_state.step`.

    A part begins as no weight of the model does. If no name is one of the model's, they may all be weights of another model.
    """
    if any(name in model_names for name in names):
        beginnings = {name.partition(".")[0] for name in model_names}
        names = [name for name in names if name.partition(".")[0] in beginnings]
    return [name for name in names if name in model_names or not _OPTIMIZER_NAME.search(name)]


def _weights_prefix(files: DcpFiles, model_names: Collection[str]) -> str:
    """Return what comes before the weights' names: the prefix under which most are. Raises MismatchError for several."""
    counts = Counter[str]()
    for stored_name in files.tensors:
        beginnings = [0, *[match.end() for match in re.finditer(r"\.", stored_name)]]
        counts.update(stored_name[:begin] for begin in beginnings if stored_name[begin:] in model_names)
    fullest = [prefix for prefix, count in counts.items() if count == max(counts.values())]
    usual = [prefix for prefix in USUAL_PREFIXES if prefix in fullest]
    if len(fullest) > 1 and not usual:
        raise MismatchError(
            f"{files.folder} has the weights {len(fullest)} times, under {' and '.join(map(repr, sorted(fullest)[:3]))}: "
            "give a folder that has them once"
        )
    return (usual or fullest or [""])[0]


# -- reading: optimizers --------------------------------------------------------------------------------------------------


class DcpOptimizers(Mapping[str, Tensor]):
    """What a folder has of optimizers' state, by parameter. As a mapping, the tensors in the folder, read when accessed.

    `parameter_names`: of the uncut model. Raises MismatchError if the folder has no state of these.
    """

    def __init__(self, files: DcpFiles, parameter_names: Collection[str]) -> None:
        self._files = files
        self._state: dict[str, dict[str, str]] = {}  # parameter -> key of its state -> name in the files
        self._options: dict[str, dict[str, str]] = {}  # parameter -> option of its group -> name in the files
        self._read_values: dict[dcp_files.Location, Any] = {}

        prefix = _optimizer_prefix(files, parameter_names)
        for stored_name in [*files.tensors, *files.values]:
            for part, found in ((STATE, self._state), (GROUPS, self._options)):
                behind = stored_name.removeprefix(prefix + part)
                if stored_name.startswith(prefix + part) and (name := _parameter_of(behind, parameter_names)):
                    found.setdefault(name, {})[behind[len(name) + 1 :]] = stored_name
        self._add_numbered_groups(prefix + GROUPS)

    def _add_numbered_groups(self, prefix: str) -> None:
        """Add groups that are stored by number, each with the list of its parameters' names."""
        groups: dict[str, dict[str, str]] = {}
        for stored_name in (name for name in [*self._files.values, *self._files.tensors] if name.startswith(prefix)):
            number, _, option = stored_name.removeprefix(prefix).partition(".")
            if number.isdecimal() and "." not in option:
                groups.setdefault(number, {})[option] = stored_name
        for options in groups.values():
            members = self._value(options.pop("params")) if options.get("params") in self._files.values else ()
            for name in members if isinstance(members, list) else ():
                if isinstance(name, str):
                    self._options.setdefault(name, options)

    def __getitem__(self, name: str) -> Tensor:
        return self._files.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files.tensors)

    def __len__(self) -> int:
        return len(self._files.tensors)

    def verify(self, names: Iterable[str]) -> None:
        """Raise DamagedFileError unless the state of these parameters can be read."""
        self._files.verify(stored for name in names for stored in self._state.get(name, {}).values())

    def _value(self, stored_name: str) -> Any:
        """Return a value, or a tensor of one number as this number."""
        if stored_name in self._files.tensors:
            return self._files.tensor(stored_name).item()
        location = self._files.values[stored_name]
        if location not in self._read_values:  # equal values may be in one place
            self._read_values[location] = self._files.value(stored_name)
        return self._read_values[location]

    def saved_optimizers(self, control: ControlGroup, optimizers: Sequence[Any], names: Mapping[int, str]) -> list[Any]:
        """Return this rank's part of `optimizers` as a checkpoint's manifest has it.

        All ranks call it: a rank without a parameter of a group gets the group's options from another one. Raises MismatchError
        for parameters that are not in the folder, and for options that are not those of one group, or of another class.

        `names`: id of each of this rank's parameters -> name.
        """
        saved = [self._saved_optimizer(optimizer, names) for optimizer in optimizers]
        options = [[group["options"] for group in part["groups"]] for part in saved]
        options_of_ranks = control.all_gather_value(options, "to compare optimizers")
        for number, part in enumerate(saved):
            for place, group in enumerate(part["groups"]):
                found = [options[number][place] for options in options_of_ranks if options[number][place] is not None]
                if any(options != found[0] for options in found):
                    raise MismatchError(f"{self._files.folder} has no common options of group {place} of {part['kind']}")
                packed = _fitting_options(optimizers[number].param_groups[place], found[0], part["kind"]) if found else {}
                group["options"] = {"dict": packed}
        return saved

    def _saved_optimizer(self, optimizer: Any, names: Mapping[int, str]) -> Any:
        members_of_groups = [
            [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
            for group in optimizer.param_groups
        ]
        groups = [{"options": self._common_options(members), "names": members} for members in members_of_groups]
        members = [name for names_of_group in members_of_groups for name in names_of_group]
        state = {name: self._packed_state(name) for name in members if name in self._state}
        return {"kind": type(optimizer).__name__, "groups": groups, "state": state}

    def _common_options(self, members: Sequence[str]) -> dict[str, Any] | None:
        """Return the options of a group, packed; None for a group without a parameter on this rank."""
        options: dict[str, Any] | None = None
        for name in members:
            if name not in self._options:
                advice = "give an optimizer of the parameters that it has"
                raise MismatchError(f"{self._files.folder} has no optimizer state of {name}: {advice}")
            own = {key: pack(self._value(stored), key, {}) for key, stored in self._options[name].items()}
            if options is not None and own != options:
                advice = "make the groups that it was saved with"
                raise MismatchError(f"{self._files.folder} has other options for {name} than for {members[0]}: {advice}")
            options = own
        return options

    def _packed_state(self, name: str) -> Any:
        """Return the state of a parameter as `pack` does, with the names of the tensors in the files."""
        state: dict[str, Any] = {"dict": {}}
        for key, stored_name in self._state[name].items():
            *parts, last = key.split(".")  # of nested dicts
            inner = state["dict"]
            for part in parts:
                inner = inner.setdefault(part, {"dict": {}})["dict"]
            is_tensor = stored_name in self._files.tensors
            inner[last] = {"tensor": stored_name} if is_tensor else pack(self._value(stored_name), key, {})
        return state


def _optimizer_prefix(files: DcpFiles, parameter_names: Collection[str]) -> str:
    """Return what comes before `state.` and `param_groups.` of the parameters. Raises MismatchError if they are not there."""
    counts = Counter[str]()
    for stored_name in [*files.tensors, *files.values]:
        for match in _OPTIMIZER_NAME.finditer(stored_name):
            if _parameter_of(stored_name[match.end() :], parameter_names):
                counts[stored_name[: match.start(2)]] += 1
    if not counts:
        is_by_number = any(re.search(r"(^|\.)state\.0\.[^.]*$", name) for name in files.tensors)
        advice = (
            "has an optimizer whose parameters are numbers: save what torch.distributed.checkpoint.state_dict.get_state_dict "
            "returns, not optimizer.state_dict()"
            if is_by_number
            else "holds no optimizer state of this model's parameters: leave out optimizer="
        )
        raise MismatchError(f"{files.folder} {advice}")
    return counts.most_common(1)[0][0]


def _parameter_of(flat_name: str, names: Collection[str]) -> str | None:
    """Return the longest of `names` that `flat_name` begins with, before a dot."""
    place = len(flat_name)
    while (place := flat_name.rfind(".", 0, place)) > 0:
        if flat_name[:place] in names:
            return flat_name[:place]
    return None


def _fitting_options(group: Mapping[str, Any], stored: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the stored options that the group has. Raises MismatchError for those of another class of optimizers.

    A release of torch may add an option to a class, so one side may have more than the other; each having its own is not that.
    """
    current = group.keys() - {*PARAMETER_KEYS, "initial_lr"}
    foreign, lacking = stored.keys() - current - {"initial_lr"}, current - stored.keys()
    if foreign and lacking:
        raise MismatchError(
            f"the folder has the options of another optimizer than {kind}: {', '.join(sorted(foreign))}, and not "
            f"{', '.join(sorted(lacking))}"
        )
    return {key: value for key, value in stored.items() if key in group}
