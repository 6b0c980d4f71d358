"""What a model does, as a graph whose nodes call units and what is between them: once for training, once for evaluation.

`trace.py` and `export.py` are the two ways to a graph, `graph_cutting.py` cuts it into stages.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx, nn

from penstock.errors import MismatchError
from penstock.partition.attributes import AttributeChange
from penstock.partition.graph_inputs import GraphInputs
from penstock.partition.graph_stage import SEED_NUMBER
from penstock.python_objects import preserve_training_flags
from penstock.torch_private import OpOverload, mutated_arguments

DEVICE_ATTRIBUTE = "penstock.device"  # what a graph reads of the stage that runs it

AUTOCAST_IS_LOST = (
    "torch.autocast, which is lost where it is cut: enter it in the forward of a layer, or call step() under torch.autocast"
)

OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
INPLACE_OPERATORS = frozenset(f"i{name}" for name in OPERATORS)  # `+=` ..
RANDOM_OPERATIONS = ("dropout", "rand", "normal", "bernoulli", "attention", "apply")  # parts of names; `apply`: of a Function


class ModelGraph(NamedTuple):
    """A model and its graphs. Units are `call_module` nodes; parameters and `extras` are read by `get_attr`."""

    model: nn.Module
    graphs: Mapping[bool, fx.Graph]  # of training (True) and of evaluation
    inputs: GraphInputs
    extras: Mapping[str, Any]  # constants that the graphs read and that are no part of the model
    changes: Sequence[AttributeChange]  # attributes that the forward around the units has set
    constants: Collection[int]  # ids of tensors in them that are the same in each call

    @classmethod
    def from_train_and_eval_graphs(
        cls,
        model: nn.Module,
        graphs: Sequence[fx.Graph],
        inputs: GraphInputs,
        changes: Sequence[AttributeChange],
        extras: Mapping[str, Any] | None = None,
        constants: Collection[int] = (),
    ) -> "ModelGraph":
        """Make one of the graphs of training and evaluation.

        Raises MismatchError unless evaluation calls the units of training in the same order; it may leave out some.
        """
        for graph in graphs:
            eliminate_unused_nodes(graph)
            _number_random_nodes(model, graph)
        training, evaluation = graphs
        if stages_of_calls(evaluation, [(unit, 0) for unit in called_units(training)]) is None:
            raise _train_eval_mismatch_error(model)
        return cls(model, {True: training, False: evaluation}, inputs, extras or {}, changes, constants)

    def text(self) -> str:
        """Return both graphs as text, to compare them with others."""
        return "\n".join(f"{training} {graph}" for training, graph in self.graphs.items())

    def unit_order(self) -> list[str]:
        """Return the units in the order in which they are called first."""
        return list(dict.fromkeys(called_units(self.graphs[True])))


def eliminate_unused_nodes(graph: fx.Graph) -> None:
    """Remove nodes whose values nobody uses, and that change nothing."""
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or has_side_effect(node))


def train_then_eval(model: nn.Module) -> Iterator[bool]:
    """Put the model into training mode, then into evaluation mode; afterwards restore the mode of each submodule."""
    with preserve_training_flags([model]):
        for training in (True, False):
            model.train(training)
            yield training


def _train_eval_mismatch_error(model: nn.Module) -> MismatchError:
    forward = f"the forward of {type(model).__name__}"
    return MismatchError(
        f"{forward} calls layers in evaluation that it does not call in training, or in another order: give a list with one "
        "module for each stage"
    )


def called_units(graph: fx.Graph) -> list[str]:
    """Return the units in the order in which they are called."""
    return [str(node.target) for node in graph.nodes if node.op == "call_module"]


def stages_of_calls(graph: fx.Graph, training_calls: Sequence[tuple[str, int]]) -> list[int] | None:
    """Return the stage of each call of a unit, as training, whose calls these are, has it; None if it has no such calls."""
    following, stages = iter(training_calls), list[int]()
    for unit in called_units(graph):
        stage = next((stage for name, stage in following if name == unit), None)
        if stage is None:
            return None
        stages.append(stage)
    return stages


def has_side_effect(node: fx.Node) -> bool:
    """Return whether a node must stay even if its value is not used: it may change something in place."""
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    if isinstance(node.target, OpOverload):
        return bool(mutated_arguments(node.target))
    name = _target_name(node)
    is_inplace = name.endswith("_") or "setitem" in name or name in INPLACE_OPERATORS
    return is_inplace or bool(node.kwargs.get("inplace")) or node.is_impure()


def _number_random_nodes(model: nn.Module, graph: fx.Graph) -> None:
    """Give numbers for seeds: to units those of the model's modules, to what is between them negative ones by position."""
    module_numbers = {name: number for number, (name, _) in enumerate(model.named_modules())}
    for position, node in enumerate(graph.nodes):
        if node.op == "call_module":
            node.meta[SEED_NUMBER] = module_numbers[str(node.target)]
        elif node.op in ("call_function", "call_method") and any(word in _target_name(node) for word in RANDOM_OPERATIONS):
            node.meta[SEED_NUMBER] = -1 - position  # by its name: a seed that is not needed does no harm


def _target_name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))
