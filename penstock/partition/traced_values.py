"""Whether a graph that was traced without data holds for what the values are: a forward may ask that of them.

`is None`, `is True`, `isinstance`, `hasattr` and `x.dtype is torch.float32` leave nothing in the graph, and the trace takes
each value for a tensor. So the forward is traced once more with what the values of a batch are, and must do the same.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from penstock.errors import MismatchError
from penstock.partition.graph_inputs import Missing
from penstock.partition.graph_stage import NO_GRAD, UNUSED_READS, VALUE_KEY, Path
from penstock.partition.model_graph import eliminate_unused_nodes, has_side_effect
from penstock.torch_private import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten
from penstock.trees import leaves

Key = Any  # of a value in the trace: the name of its node, or for an attribute of it (name, attribute)


class Constant(NamedTuple):
    """A value of which there are few: the forward is traced with the value itself."""

    value: Any


Kind = Constant | type  # what a value is: a constant, or of this class


def kind_of(value: Any) -> Kind:
    """Return what the forward could ask of `value`: the value, if there are few of its class, or else the class."""
    if isinstance(value, Tensor):
        return Tensor
    is_constant = value is None or isinstance(value, bool | str | Enum | torch.dtype | Missing)
    return Constant(value) if is_constant else type(value)


class Leaf:
    """A value in the trace that is no constant. `text`: its name, in `calls` where it is computed."""

    def __init__(self, text: str, class_: type = Tensor, node: fx.Node | None = None) -> None:
        self.text, self.class_, self.node = text, class_, node

    def __repr__(self) -> str:
        return self.text if self.class_ is Tensor else f"{self.text}: {self.class_.__qualname__}"


Templates = Mapping[str, Any]  # argument that is no tensor -> the same with a `Leaf` in the place of each that is no constant
Trace = Callable[[nn.Module, bool, Templates, Mapping[Key, Kind]], fx.Graph]  # (model, is training, ..)


class TracedValueCheck:
    """Checks the arguments and the values of a batch; each new combination of kinds traces the forward once more.

    Which argument may be None alone is known before, also where the stages are and the model is not.
    """

    def __init__(self, model: nn.Module, trace: Trace, names: Sequence[str]) -> None:
        self._model, self._trace = ref(model), trace
        self._failures: dict[Any, str | None] = {}  # combination of kinds -> what the graph does not hold for
        if len(names) > 1:
            graphs_without = cache(lambda: [trace(model, is_training, {}, {}) for is_training in (True, False)])
            for name in names:
                holds = self._is_same(model, {name: None}, {}, (True, False), graphs_without)
                self._failures[str({name: None})] = None if holds else f"{name} is None"

    def __getstate__(self) -> dict[str, Any]:
        """Return what holds in another process, which has no model to trace."""
        return {"_model": _no_model, "_trace": None, "_failures": self._failures}

    def __deepcopy__(self, memo: Any) -> "TracedValueCheck":
        return self

    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Raise MismatchError if the forward does something else for what the arguments are."""
        if all(isinstance(value, Tensor) for value in arguments.values()):
            return
        if torch.compiler.is_compiling() and all(leaf is not None for leaf in leaves(dict(arguments))):
            return

        templates = _make_templates(arguments)
        key = str(templates)
        if key not in self._failures:
            what = _describe(_argument_kinds(arguments))
            model = self._find_model(what, [kind for _, kind in _argument_kinds(arguments)])
            holds = model is None or self._is_same(model, templates, {}, (True, False))
            self._failures[key] = None if holds else what
        _raise_if(self._failures[key])

    def check_values(self, is_training: bool, values: Sequence[tuple[Key, Any]]) -> None:
        """Raise MismatchError if the forward does something else for what these `values` are. Others are tensors."""
        kinds = tuple((key, kind_of(value)) for key, value in values)
        if all(kind is Tensor for _, kind in kinds):
            return
        if (is_training, kinds) not in self._failures:
            by_key = {key: kind for key, kind in kinds if kind is not Tensor}
            model = self._find_model(", ".join(f"{key} is {kind}" for key, kind in by_key.items()), [*by_key.values()])
            failure = None
            if model is not None and not self._is_same(model, {}, by_key, (is_training,)):
                failure = self._find_cause(model, is_training, by_key)
            self._failures[is_training, kinds] = failure
        _raise_if(self._failures[is_training, kinds])

    def _find_model(self, what: str, kinds: Sequence[Kind]) -> nn.Module | None:
        """Return the model; None if it is gone, and no value is None, True, False, a text or missing."""
        model = self._model()
        if model is None and any(isinstance(kind, Constant) and not isinstance(kind.value, torch.dtype) for kind in kinds):
            raise MismatchError(
                f"{what}, and whether the forward does something else then is seen by tracing the model that was cut, which "
                "is gone: keep a reference to it until the first step, or give example_args like this batch"
            )
        return model

    def _find_cause(self, model: nn.Module, is_training: bool, kinds: Mapping[Key, Kind]) -> str:
        """Return as text the values for which the forward does something else: one that suffices, or else all."""
        labels = _labels(self._trace(model, is_training, {}, {}))
        for key, kind in kinds.items():
            if not self._is_same(model, {}, {key: kind}, (is_training,)):
                return _describe([(labels[key], kind)])
        return _describe([(labels[key], kind) for key, kind in kinds.items()])

    def _is_same(
        self,
        model: nn.Module,
        templates: Templates,
        kinds: Mapping[Key, Kind],
        modes: Sequence[bool],
        graphs_without: Callable[[], list[fx.Graph]] | None = None,
    ) -> bool:
        """Return whether the forward traced with what the values are does what it does without."""
        try:
            without = graphs_without() if graphs_without else [self._trace(model, mode, {}, {}) for mode in modes]
            graphs = [self._trace(model, mode, templates, kinds) for mode in modes]
            return [_calls(graph, templates, kinds) for graph in without] == [_calls(graph, {}, {}) for graph in graphs]
        except Exception:  # whatever the forward makes of the values
            return False


