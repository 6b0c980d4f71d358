"""What a stage exchanges with other stages, and what its forward is called with for it.

Arguments: what the stage before gave, and the keywords of the step that it takes. Where the user gives the stages as a list,
each keyword of `step(.., mask=mask)` goes to every stage whose forward has a parameter of that name. It travels with the output
of the stage before, as far as the last stage that takes it. A stage of a graph takes its messages as they are: the cut has seen
to it that each brings what is needed.

Messages: values, and behind them the parameters that stages share. A borrowed parameter's value enters the graph with the
message of the stage it is borrowed from, and its gradient leaves with that message's: `neighbours.py` says what for.

Values that share memory where a stage makes them do not where they arrive: there none of them may be changed in place, since in
the uncut model such a change is one of all of them. The message tells which they are, and the stage that takes it looks, after
its forward, whether they are as they came. Parameters of several stages are looked at likewise. Of inference tensors, which
count no changes, that is not seen.
"""

import inspect
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import MismatchError
from penstock.partition.graph_stage import GraphStage
from penstock.stage.autograd_edges import StageInput
from penstock.stage.neighbours import Neighbours
from penstock.stage.parameter_slot import slots_of
from penstock.torch_private import TensorSlot, storage_key, tensor_version, tree_leaves, unwrap_compiled
from penstock.trees import flatten

VALUE = (
    "a value of shape {} that shares memory with another one",
    "clone one of them in the stage that makes them, or cut elsewhere",
)
PARAMETER = (
    "a parameter of shape {} that another stage has too",
    "leave out what changes it, as max_norm= of an embedding does, or cut elsewhere",
)
Versions = Sequence[tuple[Tensor, int]]  # what is shared, and how often it had been changed before the forward


# -- arguments ---------------------------------------------------------------------------------------------------------


class ValueWithKeywords(NamedTuple):
    """What a stage hands on, and the keywords that ride along."""

    value: Any
    keywords: dict[str, Any]


class Arguments(NamedTuple):
    """Of one call of a stage's forward."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    keywords: Mapping[str, Any] = {}  # that came; those that later stages take ride along


class ForwardSignature:
    """What the forward of `module` takes; `later` are the keywords that some stage after it takes."""

    def __init__(self, module: nn.Module, later: Collection[str] = ()) -> None:
        self._of_graph, self._later = isinstance(module, GraphStage), frozenset(later)
        parameters = inspect.signature(unwrap_compiled(module).forward).parameters.values()
        self.keywords = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        kinds = [each.kind.name for each in parameters]
        takes_any_number = self._of_graph or "VAR_POSITIONAL" in kinds
        self._most = inf if takes_any_number else sum(kind.startswith("POSITIONAL") for kind in kinds)
        self._any = "VAR_KEYWORD" in kinds
        self._by_name_only = {*kinds} <= {"KEYWORD_ONLY", "VAR_KEYWORD"}
        self._several = len(parameters) > 1 or "VAR_POSITIONAL" in kinds or self._by_name_only

    def of_batch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """On the first stage. Raises MismatchError for more arguments than it takes, and for a keyword that no stage takes."""
        if len(args) > self._most:
            told = f"step() was given {len(args)} inputs, but the first stage's forward takes {self._most}"
            raise MismatchError(f"{told}; the target is given by name, target=..")
        if self._of_graph or not kwargs:
            return Arguments(args, kwargs)
        own = self._own(kwargs, args)
        if unknown := [name for name in kwargs if name not in own and name not in self._later]:
            takes = ", ".join(self.keywords) or "nothing"
            raise MismatchError(f"no stage's forward takes {unknown[0]}=: the first takes {takes}")
        return Arguments(args, own, kwargs)

    def of_values(self, values: Sequence[Any]) -> Arguments:
        """From what other stages gave.

        A forward of several parameters gets a tuple or list spread over them, a dict by name; else the value is one.
        """
        if self._of_graph or (not self._several and type(values[0]) is not ValueWithKeywords):
            return Arguments(values, {})
        value, keywords = values[0] if type(values[0]) is ValueWithKeywords else (values[0], {})
        args, kwargs = self._spread(value)
        if keywords:
            kwargs = kwargs | self._own(keywords, args, kwargs)
        return Arguments(args, kwargs, keywords)

    def hand_on(self, output: Any, keywords: Mapping[str, Any]) -> Any:
        """What goes to the next stage: the output, and those of the keywords that came which a later one takes."""
        onward = {name: value for name, value in keywords.items() if name in self._later}
        return ValueWithKeywords(output, onward) if onward else output

    def _spread(self, value: Any) -> tuple[Sequence[Any], dict[str, Any]]:
        if self._several and isinstance(value, tuple | list):
            return value, {}
        if self._several and isinstance(value, Mapping) and (self._by_name_only or value.keys() <= set(self.keywords)):
            return (), dict(value)
        return (value,), {}

    def _own(self, keywords: Mapping[str, Any], args: Sequence[Any], named: Collection[str] = ()) -> dict[str, Any]:
        """Those of `keywords` that this stage takes, besides `args` and what it gets by name."""
        given = {*self.keywords[: len(args)], *named}
        return {name: each for name, each in keywords.items() if (self._any or name in self.keywords) and name not in given}


def keyword_names(module: nn.Module) -> list[str]:
    """The keywords that a stage's forward takes; a stage of a graph gets its own straight from where they are."""
    return [] if isinstance(module, GraphStage) else ForwardSignature(module).keywords


