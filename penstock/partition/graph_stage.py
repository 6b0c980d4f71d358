"""A model cut along its graph: what each stage runs, and which values go from which stage to which.

A value goes straight to the next stage that uses it, and from there to the next after that: so the gradient that comes
back on the same way has been summed in the order in which autograd sums it in the uncut model, use by use from the last to
the first, and has the same bits.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list

from penstock.errors import MismatchError
from penstock.partition.inputs import Inputs

Call = Callable[..., Any]  # how a unit is called: its number, the unit, args, kwargs
TRAINING, DEVICE = "training", "penstock.device"  # what the graph reads of the stage itself
NO_GRAD = "no_grad"  # in a node's meta: it stands inside a `torch.no_grad()`
RANDOM = ("dropout", "rand", "normal", "bernoulli", "attention")


class Traced(NamedTuple):
    """What a model does, as a graph whose nodes call units (`call_module`) and what stands between them."""

    model: nn.Module
    graph: fx.Graph
    inputs: Inputs
    extras: Mapping[str, Any]  # what the graph reads that is no part of the model: constants
    numbers: Mapping[str, int]  # of units, for their random numbers

    def order(self) -> list[str]:
        """The units in the order in which they are called first."""
        return list(dict.fromkeys(str(node.target) for node in self.graph.nodes if node.op == "call_module"))


class GraphStage(nn.Module):
    """One stage of a model that was cut along its graph. Its parts are the model's own, under the model's names.

    It takes a message from each stage in `sources` and gives one to each in `takers`: the one value that goes that way, or a
    tuple of several. The first stage takes what the model's forward takes, the last one gives what it gives.
    What it has besides the model's parts is all in `penstock`, so that it stands in the way of none of their names.
    """

    def __init__(self, traced: Traced, graph: fx.Graph, sources: Mapping[int, int], takers: Sequence[int]) -> None:
        super().__init__()
        for node in sorted(graph.nodes, key=lambda node: node.op != "call_module"):  # units first: they bring their parameters
            if node.op == "call_module" or (node.op == "get_attr" and node.target not in (TRAINING, DEVICE)):
                adopt(self, traced, str(node.target))
        self.penstock = StageGraph(self, traced, graph, dict(sources), tuple(takers))

    def forward(self, *messages: Any, **kwargs: Any) -> Any:
        """What goes to the takers: a message for one, a tuple of messages for several; on the last stage the output."""
        return self.penstock(messages, kwargs, lambda number, unit, args, kwargs: unit(*args, **kwargs))


class StageGraph:
    """What a stage does, and whom it takes values from and gives values to."""

    def __init__(
        self, stage: GraphStage, traced: Traced, graph: fx.Graph, sources: dict[int, int], takers: tuple[int, ...]
    ) -> None:
        self.sources, self.takers = sources, takers  # stage -> number of values; stages
        self.device = next((each.device for each in traced.model.parameters()), torch.device("cpu"))
        self._inputs, self._runner = traced.inputs, _Runner(stage, graph, traced.numbers)

    def __call__(self, messages: Sequence[Any], kwargs: Mapping[str, Any], call: Call) -> Any:
        """As the stage's forward, with every unit and everything random between them called by `call`."""
        values = self._received(messages) if self.sources else self._inputs.values(messages, kwargs)
        return self._runner.run_with(call, values)

    def _received(self, messages: Sequence[Any]) -> list[Any]:
        counts = self.sources.values()
        values = [
            value for message, count in zip(messages, counts, strict=True) for value in ((message,) if count == 1 else message)
        ]
        return [self.device if isinstance(value, torch.device) else value for value in values]

    @property
    def code(self) -> str:
        """What the stage does, as Python."""
        return self._runner.graph.python_code("self").src


