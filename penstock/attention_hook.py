"""The attention that a model calls, `ps.attention`, so that a pipeline can cut its tokens over ranks or into slices.

Tokens meet in attention only. A pipeline that gives a forward a part of the tokens sets an `AttentionContext` around it, which
finds the keys and values of the other parts. Everywhere else `ps.attention` is torch's `scaled_dot_product_attention`.
"""

import ast
import inspect
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from textwrap import dedent
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import MismatchError
from penstock.randomness import RandomnessByPosition
from penstock.torch_private import safe_softmax

LOOKS_AHEAD = "looks at later tokens too (causal=False), which a slice does not have"
CHECKPOINTS = (
    "is run again in the backward by a checkpoint inside of the model, which cannot be done slice by slice: give "
    "Pipeline(.., recompute='block') instead"
)
# Layers that mix tokens, or images' places, in a way that no context sees.
_MIXING_LAYERS = (nn.MultiheadAttention, nn.RNNBase, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = True,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return softmax(query @ key.T * scale) @ value for each head; in a pipeline, over tokens of other ranks too.

        mixed = ps.attention(query, key, value)  # in a layer's forward; (batch, heads, time, width) each

    query, key, value
        (batch, heads, time, width). Keys and values may have fewer heads, each of which serves several of the query's. With
        more keys than queries, as with a cache, the queries are the last tokens.
    causal
        A token sees itself and those before it.
    mask
        (batch, time), True for keys that count and False for padding; or as `scaled_dot_product_attention` takes it,
        (batch, heads, queries, keys) or 1 instead of a size. With `causal` both hold.
    scale
        By default 1 / sqrt(width).
    dropout
        The probability with which a weight becomes 0. It does not know whether the layer trains: give 0 if not.

    Returns (batch, heads, time, width), to the bit what `scaled_dot_product_attention` returns.

    Raises MismatchError for a mask of another shape, and for one that cannot be cut where a pipeline cuts the tokens.
    """
    is_padding = mask is not None and mask.dtype == torch.bool and mask.shape == (key.shape[0], key.shape[2])
    if mask is not None and not is_padding and mask.dim() != 4:
        raise MismatchError(
            f"ps.attention takes a boolean mask of (batch, time), or one of (batch, heads, queries, keys), not {mask.dtype} of "
            f"shape {tuple(mask.shape)}"
        )
    attend_here = attend if _current is None else _current.count_and_attend
    return attend_here(query, key, value, causal, mask, scale, dropout)


class WeightsPart(NamedTuple):
    """The part that a forward has of attention's weights (batch, heads, tokens, tokens), besides its keys."""

    heads: int  # of all
    tokens: int  # of all
    first_head: int
    first_query: int


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
    dropout: float,
    part: WeightsPart | None = None,
) -> Tensor:
    """Return the attention of tokens that are all here; the arguments are those of `attention`.

    `part`: what is here of a sequence whose tokens are cut; dropout is then that of the whole one.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    causal = causal and bool(queries > 1)  # the last token alone sees all; a size may be symbolic, in an export
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None]

    drops_part = part is not None and dropout > 0
    if causal and (mask is not None or queries != keys or drops_part):
        visible = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
        if mask is None:
            mask = visible
        else:
            mask = mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -torch.inf)
        causal = False
    if part is not None and drops_part:
        return _attend_with_dropout(query, key, value, mask, scale, dropout, part)
    return functional.scaled_dot_product_attention(
        *(query, key, value, mask, dropout, causal), scale=scale, enable_gqa=query.shape[-3] != key.shape[-3]
    )


def _attend_with_dropout(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, dropout: float, part: WeightsPart
) -> Tensor:
    """Return what `scaled_dot_product_attention` does on a CPU, with its dropout for the whole sequence cut to `part`."""
    (batch, heads, queries, width), (_, key_heads, keys, _) = query.shape, key.shape
    if heads != key_heads:
        key, value = (tensor.repeat_interleave(heads // key_heads, 1) for tensor in (key, value))
    scores = query @ key.mT * (width**-0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = safe_softmax(scores, -1)

    factors, _ = torch.native_dropout(weights.new_ones(batch, part.heads, part.tokens, part.tokens), dropout, True)
    factors = factors.narrow(1, part.first_head, heads).narrow(2, part.first_query, queries)[..., :keys].clone()
    return (weights * factors) @ value


class AttentionContext:
    """How `attention` computes inside of `attention_context`. This base class computes as it does without a context."""

    num_calls = 0  # of `attention`, so far
    lengths: Sequence[int] = ()  # the tokens of each part of the sequence, if the forward has one of them
    part = 0  # which one that is
    sequence_dim = 1  # the dimension that has the tokens

    @property
    def first_position(self) -> int:
        """The number of tokens of the sequence before those of this forward."""
        return sum(self.lengths[: self.part])

    def count_and_attend(self, *args: Any) -> Tensor:
        """Count the call, and return what `attend` does of these arguments."""
        self.num_calls += 1
        return self.attend(*args)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float | None, dropout: float
    ) -> Tensor:
        """Return the attention of this forward's tokens. The arguments are of these tokens only."""
        return attend(query, key, value, causal, mask, scale, dropout)


class AttentionWhileTracing(AttentionContext):
    """Attention while a model is traced whose tokens will be cut, into slices or over ranks: it sees uncut examples."""

    def __init__(self, in_slices: bool) -> None:
        self._in_slices = in_slices

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float | None, dropout: float
    ) -> Tensor:
        """Return the attention. Raise MismatchError for one that cannot be cut so."""
        if self._in_slices and not causal:
            raise MismatchError(f"tokens cannot be cut into slices: a layer of the model {LOOKS_AHEAD}")
        if not self._in_slices:
            check_mask_can_be_cut(mask)
        return attend(query, key, value, causal, mask, scale, dropout)


def check_mask_can_be_cut(mask: Tensor | None) -> None:
    """Raise MismatchError for a mask that ranks which share the tokens cannot have a part of."""
    if mask is not None and mask.dim() != 2:
        raise MismatchError(
            f"a mask over queries and keys, here of shape {tuple(mask.shape)}, cannot be cut along cp: give ps.attention "
            "one of (batch, time), besides causal="
        )


_current: AttentionContext | None = None  # for all threads: on a GPU, a backward that runs a forward again has its own


@contextmanager
def attention_context(context: AttentionContext | None) -> Iterator[None]:
    """Set `context` for the calls of `attention` inside; None for none. Random numbers are those of its part of the tokens."""
    global _current
    previous, _current = _current, context
    randomness: AbstractContextManager[Any] = nullcontext()
    if context is not None and context.lengths:
        randomness = RandomnessByPosition(context.lengths, context.part, context.sequence_dim)
    try:
        with randomness:
            yield
    finally:
        _current = previous


def current_context() -> AttentionContext | None:
    """Return the context that is set."""
    return _current


def no_attention_error() -> MismatchError:
    """Return the error for a model that never calls `attention`, where its tokens are to be cut."""
    return MismatchError(
        "no layer of the model calls ps.attention, in which alone tokens that are cut can meet: call it in place of "
        'scaled_dot_product_attention, or give a model of transformers attn_implementation="penstock"'
    )


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
