"""The messages that a stage exchanges with other stages: values, and behind them the parameters that stages share.

A borrowed parameter's value enters the autograd graph with the message of the stage it is borrowed from, and its gradient
leaves with that message's gradients: `connections.py` says why.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from penstock.partition.graph_stage import GraphStage
from penstock.stage.aliasing import Versions, mark_aliased
from penstock.stage.backward.autograd_edges import GradientCapture
from penstock.stage.backward.parameter_slot import list_parameters_with_places
from penstock.stage.connections import StageConnections
from penstock.torch_private import TensorSlot
from penstock.trees import flatten


class ReceivedInputs(NamedTuple):
    """The messages that a microbatch received, for which it returns gradients; none on the first stage."""

    inputs: tuple[GradientCapture, ...] = ()  # one for each message
    borrowed_parameters: Sequence[tuple[TensorSlot, Tensor]] = ()  # what takes the places of parameters of earlier stages


class StageMessages:
    """Reads and writes the messages of one stage. Stages that only share parameters with it exchange empty ones."""

    def __init__(self, index: int, module: nn.Module, connections: StageConnections) -> None:
        self._sources, self._destinations = connections.sources, connections.destinations
        graph = module.penstock if isinstance(module, GraphStage) else None
        self._value_sources = {index - 1} if graph is None else set(graph.sources)
        self._value_destinations = (index + 1,) if graph is None else graph.destinations

        slots = {id(slot.parameter): slot for slot in list_parameters_with_places(module)}
        self._borrowed = [
            [slots[id(module.get_parameter(name))] for name in connections.borrowed_parameters.get(source, ())]
            for source in self._sources
        ]
        self._lent = [
            [module.get_parameter(name) for name in connections.lent_parameters.get(destination, ())]
            for destination in self._destinations
        ]
        self._lends = any(self._lent)
        self.shared_parameters = [slot.parameter for group in self._borrowed for slot in group]
        self.shared_parameters += [parameter for group in self._lent for parameter in group]

    def attach_inputs(self, messages: Sequence[Any]) -> tuple[Sequence[Any], ReceivedInputs]:
        """Return the values for the module, as the beginning of a graph, and what else came with the messages."""
        inputs: list[GradientCapture] = []
        values: list[Any] = []
        borrowed: list[tuple[TensorSlot, Tensor]] = []
        for slots, message in zip(self._borrowed, messages, strict=True):
            parameters: Sequence[Tensor] = ()
            if slots:
                parameters = [_leaf_like(slot.parameter) for slot in slots]  # this rank's, as if they had come with the message
                borrowed += [(place, leaf) for slot, leaf in zip(slots, parameters, strict=True) for place in slot.places]
            inputs.append(GradientCapture(parameters))
            values.append(inputs[-1].attach(message))

        if len(values) > len(self._value_sources):
            by_source = zip(self._sources, values, strict=True)
            values = [value for source, value in by_source if source in self._value_sources]
        return values, ReceivedInputs(tuple(inputs), borrowed)

    def pack_output(self, output: Any, arrived: Versions) -> Any:
        """Return what is sent: the output, or a message for each destination where there are several.

        `arrived`: see `mark_aliased`.
        """
        if len(self._destinations) <= 1:
            return output if isinstance(output, Tensor) or not self._destinations else mark_aliased([output], arrived)[0]
        outputs = output if len(self._value_destinations) > 1 else (output,)
        by_destination = dict(zip(self._value_destinations, outputs, strict=True))
        return mark_aliased([by_destination.get(destination, ()) for destination in self._destinations], arrived)

    def leaves_to_send(self, output: Any, received: ReceivedInputs) -> list[Any]:
        """Return the leaves of the messages of `pack_output`, behind each message the parameters lent to its destination."""
        if not self._lends:
            return [output] if isinstance(output, Tensor) else flatten(output)[0]
        used = {
            id(place.tensor): tensor for place, tensor in received.borrowed_parameters
        }  # in this forward, instead of the parameters
        leaves: list[Any] = []
        for message, lent in zip(output if len(self._destinations) > 1 else (output,), self._lent, strict=True):
            leaves += flatten(message)[0]
            leaves += [used.get(id(parameter), parameter) for parameter in lent]
        return leaves


def _leaf_like(parameter: nn.Parameter) -> Tensor:
    """Return a leaf that shares the parameter's memory, and is trained as it is."""
    leaf = parameter.detach().requires_grad_(parameter.requires_grad)
    leaf.grad_dtype = parameter.grad_dtype
    return leaf
