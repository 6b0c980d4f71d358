"""Parameters shared by stages on different ranks: kept equal, their gradients summed over the owners."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from penstock.comms import Topology, recv_tensor, send_tensor

Name = tuple[int, str]  # a stage, and the parameter's name in it


def find(stages: Sequence[nn.Module], placement: Sequence[int]) -> list[list[Name]]:
    """The groups of names that are one parameter object and live on more than one rank, in stage order."""
    places: dict[int, list[Name]] = {}
    for stage, module in enumerate(stages):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            places.setdefault(id(parameter), []).append((stage, name))
    return [names for names in places.values() if len({placement[stage] for stage, _ in names}) > 1]


def owned(
    groups: Sequence[Sequence[Name]], placement: Sequence[int], modules: Mapping[int, nn.Module], topology: Topology
) -> list["TiedParameter"]:
    """This rank's copies of the tied parameters, in the order all ranks go through them; `modules` are its stages."""
    copies = []
    for group in groups:
        owners = list(dict.fromkeys(placement[stage] for stage, _ in group))
        if topology.rank in owners:
            stage, name = next(each for each in group if each[0] in modules)
            copies.append(TiedParameter(modules[stage].get_parameter(name), owners, topology))
    return copies


@contextmanager
def summed(parameters: Sequence["TiedParameter"]) -> Iterator[None]:
    """Around a step: at its end, each parameter's gradient of this step is summed over its owners."""
    for parameter in parameters:
        parameter.begin()
    try:
        yield
        for parameter in parameters:
            parameter.sum()
    finally:
        for parameter in parameters:
            parameter.restore()


class TiedParameter:
    """This rank's copy of one parameter, and the ranks that own one. The first owner sums."""

    def __init__(self, parameter: nn.Parameter, owners: Sequence[int], topology: Topology) -> None:
        self.parameter, self.owners, self.topology = parameter, list(owners), topology
        self._before: torch.Tensor | None = None

    def share_value(self) -> None:
        """Give every owner the value of the first."""
        with torch.no_grad():
            self.parameter.copy_(self._from_first(self.parameter.detach()))

    def begin(self) -> None:
        """Put the gradient of earlier steps aside, so that only this step's is summed."""
        self._before, self.parameter.grad = self.parameter.grad, None

    def restore(self) -> None:
        """Put the earlier steps' gradient back, this step's added: after `sum`, or after a step that failed."""
        if self._before is not None:
            mine = self.parameter.grad
            self.parameter.grad = self._before if mine is None else self._before.add_(mine)
        self._before = None

    def sum(self) -> None:
        """Sum this step's gradient over the owners, in stage order, and give all of them the same bits."""
        parameter = self.parameter
        mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if self.topology.rank == self.owners[0]:
            for owner in self.owners[1:]:
                mine = mine + self._receive(owner)
        else:
            send_tensor(mine, self.owners[0])
        if parameter.requires_grad:
            parameter.grad = self._from_first(mine)

    def _from_first(self, mine: torch.Tensor) -> torch.Tensor:
        if self.topology.rank != self.owners[0]:
            return self._receive(self.owners[0])
        for owner in self.owners[1:]:
            send_tensor(mine, owner)
        return mine

    def _receive(self, owner: int) -> torch.Tensor:
        return recv_tensor(self.parameter.shape, owner, self.parameter.dtype, self.parameter.device)
