"""A model's forward traced by `torch.fx`, without data, to a graph of its units; see `export.py` for the other way.

The units remain modules that are called. Only what is between them, in the forwards of the modules around them, is traced.
"""

import inspect
import operator
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from penstock.errors import MismatchError
from penstock.partition.graph_inputs import GraphInputs, InputParameter, varargs_error
from penstock.partition.model_graph import INPLACE_OPERATORS, NO_GRAD, ModelGraph, first_line, train_then_eval
from penstock.torch_private import tensor_version

ADVICE = "give example_args, so that it can be exported; or a list with one module for each stage"


def trace_graph(model: nn.Module, units: Mapping[str, nn.Module]) -> ModelGraph:
    """Return the graph of the forward. Its parameters with a default keep that.

    Raises MismatchError for a forward that decides by values or shapes.
    """
    graphs = [_trace(model, units) for _ in train_then_eval(model)]
    parameters = [InputParameter(str(node.target)) for node in graphs[0].find_nodes(op="placeholder")]
    return ModelGraph.from_train_and_eval_graphs(model, graphs, GraphInputs(inspect.signature(model.forward), parameters), {})


class _Proxy(fx.Proxy):
    """A value in the graph. `value += operand` changes it in place there too, where torch's own proxy would make another."""


def _inplace_method(change: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value, operand: value.tracer.create_proxy("call_function", change, (value, operand), {})


for _name in INPLACE_OPERATORS:
    setattr(_Proxy, f"__{_name}__", _inplace_method(getattr(operator, _name)))


class _UnitTracer(fx.Tracer):
    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        super().__init__(param_shapes_constant=True)
        self.units, self._autocast = units, _autocast_modes()

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return name in self.units

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Return a node that records whether it is inside a `torch.no_grad()`."""
        if _autocast_modes() != self._autocast:
            raise MismatchError(
                f"the forward of {type(self.root).__name__} enters torch.autocast, which is lost where it is cut: enter it "
                "in the forward of a layer, or call step() under torch.autocast"
            )
        node = super().create_node(*args, **kwargs)
        node.meta |= {} if torch.is_grad_enabled() else {NO_GRAD: True}
        return node

    def create_args_for_root(self, forward: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Return placeholders for the parameters that have no default."""
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind is parameter.VAR_POSITIONAL:
                raise varargs_error(parameter.name)
        names = [
            parameter.name
            for parameter in parameters
            if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        ]
        values = [self.create_proxy("placeholder", name, (), {}) for name in names]
        return lambda model, *args: forward(model, **dict(zip(names, args, strict=True))), [self.root, *values]


def _autocast_modes() -> list[bool]:
    return [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")]


def _trace(model: nn.Module, units: Mapping[str, nn.Module]) -> fx.Graph:
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    buffer_versions = [tensor_version(buffer) for buffer in model.buffers()]
    name = type(model).__name__
    try:
        with torch.enable_grad():
            graph = _UnitTracer(units).trace(model)
    except MismatchError:
        raise
    except Exception as error:
        raise MismatchError(f"cannot follow the forward of {name} ({first_line(error)}): {ADVICE}") from error

    if random.getstate() != python_state or not torch.equal(torch.get_rng_state(), torch_state):
        raise MismatchError(
            f"the forward of {name} draws random numbers between its layers, which would be the same in every step once it is "
            "cut: draw them in a layer"
        )
    constants = [node for node in graph.nodes if node.op == "get_attr" and str(node.target).startswith("_tensor_constant")]
    if constants or [tensor_version(buffer) for buffer in model.buffers()] != buffer_versions:
        raise MismatchError(
            f"the forward of {name} makes or changes a tensor between its layers, which cannot be followed without data: do it "
            "in a layer, or give example_args"
        )
    return graph
