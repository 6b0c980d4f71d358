"""From a model's forward to a graph of its units: followed symbolically (`torch.fx`), or exported (`torch.export`).

The units stay what they are, modules that are called. Only what stands between them, in the forwards of the modules
around them, is followed. Both ways are taken twice, in training and in evaluation, so that what differs is chosen when the
graph runs.
"""

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.node import map_aggregate
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from penstock.errors import MismatchError
from penstock.inputs import Input, Inputs, Like, named
from penstock.pieces import DEVICE, TRAINING, Traced

NOT_ONE = "!= 1"  # of sizes that are broadcast: a batch of one row is as good as any
INSTEAD = "give example_args, so that it can be exported; or a list with one module for each stage"


def symbolic(model: nn.Module, units: Mapping[str, nn.Module]) -> Traced:
    """Follow the forward without any data. Its parameters with a default keep that.

    Raises MismatchError for a forward that looks at values or shapes to decide what to do.
    """
    graphs = [_followed(model, units) for _ in _both_modes(model)]
    inputs = [Input(str(node.target)) for node in graphs[0].nodes if node.op == "placeholder"]
    return Traced(model, _joined(model, graphs), Inputs(inspect.signature(model.forward), inputs), {}, _numbers(model))


class _Tracer(fx.Tracer):
    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        super().__init__(param_shapes_constant=True)
        self.units = units

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return name in self.units

    def create_args_for_root(self, forward: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Placeholders for the parameters that have no default."""
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        names = [each.name for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
        values = [self.create_proxy("placeholder", name, (), {}) for name in names]
        return lambda model, *given: forward(model, **dict(zip(names, given, strict=True))), [self.root, *values]


def _followed(model: nn.Module, units: Mapping[str, nn.Module]) -> fx.Graph:
    try:
        return _Tracer(units).trace(model)
    except Exception as error:
        raise MismatchError(f"cannot follow the forward of {type(model).__name__} ({_first_line(error)}): {INSTEAD}") from error


def exported(model: nn.Module, units: Mapping[str, nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Traced:
    """Follow the forward on an example, by `torch.export`; sizes of tensors stay open.

    Raises MismatchError with what `torch.export` says of a forward it cannot export.
    """
    signature = inspect.signature(model.forward)
    values = _several_rows(named(signature, args, kwargs))
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    values = tree_map(lambda leaf: leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf, values)
    made = [_exported(model, units, values, device) for _ in _both_modes(model)]
    guards = dict.fromkeys(guard for each in made for guard in each.program._guards_code if not guard.endswith(NOT_ONE))
    inputs = Inputs(signature, _inputs(made[0].program, values), list(guards))
    graph = _joined(model, [each.graph() for each in made], [each.extras for each in made])
    return Traced(model, graph, inputs, made[0].extras, _numbers(model))


def _several_rows(values: dict[str, Any]) -> dict[str, Any]:
    """The example, with two rows if it had one: `torch.export` takes a size of 1 to be always 1."""
    if {len(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.dim()} != {1}:
        return values
    return tree_map(lambda leaf: torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.dim() else leaf, values)


def _inputs(program: ExportedProgram, values: Mapping[str, Any]) -> list[Input]:
    """What the graph takes for the `values` of the example."""
    count = len(program.graph_signature.user_inputs)
    nodes = iter([node for node in program.graph.nodes if node.op == "placeholder"][-count:] if count else [])
    inputs = []
    for name, value in values.items():
        leaves, spec = tree_flatten(value)
        inputs.append(Input(name, spec, tuple(_like(leaf, next(nodes)) for leaf in leaves)))
    return inputs


def _like(leaf: Any, node: fx.Node) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return Like(leaf.dtype, tuple(size if isinstance(size, int) else None for size in node.meta["val"].shape))


def _exported(model: nn.Module, units: Mapping[str, nn.Module], values: dict[str, Any], device: torch.device) -> "_Rewriting":
    sizes = tree_map(_open_sizes, values)
    with torch.no_grad(), _opaque(units) as calls:
        try:
            program = torch.export.export(model, (), values, dynamic_shapes=sizes, strict=False)
        except Exception as error:
            told = f"cannot export the forward of {type(model).__name__} ({_first_line(error)})"
            raise MismatchError(f"{told}: change what it says, or give a list with one module for each stage") from error
    return _Rewriting(program, list(calls), device)


def _open_sizes(leaf: Any) -> dict[int, Any] | None:
    """Which sizes stay open: all but those of 1, which are taken to be always 1."""
    return {place: Dim.AUTO for place, size in enumerate(leaf.shape) if size != 1} if isinstance(leaf, Tensor) else None


def _numbers(model: nn.Module) -> dict[str, int]:
    """A number for each module, for its random numbers."""
    return {name: number for number, (name, _) in enumerate(model.named_modules())}


def _both_modes(model: nn.Module) -> Iterator[bool]:
    """The model in training, then in evaluation; then as it was."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for training in (True, False):
            model.train(training)
            yield training
    finally:
        for module, mode in modes:
            module.training = mode


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# -- one graph for training and evaluation ----------------------------------------------------------------------------


def _joined(model: nn.Module, graphs: Sequence[fx.Graph], extras: Sequence[Mapping[str, Any]] = ({}, {})) -> fx.Graph:
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
    return torch.equal(ours, theirs) if isinstance(ours, Tensor) and isinstance(theirs, Tensor) else type(ours) is type(theirs)


def choose(training: bool, ours: Any, theirs: Any) -> Any:
    """What holds in training, or what holds in evaluation."""
    return ours if training else theirs


def _two_ways(model: nn.Module) -> MismatchError:
    does = f"the forward of {type(model).__name__} does one thing in training and another in evaluation"
    return MismatchError(f"{does}: give a list with one module for each stage")


def _acts(node: fx.Node) -> bool:
    """Whether a node must stay even if nobody uses its value: it may change something in place."""
    return node.op == "call_module" or node.is_impure() or str(node.target).rstrip("0123456789.default").endswith("_")


# -- torch.export with units that it does not look into ---------------------------------------------------------------


class _Call:
    """One call of a unit during the export: how its arguments are put together, and what it gives."""

    def __init__(self, name: str, forward: Callable[..., Any], leaves: Sequence[Any], spec: TreeSpec) -> None:
        self.name, self.forward, self.leaves, self.spec = name, forward, leaves, spec
        self.made: list[Any] = []
        self.made_spec = spec

    def arguments(self, tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
        """(args, kwargs) with these in their places."""
        rest = {Tensor: iter(tensors), torch.SymInt: iter(numbers)}
        leaves = [next(rest[kind]) if kind in rest else leaf for leaf in self.leaves for kind in [_kind(leaf)]]
        return tree_unflatten(leaves, self.spec)

    def run(self, tensors: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
        """Run the unit on tensors without values; its tensors."""
        args, kwargs = self.arguments(tensors, numbers)
        self.made, self.made_spec = tree_flatten(self.forward(*args, **kwargs))
        self.made = [torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self.made]  # it may be an input
        return [leaf for leaf in self.made if isinstance(leaf, Tensor)]


def _kind(leaf: Any) -> Any:
    return Tensor if isinstance(leaf, Tensor) else torch.SymInt if isinstance(leaf, torch.SymInt) else None


_calls: list[_Call] = []


@torch.library.custom_op("penstock::unit", mutates_args=())
def _unit(call: int, tensors: list[Tensor], numbers: list[int]) -> list[Tensor]:
    raise AssertionError("a unit is called in an export only")


@_unit.register_fake
def _(call: int, tensors: list[Tensor], numbers: list[int]) -> list[Tensor]:
    mode = detect_fake_mode(tensors)
    with (
        mode.shape_env.suppress_guards() if mode and mode.shape_env else nullcontext()
    ):  # what sizes a unit looks at is its own
        return _calls[call].run(tensors, numbers)


@contextmanager
def _opaque(units: Mapping[str, nn.Module]) -> Iterator[list[_Call]]:
    """Every unit's forward replaced by one operation that `torch.export` does not look into."""
    _calls.clear()
    for name, unit in units.items():
        unit.forward = _stub(name, unit.forward)
    try:
        yield _calls
    finally:
        for unit in units.values():
            del unit.forward


def _stub(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    def stub(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        call = _Call(name, forward, leaves, spec)
        _calls.append(call)
        given = {kind: [leaf for leaf in leaves if _kind(leaf) is kind] for kind in (Tensor, torch.SymInt)}
        made = iter(torch.ops.penstock.unit(len(_calls) - 1, given[Tensor], given[torch.SymInt]))
        return tree_unflatten([next(made) if isinstance(leaf, Tensor) else leaf for leaf in call.made], call.made_spec)

    return stub


class _Rewriting:
    """The graph of an exported program, with its units called as modules again."""

    def __init__(self, program: ExportedProgram, calls: Sequence[_Call], device: torch.device) -> None:
        self.program, self.calls, self.device = program, calls, device
        self.made, self.extras = fx.Graph(), dict[str, Any]()
        self.values: dict[fx.Node, Any] = {}

    def graph(self) -> fx.Graph:
        """The graph; `extras` is what it reads that is no part of the model."""
        inputs = {each.arg.name: each for each in self.program.graph_signature.input_specs}
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self._input(node, inputs[node.name])
            elif node.op == "get_attr":
                self.values[node] = self._extra(getattr(self.program.graph_module, str(node.target)))
            elif node.op == "output":
                leaves = [self._value(each) for each in node.args[0]]
                spec = self.program.call_spec.out_spec
                self.made.output(leaves[0] if spec.is_leaf() else self.made.call_function(tree_unflatten, (leaves, spec)))
            elif node.target is torch.ops.penstock.unit.default:
                self.values[node] = self._unit(*node.args)
            elif node.target is operator.getitem and isinstance(self.values[node.args[0]], list):
                self.values[node] = self.values[node.args[0]][node.args[1]]
            else:
                args, kwargs = map_aggregate((node.args, node.kwargs), self._value)
                self.values[node] = self.made.create_node(node.op, node.target, args, kwargs, node.name)
        return self.made

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, torch.device) and argument.type == self.device.type:
            return self.made.get_attr(DEVICE)
        return self.values[argument] if isinstance(argument, fx.Node) else argument

    def _input(self, node: fx.Node, spec: Any) -> fx.Node:
        if spec.kind is InputKind.USER_INPUT:
            return self.made.placeholder(node.name)
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            return self.made.get_attr(spec.target)
        return self._extra(self.program.constants[spec.target])

    def _extra(self, value: Any) -> fx.Node:
        name = f"_penstock_{len(self.extras)}"
        self.extras[name] = value
        return self.made.get_attr(name)

    def _unit(self, index: int, tensors: Sequence[fx.Node], numbers: Sequence[Any]) -> list[Any]:
        """The nodes of the tensors that the call makes."""
        call = self.calls[index]
        args, kwargs = call.arguments([self._value(each) for each in tensors], [self._value(each) for each in numbers])
        node = self.made.call_module(call.name, args, kwargs)
        if call.made_spec.is_leaf():
            return [node]
        leaves = self.made.call_function(leaves_of, (node,))
        places = [place for place, leaf in enumerate(call.made) if isinstance(leaf, Tensor)]
        return [self.made.call_function(operator.getitem, (leaves, place)) for place in places]


def leaves_of(value: Any) -> list[Any]:
    """What a unit gave, flat."""
    return tree_flatten(value)[0]
