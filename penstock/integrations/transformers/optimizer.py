"""An optimizer that Trainer made of all parameters, on a rank that trains some; its state on disk is that of all."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

import penstock as ps
from penstock.engine.optimizers import check_elementwise_optimizer


class RankOptimizer:
    """`optimizer` with the parameters of this rank alone, in the groups where they were.

    Parameters that other ranks train are taken out, and their state. A state of all parameters, as plain Trainer saves it, can
    be loaded before and after that.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, own_ids: Collection[int], all_of_model: Collection[int]) -> None:
        check_elementwise_optimizer(optimizer, ps.comms.current_topology().world_size)
        self.optimizer = optimizer
        self.places: list[list[int]] = []  # of this rank's parameters, among those of all groups
        self.counts: list[int] = []  # parameters of each group on all ranks
        number = 0
        for group in optimizer.param_groups:
            parameters = group["params"]
            if any(id(parameter) not in all_of_model for parameter in parameters):
                raise ps.MismatchError("the optimizer has parameters that are not the model's: make them a part of the model")
            self.places.append([number + place for place, parameter in enumerate(parameters) if id(parameter) in own_ids])
            self.counts.append(len(parameters))
            for parameter in [parameter for parameter in parameters if id(parameter) not in own_ids]:
                optimizer.state.pop(parameter, None)
            group["params"] = [parameter for parameter in parameters if id(parameter) in own_ids]
            number += len(parameters)
        optimizer.register_load_state_dict_pre_hook(self._part)

    def _part(self, _: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's of a state of all parameters; one of its own stays."""
        if [len(group["params"]) for group in state["param_groups"]] == list(map(len, self.places)):
            return {**state}
        new_place = {place: number for number, place in enumerate(place for places in self.places for place in places)}
        groups = [
            {**group, "params": [new_place[place] for place in places]}
            for group, places in zip(state["param_groups"], self.places, strict=True)
        ]
        rank_state = {new_place[place]: value for place, value in state["state"].items() if place in new_place}
        return {**state, "state": rank_state, "param_groups": groups}

    def whole_state_dict(self) -> dict[str, Any]:
        """This rank's state, under the places that its parameters have on all ranks together."""
        state = self.optimizer.state_dict()
        place_of = [place for places in self.places for place in places]
        ends = [sum(self.counts[: number + 1]) for number in range(len(self.counts))]
        groups = [
            {**group, "params": list(range(end - count, end))}
            for group, count, end in zip(state["param_groups"], self.counts, ends, strict=True)
        ]
        return {**state, "state": {place_of[key]: value for key, value in state["state"].items()}, "param_groups": groups}

    def save(self, pipe: ps.Pipeline, path: Path) -> None:
        """Write all ranks' state to `path`; all ranks call it, and must see the folder."""
        temporary = path.with_name(f".{path.name}.{pipe.topology.rank}")
        if pipe.position.replica == 0:
            torch.save(self.whole_state_dict(), temporary)
        pipe.gather(lambda: None, "to write the optimizer's state")
        if pipe.position.world.rank == 0:
            parts = [path.with_name(f".{path.name}.{rank}") for rank in range(pipe.topology.world_size)]
            states = [torch.load(part, map_location="cpu", mmap=True, weights_only=True) for part in parts]
            merged = {place: value for state in states for place, value in state["state"].items()}
            torch.save({**states[0], "state": dict(sorted(merged.items()))}, path)
            for part in parts:
                part.unlink()
