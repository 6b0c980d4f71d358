"""A model's forward traced by `torch.fx`, without data, to a graph of its units; see `export.py` for the other way.

The units remain modules that are called. Only what is between them, in the forwards of the modules around them, is traced.
"""

import builtins
import inspect
import operator
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock.errors import MismatchError, first_line
from penstock.partition.attributes import Attribute, AttributeChange, restore_attributes_afterwards
from penstock.partition.graph_inputs import MISSING, GraphInputs, InputParameter, varargs_error
from penstock.partition.graph_stage import NO_GRAD, VALUE_KEY
from penstock.partition.model_graph import AUTOCAST_IS_LOST, INPLACE_OPERATORS, ModelGraph, train_then_eval
from penstock.partition.traced_values import (
    Constant,
    Key,
    Kind,
    Leaf,
    Templates,
    TracedValueCheck,
    record_unused_reads,
    value_key,
)
from penstock.python_objects import preserve_training_flags
from penstock.torch_private import TensorSlot, buffer_slots, tensor_version, tree_map_only

ADVICE = "give example_args, so that it can be exported; or a list with one module for each stage"


def trace_graph(model: nn.Module, units: Mapping[str, nn.Module]) -> ModelGraph:
    """Return the graph of the forward. Its parameters with a default keep that.

    Raises MismatchError for a forward that decides by values or shapes.
    """
    changes = dict[Attribute, AttributeChange]()
    graphs = [_trace(model, units, changes) for _ in train_then_eval(model)]
    for graph in graphs:
        record_unused_reads(graph)
    names = [str(node.target) for node in graphs[0].find_nodes(op="placeholder")]
    check = TracedValueCheck(model, partial(_trace_again, tuple(units)), names)
    inputs = GraphInputs(inspect.signature(model.forward), [*map(InputParameter, names)], value_check=check)
    return ModelGraph.from_train_and_eval_graphs(model, graphs, inputs, list(changes.values()))


def _trace_again(
    units: Collection[str], model: nn.Module, is_training: bool, templates: Templates, kinds: Mapping[Key, Kind]
) -> fx.Graph:
    with preserve_training_flags([model]):
        for module in model.modules():  # not by `train()`: a user's own may change weights, which a step that runs needs
            module.training = is_training
        return _trace(model, units, {}, templates, kinds)


class _ValueProxy(fx.Proxy):
    """A value in the graph.

    `value += operand` changes it in place in the graph too, where torch's own proxy would make another.
    """

    _is_param = _is_buffer = False  # `isinstance(value, nn.Parameter)` and `nn.Buffer` look at them
    _own_attributes = ("node", "tracer", "root", "attr", "_node", "is_called")

    def _key(self) -> Key:
        raise NotImplementedError

    def _unit_tracer(self) -> "_UnitTracer":
        assert isinstance(self.tracer, _UnitTracer)
        return self.tracer

    def class_(self) -> type:
        """Return the class of the value for which this one stands: that of tensors unless known otherwise."""
        return self._unit_tracer().class_of(self._key())

    def __getattr__(self, name: str) -> Any:
        if name in self._own_attributes or name.startswith("__"):
            raise AttributeError(name)
        kind = self._unit_tracer().kinds.get((self.node.name, name))
        if not isinstance(kind, Constant):
            return self._unit_tracer().attribute(self, name)
        if kind.value is MISSING:
            raise AttributeError(name)
        return kind.value

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._own_attributes:
            model = type(self._unit_tracer().root).__name__
            raise MismatchError(
                f"the forward of {model} sets .{name} of a value between its layers, which is lost where it is cut: do it in a "
                "layer, or hand the value on"
            )
        object.__setattr__(self, name, value)


class _NodeProxy(_ValueProxy):
    def _key(self) -> Key:
        return self.node.meta[VALUE_KEY]


class _AttributeProxy(_ValueProxy, fx.proxy.Attribute):
    """An attribute, or a method that is called."""

    is_called = False

    def _key(self) -> Key:
        return self.root.node.name, self.attr

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.is_called = True
        return super().__call__(*args, **kwargs)


@contextmanager
def _isinstance_of_values() -> Iterator[None]:
    """Answer `isinstance` of a value in the graph as of the value for which it stands. A `__class__` would deceive C++ too."""
    original = builtins.isinstance

    def is_instance(value: Any, classes: Any) -> bool:
        is_value = type(value) in (_NodeProxy, _AttributeProxy)
        return original(value, classes) or (is_value and issubclass(value.class_(), classes))

    builtins.isinstance = is_instance
    try:
        yield
    finally:
        builtins.isinstance = original


