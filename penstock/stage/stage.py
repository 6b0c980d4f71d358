"""One stage: its forward, its backward, and what it keeps alive in between."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from penstock.comms.messages import wire
from penstock.partition.graph_stage import GraphStage
from penstock.randomness import advance
from penstock.stage.auxiliary import Collected
from penstock.stage.backward.split import Splitter
from penstock.stage.backward.standins import DeferredGradients
from penstock.stage.backward.weight_use import edge_of, run_backward
from penstock.stage.copies import StageCopies
from penstock.stage.keywords import Keywords, WithKeywords, bare
from penstock.stage.layers import Layers, Recompute
from penstock.stage.neighbours import Neighbours
from penstock.stage.stage_input import StageInput
from penstock.stage.tied import BorrowedParameter, installed


class Given(NamedTuple):
    """What a forward starts from."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    carried: Mapping[str, Any] = {}  # keywords that ride along
    entries: tuple[StageInput, ...] = ()  # one for each message that came in
    borrowed: tuple[Tensor, ...] = ()  # stand-ins for parameters of earlier stages


class Kept(NamedTuple):
    """What a microbatch in flight keeps alive on a stage, besides what its graph saved."""

    entries: tuple[StageInput, ...]
    borrowed: tuple[Tensor, ...]
    edges: tuple[GradientEdge, ...]  # of the outputs: an output itself goes as soon as it is sent
    put_off: DeferredGradients | None  # if the backward is split
    ends: tuple[Tensor, ...]  # what replicas must know of the graph
    auxiliary: tuple[tuple[GradientEdge, Tensor], ...]  # losses that arose in the forward