class _Runner:
    """Runs a stage's graph, and lets go of each value after its last use."""

    def __init__(self, stage: GraphStage, graph: fx.Graph, numbers: Mapping[str, int]) -> None:
        self.stage, self.graph, self.numbers = stage, graph, numbers
        self._nodes = tuple(graph.nodes)
        last_use = {used: node for node in self._nodes for used in node.all_input_nodes}
        self._done: dict[fx.Node, list[fx.Node]] = defaultdict(list)  # node -> the values that nobody needs after it
        for used, node in last_use.items():
            self._done[node].append(used)

    def run_with(self, call: Call, values: Sequence[Any]) -> Any:
        """The graph's output for the `values` of its placeholders."""
        given, env = iter(values), dict[fx.Node, Any]()
        for node in self._nodes:
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op == "get_attr":
                env[node] = reduce(getattr, str(node.target).split("."), self.stage)
            else:
                args, kwargs = map(_thawed, fx.node.map_arg((node.args, node.kwargs), env.__getitem__))
                if node.op == "output":
                    return args[0]
                with torch.no_grad() if NO_GRAD in node.meta else _NOTHING:
                    env[node] = self._called(call, node, args, kwargs)
                del args, kwargs
            for used in self._done[node]:
                del env[used]
        raise AssertionError("a graph ends with its output")

    def _called(self, call: Call, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if node.op == "call_module":
            return call(self.numbers[str(node.target)], self.stage.get_submodule(str(node.target)), args, kwargs)
        function = node.target
        if not callable(function):
            function, args = getattr(args[0], function), args[1:]
        return call(node.meta["number"], function, args, kwargs) if "number" in node.meta else function(*args, **kwargs)


_NOTHING: AbstractContextManager[Any] = nullcontext()


def _thawed(value: Any) -> Any:
    """`value` with ordinary lists and dicts, where the graph has ones that cannot be changed."""
    if type(value) is immutable_dict:
        return {key: _thawed(each) for key, each in value.items()}
    if type(value) in (tuple, immutable_list):
        return (tuple if type(value) is tuple else list)([_thawed(each) for each in value])
    return value


def _random(node: fx.Node) -> bool:
    """Whether what stands between units may draw random numbers, by its name: one seed too many does no harm."""
    name = getattr(node.target, "__name__", str(node.target))
    return node.op in ("call_function", "call_method") and any(word in name for word in RANDOM)


def adopt(stage: nn.Module, traced: Traced, name: str) -> None:
    """Make the model's module, parameter or buffer `name`, or an extra, a part of `stage` under the same name."""
    if name in traced.extras:
        extra = traced.extras[name]
        stage.register_buffer(name, extra, persistent=False) if isinstance(extra, torch.Tensor) else setattr(stage, name, extra)
        return
    owner, here, (*path, last) = traced.model, stage, name.split(".")
    for part in path:
        owner = owner.get_submodule(part)
        if here._modules.get(part) is owner:  # the whole module is here
            return
        if part not in here._modules:
            here.add_module(part, nn.Module())
        here = here.get_submodule(part)
    if last in owner._modules:
        here.add_module(last, owner._modules[last])
    elif last in owner._parameters:
        here.register_parameter(last, owner._parameters[last])
    else:
        here.register_buffer(last, getattr(owner, last), persistent=last not in owner._non_persistent_buffers_set)


def cut(traced: Traced, starts: Iterable[str]) -> list[GraphStage]:
    """The stages: one begins where each of the units `starts`, in this order, is called first.

    What stands between two units belongs to the stage of the first. Parameters and constants are where they are used, further
    names of them there too; those that nothing uses go with the last stage, so that no name is lost.
    """
    stage_of = _stages(traced.graph, list(starts))
    _check_statistics(traced, stage_of)
    last = max(stage_of.values())
    routes = _routes(traced.graph, stage_of, last)
    stages: list[GraphStage] = []
    for stage in range(last + 1):
        sources = {start: len(nodes) for (start, end), nodes in sorted(routes.items()) if end == stage}
        takers = sorted(end for start, end in routes if start == stage)
        stages.append(GraphStage(traced, _graph(traced.graph, stage, stage_of, routes), sources, takers))
    owners = {id(value): module for module in stages for _, value in _entries(module)}
    used = {name for module in stages for name, _ in _entries(module)}
    for name, value in _entries(traced.model):
        if name not in used:
            adopt(owners.get(id(value), stages[-1]), traced, name)
    return stages


def _check_statistics(traced: Traced, stage_of: Mapping[fx.Node, int]) -> None:
    """Raises MismatchError for running statistics that several stages would move."""
    stages = defaultdict[str, set[int]](set)
    for node, stage in stage_of.items():
        if node.op == "call_module":
            stages[str(node.target)].add(stage)
    for name, several in stages.items():
        unit = traced.model.get_submodule(name)
        if len(several) > 1 and any(getattr(each, "running_mean", None) is not None for each in unit.modules()):
            where = " and ".join(map(str, sorted(several)))
            raise MismatchError(f"{name} runs in stages {where}, which cannot share its running statistics: cut elsewhere")


def _entries(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _stages(graph: fx.Graph, starts: list[str]) -> dict[fx.Node, int]:
    """The stage of every node."""
    stage, stage_of = 0, {}
    for node in graph.nodes:
        if node.op == "call_module" and starts and node.target == starts[0]:
            starts.pop(0)
            stage += 1
        stage_of[node] = stage
    return stage_of


Routes = dict[tuple[int, int], list[fx.Node]]


def _routes(graph: fx.Graph, stage_of: Mapping[fx.Node, int], last: int) -> Routes:
    """From stage, to stage -> the values that go there."""
    routes: Routes = defaultdict(list, {(stage, stage + 1): [] for stage in range(last)})
    for node in graph.nodes:
        if node.op != "get_attr":
            here = stage_of[node]
            for user in sorted({stage_of[each] for each in node.users if stage_of[each] > here}):
                routes[here, user].append(node)
                here = user
    return routes


def _graph(whole: fx.Graph, stage: int, stage_of: Mapping[fx.Node, int], routes: Routes) -> fx.Graph:
    """The part of the graph that is a stage's."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for (_, end), nodes in sorted(routes.items(), key=lambda route: route[0]):
        if end == stage:
            copies |= {node: graph.placeholder(node.name) for node in nodes}
    for number, node in enumerate(whole.nodes):
        homes = {stage_of[user] for user in node.users} if node.op == "get_attr" else {stage_of[node]}
        if stage in homes and node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if _random(node):
                copies[node].meta["number"] = -1 - number
    messages = [
        copies[nodes[0]] if len(nodes) == 1 else tuple(copies[node] for node in nodes)
        for (start, _), nodes in sorted(routes.items(), key=lambda route: route[0])
        if start == stage
    ]
    if messages:
        graph.output(messages[0] if len(messages) == 1 else tuple(messages))
    else:
        graph.output(fx.node.map_arg(whole.output_node().args[0], copies.__getitem__))
    return graph


def skips_of(stages: Sequence[nn.Module]) -> frozenset[tuple[int, int]]:
    """The pairs of stages between which values go past others."""
    graphs = [(stage, module.penstock) for stage, module in enumerate(stages) if isinstance(module, GraphStage)]
    return frozenset((stage, taker) for stage, graph in graphs for taker in graph.takers if taker > stage + 1)


def on(module: nn.Module, device: torch.device) -> nn.Module:
    """`module`, moved to `device`."""
    if isinstance(module, GraphStage):
        module.penstock.device = device
    return module.to(device)
