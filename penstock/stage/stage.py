"""One stage: its forward, its backward, and what it keeps alive in between."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from penstock.errors import MismatchError
from penstock.randomness import mix_in
from penstock.stage.autograd_edges import Gradients, gradient_edge
from penstock.stage.auxiliary import CollectAuxiliaryLosses
from penstock.stage.backward.deferred import DeferredGradients
from penstock.stage.backward.split import Splitter
from penstock.stage.exchange import PARAMETER, ForwardSignature, Messages, Received, Versions, check_unchanged, opened, versions
from penstock.stage.module_runner import DETERMINISTIC_LOSSES, ModuleRunner, Recompute
from penstock.stage.neighbours import Neighbours
from penstock.stage.parameter_slot import ParameterSlot, installed, slots_of
from penstock.stage.replication import NoReplication, Replication
from penstock.torch_private import buffer_slots, run_backward, shares_memory, storage_key
from penstock.trees import map_tensors, tensors


class InFlightMicrobatch(NamedTuple):
    """What a microbatch in flight keeps alive on a stage, besides what its graph saved."""

    received: Received
    edges: tuple[GradientEdge, ...]  # of the outputs: an output itself goes as soon as it is sent
    ends: tuple[Tensor, ...]  # what copies of the stage must know of the graph
    auxiliary: Sequence[tuple[GradientEdge, Tensor]]  # losses that arose in the forward
    deferred: DeferredGradients | None  # if the backward is split


class Stage:
    """A stage of the model on this rank.

    `index` is its number, `module` what it computes, on `device`; `loss_fn(output, target)` the loss, on the last stage.
    `numbers` are those of its layers, `recompute` says what is run again in the backward: see `layers.py`.
    `neighbours` are the stages it is connected to, by default those of a chain.
    `later`: keywords that stages after this one take (`exchange.py`).
    `merge`: weights' gradients that were put off may be summed in another order (see `backward/split.py`).
    `copies`: what other ranks have of the stage (see `copies.py`).
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
        layer_numbers: Sequence[int] | None = None,
        recompute: Recompute | None = None,
        neighbours: Neighbours | None = None,
        later_keywords: frozenset[str] = frozenset(),
        merge_weight_gradients: bool = False,
        replication: Replication | None = None,
        in_order: bool = False,
        first_microbatch: int = 0,
    ) -> None:
        self.index, self.module, self.loss_fn = index, module, loss_fn
        self._loss_may_draw = not any(loss_fn is each for each in (None, *DETERMINISTIC_LOSSES))
        self.replication, self._first, self._device = replication or NoReplication(), first_microbatch, device.type
        self.neighbours = neighbours or Neighbours((index - 1,), (index + 1,))
        self.in_flight: dict[int, InFlightMicrobatch] = {}
        self.auxiliary_losses: list[Tensor] = []  # losses of the last forward
        self.parameters: list[nn.Parameter] = []  # the module's, each once, when the step began
        self._without_sum: list[nn.Parameter] = []  # those of them that had no gradient then, and still have none
        self._buffers: frozenset[int] | None = None  # the memory of the module's in this step, once it was asked for
        self._signature = ForwardSignature(module, later_keywords)
        self._messages = Messages(index, module, self.neighbours)
        self._layers = ModuleRunner(index, module, device, layer_numbers, recompute)
        self._splitter = Splitter(
            module, merge_weight_gradients, self._messages.shared, in_order, self.replication.hooks_gradients
        )
        self._deferred: dict[int, DeferredGradients] = {}  # microbatch -> what its W will do
        # Around a backward: what autocast did to the forward is in the graph, no more is done to it. So it is in plain PyTorch,
        # whose users leave autocast before they call `backward()`.
        self._outside_autocast: AbstractContextManager[Any] = _NOTHING

    def wait_parameters(self) -> None:
        """Before the step's first action: wait for parameters that are elsewhere."""
        if not self.replication.parameters_ready:
            self.replication.wait_parameters()
            self._begin_with(slots_of(self.module))

    def forward(
        self,
        microbatch: int,
        inputs: Sequence[Any],
        seed: int | None = None,
        with_backward: bool = True,
        split_backward: bool = False,
    ) -> Any:
        """The output for what is `given`: the batch's (args, kwargs) on the first stage, on others what other stages gave.

        Keeps what the backward needs unless told not to. `split`: that will be `backward` and then `backward_weight`. With a
        `seed`, every layer's random numbers depend on it, the microbatch and the layer alone. Seeding moves the device's
        generator; whoever calls puts it back. A stage with several takers gives a sequence, one message for each.

        Raises MismatchError for a keyword of the batch's that no stage takes, and for a change in place of what shares memory.
        """
        deferred = self._splitter.begin() if split_backward and with_backward else None
        seed = None if seed is None else mix_in(seed, self._first + microbatch)
        if self._splitter.tied:
            self._fresh_casts()
        arrived: Versions = ()
        shared = versions(self._messages.shared)
        with _grad_mode(with_backward), CollectAuxiliaryLosses() as auxiliary:
            if self.index == 0:
                (args, kwargs, keywords), received = self._signature.of_batch(*inputs), _NOTHING_RECEIVED
            else:
                inputs, arrived = opened(inputs)
                values, received = self._messages.receive(inputs)
                args, kwargs, keywords = self._signature.of_values(values)
            with _standing_in(deferred, received):
                output = self._layers.run(seed, args, kwargs)
        check_unchanged(arrived, self.index)
        check_unchanged(shared, self.index, PARAMETER)
        if deferred is not None:
            self._splitter.hand_on(deferred)
        if seed is not None and self._loss_may_draw:
            self._layers.seed_loss(seed)
        output = self._apart(output)
        output = self._messages.to_takers(self._signature.hand_on(output, keywords) if keywords else output, arrived)
        self.auxiliary_losses = [value.detach() for value in auxiliary]
        if with_backward:
            edges, ends = self._ends(self._messages.leaves(output, received)) if self.loss_fn is None else _LOSS_FOLLOWS
            wanted = [(gradient_edge(value), value.detach()) for value in auxiliary if value.requires_grad] if auxiliary else ()
            self.in_flight[microbatch] = InFlightMicrobatch(received, edges, ends, wanted, deferred)
        return output

    def _apart(self, output: Any) -> Any:
        """`output`, with copies of buffers: the next microbatch may change them before the others have what they were now."""
        if isinstance(output, Tensor) and output.requires_grad:  # the common case, a short way
            return output
        if self._buffers is None:
            self._buffers = frozenset(
                storage_key(slot.tensor) for slot in buffer_slots(self.module) if _has_memory(slot.tensor)
            )
        return map_tensors(self._no_buffer, output) if self._buffers else output

    def _no_buffer(self, value: Tensor) -> Tensor:
        is_buffer = not value.requires_grad and _has_memory(value) and storage_key(value) in (self._buffers or ())
        return value.clone() if is_buffer else value

    def _ends(self, leaves: Sequence[Any]) -> tuple[tuple[GradientEdge, ...], tuple[Tensor, ...]]:
        """Where a backward from `leaves` starts, and what copies of the stage must know of its graph."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        return tuple(map(gradient_edge, tensors)), self.replication.graph_ends(tensors)

    def loss(self, microbatch: int, output: Any, target: Any, with_backward: bool = True) -> Tensor:
        """The loss of `output`; if kept, the backward of `microbatch` now starts there. Raises ValueError if not a scalar."""
        assert self.loss_fn is not None
        with _grad_mode(with_backward):
            loss = self.loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn must return a floating-point scalar tensor, got {got}")
        if with_backward:
            if not loss.requires_grad and any(tensor.requires_grad for tensor in tensors(output)):
                told = "loss_fn returned a loss without a graph (detached, made of numbers, or under no_grad)"
                raise ValueError(f"{told}: compute it from the output, or nothing is learned")
            received, _, _, auxiliary, deferred = self.in_flight[microbatch]
            self.in_flight[microbatch] = InFlightMicrobatch(received, *self._ends([loss]), auxiliary, deferred)
        return loss.detach()

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None], is_last: bool = False, auxiliary_weight: float = 1.0
    ) -> list[Gradients]:
        """Backward from the `gradients` of the outputs that require one; returns those of the inputs that do, by message.

        Full, unless the forward was told that it will be split: then the weights' gradients are left for
        `backward_weight`. On the last stage the one output is the loss, if anything below it requires a gradient at all.
        `last`: the weights' gradients of this step are complete with it. `weight`: of the microbatch's auxiliary losses.
        """
        received, edges, ends, auxiliary, deferred = self.in_flight.pop(microbatch)
        if deferred is not None:
            deferred.check_untouched()
            self._deferred[microbatch] = deferred
        if len(edges) != len(gradients):
            told = f"stage {self.index} gets {len(gradients)} gradients for {len(edges)} values"
            raise MismatchError(f"{told}: freeze or train a parameter that stages share on all ranks that have it")
        if auxiliary or len(gradients) != 1 or gradients[0] is None:  # else a short way
            pairs = [(edge, gradient) for edge, gradient in zip(edges, gradients, strict=True) if gradient is not None]
            pairs += [(edge, torch.full_like(value, auxiliary_weight)) for edge, value in auxiliary]
            edges, gradients = tuple(edge for edge, _ in pairs), [gradient for _, gradient in pairs]
        with self._outside_autocast:
            if is_last:
                self.replication.before_last_backward(ends)
            if edges:
                with _standing_in(deferred, received):
                    run_backward(edges, gradients)
            self._part_sums(is_last)
            if is_last:
                self._complete()
        return [each.gradients for each in received.inputs]

    def backward_weight(self, microbatches: Sequence[int], is_last: bool = False) -> None:
        """Add the weights' gradients that `backward` left, those of several microbatches as one; `last` as there."""
        deferred = [self._deferred.pop(microbatch) for microbatch in microbatches if microbatch in self._deferred]
        expect = self.replication.before_last_backward if is_last and self.replication.hooks_gradients else None
        with self._outside_autocast:
            self._splitter.end(deferred, is_last, expect)
            self._part_sums(is_last)
            if is_last:
                self._complete()

    def _part_sums(self, last: bool) -> None:
        """Give sums that have begun memory of their own: autograd may make one of a view of a gradient that is needed yet.

        What comes next is added to it in place. At the `last`, DistributedDataParallel has put it where it wants it.
        """
        if self._without_sum and not (last and self.replication.hooks_gradients):
            begun = [each for each in self._without_sum if each.grad is not None]
            for parameter in begun:
                if parameter.grad is not None and shares_memory(parameter.grad):
                    parameter.grad = parameter.grad.clone()
            if begun:
                self._without_sum = [each for each in self._without_sum if each.grad is None]

    def _complete(self) -> None:
        """The gradients of this step are complete."""
        self._splitter.casts.clear()
        self.replication.after_last_backward()

    def saved_for_weight_backward(self, microbatch: int) -> list[Tensor | None]:
        """What `backward_weight` still needs of `microbatch`, besides parameters."""
        return self._deferred[microbatch].held() if microbatch in self._deferred else []

    def _begin_with(self, slots: Sequence[ParameterSlot]) -> None:
        """The parameters are here, as they are in this step."""
        self._splitter.refresh(slots)
        parameters = [slot.parameter for slot in slots]
        self._without_sum = [each for each in parameters if each.grad is None and each.requires_grad]

    def begin_step(self) -> None:
        """Before a step: let go of microbatches that one which did not end left in flight, and look at the module anew."""
        self.in_flight.clear()
        self._deferred.clear()
        self._layers.forget()
        slots = slots_of(self.module)
        self.parameters = [slot.parameter for slot in slots]
        self._begin_with(slots)
        self._buffers = None
        self._fresh_casts()
        autocast = torch.is_autocast_enabled(self._device)
        self._outside_autocast = torch.autocast(self._device, enabled=False) if autocast else _NOTHING

    def _fresh_casts(self) -> None:
        """Have autocast, where it is on, cast parameters anew: before a step, and where a parameter is in several places.

        Inside one block of the caller's, autocast casts each parameter once and keeps that cast, a node of the graph, for all
        microbatches. Gradients are the same as with a block for each microbatch, in less memory, but where a parameter is used
        three times, cast and not: autograd sums in the order in which nodes were made. So stages with a parameter in several
        places get fresh casts; where one module uses its own parameter so, the last bits may differ.
        """
        if torch.is_autocast_enabled(self._device):
            torch.clear_autocast_cache()


def _has_memory(tensor: Tensor) -> bool:
    """Of its own, as sparse ones have not."""
    return tensor.layout == torch.strided


def _standing_in(deferred: DeferredGradients | None, received: Received) -> AbstractContextManager[None]:
    """What stands in for parameters in a microbatch's forward, and in its backward, which may run the forward again."""
    if deferred is None and not received.borrowed:
        return _NOTHING
    return installed([*(deferred.places if deferred is not None else ()), *received.borrowed])


def _grad_mode(enabled: bool) -> AbstractContextManager[Any]:
    """Gradients on or off; nothing to do in the common case."""
    return _NOTHING if torch.is_grad_enabled() == enabled else torch.set_grad_enabled(enabled)


_NOTHING: AbstractContextManager[Any] = nullcontext()
_NOTHING_RECEIVED = Received()
_LOSS_FOLLOWS: tuple[Any, Any] = (), ()  # it is where the backward of the last stage starts