# -- messages ----------------------------------------------------------------------------------------------------------


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
            values = [each.attach(message) for each, message in zip(inputs, messages, strict=True)]
        else:
            values = []
            for each, slots, message in zip(inputs, self._borrowed, messages, strict=True):
                lent = [slot.parameter.detach().requires_grad_(slot.parameter.requires_grad) for slot in slots]
                value, entered = each.attach((message, lent))  # as if it had come from there
                values.append(value)
                borrowed += [(place, each) for slot, each in zip(slots, entered, strict=True) for place in slot.places]
        if len(values) > len(self._with_values):
            values = [each for source, each in zip(self._sources, values, strict=True) if source in self._with_values]
        return values, Received(inputs, borrowed)

    def to_takers(self, output: Any, arrived: Versions = ()) -> Any:
        """The output; where there are several takers, a message for each. What `arrived` shares memory: see `marked`."""
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


# -- values that share memory ------------------------------------------------------------------------------------------


class Sharing(NamedTuple):
    """A message, and the numbers of its leaves that share memory with another one of it, or of a later stage's message."""

    message: Any
    leaves: list[int]


def marked(messages: list[Any], arrived: Versions) -> list[Any]:
    """`messages`, one for each taker in order, as Sharing where they are. What had `arrived` sharing memory still does."""
    before = {storage_key(each) for each, _ in arrived}
    places = defaultdict[int, list[tuple[int, int, Tensor]]](list)  # memory -> what lies there
    for taker, message in enumerate(messages):
        for number, leaf in enumerate(tree_leaves(message)):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.numel():
                key = storage_key(leaf)
                places[0 if key in before else key].append((taker, number, leaf))
    found = defaultdict[int, set[int]](set)
    for key, place in places.items():
        for (taker, number, leaf), (later, other, its) in combinations(place, 2):
            if not key or _overlap(_geometry(leaf), _geometry(its)):
                found[taker] |= {number, other} if taker == later else {number}
    return [Sharing(each, sorted(found[taker])) if taker in found else each for taker, each in enumerate(messages)]


def opened(messages: Sequence[Any]) -> tuple[Sequence[Any], Versions]:
    """`messages` as they were before they were marked, and what of them shares memory."""
    if Sharing not in map(type, messages):  # the common case
        return messages, ()
    shared = [tree_leaves(each.message)[number] for each in messages if type(each) is Sharing for number in each.leaves]
    return [each.message if type(each) is Sharing else each for each in messages], versions(shared)


def versions(tensors: Iterable[Tensor]) -> Versions:
    """Of `tensors`, before a forward."""
    return [(each, tensor_version(each)) for each in tensors if not each.is_inference()]


def check_unchanged(before: Versions, index: int, what: tuple[str, str] = VALUE) -> None:
    """After the forward of stage `index`. Raises MismatchError if it has changed in place what was as in `before`."""
    for each, version in before:
        if tensor_version(each) != version:
            told = f"stage {index} changes in place {what[0].format(tuple(each.shape))}"
            raise MismatchError(f"{told}, which would change with it in the uncut model, but not here: {what[1]}")


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.itemsize


@lru_cache(256)
def _overlap(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether tensors of these geometries, in the same memory, have elements in common; columns side by side have none."""
    if one == other or one[-1] != other[-1]:
        return True
    ends = [
        offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) for shape, stride, offset, _ in (one, other)
    ]
    taken = torch.zeros(max(ends) + 1, dtype=torch.bool, device="cpu")
    taken.as_strided(*one[:3]).fill_(True)
    return bool(taken.as_strided(*other[:3]).any())
