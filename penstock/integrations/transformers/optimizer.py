"""Restrict Trainer's optimizer to the parameters of this rank; save and load the state of all ranks in one file."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

import penstock as ps
from penstock.engine.optimizers import check_elementwise_optimizer


class RankOptimizer:
    """`optimizer` with only this rank's parameters, in the same groups.

    Removes the parameters of other ranks, and their state. A state of all parameters, as plain Trainer saves it, can be loaded
    before and after that. Raises MismatchError for a parameter that is not the model's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, own_ids: Collection[int], model_ids: Collection[int]) -> None:
        check_elementwise_optimizer(optimizer, ps.comms.current_topology().world_size)
        self.optimizer = optimizer
        self.indices: list[list[int]] = []  # for each group: indices of this rank's parameters among those of all groups
        self.counts: list[int] = []  # for each group: its parameters on all ranks
        first = 0
        for group in optimizer.param_groups:
            parameters = group["params"]
            if any(id(parameter) not in model_ids for parameter in parameters):
                raise ps.MismatchError("the optimizer has parameters that are not the model's: make them a part of the model")
            self.indices.append([first + index for index, parameter in enumerate(parameters) if id(parameter) in own_ids])
            self.counts.append(len(parameters))
            for parameter in [parameter for parameter in parameters if id(parameter) not in own_ids]:
                optimizer.state.pop(parameter, None)
            group["params"] = [parameter for parameter in parameters if id(parameter) in own_ids]
            first += len(parameters)
        optimizer.register_load_state_dict_pre_hook(self._select_own_state)

    def _select_own_state(self, _: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a state of all parameters; return a state of only this rank's unchanged."""
        if [len(group["params"]) for group in state["param_groups"]] == list(map(len, self.indices)):
            return {**state}
        own_index = {index: own for own, index in enumerate(index for indices in self.indices for index in indices)}
        groups = [
            {**group, "params": [own_index[index] for index in indices]}
            for group, indices in zip(state["param_groups"], self.indices, strict=True)
        ]
        rank_state = {own_index[index]: value for index, value in state["state"].items() if index in own_index}
        return {**state, "state": rank_state, "param_groups": groups}

    def global_state_dict(self) -> dict[str, Any]:
        """Return this rank's state, with the indices that its parameters have among those of all ranks."""
        state = self.optimizer.state_dict()
        own_indices = [index for indices in self.indices for index in indices]
        ends = [sum(self.counts[: number + 1]) for number in range(len(self.counts))]
        groups = [
            {**group, "params": list(range(end - count, end))}
            for group, count, end in zip(state["param_groups"], self.counts, ends, strict=True)
        ]
        return {**state, "state": {own_indices[key]: value for key, value in state["state"].items()}, "param_groups": groups}

    def save(self, pipe: ps.Pipeline, path: Path) -> None:
        """Write all ranks' state to `path`. All ranks call this, and must see the folder."""
        temporary = path.with_name(f".{path.name}.{pipe.topology.rank}")
        if pipe.position.stage_rank_index == 0:
            torch.save(self.global_state_dict(), temporary)
        pipe.gather(lambda: None, "to write the optimizer's state")
        if pipe.position.world.rank == 0:
            parts = [path.with_name(f".{path.name}.{rank}") for rank in range(pipe.topology.world_size)]
            states = [torch.load(part, map_location="cpu", mmap=True, weights_only=True) for part in parts]
            merged = {index: value for state in states for index, value in state["state"].items()}
            torch.save({**states[0], "state": dict(sorted(merged.items()))}, path)
            for part in parts:
                part.unlink()
