"""Parameters that several stages share: found by identity, kept equal over ranks. Their gradients: `exchange/neighbours.py`."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from penstock.comms.point_to_point import recv_tensor, send_tensor
from penstock.comms.topology import Topology
from penstock.stage.exchange.neighbours import Name


def find(stages: Sequence[nn.Module]) -> list[list[Name]]:
    """The groups of names that are one parameter object in several stages, in stage order."""
    return [names for names in names_of(stages) if len({stage for stage, _ in names}) > 1]


def names_of(stages: Sequence[nn.Module]) -> list[list[Name]]:
    """Of each parameter object, in stage order."""
    places: dict[int, list[Name]] = {}
    for stage, module in enumerate(stages):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            places.setdefault(id(parameter), []).append((stage, name))
    return list(places.values())


def aliases(groups: Sequence[Sequence[Name]], names: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """For the shared parameters, every further name in the uncut model -> the first; `names` as in `Parameters`."""
    whole = [[names[stage][name] for stage, name in group] for group in groups]
    return {name: group[0] for group in whole for name in group[1:] if name != group[0]}


def owned(
    groups: Sequence[Sequence[Name]], placement: Sequence[int], modules: Mapping[int, nn.Module], topology: Topology
) -> list["TiedParameter"]:
    """This rank's copies of the tied parameters, in the order all ranks go through them; `modules` are its stages."""
    copies = []
    for group in groups:
        owners = list(dict.fromkeys(placement[stage] for stage, _ in group))
        if topology.rank in owners and len(owners) > 1:
            stage, name = next(each for each in group if each[0] in modules)
            copies.append(TiedParameter(modules[stage].get_parameter(name), owners, topology))
    return copies


class TiedParameter:
    """This rank's copy of one parameter, and the ranks that own one. The first owner's holds the whole gradient."""

    def __init__(self, parameter: nn.Parameter, owners: Sequence[int], topology: Topology) -> None:
        self.parameter, self.owners, self.topology = parameter, list(owners), topology

    def share_value(self) -> None:
        """Give every owner the value of the first."""
        with torch.no_grad():
            self.parameter.copy_(self._from_first(self.parameter.detach()))

    def share_gradient(self) -> None:
        """At the end of a step: give every owner the gradient of the first."""
        parameter = self.parameter
        if parameter.requires_grad:
            found = self._from_first(torch.tensor([parameter.grad is not None], device="cpu"))
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self._from_first(mine) if found else None

    def _from_first(self, mine: torch.Tensor) -> torch.Tensor:
        first, *others = map(self.topology.of_job, self.owners)
        if self.topology.rank != self.owners[0]:
            return recv_tensor(mine.shape, first, mine.dtype, mine.device)
        for other in others:
            send_tensor(mine, other)
        return mine