def _no_model() -> None:
    """Stand for a reference to a model that is gone."""


def _raise_if(failure: str | None) -> None:
    if failure is not None:
        raise MismatchError(
            f"{failure}, and the model was cut for another value, for which its forward does something else: ask for it in a "
            "layer, give example_args like this batch if it is always so, or a list with one module for each stage"
        )


def _argument_kinds(arguments: Mapping[str, Any]) -> list[tuple[str, Kind]]:
    kinds = []
    for name, value in arguments.items():
        entries = tree_flatten_with_path(value)[0]
        kinds += [(name, kind_of(value))] * any(path for path, _ in entries)
        kinds += [(f"{name}{keystr(path)}", kind_of(leaf)) for path, leaf in entries]
    return kinds


def _describe(kinds: Sequence[tuple[str, Kind]]) -> str:
    """Return what values are as text: of those that are constants, or else of those that are no tensors."""
    constants = [f"{label} is {kind.value!r}" for label, kind in kinds if isinstance(kind, Constant)]
    classes = [f"{label} is of class {kind.__name__}" for label, kind in kinds if isinstance(kind, type) and kind is not Tensor]
    return ", ".join(constants or classes)


def _make_templates(arguments: Mapping[str, Any]) -> Templates:
    templates = dict[str, Any]()
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            flat, structure = tree_flatten(value)
            kinds = [kind_of(leaf) for leaf in flat]
            marked = [
                kind.value if isinstance(kind, Constant) else Leaf(f"{name}.{number}", kind)
                for number, kind in enumerate(kinds)
            ]
            templates[name] = tree_unflatten(marked, structure)
    return templates


# -- graphs of fx ------------------------------------------------------------------------------------------------------


def value_key(node: fx.Node) -> Key:
    """Return the key of a node's value: the same as long as the trace has taken the same way."""
    if node.target is getattr and isinstance(node.args[0], fx.Node):
        return node.args[0].name, node.args[1]
    return node.name


