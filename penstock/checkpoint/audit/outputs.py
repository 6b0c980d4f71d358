"""Digests of what a model's layers give in a step: by them a wrong activation is found in the layer that made it."""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from penstock.checkpoint.audit.digests import digest
from penstock.partition.graph_stage import GraphStage
from penstock.pipeline import Pipeline
from penstock.stage.dtensor import local
from penstock.torch_private import is_compiled, layers_of, tree_leaves

CONTAINERS = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict, GraphStage)  # what is in them are the layers


class Outputs:
    """Listens to this rank's layers while they train."""

    def __init__(self, pipe: Pipeline) -> None:
        self._found: dict[str, set[str]] = {}  # layer -> digests: an output that is made again in the backward counts once
        self._hooks = [layer.register_forward_hook(self._hook(name)) for _, name, layer in layers(pipe)]

    def _hook(self, name: str) -> Any:
        found = self._found.setdefault(name, set())

        def listen(module: nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled() and module.training:
                found.add(digest([local(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]))

        return listen

    def close(self) -> dict[str, str]:
        """Listen no more; what was heard, by layer."""
        for hook in self._hooks:
            hook.remove()
        return {name: summed(each) for name, each in self._found.items() if each}


def summed(digests: Collection[str]) -> str:
    """One of several, in whatever order they come; it changes if one of them does."""
    return f"{sum(int(each, 16) for each in digests) % 2**32:08x}"


def layers(pipe: Pipeline) -> Iterator[tuple[int, str, nn.Module]]:
    """Stage, name in the uncut model, and module of each of this rank's layers; none of a compiled stage."""
    homes = pipe.homes
    for stage, module in pipe.stages.items():
        if not any(map(is_compiled, module.modules())):
            prefix = "" if all(name in homes for name in module.state_dict()) else f"{stage}."  # see `partition.names_of`
            for name, layer in _inside(module, prefix):
                yield stage, name, layer


def _inside(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in layers_of(module).items():
        if type(child) in CONTAINERS:
            yield from _inside(child, f"{path}{name}.")
        else:
            yield path + name, child
