"""What a stage exchanges with its neighbours: values, and behind them the parameters that it shares with them.

A borrowed parameter's value enters the graph with the message of the stage it is borrowed from, and its gradient leaves with
that message's: `neighbours.py` says what for.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from penstock.partition.graph_stage import GraphStage
from penstock.stage.exchange.neighbours import Neighbours
from penstock.stage.exchange.sharing import Versions, marked
from penstock.stage.graph import StageInput
from penstock.stage.parameter_slot import slots_of
from penstock.torch_private import TensorSlot
from penstock.trees import flatten


class Received(NamedTuple):
    """What a microbatch got from other stages and gives gradients back to; nothing on the first stage."""

    inputs: tuple[StageInput, ...] = ()  # one for each message
    borrowed: Sequence[tuple[TensorSlot, Tensor]] = ()  # what stands in for parameters of earlier stages, place by place


class Messages:
    """Those of one stage, in and out; stages that only share parameters with it exchange empty ones."""

    def __init__(self, index: int, module: nn.Module, neighbours: Neighbours) -> None:
        self._sources, self._takers = neighbours.sources, neighbours.takers
        graph = module.penstock if isinstance(module, GraphStage) else None
        self._with_values = {index - 1} if graph is None else set(graph.sources)
        self._receivers = (index + 1,) if graph is None else graph.takers
        mine = {id(slot.parameter): slot for slot in slots_of(module)}
        self._borrowed = [
            [mine[id(module.get_parameter(name))] for name in neighbours.borrowed.get(source, ())] for source in self._sources
        ]
        self._lent = [[module.get_parameter(name) for name in neighbours.lent.get(taker, ())] for taker in self._takers]
        self._slots = [slot for group in self._borrowed for slot in group]
        self.shared = [slot.parameter for slot in self._slots] + [each for group in self._lent for each in group]
        self._lends = any(self._lent)

    def receive(self, messages: Sequence[Any]) -> tuple[Sequence[Any], Received]:
        """The values for the module, as part of the graph, and what else came with them."""
        inputs, borrowed = tuple([StageInput() for _ in messages]), list[tuple[TensorSlot, Tensor]]()
        if not self._slots:
            values = [each.admit(message) for each, message in zip(inputs, messages, strict=True)]
        else:
            values = []
            for each, slots, message in zip(inputs, self._borrowed, messages, strict=True):
                lent = [slot.parameter.detach().requires_grad_(slot.parameter.requires_grad) for slot in slots]
                value, entered = each.admit((message, lent))  # as if it had come from there
                values.append(value)
                borrowed += [(place, each) for slot, each in zip(slots, entered, strict=True) for place in slot.places]
        if len(values) > len(self._with_values):
            values = [each for source, each in zip(self._sources, values, strict=True) if source in self._with_values]
        return values, Received(inputs, borrowed)

    def to_takers(self, output: Any, arrived: Versions = ()) -> Any:
        """The output; where there are several takers, a message for each. What `arrived` shares memory: see `sharing.py`."""
        if len(self._takers) <= 1:
            return output if isinstance(output, Tensor) or not self._takers else marked([output], arrived)[0]
        given = dict(zip(self._receivers, output if len(self._receivers) > 1 else (output,), strict=True))
        return marked([given.get(taker, ()) for taker in self._takers], arrived)

    def leaves(self, output: Any, received: Received) -> list[Any]:
        """What the messages of `to_takers` are made of, with the parameters lent to a taker behind its message."""
        if not self._lends:
            return flatten(output)[0]
        here = {id(place.tensor): tensor for place, tensor in received.borrowed}
        leaves: list[Any] = []
        for message, lent in zip(output if len(self._takers) > 1 else (output,), self._lent, strict=True):
            leaves += flatten(message)[0]
            leaves += [here.get(id(parameter), parameter) for parameter in lent]
        return leaves
