"""A model's forward traced by `torch.fx`, without data, to a graph of its units; see `export.py` for the other way.

The units remain modules that are called. Only what is between them, in the forwards of the modules around them, is traced.
"""

import inspect
import operator
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from weakref import ref

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from penstock.errors import MismatchError
from penstock.partition.attributes import Attribute, AttributeChange, restore_attributes_afterwards
from penstock.partition.graph_inputs import GraphInputs, InputParameter, varargs_error
from penstock.partition.model_graph import (
    INPLACE_OPERATORS,
    NO_GRAD,
    ModelGraph,
    eliminate_unused_nodes,
    first_line,
    train_then_eval,
)
from penstock.torch_private import (
    TensorSlot,
    buffer_slots,
    keystr,
    tensor_version,
    tree_flatten,
    tree_flatten_with_path,
    tree_map_only,
    tree_unflatten,
)
from penstock.trees import leaves

ADVICE = "give example_args, so that it can be exported; or a list with one module for each stage"


def trace_graph(model: nn.Module, units: Mapping[str, nn.Module]) -> ModelGraph:
    """Return the graph of the forward. Its parameters with a default keep that.

    Raises MismatchError for a forward that decides by values or shapes.
    """
    changes = dict[Attribute, AttributeChange]()
    graphs = [_trace(model, units, changes, {}) for _ in train_then_eval(model)]
    names = [str(node.target) for node in graphs[0].find_nodes(op="placeholder")]
    check_nones = _NoneCheck(model, units, names)
    inputs = GraphInputs(inspect.signature(model.forward), [*map(InputParameter, names)], check_nones=check_nones)
    return ModelGraph.from_train_and_eval_graphs(model, graphs, inputs, list(changes.values()))


# -- arguments that are None -------------------------------------------------------------------------------------------


class _Leaf(str):
    """The name of a tensor, or another value that is not None, in an argument."""

    __repr__ = str.__str__


Templates = Mapping[str, Any]  # argument with a None inside -> the same with a `_Leaf` in the place of each other leaf


class _NoneCheck:
    """Whether the graphs hold for arguments with a None inside: in them `is None` is False of a value.

    Which items may be None together is seen by tracing the forward once more, for the first batch that has these Nones. Which
    argument may be None alone is known before, also where the stages are and the model is not.
    """

    def __init__(self, model: nn.Module, units: Collection[str], names: Sequence[str]) -> None:
        self._model, self._units = ref(model), tuple(units)
        self._holds: dict[str, bool] = {}
        if len(names) > 1:
            self._compare(model, [{name: None} for name in names])

    def __getstate__(self) -> dict[str, Any]:
        """Return what holds in another process, which has no model to trace."""
        return {"_model": _no_model, "_units": (), "_holds": self._holds}

    def __deepcopy__(self, memo: Any) -> "_NoneCheck":
        return self

    def __call__(self, arguments: Mapping[str, Any]) -> None:
        """Raise MismatchError if the forward does something else for the Nones in `arguments`."""
        if all(leaf is not None for leaf in leaves(dict(arguments))):
            return

        entries = [(name, *entry) for name, value in arguments.items() for entry in tree_flatten_with_path(value)[0]]
        nones = ", ".join(f"{name}{keystr(path)} is None" for name, path, leaf in entries if leaf is None)
        templates = _make_templates(arguments)
        if str(templates) not in self._holds:
            model = self._model()
            if model is None:
                raise MismatchError(
                    f"{nones}, and whether the forward does something else then is seen by tracing the model that was cut, "
                    "which is gone: keep a reference to it until the first step, or give example_args with None"
                )
            self._compare(model, [templates])
        if not self._holds[str(templates)]:
            raise MismatchError(
                f"{nones}, and the model was cut for another value, for which its forward does something else: give "
                "example_args with None if it is always None, or a list with one module for each stage"
            )

    def _compare(self, model: nn.Module, sets_of_nones: Sequence[Templates]) -> None:
        """Record whether the forward traced with each set of Nones does what it does without them."""
        graphs_without_nones = cache(partial(self._trace_in_both_modes, model, {}))
        for templates in sets_of_nones:
            self._holds[str(templates)] = self._is_same(model, templates, graphs_without_nones)

    def _is_same(self, model: nn.Module, templates: Templates, graphs_without_nones: Callable[[], list[fx.Graph]]) -> bool:
        try:
            graphs, graphs_for_nones = graphs_without_nones(), self._trace_in_both_modes(model, templates)
            return [_calls(graph, templates) for graph in graphs] == [_calls(graph, {}) for graph in graphs_for_nones]
        except Exception:  # whatever the forward makes of a None
            return False

    def _trace_in_both_modes(self, model: nn.Module, templates: Templates) -> list[fx.Graph]:
        """Return the graphs of training and of evaluation."""
        graphs = []
        for is_training in (True, False):
            with _training_flags(model, is_training):
                graphs.append(_trace(model, self._units, {}, templates))
        return graphs


