"""The loss of a causal language model whose tokens are cut, by `slices=` or `cp=`.

The model would shift its labels by a token, but a stage has a part of the tokens. So labels are shifted before they are cut,
and the last stage calls the model's own loss function for each part, divided by the tokens of the whole step. The losses of
all parts add up to the loss of plain Trainer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import penstock as ps
from penstock.integrations.transformers.attention_implementation import NAME
from penstock.integrations.transformers.model_call import ModelCall

IGNORE_INDEX = -100  # of labels that are not counted, in transformers


class TokenLoss(nn.Module):
    """The pipeline's loss for one part of a microbatch's tokens. `convert`: of the model's outputs; `factor`: of each loss."""

    def __init__(self, model: Any, convert: Callable[[Any], Any], factor: int) -> None:
        super().__init__()
        self._loss_function, self._vocab_size = model.loss_function, model.config.get_text_config().vocab_size
        self._convert, self._factor = convert, factor
        self._num_items: Any = None  # the tokens of the step
        self.register_buffer("state", torch.empty(0), persistent=False)  # so that no check of the pipeline calls it again

    def begin_step(self, calls: Sequence[ModelCall]) -> tuple[list[dict[str, Any]], list[Tensor]]:
        """Return the arguments of each call without those of the loss, and the shifted labels."""
        targets = []
        for number, call in enumerate(calls):
            if call.arguments.get("labels") is None:
                raise ps.MismatchError(f"batch {number} has no labels, from which slices= and cp= make the loss")
            targets.append(shift_labels(call.arguments["labels"]))
        self._num_items = calls[0].arguments["num_items_in_batch"]
        kept = [{n: v for n, v in call.arguments.items() if n not in ("labels", "num_items_in_batch")} for call in calls]
        return kept, targets

    def forward(self, outputs: Any, target: Tensor) -> Tensor:
        """Return the loss of one part, on the last stage. `target`: (rows, tokens of the part)."""
        loss: Tensor = self._loss_function(
            logits=self._convert(outputs)["logits"],
            labels=None,
            vocab_size=self._vocab_size,
            num_items_in_batch=self._num_items,
            shift_labels=target,
        )
        return loss * self._factor


def shift_labels(labels: Tensor) -> Tensor:
    """Return the label of the next token at each token. `labels`: (rows, tokens)."""
    return nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:].contiguous()


def check_tokens_can_be_cut(trainer: Any) -> None:
    """Raise MismatchError for a trainer whose loss or model cannot take a part of the tokens."""
    model, args = trainer.model, trainer.args
    name = "cp=" if args.cp > 1 else "slices="
    losses = {
        "compute_loss": "compute_loss" in vars(trainer) or type(trainer).compute_loss is not transformers.Trainer.compute_loss,
        "compute_loss_func=": trainer.compute_loss_func is not None,
        "label_smoothing_factor=": trainer.label_smoother is not None,
    }
    if own := [loss for loss, is_set in losses.items() if is_set]:
        raise ps.MismatchError(
            f"{name} cuts tokens, and {own[0]} would see a part of them: leave it out, so that the loss is the model's own"
        )
    if getattr(model, "loss_type", None) != "ForCausalLM" or not trainer.model_accepts_loss_kwargs:
        raise ps.MismatchError(
            f"{name} cuts tokens, and the loss of a {type(model).__name__} is no sum over them: it needs a ..ForCausalLM model"
        )
    if getattr(model.config, "output_router_logits", False):
        raise ps.MismatchError(
            f"{name} cuts tokens, and output_router_logits=True adds a loss of all tokens: make the model without it"
        )
    implementation = model.config._attn_implementation
    if implementation != NAME:
        raise ps.MismatchError(
            f'{name} cuts tokens, and the model has attn_implementation="{implementation}": make it with '
            f'attn_implementation="{NAME}"'
        )
