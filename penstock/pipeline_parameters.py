"""The part of a model that this rank runs, as a user of its pipeline sees it: stages, parameters, gradients, state."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Self

from torch import Tensor, nn

from penstock.engine.model_partition import OriginalModel
from penstock.engine.optimizers import (
    check_elementwise_optimizer,
    gather_gradient_norms,
    norm_type_of_caller,
    optimizer_of_caller,
)
from penstock.engine.pipeline_calls import PipelineCalls
from penstock.errors import MismatchError
from penstock.guards.unequal_updates import UnequalUpdatesCheck
from penstock.mesh.position import MeshPosition
from penstock.stage.rank_parameters import RankParameters


class PipelineParameters(PipelineCalls):
    """A base of Pipeline: this rank's parameters, under their names in the uncut model (`stage/rank_parameters.py`)."""

    position: MeshPosition
    _parameters: RankParameters
    _original: OriginalModel
    _update_check: UnequalUpdatesCheck
    _empty_parameter: nn.Parameter  # see `parameters`
    _has_optimizer = False  # whether one was made of `parameters()`

    @property
    def stages(self) -> dict[int, nn.Module]:
        """This rank's stages, by number."""
        return self._parameters.modules

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over this rank's parameters, each once, with the name that `named_parameters()` of the uncut model gives it.

            groups = [{"params": [p for name, p in pipe.named_parameters() if "norm" in name], "weight_decay": 0.0}, ..]

        A parameter that several ranks share, as tied embeddings, has one name on all of them: groups that are made by names put
        it into the same one everywhere. `state_dict()` has it under each of its names.
        """
        return self._parameters.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over this rank's parameters, each once, for its optimizer.

            optimizer = torch.optim.AdamW(pipe.parameters())
            torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)  # as pipe.clip_grad_norm_(1.0): all ranks call it

        Torch's functions that take or clip a norm also get a stand-in for each gradient of other ranks, so that the norm is the
        whole model's. Pass them this iterator, or a generator over it: a list, as in `optimizer.param_groups`, has this rank's
        parameters only, and so its norm.

        If all are frozen, one empty trainable parameter is added, because torch optimizers refuse an empty list. Raises
        MismatchError for an optimizer whose step depends on all parameters at once, as LBFGS, if there are several ranks.
        """
        parameters = list(self._parameters.parameters())
        has_trained = any(parameter.requires_grad for parameter in parameters)
        return self._iterate_for_calling_function(parameters if has_trained else [*parameters, self._empty_parameter])

    def _iterate_for_calling_function(self, parameters: list[nn.Parameter]) -> Iterator[Any]:
        """Iterate over `parameters`; for a function that takes a norm, also over stand-ins for other ranks' gradients."""
        frame = inspect.currentframe()
        norm_type = norm_type_of_caller(frame)
        if norm_type is not None and self.position.world.world_size > 1:
            yield from self._parameters.with_remote_gradient_norms(self._exchange_gradient_norms(norm_type))
        else:
            optimizer = optimizer_of_caller(frame)
            check_elementwise_optimizer(optimizer, self.position.pipeline.world_size)
            self._has_optimizer = self._has_optimizer or optimizer is not None
            yield from parameters

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode of this rank's modules, as `nn.Module.train`. `step` does not change it."""
        for module in self.stages.values():
            module.train(mode)
        if self._original.cuttable is not None:
            self._original.cuttable.model.training = mode
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset this rank's gradients to None, or to 0; as `nn.Module.zero_grad`."""
        for module in self.stages.values():
            module.zero_grad(set_to_none)

    def state_dict(self, strict: bool = True) -> dict[str, Any]:
        """Return this rank's part of the uncut model's state, under the uncut model's names; all ranks' parts are the whole.

        Parameters in shards (`fully_shard`, `tensor_parallel`) are DTensors: `full_tensor()`, called by all ranks that have a
        shard, returns the whole one. Raises MismatchError while a tensor has no values yet, unless `strict` is False.
        """
        if strict:
            self._parameters.check_initialised()
        return self._parameters.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of `state`, which may be the whole model's. Every rank that has a tied parameter loads it.

        Raises MismatchError, before anything is loaded, for a name that is missing in `state`, for one that no stage has (both
        unless `strict` is False), and for a shape that differs.
        """
        value: Any = state
        if not isinstance(value, Mapping):
            raise MismatchError(
                f"load_state_dict() takes names and tensors, not a {type(value).__name__}: of files, "
                "checkpoint.import_weights(pipe, path)"
            )
        self._parameters.load_state_dict(state, strict)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all ranks' gradients so that the norm of the whole model is at most `max_norm`; return the norm before.

        All ranks call it. The norm is bitwise that of the uncut model: parameters are taken in its order, and a tied parameter
        counts once. Raises MismatchError for a `max_norm` that is no number of 0 or more, or another one on each rank.
        """
        norms = self._exchange_gradient_norms(norm_type, max_norm)
        total = self._parameters.clip_grads(norms, max_norm, float(norm_type))
        self._update_check.record_gradients()
        return total

    def _exchange_gradient_norms(self, norm_type: float, max_norm: float = 0.0) -> list[Any]:
        """Return the norms of each rank's gradients, by rank. All ranks call it. Raises as `clip_grad_norm_`."""
        waits = self.position.num_ranks_per_stage > 1  # in the norm of a DTensor
        with self.collective("clip_grad_norm_()", announces=waits) as control:
            return gather_gradient_norms(control, self._parameters, norm_type, max_norm)
