"""Stand-ins: what takes the place of a stage's parameters while a forward runs whose backward will be split.

They are leaves of their own that share the parameters' memory, so nothing that happens in `I` reaches the parameters:

* An operation of `rules.RULES` puts its weights' gradients off: `I` keeps the output's gradient beside the saved input, and
  `W` computes.
* Whatever else touches a parameter (norms, biases, code of the user's) leaves its gradient on the stand-in, in `I`.

A checkpointed forward is recomputed with the same stand-ins, once, in `I`.
"""

import functools
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.stage.backward.deferred import DeferredGradients
from penstock.stage.backward.rules import RULES
from penstock.torch_private import DisableTorchFunctionSubclass, in_functional_transform, make_leaf

# What makes views of a weight whose products with an input are still a weight's.
VIEWS = frozenset(
    (Tensor.t, torch.t, Tensor.transpose, torch.transpose, Tensor.T.__get__, Tensor.mT.__get__, Tensor.chunk, Tensor.split)  # type: ignore[attr-defined]
)


class Weight(Tensor):
    """The stand-in of a real matrix, embedding or kernel, or a view of one: operations that take it go through the rules."""

    deferred: DeferredGradients
    parameter_index: int | None  # of the parameter it stands for; None for a view of one
    bare: Tensor | None  # the same memory, outside the graph

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """By its rule, if there is one; a function made of others by theirs; a view of a weight as a weight; else as it is."""
        kwargs = kwargs or {}
        known = (func in RULES or func in VIEWS) and not in_functional_transform()
        if not known and isinstance(func, FunctionType) and func not in _running and torch.is_grad_enabled():
            _running.add(func)
            try:
                return _body(func)(*args, **kwargs)
            finally:
                _running.discard(func)
        with DisableTorchFunctionSubclass():
            if known and torch.is_grad_enabled():
                for each in (*args, *kwargs.values()):
                    if type(each) is Weight:
                        return _deferred(each.deferred, func, args, kwargs)
            return func(*args, **kwargs)


_running: set[FunctionType] = set()  # functions made of others that are being looked into


def _deferred(deferred: DeferredGradients, func: Any, args: Any, kwargs: Any) -> Any:
    """`func`, which has a rule or makes views of a weight."""
    if func in RULES:
        output = RULES[func](deferred, *args, **kwargs)
        return func(*args, **kwargs) if output is NotImplemented else output
    output = func(*args, **kwargs)
    return _view(deferred, output) if isinstance(output, Tensor) else tuple([_view(deferred, each) for each in output])


def _view(deferred: DeferredGradients, output: Tensor) -> Weight:
    view = output.as_subclass(Weight)
    view.deferred, view.parameter_index, view.bare = deferred, None, None
    return view


@functools.cache
def _body(func: FunctionType) -> FunctionType:
    """`func` without the look for overrides at its beginning, which would lead back here."""
    names = func.__globals__ | dict.fromkeys(
        ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _no
    )
    body = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _no(*tensors: Any) -> bool:
    return False


def stand_in(parameter: nn.Parameter, index: int) -> Any:
    """A stand-in for the stage's `parameter` of this index."""
    bare = parameter.detach()
    leaf = make_leaf(bare, Weight if parameter.dim() > 1 and not parameter.is_complex() else nn.Parameter)
    leaf.parameter_index, leaf.bare = index, bare
    return leaf