class Stage:
    """A stage of the model on this rank.

    `numbers` are those of its layers, `recompute` says what is run again in the backward: see `layers.py`.
    `neighbours` are the stages it is connected to, by default those of a chain.
    `later`: keywords that stages after this one take (`keywords.py`).
    `merge`: weights' gradients that were put off may be summed in another order (see `backward/split.py`).
    `copies`: what other processes have of the stage (see `copies.py`).
    `in_order`: microbatches' W come in the order of their I.
    `first`: the number that random numbers take microbatch 0 for; a replica counts on where the one before it ends.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        device: torch.device,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        *,
        numbers: Sequence[int] | None = None,
        recompute: Recompute | None = None,
        neighbours: Neighbours | None = None,
        later: frozenset[str] = frozenset(),
        merge: bool = False,
        copies: StageCopies | None = None,
        in_order: bool = False,
        first: int = 0,
    ) -> None:
        self.index, self.module, self.loss_fn = index, module, loss_fn
        self.copies, self._first = copies or StageCopies(), first
        self.neighbours = neighbours or Neighbours.of_chain(index)
        piece = module.penstock if isinstance(module, GraphStage) else None  # of a graph
        self._from, self._to = (tuple(piece.sources), piece.takers) if piece else ((index - 1,), (index + 1,))
        self._borrowed = {
            to: [BorrowedParameter(module, name) for name in names] for to, names in self.neighbours.borrowed.items()
        }
        self._standins = [each for group in self._borrowed.values() for each in group]
        self.kept: dict[int, Kept] = {}
        self._layers = Layers(index, module, device, numbers, recompute)
        self._keywords = None if piece else Keywords(module, later)
        self._spread = frozenset() if piece else _takes_several(module)
        shared = {id(module.get_parameter(name)) for names in self.neighbours.lent.values() for name in names}
        shared |= {id(standin.parameter) for standin in self._standins}
        hooked = self.copies.hooked
        self._splitter = Splitter(module, merge and not hooked, shared, in_order and not hooked)
        self._put_off: dict[int, DeferredGradients] = {}  # microbatch -> what its W will do

    def get_ready(self) -> None:
        """Before the step's first action: wait for parameters that are elsewhere."""
        if not self.copies.ready:
            self.copies.get_ready()
            self._splitter.refresh()

    def forward(
        self, microbatch: int, values: Sequence[Any], seed: int | None = None, keep: bool = True, split: bool = False
    ) -> Any:
        """The output for the `values` that other stages gave; keeps what the backward needs unless told not to.

        `split`: the backward will be `backward_input` and `backward_weight`. With a `seed`, every layer's random numbers
        depend on it, the microbatch and the layer alone. Seeding moves the device's generator; whoever calls puts it back.
        A stage with several takers gives a sequence, one message for each.
        """
        entries = tuple([StageInput() for _ in values])
        with _grad_mode(keep):
            if self._standins and keep:
                values, borrowed = self._admit_shared(entries, values)
            else:
                values, borrowed = [entry.admit(value) for entry, value in zip(entries, values, strict=True)], ()
            if len(values) > len(self._from):
                values = [value for source, value in zip(self.neighbours.sources, values, strict=True) if source in self._from]
            args, kwargs, carried = self._arguments(values)
        return self._forward(microbatch, Given(args, kwargs, carried, entries, borrowed), seed, keep, split)

    def _admit_shared(self, entries: Sequence[StageInput], values: Sequence[Any]) -> tuple[list[Any], tuple[Tensor, ...]]:
        """The values, and the borrowed parameters as if they had come with them."""
        shared = {source: [each.value() for each in group] for source, group in self._borrowed.items()}
        admitted = [
            entry.admit((value, shared.get(source, [])))
            for source, entry, value in zip(self.neighbours.sources, entries, values, strict=True)
        ]
        by_source = dict(zip(self.neighbours.sources, admitted, strict=True))
        return [value for value, _ in admitted], tuple([each for source in shared for each in by_source[source][1]])

    def first_forward(
        self, microbatch: int, args: Any, kwargs: Any, seed: int | None = None, keep: bool = True, split: bool = False
    ) -> Any:
        """As `forward`, for the stage that the batch goes into."""
        own = self._keywords.first(kwargs, args) if kwargs and self._keywords else kwargs
        return self._forward(microbatch, Given(args, own, kwargs), seed, keep, split)

    def _forward(self, microbatch: int, given: Given, seed: int | None, keep: bool, split: bool) -> Any:
        put_off = self._splitter.begin() if split and keep else None
        seed = None if seed is None else advance(seed, self._first + microbatch)
        standins = self._installed(put_off, given.borrowed) if put_off or given.borrowed else _NOTHING
        with _grad_mode(keep), Collected() as auxiliary, standins:
            output = self._layers.run(seed, given.args, given.kwargs)
        if given.carried and self._keywords:
            output = self._keywords.hand_on(output, given.carried)
        if len(self.neighbours.takers) > 1:
            output = self._messages(output)
        self.auxiliary = [value.detach() for value in auxiliary]
        if keep:
            wanted = tuple([(edge_of(value), value.detach()) for value in auxiliary if value.requires_grad])
            self._keep(microbatch, output, Kept(given.entries, given.borrowed, (), put_off, (), wanted))
        return output

    def _messages(self, output: Any) -> list[Any]:
        """One for each taker; those that only share parameters get an empty one."""
        messages = dict(zip(self._to, output if len(self._to) > 1 else (output,), strict=True))
        return [messages.get(taker, ()) for taker in self.neighbours.takers]

    @contextmanager
    def _installed(self, put_off: DeferredGradients | None, borrowed: Sequence[Tensor]) -> Iterator[None]:
        """What stands in for parameters in a microbatch's forward, and in its backward, which may run the forward again."""
        with put_off.installed() if put_off else _NOTHING, installed(self._standins, borrowed) if borrowed else _NOTHING:
            yield

    def loss(self, microbatch: int, output: Any, target: Any, keep: bool = True) -> Tensor:
        """The loss of `output`; if kept, the backward of `microbatch` now starts there. Raises ValueError if not a scalar."""
        assert self.loss_fn is not None
        with _grad_mode(keep):
            loss = self.loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn must return a floating-point scalar tensor, got {got}")
        if keep:
            self._keep(microbatch, loss, self.kept[microbatch])
        return loss.detach()

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None], last: bool = False, weight: float = 1.0
    ) -> list[tuple[Tensor | None, ...]]:
        """Backward from the `gradients` of the outputs that require one; returns those of the inputs that do, by message.

        Full, unless the forward was told that it will be split: then the weights' gradients are left for
        `backward_weight`. On the last stage the one output is the loss, if anything below it requires a gradient at all.
        `last`: the weights' gradients of this step are complete with it. `weight`: of the microbatch's auxiliary losses.
        """
        entries, borrowed, edges, put_off, ends, auxiliary = self.kept.pop(microbatch)
        pairs = [(edge, gradient) for edge, gradient in zip(edges, gradients, strict=True) if gradient is not None]
        pairs += [(edge, torch.full_like(value, weight)) for edge, value in auxiliary]
        if put_off is not None:
            self._put_off[microbatch] = put_off
        if last:
            self.copies.expect(ends)
        if pairs:
            with self._installed(put_off, borrowed) if put_off or borrowed else _NOTHING:
                run_backward(*zip(*pairs, strict=True))
        if last:
            self.copies.complete()
        return [entry.gradients for entry in entries]

    def backward_weight(self, microbatches: Sequence[int], last: bool = False) -> None:
        """Add the weights' gradients that `backward` left, those of several microbatches as one; `last` as there."""
        put_off = [self._put_off.pop(microbatch) for microbatch in microbatches if microbatch in self._put_off]
        self._splitter.end(put_off, last, self.copies.expect if last and self.copies.hooked else None)
        if last:
            self.copies.complete()

    def owed(self, microbatch: int) -> list[Tensor | None]:
        """What `backward_weight` still needs of `microbatch`, besides parameters."""
        return self._put_off[microbatch].held() if microbatch in self._put_off else []

    def forget(self) -> None:
        """Before a step: let go of all microbatches that a step which did not end left in flight."""
        self.kept.clear()
        self._put_off.clear()
        self._splitter.refresh()

    def _keep(self, microbatch: int, output: Any, kept: Kept) -> None:
        """Keep `kept`, with the backward starting at `output`."""
        leaves = self._with_lent(output, kept.borrowed) if self.neighbours.lent else wire.flatten(output)[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        edges = tuple([edge_of(tensor) for tensor in tensors])
        ends = self.copies.ends_of(tensors)
        self.kept[microbatch] = Kept(kept.entries, kept.borrowed, edges, kept.put_off, ends, kept.auxiliary)

    def _with_lent(self, output: Any, borrowed: Sequence[Tensor]) -> list[Any]:
        """The leaves of the messages to all takers, each with the parameters lent to that taker behind it."""
        mine = {id(each.parameter): tensor for each, tensor in zip(self._standins, borrowed, strict=False)}
        leaves: list[Any] = []
        for taker, message in zip(
            self.neighbours.takers, output if len(self.neighbours.takers) > 1 else (output,), strict=True
        ):
            leaves += wire.flatten(message)[0]
            lent = [self.module.get_parameter(name) for name in self.neighbours.lent.get(taker, ())]
            leaves += [mine.get(id(parameter), parameter) for parameter in lent]
        return leaves

    def _arguments(self, values: list[Any]) -> tuple[Sequence[Any], dict[str, Any], dict[str, Any]]:
        """args, kwargs, and the keywords that ride along, from what other stages gave.

        A forward of several parameters gets a tuple or list spread over them, a dict by name; else the value is one.
        """
        carried: dict[str, Any] = {}
        if type(values[0]) is WithKeywords:
            values, carried = [values[0].value], values[0].kwargs
        args: Sequence[Any] = values
        kwargs: dict[str, Any] = {}
        if self._spread and isinstance(values[0], tuple | list):
            args = values[0]
        elif self._spread and isinstance(values[0], dict) and values[0].keys() <= self._spread:
            args, kwargs = (), values[0]
        if carried and self._keywords:
            kwargs = kwargs | self._keywords.own(carried, args, kwargs)
        return args, kwargs, carried


def _grad_mode(enabled: bool) -> AbstractContextManager[Any]:
    """Gradients on or off; nothing to do in the common case."""
    return _NOTHING if torch.is_grad_enabled() == enabled else torch.set_grad_enabled(enabled)


_NOTHING: AbstractContextManager[Any] = nullcontext()


def _takes_several(module: nn.Module) -> frozenset[str]:
    """The parameters of the module's forward if a stage's output may be spread over them, else nothing."""
    parameters = inspect.signature(bare(module).forward).parameters.values()
    several = len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return frozenset(p.name for p in parameters) if several else frozenset()
