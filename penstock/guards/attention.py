"""Checks, before a pipeline is built, that the tokens of a model can be cut: they meet in `ps.attention` alone."""

import ast
import inspect
import warnings
from collections.abc import Collection, Iterable, Iterator
from textwrap import dedent
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import nn

from penstock.errors import MismatchError
from penstock.partition.cutting import CuttableModel
from penstock.rebuild import Redistribution
from penstock.stage.attention import CHECKPOINTS, LOOKS_AHEAD, AttentionContext, attention, no_attention_error

# Layers that mix tokens, or images' places, in a way that no context sees.
_MIXING_LAYERS = (nn.MultiheadAttention, nn.RNNBase, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def check_attention(
    modules: Iterable[nn.Module],
    cuttable: CuttableModel | None,
    context: AttentionContext,
    in_slices: bool,
    redistribution: Redistribution | None,
) -> None:
    """Raise MismatchError if tokens would mix in a layer that does not call `ps.attention`, as far as it is known here.

    `context`: which was set when the model was cut. `redistribution`: of a model that was cut before.
    """
    for module in modules:
        check_tokens_mix_in_attention(module)
        if in_slices:
            check_layers_can_run_in_slices(module)
        if cuttable is None:
            check_positions(module)
    if cuttable is not None:
        check_positions(cuttable.model, cuttable.unit_order)
    if cuttable is None or not cuttable.is_exported:
        return
    if redistribution is not None and not redistribution.cuts_tokens:
        raise MismatchError("the model was traced for whole sequences, and its masks are theirs: make a new Pipeline of slices")
    if redistribution is None and not context.num_calls:
        raise no_attention_error()


def check_tokens_mix_in_attention(module: nn.Module) -> None:
    """Raise MismatchError, with the layer's name, if a layer of `module` mixes tokens otherwise than by `attention`."""
    functions = _functions_in_forward(module)
    for name, layer in module.named_modules():
        if isinstance(layer, _MIXING_LAYERS) and max(getattr(layer, "kernel_size", (2,))) > 1:
            raise MismatchError(
                f"the tokens of a sequence cannot be cut before {name or 'the model'}, a {type(layer).__name__}, which mixes "
                "them: only layers that call ps.attention may"
            )
        called = {called for function in functions[type(layer)] for called in function.__code__.co_names}
        if "scaled_dot_product_attention" in called and "attention" not in called:
            raise MismatchError(
                f"the tokens of a sequence cannot be cut before {name or 'the model'}, a {type(layer).__name__}, whose forward "
                "calls scaled_dot_product_attention: call ps.attention there instead"
            )
        implementation = getattr(getattr(layer, "config", None), "_attn_implementation", "penstock")
        if implementation not in ("penstock", None):
            raise MismatchError(
                f"the tokens of a sequence cannot be cut before {name or 'the model'}, a {type(layer).__name__}, whose config "
                f'has attn_implementation="{implementation}": make the model with attn_implementation="penstock"'
            )


def check_layers_can_run_in_slices(module: nn.Module) -> None:
    """Raise MismatchError, with the layer's name, if a layer of `module` is known to look at later tokens, or to checkpoint."""
    functions = _functions_in_forward(module)
    for name, layer in module.named_modules():
        looks_ahead = getattr(layer, "is_causal", True) is False or any(
            map(_all_attention_calls_have_causal_false, functions[type(layer)])
        )
        checkpoints = getattr(layer, "gradient_checkpointing", False) is True
        if looks_ahead or checkpoints:
            problem = LOOKS_AHEAD if looks_ahead else CHECKPOINTS
            raise MismatchError(f"tokens cannot be cut into slices: {name or 'the model'}, a {type(layer).__name__}, {problem}")


def _functions_in_forward(module: nn.Module) -> dict[type[nn.Module], list[FunctionType]]:
    """Return, for each class of layers, its forward, its methods and the functions that it names, and those which they name.

    Without those of torch and transformers, but for their layers' forwards.
    """
    return {kind: list(_list_functions_called_by_forward(kind)) for kind in {type(layer): None for layer in module.modules()}}


def _list_functions_called_by_forward(kind: type[nn.Module]) -> Iterator[FunctionType]:
    queue: list[Any] = [kind.forward]
    visited: set[Any] = {attention}
    while queue:
        value = queue.pop(0)
        if not isinstance(value, FunctionType) or (function := inspect.unwrap(value)) in visited:
            continue
        visited.add(function)
        is_library = function.__module__.partition(".")[0] in ("torch", "transformers")
        if not isinstance(function, FunctionType) or (is_library and len(visited) > 2):
            continue
        yield function
        names = function.__code__.co_names
        values = [function.__globals__.get(name) for name in names]
        values += [getattr(value, name, None) for value in values if isinstance(value, ModuleType) for name in names]
        queue += [*values, *(vars(base).get(name) for base in kind.__mro__ for name in names)]
        queue += [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]


def _all_attention_calls_have_causal_false(function: FunctionType) -> bool:
    """Return whether all calls of `attention` in the text of a function have causal=False; False if there is no text."""
    if "attention" not in function.__code__.co_names or "'causal'" not in str(function.__code__.co_consts):
        return False
    try:
        nodes = list(ast.walk(ast.parse(dedent(inspect.getsource(function)))))
    except (OSError, TypeError, SyntaxError):
        return False
    calls = [node for node in nodes if isinstance(node, ast.Call) and _named_value(node.func, function) is attention]
    values = [[word.value for word in call.keywords if word.arg == "causal"] for call in calls]
    return bool(calls) and all(value and getattr(value[0], "value", None) is False for value in values)


def _named_value(node: ast.expr, function: FunctionType) -> Any:
    """Return what `name` or `module.name` is in a function."""
    if isinstance(node, ast.Attribute):
        return getattr(_named_value(node.value, function), node.attr, None)
    return function.__globals__.get(node.id) if isinstance(node, ast.Name) else None


def _names_in_forward(layer: nn.Module) -> tuple[Collection[str], Collection[str]]:
    """Return what the code of a layer's forward calls or reads by name, and its variables; nothing if it is not in Python."""
    code = getattr(inspect.unwrap(type(layer).forward), "__code__", None)
    return ((), ()) if code is None else (code.co_names, code.co_varnames)


def check_positions(module: nn.Module, units: Collection[str] | None = None) -> None:
    """Check, in the code of the forwards of `module`, that positions of tokens begin behind those of earlier parts.

    `units`: of a model that was traced, the submodules that run as they are; of the other forwards only a graph is left.

    Raises MismatchError for a forward that asks `first_position` outside of the units; warns of one that calls `arange` and
    neither asks nor takes `position_ids`.
    """
    for name, layer in module.named_modules():
        called, variables = _names_in_forward(layer)
        if "first_position" in called:
            if units is not None and not any(f"{name}.".startswith(f"{unit}.") for unit in units):
                raise MismatchError(
                    f"{type(layer).__name__}.forward calls first_position(), but is traced once for all parts of a sequence: "
                    "call it in the forward of a layer, for instance of one that has the embeddings of the positions"
                )
        elif "arange" in called and "position_ids" not in variables:
            warnings.warn(
                f"{type(layer).__name__}.forward calls arange: if it numbers the tokens of a sequence, it begins at 0 in each "
                "part that the sequence is cut into. Begin at ps.cache.first_position() in a layer, or take position_ids",
                stacklevel=6,
            )