def _no_model() -> None:
    """Stand for a reference to a model that is gone."""


def _make_templates(arguments: Mapping[str, Any]) -> Templates:
    templates = dict[str, Any]()
    for name, value in arguments.items():
        flat, structure = tree_flatten(value)
        if any(leaf is None for leaf in flat):
            marked = [None if leaf is None else _Leaf(f"{name}.{number}") for number, leaf in enumerate(flat)]
            templates[name] = tree_unflatten(marked, structure)
    return templates


@contextmanager
def _training_flags(model: nn.Module, is_training: bool) -> Iterator[None]:
    """Set the flags alone, since a `train()` of the user's own may change weights, which a step that runs needs."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in flags:
            module.training = is_training
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def _calls(graph: fx.Graph, templates: Templates) -> list[str]:
    """Return what the graph does, with `templates` for its arguments: items that it takes out of them are taken out here."""
    eliminate_unused_nodes(graph)
    values, calls = dict[fx.Node, Any](), list[str]()
    for node in graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "placeholder":
            template = templates.get(node.target, _Leaf(node.target))
            values[node] = tree_map_only(_Leaf, lambda leaf: leaf, template)  # a copy: the graph may change it
        elif _is_of_template(node, values):
            function = node.target if node.op == "call_function" else getattr(args[0], node.target)
            values[node] = function(*(args if node.op == "call_function" else args[1:]), **kwargs)
        else:
            values[node] = _Leaf(f"%{len(calls)}")
            calls.append(f"{node.op} {node.target} {args} {kwargs} {NO_GRAD in node.meta}")
    return calls


def _is_of_template(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    """Whether a node takes an item out of a dict or tuple in the templates, or calls a method of it."""
    container = values.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    if container is None or isinstance(container, _Leaf):
        return False
    return node.op == "call_method" or node.target in (getattr, operator.getitem, operator.setitem)


# -- the trace ---------------------------------------------------------------------------------------------------------


class _Proxy(fx.Proxy):
    """A value in the graph. `value += operand` changes it in place there too, where torch's own proxy would make another."""


def _inplace_method(change: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value, operand: value.tracer.create_proxy("call_function", change, (value, operand), {})


for _name in INPLACE_OPERATORS:
    setattr(_Proxy, f"__{_name}__", _inplace_method(getattr(operator, _name)))


class _UnitTracer(fx.Tracer):
    def __init__(self, units: Collection[str], templates: Templates) -> None:
        super().__init__(param_shapes_constant=True)
        self.units, self._templates, self._autocast = units, templates, _autocast_modes()
        self.changes: dict[Attribute, AttributeChange] = {}  # attributes that the forward has set

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
        templates = {name: self._templates.get(name, _Leaf(name)) for name in names}
        arguments = tree_map_only(_Leaf, lambda leaf: self.create_proxy("placeholder", leaf, (), {}), templates)

        def traced_forward(model: nn.Module) -> Any:
            with restore_attributes_afterwards(model) as self.changes:
                return forward(model, **arguments)

        return traced_forward, [self.root]


def _autocast_modes() -> list[bool]:
    return [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")]


def _trace(
    model: nn.Module, units: Collection[str], changes: dict[Attribute, AttributeChange], templates: Templates
) -> fx.Graph:
    """Return the graph; put the attributes that the forward sets into `changes`. `templates`: of arguments with a None."""
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    buffers = [(slot, tensor_version(slot.tensor)) for slot in buffer_slots(model)]
    name, tracer = type(model).__name__, _UnitTracer(units, templates)
    try:
        with torch.enable_grad():
            graph = tracer.trace(model)
    except MismatchError:
        raise
    except Exception as error:
        raise MismatchError(f"cannot follow the forward of {name} ({first_line(error)}): {ADVICE}") from error
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