def record_unused_reads(graph: fx.Graph) -> None:
    """Note at each node that stays which of its items and attributes nodes read that nobody uses: the forward asks for them."""
    reads = {
        node: (node.args[0], (node.target, node.args[1]))
        for node in graph.nodes
        if node.target in (getattr, operator.getitem) and isinstance(node.args[0], fx.Node) and _is_plain(node.args[1])
    }
    eliminate_unused_nodes(graph)
    used, paths = {*graph.nodes}, dict[fx.Node, tuple[fx.Node, Path]]()
    for node, (parent, step) in reads.items():
        if node not in used:
            root, path = paths.get(parent, (parent, ()))
            paths[node] = root, (*path, step)
            if root in used:
                root.meta.setdefault(UNUSED_READS, []).append((node.meta[VALUE_KEY], paths[node][1]))


def _is_plain(key: Any) -> bool:
    return isinstance(key, int | str)


def _labels(graph: fx.Graph) -> dict[Key, str]:
    """Return how an error calls each value."""
    texts = dict[fx.Node, str]()
    for node in graph.nodes:
        if node.op == "call_module":
            text = f"{node.target}(..)"
        elif node.target in (getattr, operator.getitem) and node.args[0] in texts:
            parent = texts[node.args[0]]
            text = f"{parent}.{node.args[1]}" if node.target is getattr else f"{parent}[{node.args[1]!r}]"
        else:
            text = str(node.target) if node.op == "placeholder" else node.name
        texts[node] = text
    return {node.meta.get(VALUE_KEY, node.name): text for node, text in texts.items()}


def _calls(graph: fx.Graph, templates: Templates, kinds: Mapping[Key, Kind]) -> list[str]:
    """Return what the graph does if its values are these: what can be computed from them alone is computed here."""
    values, calls = dict[fx.Node, Any](), list[tuple[fx.Node, Any]]()
    for node in graph.nodes:
        arguments = map_arg((node.args, node.kwargs), values.__getitem__)
        kind = kinds.get(node.meta.get(VALUE_KEY))
        if node.op == "placeholder":
            template = templates.get(str(node.target), Leaf(str(node.target)))
            values[node] = tree_map(lambda leaf: Leaf(leaf.text) if isinstance(leaf, Leaf) else leaf, template)
        elif isinstance(kind, Constant):
            values[node] = kind.value
            calls.append((node, _copy(arguments)))
        elif _is_known(node, values, arguments):
            values[node] = _compute(node, *arguments)
        else:
            values[node] = Leaf("", node=node)
            calls.append((node, _copy(arguments)))
    return _call_texts(calls, values)


def _call_texts(calls: Sequence[tuple[fx.Node, Any]], values: Mapping[fx.Node, Any]) -> list[str]:
    """Return the calls that change something, and those whose results are used."""
    used = set[fx.Node]()
    for node, arguments in reversed(calls):
        if node in used or node.op == "output" or has_side_effect(node):
            used |= {node} | {leaf.node for leaf in tree_leaves(arguments) if isinstance(leaf, Leaf) and leaf.node is not None}

    texts = list[str]()
    for node, (args, kwargs) in calls:
        if node in used:
            if isinstance(values[node], Leaf):
                values[node].text = f"%{len(texts)}"
            texts.append(f"{node.op} {node.target} {args} {kwargs} {NO_GRAD in node.meta}")
    return texts


def _copy(tree: Any) -> Any:
    """Return `tree` with containers of its own: the graph may change them."""
    return tree_map(lambda leaf: leaf, tree)


def _is_known(node: fx.Node, values: Mapping[fx.Node, Any], arguments: Any) -> bool:
    """Whether a node takes an item out of a container, calls a method of one, or computes with constants alone."""
    first = node.args[0] if node.args else None
    has_container = isinstance(first, fx.Node) and not isinstance(values[first], Leaf)
    if has_container and (node.op == "call_method" or node.target in (getattr, operator.getitem, operator.setitem)):
        return True
    is_operator = node.op == "call_function" and getattr(node.target, "__module__", "") in ("_operator", "builtins", "math")
    return is_operator and not any(isinstance(leaf, Leaf) for leaf in tree_leaves(arguments))


def _compute(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)
