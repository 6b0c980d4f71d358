"""Digests of weights, gradients and optimizer state, by the uncut model's names: the same for every cut of the same numbers.

A digest is the CRC-32 of a value's bytes, dtype and shape. It differs for certain where the change lies within 32 bits in a
row, as one flipped bit does, and else but for one case in four billion. It is the same in every process and release of Python
and torch, and the fastest hash of the standard library of which that is true (`benchmarks/watching.py` measures them). Tensors
that are not on the CPU are condensed where they are, so that they need not be copied.
"""

import ctypes
import hashlib
import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from penstock.checkpoint.files.packing import pack
from penstock.comms.control import Control
from penstock.errors import MismatchError
from penstock.pipeline import Pipeline
from penstock.stage.dtensor import local, shard_of
from penstock.torch_private import tree_map_only

Digest = str | dict[str, str]  # eight hexadecimal digits; by rank where ranks that should have the same have not
Digests = dict[str, dict[str, Digest]]  # "weights", "gradients" or "optimizer" -> name in the uncut model -> digest
BLOCK = 2**20  # words that become one


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
    return merged(pipe.gather(lambda: own(pipe, optimizer), "to compare digests"), list(pipe.homes))


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


def check_replicas(control: Control, pipe: Pipeline, optimizer: Any) -> None:
    """Raises MismatchError, on every rank, where ranks that have the same parameter, or shard of one, differ in its bits."""
    aliases = pipe.aliases
    among = None if pipe.position.copies > 1 else {*aliases.values()}  # a chain of ranks has no more than these twice
    mine: dict[str, dict[str, str]] = {}
    for kind, name, parameter, value in _values(pipe, optimizer, among):
        if kind != "gradients":
            shard = "".join(f", shard {each}" for each in shard_of(parameter))
            mine.setdefault(kind, {})[name + shard] = digest(tree_map_only(Tensor, local, value))
    for kind, named in merged(control.gather_objects(mine, "to compare replicas"), ()).items():
        for name, each in named.items():
            if isinstance(each, dict):
                raise MismatchError(f"{told(kind, name)} is not the same on all ranks that have it: {different(each)}")


def told(kind: str, name: str) -> str:
    """What a digest is of, in words."""
    return {
        "weights": name,
        "gradients": f"the gradient of {name}",
        "optimizer": f"the optimizer's state of {name}",
        "outputs": f"the output of {name}",
    }[kind]


def different(by_rank: Mapping[str, str]) -> str:
    """Which ranks have which digest."""
    ranks: dict[str, list[str]] = {}
    for rank, each in by_rank.items():
        ranks.setdefault(each, []).append(rank)
    return ", ".join(f"rank{'s' * (len(those) > 1)} {'/'.join(those)} {each}" for each, those in ranks.items())


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
        crc = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        dense = tensor.to_dense().resolve_conj().resolve_neg().contiguous()
        dense = dense if dense.device.type == "cpu" else condensed(dense).cpu()
        if dense.nbytes:
            crc = zlib.crc32((ctypes.c_char * dense.nbytes).from_address(dense.data_ptr()), crc)
    return f"{crc:08x}"


def condensed(tensor: Tensor) -> Tensor:
    """Eight bytes for each `BLOCK` words of four, which a change inside one word changes for certain.

    A sum of words, each times a random odd number of 64 bits, modulo 2**64 (multilinear hashing: Lemire and Kaser, "Strongly
    universal string hashing is fast", 2014): integers, so its bits do not depend on the order in which a device sums.
    """
    data = tensor.flatten().view(torch.uint8)
    words = nn.functional.pad(data, (0, -len(data) % 4)).view(torch.int32)
    odd = _odd_numbers(tensor.device)
    return torch.stack([(block * odd[: len(block)]).sum() for block in words.split(BLOCK)])


@cache
def _odd_numbers(device: torch.device) -> Tensor:
    """Random ones, the same everywhere and for ever."""
    stream = bytearray(hashlib.shake_256(b"penstock").digest(8 * BLOCK))
    return torch.frombuffer(stream, dtype=torch.int64).bitwise_or(1).to(device)
