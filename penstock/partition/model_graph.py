"""What a model does, as a graph whose nodes call units and what stands between them: once for training, once for evaluation.

`trace.py` and `export.py` are the two ways to such a graph, `graph_stage.py` cuts it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx, nn

from penstock.errors import MismatchError
from penstock.partition.graph_inputs import GraphInputs
from penstock.torch_private import OpOverload, mutated_arguments

DEVICE = "penstock.device"  # what a graph reads of the stage that runs it
NO_GRAD = "no_grad"  # in a node's meta: it stands inside a `torch.no_grad()`
NUMBER = "number"  # in a node's meta: what its random numbers are seeded by, where it may draw some
OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
ASSIGNING = frozenset(f"i{each}" for each in OPERATORS)  # the names of `+=` ..
RANDOM = ("dropout", "rand", "normal", "bernoulli", "attention")


class ModelGraph(NamedTuple):
    """A model and its graphs. Units are `call_module` nodes; parameters and `extras` are read by `get_attr`."""

    model: nn.Module
    graphs: Mapping[bool, fx.Graph]  # of training (True) and of evaluation
    inputs: GraphInputs
    extras: Mapping[str, Any]  # what the graphs read that is no part of the model: constants

    @classmethod
    def from_graphs(
        cls, model: nn.Module, graphs: Sequence[fx.Graph], inputs: GraphInputs, extras: Mapping[str, Any]
    ) -> "ModelGraph":
        """From the graphs of training and evaluation. Raises MismatchError unless both call the same units, in one order."""
        for graph in graphs:
            graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or _acts(node))
            _number(model, graph)
        training, evaluation = graphs
        if _calls(training) != _calls(evaluation):
            raise train_eval_mismatch_error(model)
        return cls(model, {True: training, False: evaluation}, inputs, extras)

    def unit_order(self) -> list[str]:
        """The units in the order in which they are called first."""
        return list(dict.fromkeys(_calls(self.graphs[True])))


def train_then_eval(model: nn.Module) -> Iterator[bool]:
    """The model in training, then in evaluation; then as it was."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for training in (True, False):
            model.train(training)
            yield training
    finally:
        for module, mode in modes:
            module.training = mode


def train_eval_mismatch_error(model: nn.Module) -> MismatchError:
    """For a forward whose two graphs cannot be cut alike."""
    does = f"the forward of {type(model).__name__} does one thing in training and another in evaluation"
    return MismatchError(f"{does}: give a list with one module for each stage")


def first_line(error: BaseException) -> str:
    """What it says first, or its name."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _calls(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_module"]


def _acts(node: fx.Node) -> bool:
    """Whether a node must stay even if nobody uses its value: it may change something in place."""
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    if isinstance(node.target, OpOverload):
        return bool(mutated_arguments(node.target))
    name = _name(node)
    changes = name.endswith("_") or "setitem" in name or name in ASSIGNING
    return changes or bool(node.kwargs.get("inplace")) or node.is_impure()


def _number(model: nn.Module, graph: fx.Graph) -> None:
    """Number what may draw random numbers: units as modules of the model, what stands between them by its place, below 0."""
    numbers = {name: number for number, (name, _) in enumerate(model.named_modules())}
    for place, node in enumerate(graph.nodes):
        if node.op == "call_module":
            node.meta[NUMBER] = numbers[str(node.target)]
        elif node.op in ("call_function", "call_method") and any(word in _name(node) for word in RANDOM):
            node.meta[NUMBER] = -1 - place  # by its name: one seed too many does no harm


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))
