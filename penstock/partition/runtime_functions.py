"""Functions around the layers that decide by the values of tensors: an export calls them as they are, in each forward.

Transformers' functions that make attention masks return None where the kernel needs no mask: for a batch without padding, say.
While they are exported they return a mask always, and with a mask attention takes another kernel, whose sums have other bits.
So each is one operation in the exported program, and a call of the function in the graph.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn

from penstock.partition.opaque_units import UNIT_OPERATION, RecordedUnitCall, as_custom_op
from penstock.torch_private import tree_leaves

MASK_FUNCTIONS = "transformers.masking_utils"  # the module: its functions create_causal_mask, create_bidirectional_mask, ..


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
    """Whether only layers take what the functions return. Code around the layers may do something else with None.

    `nodes`: of the exported program.
    """
    results = {node for node in nodes if node.target is UNIT_OPERATION and not calls[node.args[0]].is_unit}
    users = {user for node in results for item in node.users for user in item.users}
    return all(user.target is UNIT_OPERATION and calls[user.args[0]].is_unit for user in users)
