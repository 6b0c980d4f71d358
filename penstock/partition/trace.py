"""A model's forward followed symbolically by `torch.fx`, to a graph of its units; see `export.py` for the other way.

The units stay what they are, modules that are called. Only what stands between them, in the forwards of the modules
around them, is followed.
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
from penstock.partition.model_graph import ASSIGNING, NO_GRAD, ModelGraph, first_line, train_then_eval
from penstock.torch_private import tensor_version

INSTEAD = "give example_args, so that it can be exported; or a list with one module for each stage"


def trace_graph(model: nn.Module, units: Mapping[str, nn.Module]) -> ModelGraph:
    """Follow the forward without any data. Its parameters with a default keep that.

    Raises MismatchError for a forward that looks at values or shapes to decide what to do.
    """
    graphs = [_followed(model, units) for _ in train_then_eval(model)]
    inputs = [InputParameter(str(node.target)) for node in graphs[0].find_nodes(op="placeholder")]
    return ModelGraph.from_graphs(model, graphs, GraphInputs(inspect.signature(model.forward), inputs), {})


class _Value(fx.Proxy):
    """A value in the graph; `value += other` changes it in place there too, with which torch's own would make another."""


def _assigning(change: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value, other: value.tracer.create_proxy("call_function", change, (value, other), {})


for _name in ASSIGNING:
    setattr(_Value, f"__{_name}__", _assigning(getattr(operator, _name)))


class _Tracer(fx.Tracer):
    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        super().__init__(param_shapes_constant=True)
        self.units, self._casts = units, _casts()

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return name in self.units

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """A node, which remembers whether gradients are wanted where it stands."""
        if _casts() != self._casts:
            raise MismatchError(
                f"the forward of {type(self.root).__name__} enters torch.autocast, which is lost where it is cut: enter it "
                "in the forward of a layer, or call step() under torch.autocast"
            )
        node = super().create_node(*args, **kwargs)
        node.meta |= {} if torch.is_grad_enabled() else {NO_GRAD: True}
        return node

    def create_args_for_root(self, forward: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Placeholders for the parameters that have no default."""
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        for each in parameters:
            if each.kind is each.VAR_POSITIONAL:
                raise varargs_error(each.name)
        names = [each.name for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
        values = [self.create_proxy("placeholder", name, (), {}) for name in names]
        return lambda model, *given: forward(model, **dict(zip(names, given, strict=True))), [self.root, *values]


def _casts() -> list[bool]:
    return [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")]


def _followed(model: nn.Module, units: Mapping[str, nn.Module]) -> fx.Graph:
    drawn, written = (random.getstate(), torch.get_rng_state()), [tensor_version(each) for each in model.buffers()]
    try:
        with torch.enable_grad():
            graph = _Tracer(units).trace(model)
        if random.getstate() != drawn[0] or not torch.equal(torch.get_rng_state(), drawn[1]):
            told = f"the forward of {type(model).__name__} draws random numbers between its layers"
            raise MismatchError(f"{told}, which would be the same in every step once it is cut: draw them in a layer")
        made = [node for node in graph.nodes if node.op == "get_attr" and str(node.target).startswith("_tensor_constant")]
        if made or [tensor_version(each) for each in model.buffers()] != written:
            told = f"the forward of {type(model).__name__} makes or changes a tensor between its layers"
            raise MismatchError(f"{told}, which cannot be followed without data: do it in a layer, or give example_args")
        return graph
    except MismatchError:
        raise
    except Exception as error:
        raise MismatchError(f"cannot follow the forward of {type(model).__name__} ({first_line(error)}): {INSTEAD}") from error
