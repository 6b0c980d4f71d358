"""A stage of a model that was cut along its graph: it runs the nodes between two cuts, and passes on what later ones use."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.fx.node import map_arg

from penstock.partition.graph_inputs import MISSING, GraphInputs
from penstock.torch_private import fsdp_input_dtype

CallLayer = Callable[..., Any]  # (seed number, function, args, kwargs): calls what may draw random numbers
Route = tuple[int, int]  # from one stage to another
Path = tuple[tuple[Callable[..., Any], Any], ...]  # to an item or attribute: (getitem, 0), (getattr, "dtype") ..

# Keys in a node's meta.
NO_GRAD = "no_grad"  # it is inside a `torch.no_grad()`
SEED_NUMBER = "seed_number"  # seeds its random numbers, if it may draw any
LAST_USES = "last_uses"  # the nodes whose values are not used after it
VALUE_KEY = "value_key"  # names its value for `ValueCheck`
UNUSED_READS = "unused_reads"  # keys and paths of what the forward reads of its value, though nothing in the graph uses that


class GraphStage(nn.Module):
    """One stage of a model that was cut along its graph. Its submodules and parameters are the model's, under the same names.

    It takes a message from each stage in `sources` and gives one to each in `destinations`: the one value that goes that way,
    or a tuple of several. The first stage takes what the model's forward takes, the last one gives what it gives.
    All that it has besides parts of the model is in `penstock`, so that it takes none of their names.
    """

    def __init__(
        self,
        graphs: Mapping[bool, fx.Graph],
        sources: Mapping[int, int],
        destinations: tuple[int, ...],
        inputs: GraphInputs,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.penstock = GraphInterpreter(self, graphs, sources, destinations, inputs, device)

    def forward(self, *messages: Any, **kwargs: Any) -> Any:
        """Return the message for one destination, a tuple of messages for several; on the last stage the output."""
        return self.penstock(messages, kwargs, lambda number, unit, args, kwargs: unit(*args, **kwargs))


class GraphInterpreter:
    """Runs a stage's graph node by node, and frees each value after its last use.

    `graphs`: of training (True) and of evaluation.
    `sources`: the stages that it gets values from, with the number of values; `destinations`: the stages that it sends some to.
    `inputs`: those of the whole model. `device`: the stage's, which the graph may read.
    """

    def __init__(
        self,
        stage: GraphStage,
        graphs: Mapping[bool, fx.Graph],
        sources: Mapping[int, int],
        destinations: tuple[int, ...],
        inputs: GraphInputs,
        device: torch.device,
    ) -> None:
        self.stage, self.sources, self.destinations, self._inputs, self.device = stage, sources, destinations, inputs, device
        self.signature = inputs.signature  # of the model's forward
        self.input_names = [parameter.name for parameter in inputs.parameters]  # those that the graph has
        self._nodes = {training: tuple(graph.nodes) for training, graph in graphs.items()}

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
        no_tensors.append((key, _read_path(value, path)))


def _read_path(value: Any, path: Path) -> Any:
    """Return the item or attribute, or MISSING."""
    try:
        for read, key in path:
            value = read(value, key)
    except (AttributeError, LookupError, TypeError):
        return MISSING
    return value


def _with_mutable_containers(value: Any) -> Any:
    """Return `value` with ordinary lists and dicts instead of the graph's immutable ones."""
    if type(value) is immutable_dict:
        return {key: _with_mutable_containers(element) for key, element in value.items()}
    if type(value) in (tuple, immutable_list):
        return (tuple if type(value) is tuple else list)([_with_mutable_containers(element) for element in value])
    return value


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
