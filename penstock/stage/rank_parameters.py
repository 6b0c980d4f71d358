"""One truth for names: this rank's parameters and buffers, under their names in the uncut model."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import MismatchError
from penstock.stage.dtensor import ShardKey, local_shard, shard_coordinates, shard_like
from penstock.torch_private import foreach_norm, tensor_version

MISSING, UNEXPECTED, WRONG_SHAPE = "missing", "unknown", "of another shape"  # what a name can be in a state that does not fit


class RankParameters:
    """The parameters of a rank's stages.

    `modules`: stage -> module, this rank's. `names`: for every stage of the model, its own name of each entry -> the name in
    the uncut model. `aliases`: further names there of what has several -> the first, which `named_parameters` of the uncut
    model gives; no stage of this rank need have that one. `order`: of all names in the uncut model, by default that of the
    stages. `unset`: names of what has no value until somebody writes to it, as loading a state does. `origin`: what the uncut
    model was besides, if it had a configuration.
    """

    def __init__(
        self,
        modules: dict[int, nn.Module],
        names: Sequence[Mapping[str, str]],
        aliases: Mapping[str, str] | None = None,
        order: Sequence[str] | None = None,
        unset: Collection[str] = (),
        origin: Any = None,
    ) -> None:
        self.modules, self.names, self.aliases = modules, names, dict(aliases or {})
        self.origin = origin
        self.order = order or [name for stage in names for name in stage.values()]
        tensors = self.state_dict(keep_vars=True) if unset else {}
        self._unset = {name: (tensor, tensor_version(tensor)) for name, tensor in tensors.items() if name in unset}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter once, by its first name in the uncut model. Raises MismatchError for one that has come since."""
        found = dict[int, tuple[str, nn.Parameter]]()
        for stage, module in self.modules.items():
            for own, parameter in module.named_parameters():
                name = self._name(stage, own)
                found.setdefault(id(parameter), (self.aliases.get(name, name), parameter))
        return iter(found.values())

    def _name(self, stage: int, name: str) -> str:
        """In the uncut model. Raises MismatchError for what has come since."""
        if name not in self.names[stage]:
            told = f"stage {stage} has a {name} that was not there when the pipeline was built"
            raise MismatchError(f"{told}: add layers and parameters to the model, then build the pipeline")
        return self.names[stage][name]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Each parameter once."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self, keep_vars: bool = False) -> dict[str, Any]:
        """Parameters and buffers by their names in the uncut model; if `keep_vars` they themselves, else cut off."""
        return {
            self._name(stage, name): value
            for stage, module in self.modules.items()
            for name, value in module.state_dict(keep_vars=keep_vars).items()
        }

    def check_initialised(self) -> None:
        """Raises MismatchError if something has no value yet."""
        if self._unset:
            now = self.state_dict(keep_vars=True)
            untouched = {name: entry for name, entry in self._unset.items() if now.get(name) is entry[0]}
            self._unset = {name: entry for name, entry in untouched.items() if tensor_version(entry[0]) == entry[1]}
        if self._unset:
            names = list(self._unset)
            raise MismatchError(
                f"what has no value yet ({len(names)}: {_few(names)}) cannot be used: the model was built on the meta "
                "device and nothing initialises them; load them (load_state_dict, checkpoint.import_weights or "
                "checkpoint.resume) or pass init="
            )

    def load_state_dict(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load what is this rank's, once all of it is known to fit."""
        state = self._under_all_names(state)
        unfit = self.state_mismatches({name: _shape(value) for name, value in state.items()})
        if not strict:
            unfit = {WRONG_SHAPE: unfit[WRONG_SHAPE]}
        if any(unfit.values()):
            raise MismatchError(f"the state does not fit this model: {describe_mismatches(unfit)}")
        for stage, module in self.modules.items():
            own = module.state_dict()
            part = {key: shard_like(state[name], own[key]) for key, name in self.names[stage].items() if name in state}
            module.load_state_dict(part, strict=strict)

    def _under_all_names(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """`state` with what has several names under all of them, as the last of these has it, as in the uncut model."""
        first = {name: self.aliases.get(name, name) for name in self.order}
        last = {first[name]: state[name] for name in self.order if name in state}
        return {**state, **{name: last[first[name]] for name in self.order if first[name] in last}}

    def state_mismatches(self, shapes: Mapping[str, Any]) -> dict[str, list[str]]:
        """The names that keep a state of these names and shapes (None: no tensor) from being loaded, by what they are."""
        mine, known = self.state_dict(), {name for names in self.names for name in names.values()}
        return {
            MISSING: [name for name in mine if name not in shapes],
            UNEXPECTED: [name for name in shapes if name not in known],
            WRONG_SHAPE: [name for name in mine if name in shapes and _shape(mine[name]) != shapes[name]],
        }

    def gradient_norms_by_name(self, norm_type: float) -> dict[ShardKey, Tensor]:
        """The norm of each gradient that this rank has, or of its shard of one, by the parameter's name."""
        gradients = {
            (name, shard_coordinates(parameter.grad)): local_shard(parameter.grad)
            for name, parameter in self.named_parameters()
            if parameter.grad is not None and local_shard(parameter.grad).numel()
        }
        return dict(zip(gradients, _norms([*gradients.values()], norm_type), strict=True))

    def clip_grads(self, parts: Sequence[Mapping[ShardKey, Tensor]], max_norm: float, norm_type: float) -> Tensor:
        """Scale this rank's gradients by what all ranks' `gradient_norms` ask for; returns the norm of the whole model's."""
        total = nn.utils.get_total_norm(self._in_order(parts).values(), norm_type)
        parameters = [_here(parameter) for parameter in self.parameters() if parameter.grad is not None]
        total = total.to(parameters[0].device, non_blocking=True) if parameters else total
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total

    def with_remote_gradient_norms(self, parts: Sequence[Mapping[ShardKey, Tensor]]) -> list[Tensor]:
        """This rank's parameters, and for each gradient of other ranks a number whose gradient is its norm.

        In the uncut model's order, those that have a gradient: their norm is the whole model's. `parts`: all ranks'
        `gradient_norms`.
        """
        own = {
            (name, shard_coordinates(parameter.grad)): _here(parameter)
            for name, parameter in self.named_parameters()
            if parameter.grad is not None
        }
        device = next(iter(own.values())).device if own else torch.device("cpu")
        norms = self._in_order(parts)
        moved = {
            key: norm
            for dtype in {norm.dtype for norm in norms.values()}
            for keys in [[key for key, norm in norms.items() if norm.dtype == dtype]]
            for key, norm in zip(keys, torch.stack([norms[key] for key in keys]).to(device).unbind(), strict=True)
        }
        return [own[key] if key in own else _with_gradient(torch.zeros_like(moved[key]), moved[key]) for key in norms]

    def _in_order(self, parts: Sequence[Mapping[ShardKey, Tensor]]) -> dict[ShardKey, Tensor]:
        """The norms of all gradients, or of the shards of one, as the uncut model has them."""
        norms = {key: norm for part in parts for key, norm in part.items()}  # replicas and owners of one agree
        place = {name: number for number, name in enumerate(self.order)}
        return {key: norms[key] for key in sorted(norms, key=lambda key: (place[key[0]], key[1]))}


def _norms(tensors: list[Tensor], norm_type: float) -> list[Tensor]:
    """The norm of each, in its dtype, on the CPU; those of one dtype are waited for once."""
    norms, here = list(map(Tensor.type_as, foreach_norm(tensors, norm_type), tensors)), dict[torch.dtype, Iterator[Tensor]]()
    for dtype in {each.dtype for each in norms}:
        here[dtype] = iter(torch.stack([each for each in norms if each.dtype == dtype]).cpu())
    return [next(here[each.dtype]) for each in norms]


def _here(parameter: nn.Parameter) -> Tensor:
    """`parameter`, or a tensor with this rank's shard of it and of its gradient."""
    shard = local_shard(parameter)
    return parameter if shard is parameter else _with_gradient(shard.detach(), local_shard(parameter.grad))


def _with_gradient(value: Tensor, gradient: Tensor) -> Tensor:
    value.requires_grad_().grad = gradient
    return value


def describe_mismatches(unfit: Mapping[str, Sequence[str]]) -> str:
    """How many names each kind of `unfit` has, and a few of them."""
    return "; ".join(f"{len(names)} {kind} ({_few(names)})" for kind, names in unfit.items() if names)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", .." if len(names) > 3 else "")


def _shape(value: Any) -> Any:
    return getattr(value, "shape", None)
