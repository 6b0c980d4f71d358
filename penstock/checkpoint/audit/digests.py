"""Digests of weights, gradients and optimizer state, by the uncut model's names: the same for every cut of the same numbers.

A tensor's is that of `engine/checks/digest.py`.
"""

import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from penstock.checkpoint.files.packing import pack
from penstock.comms.control import Control
from penstock.engine.checks.copies import CAUSES
from penstock.engine.checks.digest import crc_of, ranks_by_digest
from penstock.errors import MismatchError
from penstock.pipeline import Pipeline
from penstock.stage.dtensor import local, shard_of
from penstock.torch_private import tree_map_only

Digest = str | dict[str, str]  # eight hexadecimal digits; by rank where ranks that should have the same have not
Digests = dict[str, dict[str, Digest]]  # "weights", "gradients" or "optimizer" -> name in the uncut model -> digest


def digests(pipe: Pipeline, optimizer: Any = None) -> Digests:
    """Digests of `"weights"` (with buffers), `"gradients"` and `"optimizer"` state, by name; the same on every rank.

    All ranks call it after the optimizer's step and before gradients are let go. What is the same to the bit has the same
    digests in any cut, on any ranks and schedule, and in one process. A tied parameter is there once, under its first name;
    one that ranks have shards of as a whole, which takes a message. A parameter without a gradient or state has no digest.

    `optimizer`: of this rank's `pipe.parameters()`.

    Each digest is eight hexadecimal digits, or, where ranks that have the same parameter differ in it, those of each such rank.

        loss = pipe.step(inputs, target=targets)
        optimizer.step()
        before = checkpoint.digests(pipe, optimizer)["weights"]
    """
    with pipe.collective("checkpoint.digests()") as control:
        everyone = control.gather_objects(own(pipe, optimizer), "to compare digests")
    return merged(everyone, list(pipe.homes))


def own(pipe: Pipeline, optimizer: Any) -> dict[str, dict[str, str]]:
    """This rank's."""
    found: dict[str, dict[str, str]] = {}
    for kind, name, _, value in _values(pipe, optimizer):
        found.setdefault(kind, {})[name] = digest(value)
    return found


def merged(everyone: Sequence[Mapping[str, Mapping[str, str]]], order: Sequence[str]) -> Digests:
    """All ranks' as one, in the `order` of names."""
    holders: dict[str, dict[str, dict[str, str]]] = {}
    for rank, mine in enumerate(everyone):
        for kind, named in mine.items():
            for name, each in named.items():
                holders.setdefault(kind, {}).setdefault(name, {})[str(rank)] = each
    place = {name: number for number, name in enumerate(order)}
    return {
        kind: {name: _one(named[name]) for name in sorted(named, key=lambda name: place.get(name, len(place)))}
        for kind, named in holders.items()
    }


def _one(by_rank: dict[str, str]) -> Digest:
    return by_rank if len({*by_rank.values()}) > 1 else next(iter(by_rank.values()))


def check_replicas(control: Control, pipe: Pipeline, optimizer: Any = None) -> None:
    """Raises MismatchError, on every rank, where ranks that have the same parameter, or shard of one, differ in its bits."""
    among = None if pipe.position.copies > 1 else pipe.tied  # a chain of ranks has no more than these twice
    if among is not None and not among:  # on no rank
        return
    mine: dict[str, dict[str, str]] = {}
    for kind, name, parameter, value in _values(pipe, optimizer, among):
        if kind != "gradients":
            shard = "".join(f", shard {each}" for each in shard_of(parameter))
            mine.setdefault(kind, {})[name + shard] = digest(tree_map_only(Tensor, local, value))
    for kind, named in merged(control.gather_objects(mine, "to compare replicas"), ()).items():
        for name, each in named.items():
            if isinstance(each, dict):
                differ = f"{told(kind, name)} is not the same on all ranks that have it: {ranks_by_digest(each)}"
                raise MismatchError(f"{differ}; {CAUSES}" if name in pipe.tied else differ)


def told(kind: str, name: str) -> str:
    """What a digest is of, in words."""
    return {
        "weights": name,
        "gradients": f"the gradient of {name}",
        "optimizer": f"the optimizer's state of {name}",
        "outputs": f"the output of {name}",
    }[kind]


def _values(pipe: Pipeline, optimizer: Any, among: Collection[str] | None = None) -> Iterator[tuple[str, str, Any, Any]]:
    """Kind, name, tensor of the model, and the value that this rank has, of each or of those `among` the names."""
    aliases, done = pipe.aliases, set[tuple[str, str]]()
    for kind, name, parameter, value in _all(pipe, optimizer):
        key = kind, aliases.get(name, name)
        if value is not None and key not in done and (among is None or key[1] in among):
            done.add(key)
            yield *key, parameter, value


def _all(pipe: Pipeline, optimizer: Any) -> Iterator[tuple[str, str, Any, Any]]:
    for name, value in pipe.state_dict().items():
        yield "weights", name, value, value
    for name, parameter in pipe.named_parameters():
        yield "gradients", name, parameter, parameter.grad
        yield "optimizer", name, parameter, getattr(optimizer, "state", {}).get(parameter)


# -- one digest ---------------------------------------------------------------------------------------------------------


def digest(value: Any) -> str:
    """Of a tensor, or of numbers, texts and tensors in lists, tuples and dicts; of shards, all who have one call it."""
    tensors: dict[str, Tensor] = {}
    crc = zlib.crc32(json.dumps(pack(value, "", tensors)).encode())
    for tensor in tensors.values():
        crc = crc_of(tensor, crc)
    return f"{crc:08x}"
