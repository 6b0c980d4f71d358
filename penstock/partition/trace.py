"""From a model's forward to a graph of its units, followed symbolically by `torch.fx`; see `export.py` for the other way.

The units stay what they are, modules that are called. Only what stands between them, in the forwards of the modules
around them, is followed. It is done twice, in training and in evaluation, so that what differs is chosen when the graph runs.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from penstock.errors import MismatchError
from penstock.partition.graph_stage import NO_GRAD, TRAINING, Traced
from penstock.partition.inputs import Input, Inputs, refused

INSTEAD = "give example_args, so that it can be exported; or a list with one module for each stage"


def symbolic(model: nn.Module, units: Mapping[str, nn.Module]) -> Traced:
    """Follow the forward without any data. Its parameters with a default keep that.

    Raises MismatchError for a forward that looks at values or shapes to decide what to do.
    """
    graphs = [_followed(model, units) for _ in both_modes(model)]
    inputs = [Input(str(node.target)) for node in graphs[0].nodes if node.op == "placeholder"]
    return Traced(model, joined(model, graphs), Inputs(inspect.signature(model.forward), inputs), {}, numbers(model))


class _Tracer(fx.Tracer):
    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        super().__init__(param_shapes_constant=True)
        self.units = units

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return name in self.units

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """A node, which remembers whether gradients are wanted where it stands."""
        node = super().create_node(*args, **kwargs)
        node.meta |= {} if torch.is_grad_enabled() else {NO_GRAD: True}
        return node

    def create_args_for_root(self, forward: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Placeholders for the parameters that have no default."""
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        for each in parameters:
            if each.kind is each.VAR_POSITIONAL:
                raise refused(each.name)
        names = [each.name for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
        values = [self.create_proxy("placeholder", name, (), {}) for name in names]
        return lambda model, *given: forward(model, **dict(zip(names, given, strict=True))), [self.root, *values]


def _followed(model: nn.Module, units: Mapping[str, nn.Module]) -> fx.Graph:
    try:
        with torch.enable_grad():
            return _Tracer(units).trace(model)
    except MismatchError:
        raise
    except Exception as error:
        raise MismatchError(f"cannot follow the forward of {type(model).__name__} ({first_line(error)}): {INSTEAD}") from error


def numbers(model: nn.Module) -> dict[str, int]:
    """A number for each module, for its random numbers."""
    return {name: number for number, (name, _) in enumerate(model.named_modules())}


def both_modes(model: nn.Module) -> Iterator[bool]:
    """The model in training, then in evaluation; then as it was."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for training in (True, False):
            model.train(training)
            yield training
    finally:
        for module, mode in modes:
            module.training = mode


def first_line(error: BaseException) -> str:
    """What it says first, or its name."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# -- one graph for training and evaluation ----------------------------------------------------------------------------


def joined(model: nn.Module, graphs: Sequence[fx.Graph], extras: Sequence[Mapping[str, Any]] = ({}, {})) -> fx.Graph:
    """The graph for training, which takes the other's constants where the piece that runs it is in evaluation mode."""
    training, evaluation = graphs
    for graph in (training, evaluation):
        graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or _acts(node))
    if len(training.nodes) != len(evaluation.nodes):
        raise _two_ways(model)
    twins: dict[fx.Node, fx.Node] = {}
    for mine, other in zip(training.nodes, evaluation.nodes, strict=True):
        twins[other] = mine
        if mine.op != other.op or mine.target != other.target:
            raise _two_ways(model)
        if mine.op == "get_attr" and not _same(*[each.get(str(mine.target)) for each in extras]):
            raise _two_ways(model)
        ours, shape = _leaves((mine.args, mine.kwargs))
        theirs, other_shape = _leaves((other.args, other.kwargs))
        if shape != other_shape:
            raise _two_ways(model)
        chosen = [_chosen(model, training, mine, a, b, twins) for a, b in zip(ours, theirs, strict=True)]
        mine.args, mine.kwargs = _replaced((mine.args, mine.kwargs), chosen)
    return training


def _leaves(arguments: Any) -> tuple[list[Any], str]:
    """What stands in a node's arguments, in slices too, and their structure."""
    leaves: list[Any] = []
    return leaves, str(map_aggregate(arguments, lambda leaf: leaves.append(leaf)))


def _replaced(arguments: Any, leaves: Sequence[Any]) -> Any:
    rest = iter(leaves)
    return map_aggregate(arguments, lambda _: next(rest))


def _chosen(model: nn.Module, graph: fx.Graph, node: fx.Node, ours: Any, theirs: Any, twins: dict[fx.Node, fx.Node]) -> Any:
    if isinstance(theirs, fx.Node):
        if twins[theirs] is not ours:
            raise _two_ways(model)
        return ours
    if isinstance(ours, fx.Node):
        raise _two_ways(model)
    if type(ours) is type(theirs) and (ours is theirs or ours == theirs):
        return ours
    with graph.inserting_before(node):
        return graph.call_function(choose, (graph.get_attr(TRAINING), ours, theirs))


def _same(ours: Any, theirs: Any) -> bool:
    """Whether two constants are equal; parts of a graph, which only torch.export makes, are taken to be."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return torch.equal(ours, theirs)
    return isinstance(ours, nn.Module) == isinstance(theirs, nn.Module)


def choose(training: bool, ours: Any, theirs: Any) -> Any:
    """What holds in training, or what holds in evaluation."""
    return ours if training else theirs


def _two_ways(model: nn.Module) -> MismatchError:
    does = f"the forward of {type(model).__name__} does one thing in training and another in evaluation"
    return MismatchError(f"{does}: give a list with one module for each stage")


def _acts(node: fx.Node) -> bool:
    """Whether a node must stay even if nobody uses its value: it may change something in place."""
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    name = getattr(node.target, "__name__", str(node.target))
    return name.endswith("_") or "setitem" in name or bool(node.kwargs.get("inplace")) or node.is_impure()
