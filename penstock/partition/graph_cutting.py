"""A graph cut into stages: which nodes each stage runs, and which values go from which stage to which.

A value goes to the next stage that uses it, and from there to the next after that. So the gradient that comes back the same way
has been summed in the order in which autograd sums it in the uncut model, use by use from the last to the first, and has the
same bits.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from penstock.partition.graph_stage import LAST_USES, GraphStage, Route
from penstock.partition.model_graph import DEVICE_ATTRIBUTE, ModelGraph, called_units, stages_of_calls
from penstock.torch_private import is_persistent_buffer


def cut_graph(model_graph: ModelGraph, starts: Sequence[str]) -> list[GraphStage]:
    """Return the stages: one begins where each of the units `starts`, in this order, is called first.

    What is between two units belongs to the stage of the first. Parameters and constants go where they are used, with all their
    names. Unused ones go with the last stage, so that no name is lost.
    Where training and evaluation send different numbers of values, None stands for those that one of them has not.
    """
    calls = list(_stages_of_training_calls(model_graph.graphs[True], starts))
    cuts = {training: _CutGraph(graph, calls, len(starts)) for training, graph in model_graph.graphs.items()}
    routes = sorted({route for cut in cuts.values() for route in cut.routes})
    counts = {route: max(len(cut.routes.get(route, ())) for cut in cuts.values()) for route in routes}

    device = next((parameter.device for parameter in model_graph.model.parameters()), torch.device("cpu"))
    stages = list[GraphStage]()
    for stage in range(len(starts) + 1):
        sources = {source: count for (source, destination), count in counts.items() if destination == stage}
        destinations = tuple(destination for source, destination in counts if source == stage)
        graphs = {training: cut.stage_graph(stage, counts) for training, cut in cuts.items()}
        stages.append(GraphStage(graphs, sources, destinations, model_graph.inputs, device))
        _add_used_parts(stages[-1], model_graph, graphs.values())
    _add_unused_tensors(stages, model_graph)
    return stages


class _CutGraph:
    """A graph with the stage of every node, and the values that go from stage to stage."""

    def __init__(self, graph: fx.Graph, training_calls: Sequence[tuple[str, int]], last_stage: int) -> None:
        self.graph = graph
        self.stage_of = dict(_assign_stages(graph, training_calls))
        self.routes = self._find_routes(last_stage)

    def _find_routes(self, last_stage: int) -> dict[Route, list[fx.Node]]:
        """Return the values of every route. Each stage has a route to the next.

        A route's values are in the order of their first uses where it ends. The order in which they are computed may differ
        from rank to rank: a model's forward may iterate over a set of names, whose order differs in each process.
        """
        routes: dict[Route, list[fx.Node]] = defaultdict(list, {(stage, stage + 1): [] for stage in range(last_stage)})
        for node in self.graph.nodes:
            if node.op != "get_attr":
                source = self.stage_of[node]
                for destination in sorted({self.stage_of[user] for user in node.users if self.stage_of[user] > source}):
                    routes[source, destination].append(node)
                    source = destination

        position = {node: number for number, node in enumerate(self.graph.nodes)}

        def first_use(node: fx.Node, stage: int) -> tuple[int, int]:
            user = min((user for user in node.users if self.stage_of[user] == stage), key=position.__getitem__)
            return position[user], user.all_input_nodes.index(node)

        return {route: sorted(nodes, key=lambda node: first_use(node, route[1])) for route, nodes in sorted(routes.items())}

    def stage_graph(self, stage: int, counts: Mapping[Route, int]) -> fx.Graph:
        """Return the graph of one stage. `counts`: the number of values of every route, of which some may be None."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for route, count in counts.items():
            if route[1] == stage:
                nodes = self.routes.get(route, [])
                copies |= {node: graph.placeholder(node.name) for node in nodes}
                for _ in range(count - len(nodes)):
                    graph.placeholder("none")

        for node in self.graph.nodes:
            stages = {self.stage_of[user] for user in node.users} if node.op == "get_attr" else {self.stage_of[node]}
            if stage in stages and node.op != "output":
                copies[node] = graph.node_copy(node, copies.__getitem__)

        messages = []
        for route, count in counts.items():
            if route[0] == stage:
                values = [copies[node] for node in self.routes.get(route, [])]
                messages.append(_unwrap_if_single([*values, *[None] * (count - len(values))]))
        graph.output(_unwrap_if_single(messages) if messages else map_arg(self.graph.output_node().args[0], copies.__getitem__))

        last_user = {input_node: node for node in graph.nodes for input_node in node.all_input_nodes}
        for input_node, node in last_user.items():
            node.meta.setdefault(LAST_USES, []).append(input_node)
        return graph


def _stages_of_training_calls(graph: fx.Graph, starts: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield every call of a unit with its stage."""
    stage = 0
    for unit in called_units(graph):
        stage += stage < len(starts) and unit == starts[stage]
        yield unit, stage


def _assign_stages(graph: fx.Graph, training_calls: Sequence[tuple[str, int]]) -> Iterator[tuple[fx.Node, int]]:
    call_stages, stage = iter(stages_of_calls(graph, training_calls) or ()), 0
    for node in graph.nodes:
        if node.op == "call_module":
            stage = next(call_stages)
        elif node.op == "output":
            stage = max((stage for _, stage in training_calls), default=0)
        yield node, stage


def _unwrap_if_single(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


# -- parts of the model in stages --------------------------------------------------------------------------------------


def _add_used_parts(stage: nn.Module, model_graph: ModelGraph, graphs: Iterable[fx.Graph]) -> None:
    """Add the units, parameters, buffers and extras that the stage's `graphs` use. Units first: they bring their parameters."""
    nodes = [node for graph in graphs for node in graph.nodes]
    for op in ("call_module", "get_attr"):
        for name in dict.fromkeys(str(node.target) for node in nodes if node.op == op):
            if name != DEVICE_ATTRIBUTE:
                _add_module_or_tensor(stage, model_graph, name)


def _add_module_or_tensor(stage: nn.Module, model_graph: ModelGraph, name: str) -> None:
    """Add the model's module, parameter or buffer `name`, or an extra, to `stage` under the same name."""
    if name in model_graph.extras:
        _set_buffer_or_attribute(stage, name, model_graph.extras[name], is_saved=False)
        return
    model_module, stage_module, (*path, attribute) = model_graph.model, stage, name.split(".")
    for child in path:
        model_module = model_module.get_submodule(child)
        if getattr(stage_module, child, None) is model_module:  # the stage has the whole module
            return
        if not hasattr(stage_module, child):
            stage_module.add_module(child, nn.Module())
        stage_module = stage_module.get_submodule(child)
    _set_buffer_or_attribute(
        stage_module, attribute, getattr(model_module, attribute), is_persistent_buffer(model_module, attribute)
    )


def _set_buffer_or_attribute(module: nn.Module, name: str, value: Any, is_saved: bool) -> None:
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        module.register_buffer(name, value, persistent=is_saved)
    else:
        setattr(module, name, value)


def _add_unused_tensors(stages: Sequence[GraphStage], model_graph: ModelGraph) -> None:
    """Add tensors that no stage uses: another name of a tensor to the stage that has it, others to the last stage."""
    stage_with = {id(tensor): stage for stage in stages for _, tensor in _named_tensors(stage)}
    used_names = {name for stage in stages for name, _ in _named_tensors(stage)}
    for name, tensor in _named_tensors(model_graph.model):
        if name not in used_names:
            _add_module_or_tensor(stage_with.get(id(tensor), stages[-1]), model_graph, name)


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
