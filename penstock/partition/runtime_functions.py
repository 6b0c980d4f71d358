"""Functions around the layers whose graphs would say less than they do: an export calls them as they are, in each forward.

Transformers' functions that make attention masks return None where the kernel needs no mask: for a batch without padding, say.
While they are exported they return a mask always, and with a mask attention takes another kernel, whose sums have other bits.
A `torch.autograd.Function` has a backward of its own, which an export does not see: it records the forward's operations.
So each is one operation in the exported program, and a call of the function in the graph.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.errors import MismatchError
from penstock.partition.opaque_units import UNIT_OPERATION, RecordedUnitCall, as_custom_op, inside_operation
from penstock.torch_private import tree_leaves

MASK_FUNCTIONS = "transformers.masking_utils"  # the module: its functions create_causal_mask, create_bidirectional_mask, ..
REQUIRES_GRAD: Any = Tensor.requires_grad  # what reads the attribute, which a mode sees as a function


@contextmanager
def mask_functions_as_custom_ops(model: nn.Module, calls: list[RecordedUnitCall]) -> Iterator[None]:
    """Replace the functions that make masks, where the Python modules of the model's classes use them, by one operation."""
    functions = _mask_functions()
    classes = {cls for module in model.modules() for cls in type(module).__mro__} if functions else set()
    namespaces = [vars(sys.modules[name]) for name in sorted({cls.__module__ for cls in classes}) if name in sys.modules]
    replaced = [
        (namespace, name, value)
        for namespace in namespaces
        for name, value in namespace.items()
        if any(value is function for function in functions)
    ]
    for namespace, name, function in replaced:
        namespace[name] = _as_custom_op_if_possible(function, calls)
    try:
        yield
    finally:
        for namespace, name, function in replaced:
            namespace[name] = function


def _mask_functions() -> list[Callable[..., Any]]:
    module = sys.modules.get(MASK_FUNCTIONS)
    names = [name for name in vars(module) if name.startswith("create_") and "mask" in name] if module is not None else []
    return [getattr(module, name) for name in names]


def _as_custom_op_if_possible(function: Callable[..., Any], calls: list[RecordedUnitCall]) -> Callable[..., Any]:
    """Return `function` as one operation, unless it is given a cache, or functions that may hold tensors of the export."""
    operation, signature = as_custom_op(function.__name__, function, calls, is_unit=False), inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        has_cache = signature.bind(*args, **kwargs).arguments.get("past_key_values") is not None
        is_possible = not has_cache and not any(callable(leaf) for leaf in tree_leaves((args, kwargs)))
        return (operation if is_possible else function)(*args, **kwargs)

    return call


def only_units_use_results(nodes: Sequence[Any], calls: Sequence[RecordedUnitCall]) -> bool:
    """Whether only layers take the masks that functions return. Code around the layers may do something else with None.

    `nodes`: of the exported program.
    """
    functions = _mask_functions()
    results = {node for node in nodes if node.target is UNIT_OPERATION and calls[node.args[0]].forward in functions}
    users = {user for node in results for item in node.users for user in item.users}
    return all(user.target is UNIT_OPERATION and calls[user.args[0]].is_unit for user in users)


# -- functions with a backward of their own ----------------------------------------------------------------------------


@contextmanager
def autograd_functions_as_custom_ops(calls: list[RecordedUnitCall]) -> Iterator[None]:
    """Replace the forward of every `torch.autograd.Function` by one operation, which calls its `apply`.

    Not `apply` itself: a module may have kept `reverse = GradientReversal.apply` under a name of its own.
    """
    functions = [function for function in _subclasses(torch.autograd.Function) if not function.__module__.startswith("torch._")]
    own_forwards = {function: vars(function).get("forward") for function in functions}
    for function in functions:
        function.forward = staticmethod(partial(_call_as_custom_op, function, function.forward, calls))
    try:
        yield
    finally:
        for function, forward in own_forwards.items():
            del function.forward
            if forward is not None:
                function.forward = forward


def _subclasses(cls: type) -> list[Any]:
    direct: list[Any] = cls.__subclasses__()
    return list(dict.fromkeys([*direct, *(below for subclass in direct for below in _subclasses(subclass))]))


def _call_as_custom_op(
    function: type[torch.autograd.Function],
    forward: Callable[..., Any],
    calls: list[RecordedUnitCall],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Stand for `forward`, which is given a context first unless the function has a `setup_context`."""
    if inside_operation():
        return forward(*args, **kwargs)
    has_context = function.setup_context is torch.autograd.Function.setup_context
    inputs, name = args[has_context:], f"{function.__name__}.apply"
    if any(callable(leaf) for leaf in tree_leaves((inputs, kwargs))):
        raise MismatchError(
            f"the forward gives a function to {name} between its layers, which cannot be followed: call it in the forward of a "
            "layer; for torch.utils.checkpoint give use_reentrant=False, or Pipeline(recompute=)"
        )
    return as_custom_op(name, function.apply, calls, is_unit=False)(*inputs, **kwargs)


class RefuseAutogradQuestions(TorchFunctionMode):
    """Refuses what code between the layers asks or wants of autograd, for which an export has no answer and no place.

    In evaluation no value requires a gradient, and modules of torch ask whether one does.
    """

    def __init__(self, is_training: bool) -> None:
        super().__init__()
        self.is_training = is_training

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_parameter = bool(args) and isinstance(args[0], nn.Parameter)
        if torch.is_grad_enabled() and not is_parameter and not inside_operation():
            fault = None
            if func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
                fault = f"calls {func.__name__}() of a tensor between its layers, which is lost where it is cut"
            if func == REQUIRES_GRAD.__get__ and self.is_training:
                fault = "asks for .requires_grad of a tensor between its layers, which no trace of it knows"
            if fault is not None:
                raise MismatchError(f"the forward {fault}: do it in the forward of a layer")
        return func(*args, **(kwargs or {}))
