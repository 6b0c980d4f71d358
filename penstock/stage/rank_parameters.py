"""This rank's parameters and buffers, under their names in the uncut model: state, gradient norms, clipping."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.comms.topology import CPU
from penstock.errors import MismatchError
from penstock.stage.dtensor import ShardKey, local_shard, shard_coordinates, shard_like
from penstock.torch_private import foreach_norm, tensor_version

MISSING, UNEXPECTED, WRONG_SHAPE = "missing", "unknown", "of another shape"  # why a name of a state does not fit


class RankParameters:
    """The parameters and buffers of a rank's stages.

    `modules`: stage -> module, this rank's.
    `names`: for every stage of the model, its name of each entry -> the name in the uncut model.
    `aliases`: for an entry with several names in the uncut model, the others -> the first, which its `named_parameters` gives.
    No stage of this rank need have that one.
    `order`: all names in the order of the uncut model, by default that of the stages.
    `unset`: names of entries that have no value until something is written to them, as loading a state does.
    `origin`: what else is known of the uncut model, if it had a configuration.
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

    # -- names and state ---------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return each parameter once, with its first name in the uncut model. Raises MismatchError for one added since."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for stage, module in self.modules.items():
            for stage_name, parameter in module.named_parameters():
                name = self._model_name(stage, stage_name)
                found.setdefault(id(parameter), (self.aliases.get(name, name), parameter))
        return iter(found.values())

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return each parameter once."""
        return (parameter for _, parameter in self.named_parameters())

    def _model_name(self, stage: int, stage_name: str) -> str:
        """Return the name in the uncut model. Raises MismatchError for an entry that was added later."""
        if stage_name not in self.names[stage]:
            raise MismatchError(
                f"stage {stage} has a {stage_name} that was not there when the pipeline was built: add layers and parameters "
                "to the model, then build the pipeline"
            )
        return self.names[stage][stage_name]

    def state_dict(self, keep_vars: bool = False) -> dict[str, Any]:
        """Return parameters and buffers by their names in the uncut model, detached unless `keep_vars`."""
        return {
            self._model_name(stage, name): value
            for stage, module in self.modules.items()
            for name, value in module.state_dict(keep_vars=keep_vars).items()
        }

    @property
    def has_unset(self) -> bool:
        """Whether an entry had no value when this was last checked."""
        return bool(self._unset)

    def check_initialised(self) -> None:
        """Raise MismatchError if an entry of `unset` has no value yet."""
        if self._unset:
            tensors = self.state_dict(keep_vars=True)
            same = {name: entry for name, entry in self._unset.items() if tensors.get(name) is entry[0]}
            self._unset = {name: entry for name, entry in same.items() if tensor_version(entry[0]) == entry[1]}
        if self._unset:
            names = list(self._unset)
            raise MismatchError(
                f"what has no value yet ({len(names)}: {_first_names(names)}) cannot be used: the model was built on the meta "
                "device and nothing initialises them; load them (load_state_dict, checkpoint.import_weights or "
                "checkpoint.resume) or pass init="
            )

    def load_state_dict(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load this rank's part of `state`, once all of it is known to fit."""
        state = self._with_aliases(state)
        mismatches = self.state_mismatches({name: _shape(value) for name, value in state.items()})
        if not strict:
            mismatches = {WRONG_SHAPE: mismatches[WRONG_SHAPE]}
        if any(mismatches.values()):
            raise MismatchError(f"the state does not fit this model: {describe_mismatches(mismatches)}")

        for stage, module in self.modules.items():
            current = module.state_dict()
            stage_state = {
                stage_name: shard_like(state[name], current[stage_name])
                for stage_name, name in self.names[stage].items()
                if name in state
            }
            module.load_state_dict(stage_state, strict=strict)

    def _with_aliases(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return `state` with all names of an entry. If several are in `state` the last one counts, as in the uncut model."""
        first_name = {name: self.aliases.get(name, name) for name in self.order}
        last_value = {first_name[name]: state[name] for name in self.order if name in state}
        return {**state, **{name: last_value[first_name[name]] for name in self.order if first_name[name] in last_value}}

    def state_mismatches(self, shapes: Mapping[str, Any]) -> dict[str, list[str]]:
        """Return the names that keep a state of these names and shapes (None: no tensor) from being loaded, by reason."""
        state, model_names = self.state_dict(), {name for names in self.names for name in names.values()}
        return {
            MISSING: [name for name in state if name not in shapes],
            UNEXPECTED: [name for name in shapes if name not in model_names],
            WRONG_SHAPE: [name for name in state if name in shapes and _shape(state[name]) != shapes[name]],
        }

    # -- norms and clipping ------------------------------------------------------------------------------------------

    def gradient_norms_by_name(self, norm_type: float) -> dict[ShardKey, Tensor]:
        """Return the norm of each gradient of this rank, or of its shard of one, by the parameter's name."""
        gradients = {
            (name, shard_coordinates(parameter.grad)): local_shard(parameter.grad)
            for name, parameter in self.named_parameters()
            if parameter.grad is not None and local_shard(parameter.grad).numel()
        }
        norms = map(Tensor.type_as, foreach_norm([*gradients.values()], norm_type), gradients.values())
        return dict(zip(gradients, _copy_scalars([*norms], Tensor.cpu), strict=True))

    def clip_grads(self, rank_norms: Sequence[Mapping[ShardKey, Tensor]], max_norm: float, norm_type: float) -> Tensor:
        """Clip this rank's gradients by the norm of the whole model's gradients, and return that norm.

        `rank_norms`: `gradient_norms_by_name` of every rank.
        """
        total = nn.utils.get_total_norm(self._norms_in_model_order(rank_norms).values(), norm_type)
        parameters = [_local_shard_with_grad(parameter) for parameter in self.parameters() if parameter.grad is not None]
        total = total.to(parameters[0].device, non_blocking=True) if parameters else total
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total

    def with_remote_gradient_norms(self, rank_norms: Sequence[Mapping[ShardKey, Tensor]]) -> list[Tensor]:
        """Return this rank's parameters, and for each gradient of other ranks a scalar that has its norm as gradient.

        They are in the uncut model's order, and all have a gradient: the total norm of these is the whole model's.
        `rank_norms`: `gradient_norms_by_name` of every rank.
        """
        parameters = {
            (name, shard_coordinates(parameter.grad)): _local_shard_with_grad(parameter)
            for name, parameter in self.named_parameters()
            if parameter.grad is not None
        }
        device = next(iter(parameters.values())).device if parameters else CPU
        norms = self._norms_in_model_order(rank_norms)
        return [
            parameters[key] if key in parameters else _with_gradient(torch.zeros_like(norm), norm)
            for key, norm in zip(norms, _copy_scalars([*norms.values()], partial(Tensor.to, device=device)), strict=True)
        ]

    def _norms_in_model_order(self, rank_norms: Sequence[Mapping[ShardKey, Tensor]]) -> dict[ShardKey, Tensor]:
        norms = {key: norm for part in rank_norms for key, norm in part.items()}  # ranks that have the same gradient agree
        positions = {name: position for position, name in enumerate(self.order)}
        return {key: norms[key] for key in sorted(norms, key=lambda key: (positions[key[0]], key[1]))}


def _copy_scalars(scalars: Sequence[Tensor], copy: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return `scalars` where `copy` brings them, in one transfer for each dtype."""
    by_dtype: dict[torch.dtype, Iterator[Tensor]] = {}
    for dtype in {scalar.dtype for scalar in scalars}:
        by_dtype[dtype] = iter(copy(torch.stack([scalar for scalar in scalars if scalar.dtype == dtype])))
    return [next(by_dtype[scalar.dtype]) for scalar in scalars]


def _local_shard_with_grad(parameter: nn.Parameter) -> Tensor:
    """Return `parameter`, or a tensor with this rank's shard of it and of its gradient."""
    shard = local_shard(parameter)
    return parameter if shard is parameter else _with_gradient(shard.detach(), local_shard(parameter.grad))


def _with_gradient(value: Tensor, gradient: Tensor) -> Tensor:
    value.requires_grad_().grad_dtype = gradient.dtype
    value.grad = gradient
    return value


def describe_mismatches(mismatches: Mapping[str, Sequence[str]]) -> str:
    """Return as text how many names there are for each reason, and the first of them."""
    return "; ".join(f"{len(names)} {reason} ({_first_names(names)})" for reason, names in mismatches.items() if names)


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", .." if len(names) > 3 else "")


def _shape(value: Any) -> Any:
    return getattr(value, "shape", None)