def _inplace_method(change: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value, operand: value.tracer.create_proxy("call_function", change, (value, operand), {})


for _name in INPLACE_OPERATORS:
    setattr(_ValueProxy, f"__{_name}__", _inplace_method(getattr(operator, _name)))


class _UnitTracer(fx.Tracer):
    def __init__(self, units: Collection[str], templates: Templates, kinds: Mapping[Key, Kind]) -> None:
        super().__init__(param_shapes_constant=True)
        self.units, self.kinds, self._templates, self._autocast = units, kinds, templates, _autocast_modes()
        self.changes: dict[Attribute, AttributeChange] = {}  # attributes that the forward has set
        self._attributes: list[_AttributeProxy] = []  # of values, which the forward has read
        self._argument_classes: dict[str, type] = {}  # by name of a placeholder

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return name in self.units

    def proxy(self, node: fx.Node) -> Any:
        """Return what the forward gets of a node: a value in the graph, or the value itself if it is known."""
        kind = self.kinds.get(node.meta[VALUE_KEY])
        if not isinstance(kind, Constant):
            return _NodeProxy(node, self)
        if kind.value is MISSING:
            raise KeyError(node.args[1])
        return kind.value

    def attribute(self, value: _ValueProxy, name: str) -> _AttributeProxy:
        self._attributes.append(_AttributeProxy(value, name))
        return self._attributes[-1]

    def class_of(self, key: Key) -> type:
        """Return the class of the value for which one in the graph stands."""
        kind = self.kinds.get(key) or self._argument_classes.get(key, Tensor)
        return type(kind.value) if isinstance(kind, Constant) else kind

    def create_arg(self, a: Any) -> Any:
        """Return what stands in the graph for an argument."""
        return a.node if type(a) in (_NodeProxy, _AttributeProxy) else super().create_arg(a)  # `isinstance` would find a tensor

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Return a node that records whether it is inside a `torch.no_grad()`."""
        if _autocast_modes() != self._autocast:
            raise MismatchError(f"the forward of {type(self.root).__name__} enters {AUTOCAST_IS_LOST}")
        node = super().create_node(*args, **kwargs)
        node.meta[VALUE_KEY] = value_key(node)
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
        templates = {name: self._templates.get(name, Leaf(name)) for name in names}
        arguments = tree_map_only(Leaf, self._placeholder, templates)

        def traced_forward(model: nn.Module) -> Any:
            with restore_attributes_afterwards(model) as self.changes:
                output = forward(model, **arguments)
            for attribute in self._attributes:
                if not attribute.is_called:
                    assert attribute.node  # makes it, if the forward has only looked at the attribute
            return output

        return traced_forward, [self.root]

    def _placeholder(self, leaf: Leaf) -> Any:
        value = self.create_proxy("placeholder", leaf.text, (), {})
        self._argument_classes[value.node.name] = leaf.class_
        return value


def _autocast_modes() -> list[bool]:
    return [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")]


def _trace(
    model: nn.Module,
    units: Collection[str],
    changes: dict[Attribute, AttributeChange],
    templates: Templates | None = None,
    kinds: Mapping[Key, Kind] | None = None,
) -> fx.Graph:
    """Return the graph; put the attributes that the forward sets into `changes`.

    `templates`, `kinds`: what arguments and other values are if they are no tensors.
    """
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    buffers = [(slot, tensor_version(slot.tensor)) for slot in buffer_slots(model)]
    name, tracer = type(model).__name__, _UnitTracer(units, templates or {}, kinds or {})
    try:
        with torch.enable_grad(), _isinstance_of_values():
            graph = tracer.trace(model)
    except MismatchError:
        raise
    except Exception as error:
        reason = first_line(error)
        if "unwrap_if_dead" in reason:  # torch's words for a function that is given a value of the trace
            reason = "it calls a torch.autograd.Function between its layers"
        raise MismatchError(f"cannot follow the forward of {name} ({reason}): {ADVICE}") from error
    finally:
        changed_buffers = [slot for slot, version in buffers if not _is_unchanged(slot, version)]
        for slot in changed_buffers:
            slot.replace(slot.tensor)

    if random.getstate() != python_state or not torch.equal(torch.get_rng_state(), torch_state):
        raise MismatchError(
            f"the forward of {name} draws random numbers between its layers, which would be the same in every step once it is "
            "cut: draw them in a layer"
        )
    constants = [node for node in graph.nodes if node.op == "get_attr" and str(node.target).startswith("_tensor_constant")]
    if constants or changed_buffers:
        raise MismatchError(
            f"the forward of {name} makes or changes a tensor between its layers, which cannot be followed without data: do it "
            "in a layer, or give example_args"
        )
    changes |= {attribute: change for attribute, change in tracer.changes.items() if attribute not in changes}
    return graph


def _is_unchanged(slot: TensorSlot, version: int) -> bool:
    return slot.registry.get(slot.key) is slot.tensor and tensor_version(slot.tensor) == version
