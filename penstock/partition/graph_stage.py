"""A model cut along its graph: what each stage runs, and which values go from which stage to which.

A value goes straight to the next stage that uses it, and from there to the next after that: so the gradient that comes
back on the same way has been summed in the order in which autograd sums it in the uncut model, use by use from the last to
the first, and has the same bits.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.fx.node import map_arg

from penstock.partition.model_graph import DEVICE, NO_GRAD, NUMBER, ModelGraph, train_eval_mismatch_error
from penstock.torch_private import fsdp_input_dtype, is_persistent_buffer

CallLayer = Callable[..., Any]  # how what may draw random numbers is called: its number, it, args, kwargs
Route = tuple[int, int]  # from one stage to another
DONE = "done"  # in a node's meta: the nodes whose values nobody needs after it


class StageGraphs(NamedTuple):
    """What one stage does, in training (True) and in evaluation, and whom it takes values from and gives values to."""

    graphs: Mapping[bool, fx.Graph]
    sources: Mapping[int, int]  # stage -> number of values
    takers: tuple[int, ...]  # stages


class GraphStage(nn.Module):
    """One stage of a model that was cut along its graph. Its parts are the model's own, under the model's names.

    It takes a message from each stage in `sources` and gives one to each in `takers`: the one value that goes that way, or a
    tuple of several. The first stage takes what the model's forward takes, the last one gives what it gives.
    What it has besides the model's parts is all in `penstock`, so that it stands in the way of none of their names.
    """

    def __init__(self, whole: ModelGraph, part: StageGraphs) -> None:
        super().__init__()
        nodes = [node for graph in part.graphs.values() for node in graph.nodes]
        for op in ("call_module", "get_attr"):  # units first: they bring their parameters
            for name in dict.fromkeys(str(node.target) for node in nodes if node.op == op):
                if name != DEVICE:
                    add_model_part(self, whole, name)
        self.penstock = GraphInterpreter(self, whole, part)

    def forward(self, *messages: Any, **kwargs: Any) -> Any:
        """What goes to the takers: a message for one, a tuple of messages for several; on the last stage the output."""
        return self.penstock(messages, kwargs, lambda number, unit, args, kwargs: unit(*args, **kwargs))


class GraphInterpreter:
    """Runs what a stage does, and lets go of each value after its last use."""

    def __init__(self, stage: GraphStage, whole: ModelGraph, part: StageGraphs) -> None:
        self.sources, self.takers = part.sources, part.takers
        self.device = next((each.device for each in whole.model.parameters()), torch.device("cpu"))
        self.stage, self._inputs = stage, whole.inputs
        self._nodes = {training: tuple(graph.nodes) for training, graph in part.graphs.items()}

    def __call__(self, messages: Sequence[Any], kwargs: Mapping[str, Any], call: CallLayer) -> Any:
        """As the stage's forward, with every unit and everything random between them called by `call`."""
        cast = fsdp_input_dtype(self.stage)
        given = iter(self._received(messages) if self.sources else self._inputs.values(messages, kwargs, cast))
        env: dict[fx.Node, Any] = {}
        for node in self._nodes[self.stage.training]:
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op == "get_attr":
                env[node] = self._part(node)
            else:
                args, kwargs = map(_thawed, map_arg((node.args, node.kwargs), env.__getitem__))
                if node.op == "output":
                    return args[0]
                with torch.no_grad() if NO_GRAD in node.meta else _NOTHING:
                    env[node] = self._called(call, node, args, kwargs)
                del args, kwargs
            for used in node.meta.get(DONE, ()):
                del env[used]
        raise AssertionError("a graph ends with its output")

    def _received(self, messages: Sequence[Any]) -> list[Any]:
        several = zip(messages, self.sources.values(), strict=True)
        values = [value for message, count in several for value in ((message,) if count == 1 else message)]
        return [self.device if isinstance(value, torch.device) else value for value in values]

    def _part(self, node: fx.Node) -> Any:
        return reduce(getattr, str(node.target).split("."), self.stage)

    def _called(self, call: CallLayer, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        function: Any = node.target
        if node.op == "call_module":
            function = self._part(node)
        elif node.op == "call_method":
            function, args = getattr(args[0], function), args[1:]
        return call(node.meta[NUMBER], function, args, kwargs) if NUMBER in node.meta else function(*args, **kwargs)


_NOTHING: AbstractContextManager[Any] = nullcontext()


def _thawed(value: Any) -> Any:
    """`value` with ordinary lists and dicts, where the graph has ones that cannot be changed."""
    if type(value) is immutable_dict:
        return {key: _thawed(each) for key, each in value.items()}
    if type(value) in (tuple, immutable_list):
        return (tuple if type(value) is tuple else list)([_thawed(each) for each in value])
    return value


# -- cutting ----------------------------------------------------------------------------------------------------------


def cut_graph(whole: ModelGraph, starts: Sequence[str]) -> list[GraphStage]:
    """The stages: one begins where each of the units `starts`, in this order, is called first.

    What stands between two units belongs to the stage of the first. Parameters and constants are where they are used, further
    names of them there too; those that nothing uses go with the last stage, so that no name is lost.
    Raises MismatchError where training and evaluation send different values.
    """
    cuts = {training: _Cut(graph, starts) for training, graph in whole.graphs.items()}
    counts, others = ({route: len(nodes) for route, nodes in each.routes.items()} for each in cuts.values())
    if counts != others:
        raise train_eval_mismatch_error(whole.model)
    stages = []
    for stage in range(len(starts) + 1):
        sources = {start: count for (start, end), count in counts.items() if end == stage}
        takers = tuple(end for start, end in counts if start == stage)
        graphs = {training: each.graph_of(stage) for training, each in cuts.items()}
        stages.append(GraphStage(whole, StageGraphs(graphs, sources, takers)))
    _adopt_rest(stages, whole)
    return stages


class _Cut:
    """Where one graph is cut: the stage of every node, and the values that go from stage to stage."""

    def __init__(self, graph: fx.Graph, starts: Sequence[str]) -> None:
        self.graph = graph
        self.stage_of = dict(_stages(graph, starts))
        self.routes = self._routes(len(starts))

    def _routes(self, last: int) -> dict[Route, list[fx.Node]]:
        """The values of every route, in the order of the routes; each stage has one to the next.

        A route's values are in the order of their first uses where it ends: that in which they are computed may be another on
        each rank, since a model's forward may go through a set of names, whose order is a process's own.
        """
        routes: dict[Route, list[fx.Node]] = defaultdict(list, {(stage, stage + 1): [] for stage in range(last)})
        for node in self.graph.nodes:
            if node.op != "get_attr":
                here = self.stage_of[node]
                for user in sorted({self.stage_of[each] for each in node.users if self.stage_of[each] > here}):
                    routes[here, user].append(node)
                    here = user
        place = {node: number for number, node in enumerate(self.graph.nodes)}

        def first_use(node: fx.Node, stage: int) -> tuple[int, int]:
            user = min((each for each in node.users if self.stage_of[each] == stage), key=place.__getitem__)
            return place[user], user.all_input_nodes.index(node)

        return {route: sorted(nodes, key=lambda node: first_use(node, route[1])) for route, nodes in sorted(routes.items())}

    def graph_of(self, stage: int) -> fx.Graph:
        """The part of the graph that is a stage's."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for (_, end), nodes in self.routes.items():
            if end == stage:
                copies |= {node: graph.placeholder(node.name) for node in nodes}
        for node in self.graph.nodes:
            homes = {self.stage_of[user] for user in node.users} if node.op == "get_attr" else {self.stage_of[node]}
            if stage in homes and node.op != "output":
                copies[node] = graph.node_copy(node, copies.__getitem__)
        sent = [nodes for (start, _), nodes in self.routes.items() if start == stage]
        messages = [_one_or_all([copies[node] for node in nodes]) for nodes in sent]
        graph.output(_one_or_all(messages) if messages else map_arg(self.graph.output_node().args[0], copies.__getitem__))
        last_use = {used: node for node in graph.nodes for used in node.all_input_nodes}
        for used, last in last_use.items():
            last.meta.setdefault(DONE, []).append(used)
        return graph


def _stages(graph: fx.Graph, starts: Sequence[str]) -> Iterator[tuple[fx.Node, int]]:
    """The stage of every node."""
    stage = 0
    for node in graph.nodes:
        if node.op == "call_module" and stage < len(starts) and node.target == starts[stage]:
            stage += 1
        yield node, stage


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


# -- whose parts are whose --------------------------------------------------------------------------------------------


def add_model_part(stage: nn.Module, whole: ModelGraph, name: str) -> None:
    """Make the model's module, parameter or buffer `name`, or an extra, a part of `stage` under the same name."""
    if name in whole.extras:
        _add(stage, name, whole.extras[name], saved=False)
        return
    owner, here, (*path, last) = whole.model, stage, name.split(".")
    for part in path:
        owner = owner.get_submodule(part)
        if getattr(here, part, None) is owner:  # the whole module is here
            return
        if not hasattr(here, part):
            here.add_module(part, nn.Module())
        here = here.get_submodule(part)
    _add(here, last, getattr(owner, last), saved=is_persistent_buffer(owner, last))


def _add(module: nn.Module, name: str, part: Any, saved: bool) -> None:
    if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
        module.register_buffer(name, part, persistent=saved)
    else:
        setattr(module, name, part)


def _adopt_rest(stages: Sequence[GraphStage], whole: ModelGraph) -> None:
    """What no stage uses: under a further name where its tensor is already, else with the last stage."""
    owners = {id(value): stage for stage in stages for _, value in _entries(stage)}
    used = {name for stage in stages for name, _ in _entries(stage)}
    for name, value in _entries(whole.model):
        if name not in used:
            add_model_part(owners.get(id(value), stages[-1]), whole, name)


def _entries(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


# -- of stages --------------------------------------------------------------------------------------------------------


def skip_routes(stages: Mapping[int, nn.Module]) -> frozenset[Route]:
    """The pairs of stages between which values go past others, as far as `stages` give them."""
    graphs = [(stage, module.penstock) for stage, module in stages.items() if isinstance(module, GraphStage)]
    return frozenset((stage, taker) for stage, graph in graphs for taker in graph.takers if taker > stage + 1)


def move_to(module: nn.Module, device: torch.device) -> nn.Module:
    """`module`, moved to `device`."""
    if isinstance(module, GraphStage):
        module.penstock.device = device
    return module.to(device)
