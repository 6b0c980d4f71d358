"""Stand-ins: tensors that replace a stage's parameters while a forward runs whose backward will be split.

They are leaves that share the parameters' memory, so nothing that happens in `I` reaches the parameters:

* An operation of `rules.RULES` defers its weights' gradients: `I` stores the output's gradient with the saved input, and `W`
  computes.
* Any other use of a parameter (norms, biases, the user's code) leaves its gradient on the stand-in, in `I`.

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

# Operations that make views of a weight whose products with an input still go through the rules.
VIEW_OPERATIONS = frozenset(
    (Tensor.t, torch.t, Tensor.transpose, torch.transpose, Tensor.T.__get__, Tensor.mT.__get__, Tensor.chunk, Tensor.split)  # type: ignore[attr-defined]
)


class StandInWeight(Tensor):
    """The stand-in of a real matrix, embedding or kernel, or a view of one: operations that take it go through the rules."""

    deferred: DeferredGradients
    parameter_index: int | None  # of the parameter it stands for; None for a view of one
    detached: Tensor | None  # the same memory, outside the graph

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`: by its rule; operation by operation if it is a Python function; else unchanged."""
        kwargs = kwargs or {}
        has_rule = (func in RULES or func in VIEW_OPERATIONS) and not in_functional_transform()
        if not has_rule and isinstance(func, FunctionType) and func not in _expanding and torch.is_grad_enabled():
            _expanding.add(func)
            try:
                return _without_override_check(func)(*args, **kwargs)
            finally:
                _expanding.discard(func)

        with DisableTorchFunctionSubclass():
            if has_rule and torch.is_grad_enabled():
                for argument in (*args, *kwargs.values()):
                    if type(argument) is StandInWeight:
                        return _run_rule(argument.deferred, func, args, kwargs)
            return func(*args, **kwargs)


_expanding: set[FunctionType] = set()  # Python functions that run operation by operation now


def _run_rule(deferred: DeferredGradients, func: Any, args: Any, kwargs: Any) -> Any:
    """Run `func`, which has a rule or makes views of a weight."""
    if func in RULES:
        output = RULES[func](deferred, *args, **kwargs)
        return func(*args, **kwargs) if output is NotImplemented else output
    output = func(*args, **kwargs)
    if isinstance(output, Tensor):
        return _standin_view(deferred, output)
    return tuple([_standin_view(deferred, view) for view in output])


def _standin_view(deferred: DeferredGradients, output: Tensor) -> StandInWeight:
    view = output.as_subclass(StandInWeight)
    view.deferred, view.parameter_index, view.detached = deferred, None, None
    return view


@functools.cache
def _without_override_check(func: FunctionType) -> FunctionType:
    """Return `func` without its first test for tensor subclasses, which would call `__torch_function__` again."""
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = func.__globals__ | dict.fromkeys(checks, _return_false)
    copied = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copied.__kwdefaults__ = func.__kwdefaults__
    return copied


def _return_false(*tensors: Any) -> bool:
    return False


def make_standin(parameter: nn.Parameter, index: int) -> Any:
    """Return a stand-in for the stage's `parameter` of this index."""
    detached = parameter.detach()
    leaf = make_leaf(detached, StandInWeight if parameter.dim() > 1 and not parameter.is_complex() else nn.Parameter)
    leaf.parameter_index, leaf.detached, leaf.grad_dtype = index, detached, parameter.grad_dtype
    return leaf
