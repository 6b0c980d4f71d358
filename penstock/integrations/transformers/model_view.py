"""A stand-in for the model where Trainer calls it, and a loss module that calls Trainer's `compute_loss`."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import maybe_install_capturing_hooks

import penstock as ps


class ModelView:
    """Has all attributes and the type of the uncut model, but calling it calls `forward`."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        self._model, self._forward = model, forward

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for isinstance
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`. Raises MismatchError for positional arguments."""
        if args:
            raise ps.MismatchError(
                "compute_loss calls the model with arguments by position: give them by name, model(**inputs)"
            )
        return self._forward(**kwargs)


def refuse_call(**_: Any) -> NoReturn:
    """Raise MismatchError: the forward of a model that nothing may call."""
    raise ps.MismatchError("the model is cut over the ranks: train, evaluate and predict run it, nothing else does")


def prepare_for_cut(model: nn.Module) -> None:
    """Turn off the cache in the model's outputs, and install the hooks that transformers installs at the first forward."""
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        if getattr(module.config, "use_cache", False):  # a decoder may have its own config, which Trainer does not change
            module.config.use_cache = False
        records = getattr(module, "_can_record_outputs", None) or {}
        if any(getattr(module.config, f"output_{name}", False) for name in records):  # as the routers' logits
            maybe_install_capturing_hooks(module)


class _ModelCall(BaseException):
    """Raised to end a function where it calls the model; holds the arguments of the call."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments


def arguments_of_call(model: nn.Module, function: Callable[[Any], object]) -> dict[str, Any]:
    """Return the arguments with which `function(model)` calls the model. The call ends the function; the model is not run."""

    def forward(**arguments: Any) -> NoReturn:
        raise _ModelCall(arguments)

    try:
        function(ModelView(model, forward))
    except _ModelCall as call:
        return call.arguments
    raise ps.MismatchError("compute_loss does not call the model: it calls it once, model(**inputs)")


def outputs_once(outputs: Any, accelerator: Any) -> Callable[..., Any]:
    """Return a forward that returns `outputs` once, in float32 if accelerate would; a second call raises MismatchError."""
    if accelerator.native_amp:
        from accelerate.utils import convert_to_fp32  # the attention of this package needs no accelerate

        outputs = convert_to_fp32(outputs)
    calls = [outputs]

    def forward(**_: Any) -> Any:
        if not calls:
            raise ps.MismatchError(
                "compute_loss calls the model twice, and a step of the pipeline is one forward: call it once"
            )
        return calls.pop()

    return forward


class TrainerLoss(nn.Module):
    """Calls `compute_loss` on a batch's outputs, and scales as `training_step` does, so that losses of batches add up."""

    num_items: Tensor | None

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._trainer = trainer
        self.register_buffer("num_items", torch.zeros(()), persistent=False)  # tokens of the step, on all replicas

    def forward(self, outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Return the loss, on the last stage. `inputs`: the batch, labels included."""
        trainer = self._trainer
        view = ModelView(trainer.model, outputs_once(outputs, trainer.accelerator))
        with torch.autocast(trainer.args.device.type, enabled=False):
            loss: Tensor = trainer.compute_loss(view, dict(inputs), num_items_in_batch=self.num_items)
            return loss if self.is_scaled() else loss / trainer.current_gradient_accumulation_steps

    def is_scaled(self) -> bool:
        """Return whether `compute_loss` already divides by the tokens of the whole step."""
        trainer = self._trainer
        if (scaled := getattr(trainer, "loss_is_scaled_for_ga", None)) is not None:
            return bool(scaled)
        return (trainer.model_accepts_loss_kwargs and self.num_items is not None) or trainer.compute_loss_func is not None
