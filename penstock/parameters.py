"""One truth for names: this rank's parameters and buffers, under their names in the uncut model."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from penstock.errors import MismatchError

T = TypeVar("T")


class Parameters:
    """The parameters of a rank's stages.

    `modules`: stage -> module, this rank's. `names`: for every stage of the model, its own name of each entry -> the name in
    the uncut model. `counted_elsewhere`: names of tied parameters that another owner counts in the norm.
    """

    def __init__(
        self, modules: dict[int, nn.Module], names: Sequence[Mapping[str, str]], counted_elsewhere: Collection[str]
    ) -> None:
        self.modules, self.names, self.counted_elsewhere = modules, names, frozenset(counted_elsewhere)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names in the uncut model, parameters."""
        for stage, module in self.modules.items():
            for name, parameter in module.named_parameters():
                yield self.names[stage][name], parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Each parameter once."""
        return iter({id(parameter): parameter for _, parameter in self.named_parameters()}.values())

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers by their names in the uncut model."""
        return {
            self.names[stage][name]: value
            for stage, module in self.modules.items()
            for name, value in module.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load what is this rank's, once all of it is known to fit."""
        mine = self.state_dict()
        unfit = {
            "missing": [name for name in mine if name not in state] if strict else [],
            "unknown": [name for name in state if not any(name in names.values() for names in self.names)] if strict else [],
            "of another shape": [name for name in mine if name in state and _shape(mine[name]) != _shape(state[name])],
        }
        if any(unfit.values()):
            told = [f"{len(names)} {what} ({_few(names)})" for what, names in unfit.items() if names]
            raise MismatchError(f"the state does not fit this model: {'; '.join(told)}")
        for stage, module in self.modules.items():
            part = {own: state[name] for own, name in self.names[stage].items() if name in state}
            module.load_state_dict(part, strict=strict)

    def in_order(self, parts: Sequence[Mapping[str, T]]) -> dict[str, T]:
        """What all ranks say of their names, in the uncut model's order."""
        merged = {name: value for part in parts for name, value in part.items()}
        return {name: merged[name] for names in self.names for name in names.values() if name in merged}

    def gradient_norms(self, norm_type: float) -> dict[str, Tensor]:
        """The norm of each gradient that this rank counts."""
        return {
            name: torch.linalg.vector_norm(parameter.grad, norm_type).cpu()
            for name, parameter in self.named_parameters()
            if parameter.grad is not None and name not in self.counted_elsewhere
        }

    def clip(self, norms: Mapping[str, Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Scale this rank's gradients by what `norms`, of the whole model, ask for; returns their norm."""
        total = torch.linalg.vector_norm(torch.stack(list(norms.values())), norm_type) if norms else torch.zeros(())
        parameters = list(self.parameters())
        total = total.to(parameters[0].device) if parameters else total
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total


def _shape(value: Any) -> Any:
    return getattr(value, "shape", None)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", .." if len(names) > 3 else "")
