"""A model cut along its graph: what each stage runs, and which values go from which stage to which.

A value goes to the next stage that uses it, and from there to the next after that. So the gradient that comes back the same way
has been summed in the order in which autograd sums it in the uncut model, use by use from the last to the first, and has the
same bits.
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

from penstock.partition.model_graph import DEVICE_ATTRIBUTE, NO_GRAD, SEED_NUMBER, ModelGraph, train_eval_mismatch_error
from penstock.partition.traced_values import MISSING, UNUSED_READS, VALUE_KEY, read_path
from penstock.torch_private import fsdp_input_dtype, is_persistent_buffer

CallLayer = Callable[..., Any]  # (seed number, function, args, kwargs): calls what may draw random numbers
Route = tuple[int, int]  # from one stage to another
LAST_USES = "last_uses"  # key in a node's meta: the nodes whose values are not used after it


class StageGraphs(NamedTuple):
    """What one stage runs, in training (True) and in evaluation, and the stages it exchanges values with."""

    graphs: Mapping[bool, fx.Graph]
    sources: Mapping[int, int]  # stage -> number of values
    destinations: tuple[int, ...]  # stages


class GraphStage(nn.Module):
    """One stage of a model that was cut along its graph. Its submodules and parameters are the model's, under the same names.

    It takes a message from each stage in `sources` and gives one to each in `destinations`: the one value that goes that way,
    or a tuple of several. The first stage takes what the model's forward takes, the last one gives what it gives.
    All that it has besides parts of the model is in `penstock`, so that it takes none of their names.
    """

    def __init__(self, model_graph: ModelGraph, stage_graphs: StageGraphs) -> None:
        super().__init__()
        nodes = [node for graph in stage_graphs.graphs.values() for node in graph.nodes]
        for op in ("call_module", "get_attr"):  # units first: they bring their parameters
            for name in dict.fromkeys(str(node.target) for node in nodes if node.op == op):
                if name != DEVICE_ATTRIBUTE:
                    add_module_or_tensor(self, model_graph, name)
        self.penstock = GraphInterpreter(self, model_graph, stage_graphs)

    def forward(self, *messages: Any, **kwargs: Any) -> Any:
        """Return the message for one destination, a tuple of messages for several; on the last stage the output."""
        return self.penstock(messages, kwargs, lambda number, unit, args, kwargs: unit(*args, **kwargs))


class GraphInterpreter:
    """Runs a stage's graph node by node, and frees each value after its last use."""

    def __init__(self, stage: GraphStage, model_graph: ModelGraph, stage_graphs: StageGraphs) -> None:
        self.sources, self.destinations = stage_graphs.sources, stage_graphs.destinations
        self.device = next((parameter.device for parameter in model_graph.model.parameters()), torch.device("cpu"))
        self.stage, self._inputs = stage, model_graph.inputs
        self.signature = model_graph.inputs.signature  # of the model's forward
        self.input_names = [parameter.name for parameter in model_graph.inputs.parameters]  # those that the graph has
        self._nodes = {training: tuple(graph.nodes) for training, graph in stage_graphs.graphs.items()}

    def __call__(self, messages: Sequence[Any], kwargs: Mapping[str, Any], call_layer: CallLayer) -> Any:
        """Return what the stage's forward returns. `call_layer` calls every unit, and what is random between them."""
        check = self._inputs.value_check
        if check is None or torch.compiler.is_compiling():
            return self._run(messages, kwargs, call_layer, None)
        is_training, values = self.stage.training, list[tuple[Any, Any]]()
        try:
            return self._run(messages, kwargs, call_layer, values)
        finally:  # also if a layer fails: for a value that the trace took for a tensor, perhaps
            check.check_values(is_training, values)

    def _run(
        self,
        messages: Sequence[Any],
        kwargs: Mapping[str, Any],
        call_layer: CallLayer,
        no_tensors: list[tuple[Any, Any]] | None,
    ) -> Any:
        """Run the nodes. `no_tensors`: gets the values that are no tensors, and those that nobody uses, with their keys."""
        cast = fsdp_input_dtype(self.stage)
        inputs = iter(self._unpack(messages) if self.sources else self._inputs.flatten_call(messages, kwargs, cast))
        values: dict[fx.Node, Any] = {}

        for node in self._nodes[self.stage.training]:
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "get_attr":
                values[node] = self._read_attribute(node)
            else:
                args, kwargs = map(_with_mutable_containers, map_arg((node.args, node.kwargs), values.__getitem__))
                if node.op == "output":
                    return args[0]
                try:
                    with torch.no_grad() if NO_GRAD in node.meta else _NOTHING:
                        values[node] = self._call(call_layer, node, args, kwargs)
                except AttributeError:
                    if node.target is getattr and no_tensors is not None:
                        no_tensors.append((node.meta[VALUE_KEY], MISSING))
                    raise
                del args, kwargs
            if no_tensors is not None:
                _record_value(node, values[node], no_tensors)
            for dead_node in node.meta.get(LAST_USES, ()):
                del values[dead_node]
        raise AssertionError("a graph ends with its output")

    def _unpack(self, messages: Sequence[Any]) -> list[Any]:
        by_source = zip(messages, self.sources.values(), strict=True)
        values = [value for message, count in by_source for value in ((message,) if count == 1 else message)]
        return [self.device if isinstance(value, torch.device) else value for value in values]

    def _read_attribute(self, node: fx.Node) -> Any:
        return reduce(getattr, str(node.target).split("."), self.stage)

    def _call(self, call_layer: CallLayer, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        function: Any = node.target
        if node.op == "call_module":
            function = self._read_attribute(node)
        elif node.op == "call_method":
            function, args = getattr(args[0], function), args[1:]
        if SEED_NUMBER in node.meta:
            return call_layer(node.meta[SEED_NUMBER], function, args, kwargs)
        return function(*args, **kwargs)


_NOTHING: AbstractContextManager[Any] = nullcontext()


def _record_value(node: fx.Node, value: Any, no_tensors: list[tuple[Any, Any]]) -> None:
    meta = node.meta
    if type(value) is not Tensor and VALUE_KEY in meta and node.op != "placeholder":
        no_tensors.append((meta[VALUE_KEY], value))
    for key, path in meta.get(UNUSED_READS, ()):
        no_tensors.append((key, read_path(value, path)))


def _with_mutable_containers(value: Any) -> Any:
    """Return `value` with ordinary lists and dicts instead of the graph's immutable ones."""
    if type(value) is immutable_dict:
        return {key: _with_mutable_containers(element) for key, element in value.items()}
    if type(value) in (tuple, immutable_list):
        return (tuple if type(value) is tuple else list)([_with_mutable_containers(element) for element in value])
    return value


# -- cutting -----------------------------------------------------------------------------------------------------------


def cut_graph(model_graph: ModelGraph, starts: Sequence[str]) -> list[GraphStage]:
    """Return the stages: one begins where each of the units `starts`, in this order, is called first.

    What is between two units belongs to the stage of the first. Parameters and constants go where they are used, with all their
    names. Unused ones go with the last stage, so that no name is lost.
    Raises MismatchError if training and evaluation send different values.
    """
    cuts = {training: _CutGraph(graph, starts) for training, graph in model_graph.graphs.items()}
    counts, eval_counts = ({route: len(nodes) for route, nodes in cut.routes.items()} for cut in cuts.values())
    if counts != eval_counts:
        raise train_eval_mismatch_error(model_graph.model)

    stages = []
    for stage in range(len(starts) + 1):
        sources = {source: count for (source, destination), count in counts.items() if destination == stage}
        destinations = tuple(destination for source, destination in counts if source == stage)
        graphs = {training: cut.stage_graph(stage) for training, cut in cuts.items()}
        stages.append(GraphStage(model_graph, StageGraphs(graphs, sources, destinations)))
    _add_unused_tensors(stages, model_graph)
    return stages


class _CutGraph:
    """A graph with the stage of every node, and the values that go from stage to stage."""

    def __init__(self, graph: fx.Graph, starts: Sequence[str]) -> None:
        self.graph = graph
        self.stage_of = dict(_assign_stages(graph, starts))
        self.routes = self._find_routes(len(starts))

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

    def stage_graph(self, stage: int) -> fx.Graph:
        """Return the graph of one stage."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for (_, destination), nodes in self.routes.items():
            if destination == stage:
                copies |= {node: graph.placeholder(node.name) for node in nodes}

        for node in self.graph.nodes:
            stages = {self.stage_of[user] for user in node.users} if node.op == "get_attr" else {self.stage_of[node]}
            if stage in stages and node.op != "output":
                copies[node] = graph.node_copy(node, copies.__getitem__)

        sent_nodes = [nodes for (source, _), nodes in self.routes.items() if source == stage]
        messages = [_unwrap_if_single([copies[node] for node in nodes]) for nodes in sent_nodes]
        graph.output(_unwrap_if_single(messages) if messages else map_arg(self.graph.output_node().args[0], copies.__getitem__))

        last_user = {input_node: node for node in graph.nodes for input_node in node.all_input_nodes}
        for input_node, node in last_user.items():
            node.meta.setdefault(LAST_USES, []).append(input_node)
        return graph


def _assign_stages(graph: fx.Graph, starts: Sequence[str]) -> Iterator[tuple[fx.Node, int]]:
    stage = 0
    for node in graph.nodes:
        if node.op == "call_module" and stage < len(starts) and node.target == starts[stage]:
            stage += 1
        yield node, stage


def _unwrap_if_single(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


# -- parts of the model in stages --------------------------------------------------------------------------------------


def add_module_or_tensor(stage: nn.Module, model_graph: ModelGraph, name: str) -> None:
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
            add_module_or_tensor(stage_with.get(id(tensor), stages[-1]), model_graph, name)


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


# -- of stages ---------------------------------------------------------------------------------------------------------


def skip_routes(stages: Mapping[int, nn.Module]) -> frozenset[Route]:
    """Return the pairs of stages between which values go past other stages."""
    return frozenset(
        (stage, destination)
        for stage, module in stages.items()
        if isinstance(module, GraphStage)
        for destination in module.penstock.destinations
        if destination > stage + 1
    )


def move_stage_to_device(module: nn.Module, device: torch.device) -> nn.Module:
    """Move a stage to `device`, and return it."""
    if isinstance(module, GraphStage):
        module.penstock.device = device
    return module.to(device)
