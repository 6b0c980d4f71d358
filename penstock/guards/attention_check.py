"""Checks, before a pipeline is built, that the tokens of a model can be cut: they meet in `ps.attention` alone."""

from collections.abc import Iterable

from torch import nn

from penstock.errors import MismatchError
from penstock.partition.cutting import CuttableModel
from penstock.stage.attention import CHECKPOINTS, LOOKS_AHEAD, AttentionContext, no_attention_error

# Layers that mix tokens, or images' places, in a way that no context sees.
_MIXING_LAYERS = (nn.MultiheadAttention, nn.RNNBase, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def check_attention(
    modules: Iterable[nn.Module],
    cuttable: CuttableModel | None,
    context: AttentionContext,
    in_slices: bool,
    cut_tokens_before: bool | None,
) -> None:
    """Raise MismatchError if tokens would mix in a layer that does not call `ps.attention`, as far as it is known here.

    `context`: which was set when the model was cut. `cut_tokens_before`: whether the pipeline before cut its tokens; None for a
    model that had none.
    """
    for module in modules:
        check_tokens_mix_in_attention(module)
        if in_slices:
            check_layers_can_run_in_slices(module)
    if cuttable is None or not cuttable.is_exported:
        return
    if cut_tokens_before is False:
        raise MismatchError("the model was traced for whole sequences, and its masks are theirs: make a new Pipeline of slices")
    if cut_tokens_before is None and not context.num_calls:
        raise no_attention_error()


def check_tokens_mix_in_attention(module: nn.Module) -> None:
    """Raise MismatchError, with its name, for a layer of `module` of a kind that mixes tokens otherwise than by `attention`.

    Layers that mix them in their own code are found in the first step, by `token_mixing.py`.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, _MIXING_LAYERS) and max(getattr(layer, "kernel_size", (2,))) > 1:
            raise MismatchError(
                f"the tokens of a sequence cannot be cut before {name or 'the model'}, a {type(layer).__name__}, which mixes "
                "them: only layers that call ps.attention may"
            )
        implementation = getattr(getattr(layer, "config", None), "_attn_implementation", "penstock")
        if implementation not in ("penstock", None):
            raise MismatchError(
                f"the tokens of a sequence cannot be cut before {name or 'the model'}, a {type(layer).__name__}, whose config "
                f'has attn_implementation="{implementation}": make the model with attn_implementation="penstock"'
            )


def check_layers_can_run_in_slices(module: nn.Module) -> None:
    """Raise MismatchError, with its name, for a layer of `module` that declares to look at later tokens, or to checkpoint."""
    for name, layer in module.named_modules():
        looks_ahead = getattr(layer, "is_causal", True) is False
        if looks_ahead or getattr(layer, "gradient_checkpointing", False) is True:
            problem = LOOKS_AHEAD if looks_ahead else CHECKPOINTS
            raise MismatchError(f"tokens cannot be cut into slices: {name or 'the model'}, a {type(layer).__name__}, {problem}")
