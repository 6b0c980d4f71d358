"""The reference of `Trainer(.., ref_model=)`: the pipeline's teacher, whose outputs a loss gets as if it called the model."""

import inspect
from functools import wraps
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import penstock as ps
from penstock.integrations.transformers.model_call import current_call
from penstock.integrations.transformers.model_view import ModelView, prepare_for_cut


class ReferenceOutputs:
    """Stands in for the call of an evaluation, and takes what the reference returned."""

    outputs: Any = None

    def finish(self, _: Any, reference: Any) -> Tensor:
        """Take the reference's outputs. Return a loss that nobody reads."""
        self.outputs = reference
        return torch.zeros(())


def take_reference(trainer: Any, model: nn.Module) -> None:
    """Make `trainer.ref_model`, and pass its outputs to `compute_loss_func`.

    Raises MismatchError if no loss takes them, and where tokens are cut.
    """
    if trainer.args.cuts_tokens:
        raise ps.MismatchError("ref_model= runs on whole sequences: leave out slices and cp, or ref_model=")
    function = trainer.compute_loss_func
    advice = "give compute_loss_func= a function of (outputs, labels, ref_outputs, num_items_in_batch=None)"
    if function is None and type(trainer).compute_loss is transformers.Trainer.compute_loss:
        raise ps.MismatchError(
            f"ref_model= has outputs for a loss, and the model's own does not take them: {advice}, or a compute_loss that "
            "calls self.ref_model(**inputs) after the model"
        )
    if function is not None:
        try:
            inspect.signature(function).bind(None, None, None, num_items_in_batch=None)
        except TypeError as error:
            raise ps.MismatchError(f"compute_loss_func does not take the outputs of ref_model= ({error}): {advice}") from None

        @wraps(function)
        def loss_of_both(outputs: Any, labels: Any, **options: Any) -> Any:
            return function(outputs, labels, current_call.get().reference_outputs(), **options)

        trainer.compute_loss_func = loss_of_both
    prepare_for_cut(model)
    trainer.ref_model = ModelView(model, _call_reference)


def _call_reference(**arguments: Any) -> Any:
    """Return the reference's outputs, which the step of the pipeline has made with the arguments of the model."""
    call = current_call.get(None)
    if call is None:
        raise ps.MismatchError(
            "ref_model is cut over the ranks, and runs in the pipeline's steps: call it in compute_loss only, after the model"
        )
    return call.reference_outputs(arguments)
