"""Parameters that several stages share: found by identity, kept equal over ranks. Their gradients: `connections.py`."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from penstock.comms.point_to_point import recv_tensor, send_tensor
from penstock.comms.topology import Topology
from penstock.stage.connections import StageParameter


def find_tied_groups(stages: Mapping[int, nn.Module]) -> list[list[StageParameter]]:
    """Return the groups of names that are one parameter object in several stages, in stage order."""
    return [names for names in names_by_parameter(stages) if len({stage for stage, _ in names}) > 1]


def names_by_parameter(stages: Mapping[int, nn.Module]) -> list[list[StageParameter]]:
    """Return for each parameter object all its names, in stage order."""
    names: dict[int, list[StageParameter]] = {}
    for stage, module in sorted(stages.items()):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append((stage, name))
    return list(names.values())


class TiedParameters:
    """The parameters that several ranks have a copy of. The copy of the first owner gets the full gradient.

    `groups`: as `find_tied_groups` returns them. `modules`: this rank's stages. `names`, `aliases`: as in `RankParameters`.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[StageParameter]],
        placement: Sequence[int],
        modules: Mapping[int, nn.Module],
        names: Sequence[Mapping[str, str]],
        aliases: Mapping[str, str],
        topology: Topology,
    ) -> None:
        self.topology = topology
        self.owners: dict[str, list[int]] = {}  # name in the uncut model -> ranks; the same on all ranks, in the same order
        self.copies: dict[str, nn.Parameter] = {}  # this rank's
        for group in groups:
            owners = list(dict.fromkeys(placement[stage] for stage, _ in group))
            if len(owners) == 1:
                continue
            first_stage, first_name = group[0]
            model_name = names[first_stage][first_name]
            name = aliases.get(model_name, model_name)
            self.owners[name] = owners
            for stage, stage_name in group:
                if stage in modules:
                    self.copies[name] = modules[stage].get_parameter(stage_name)

    def parameters_of_other_owners(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return this rank's copies whose first owner is another rank, by name."""
        return ((name, copy) for name, copy in self.copies.items() if self.owners[name][0] != self.topology.rank)

    def broadcast_values(self) -> None:
        """Copy each tied parameter's value from its first owner to the others."""
        with torch.no_grad():
            for name, copy in self.copies.items():
                copy.copy_(self._broadcast_from_first_owner(name, copy.detach()))

    def broadcast_gradients(self) -> None:
        """Copy each tied parameter's gradient from its first owner to the others, at the end of a step."""
        for name, copy in self.copies.items():
            if copy.requires_grad:
                has_gradient = torch.tensor([copy.grad is not None], device="cpu")
                has_gradient = self._broadcast_from_first_owner(name, has_gradient)
                gradient = torch.zeros_like(copy, dtype=copy.grad_dtype) if copy.grad is None else copy.grad
                copy.grad = self._broadcast_from_first_owner(name, gradient) if has_gradient else None

    def _broadcast_from_first_owner(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        first, *others = map(self.topology.get_global_rank, self.owners[name])
        if self.topology.rank != self.owners[name][0]:
            return recv_tensor(tensor.shape, first, tensor.dtype, tensor.device)
        for rank in others:
            send_tensor(tensor, rank)
        return tensor
