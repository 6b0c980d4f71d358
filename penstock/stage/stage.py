"""One stage: its forward, its backward, and what it keeps alive in between."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from penstock.errors import MismatchError
from penstock.stage.aliasing import (
    ALIASED_VALUE,
    SHARED_PARAMETER,
    Versions,
    check_unchanged,
    record_versions,
    unwrap_aliased_messages,
)
from penstock.stage.attention import attention_context
from penstock.stage.auxiliary import AuxiliaryLossCollector
from penstock.stage.backward.autograd_edges import Gradients, gradient_edge
from penstock.stage.backward.deferred import DeferredGradients
from penstock.stage.backward.parameter_slot import ParameterReader, replace_temporarily
from penstock.stage.backward.split import BackwardSplitter
from penstock.stage.connections import StageConnections
from penstock.stage.forward_arguments import ForwardSignature
from penstock.stage.hooks import DataParallelHooks, NoDataParallelHooks
from penstock.stage.messages import ReceivedInputs, StageMessages
from penstock.stage.module_runner import DETERMINISTIC_LOSSES, ModuleRunner
from penstock.stage.recompute import Recompute
from penstock.stage.sliced_attention import SequenceSlice, SlicedAttention
from penstock.torch_private import buffer_slots, run_backward, shares_memory, storage_key
from penstock.trees import map_tensors, tensors


@dataclass(slots=True)
class InFlightMicrobatch:
    """What a microbatch or slice keeps from its forward to its backward, besides the tensors that autograd saves."""

    received: ReceivedInputs
    roots: tuple[GradientEdge | Tensor, ...]  # of the backward: the loss, or edges of outputs, which are freed once sent
    graph_ends: tuple[Tensor, ...]  # for `DataParallelHooks.before_last_backward`
    auxiliary: Sequence[tuple[GradientEdge, Tensor]]  # auxiliary losses of the forward
    deferred: DeferredGradients | None  # if the backward is split
    attention: SlicedAttention | None  # of a slice of a microbatch
    slice: int


class Stage:
    """A stage of the model on this rank: `module` on `device`, its number is `index`.

    `loss_fn`: `loss_fn(output, target)` is the loss, on the last stage.
    `layer_numbers`, `recompute`: see `ModuleRunner`.
    `connections`: the stages it exchanges messages with, by default those of a chain.
    `later_keywords`: keywords of the step that stages after this one take (see `forward_arguments.py`).
    `in_order`: see `BackwardSplitter`.
    `data_parallel`: how data parallelism replicates or shards the stage.
    `is_frozen`: it has no backward, and its outputs no graph; none of its parameters is trained.
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
        connections: StageConnections | None = None,
        later_keywords: frozenset[str] = frozenset(),
        data_parallel: DataParallelHooks | None = None,
        in_order: bool = False,
        is_frozen: bool = False,
    ) -> None:
        self.index, self.module, self.loss_fn, self.is_frozen = index, module, loss_fn, is_frozen
        self.connections = connections or StageConnections((index - 1,), (index + 1,))
        self.data_parallel = data_parallel or NoDataParallelHooks()
        self._device_type = device.type
        self._loss_may_draw = not any(loss_fn is deterministic for deterministic in (None, *DETERMINISTIC_LOSSES))

        self._signature = ForwardSignature(module, later_keywords)
        self._messages = StageMessages(index, module, self.connections)
        self._runner = ModuleRunner(index, module, device, layer_numbers, recompute)
        self._parameter_reader = ParameterReader(module)
        shared_parameters = self._messages.shared_parameters
        self._splitter = BackwardSplitter(module, shared_parameters, in_order, self.data_parallel.hooks_gradients)

        # Of the microbatches in flight.
        self.in_flight: dict[int, InFlightMicrobatch] = {}  # slices of microbatches have a number each
        self._deferred: dict[int, DeferredGradients] = {}  # between the two parts of a split backward
        self._sliced_attention: dict[int, SlicedAttention] = {}  # by microbatch
        self.auxiliary_losses: list[Tensor] = []  # of the last forward

        # Of this step.
        self.parameters: list[nn.Parameter] = []  # the module's, each once
        self._without_gradient: list[nn.Parameter] = []  # those that have had no `.grad` in this step
        self._causal_masks: dict[Any, Tensor] = {}  # of slices
        self._buffer_memory: frozenset[int] | None = None  # storage keys of the module's buffers; None: not looked at yet
        # What autocast did in the forward is in the graph, the backward runs without it: as in plain PyTorch, where users leave
        # autocast before they call `backward()`.
        self._outside_autocast: AbstractContextManager[Any] = _NOTHING

    def begin_step(self) -> None:
        """Prepare for a step: drop microbatches that a failed one has left in flight, and read the module anew."""
        self.in_flight.clear()
        self._deferred.clear()
        self._sliced_attention.clear()
        self._causal_masks.clear()
        self._runner.begin_step()
        self.parameters = self._read_parameters()
        self._buffer_memory, self._outside_autocast = None, _NOTHING
        if torch.is_autocast_enabled(self._device_type):
            torch.clear_autocast_cache()
            self._outside_autocast = torch.autocast(self._device_type, enabled=False)

    def wait_parameters(self) -> None:
        """Wait for parameters that are on other ranks. Called before every action: only the first of a step waits."""
        if not self.data_parallel.parameters_ready:
            self.data_parallel.wait_parameters()
            self._read_parameters()

    def _read_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the module has now, for this step."""
        slots = self._parameter_reader.read()
        self._splitter.begin_step(slots)
        parameters = [slot.parameter for slot in slots]
        self._without_gradient = [parameter for parameter in parameters if parameter.grad is None and parameter.requires_grad]
        return parameters

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(
        self,
        microbatch: int,
        inputs: Sequence[Any],
        seed: int | None = None,
        with_backward: bool = True,
        split_backward: bool = False,
        sequence_slice: SequenceSlice | None = None,
    ) -> Any:
        """Run the module on `inputs`, and return what is sent: the output, or a message for each of several destinations.

        `inputs`: on the first stage the batch's (args, kwargs), on others the messages that arrived.
        `seed`: of the microbatch; the random numbers of every layer depend on it and the layer alone. Seeding moves the
        device's generator, which the caller restores.
        `with_backward`: keep what the backward needs. `split_backward`: the weights' gradients are for `backward_weight`.
        `sequence_slice`: if the inputs are a slice of a microbatch's tokens; then `microbatch` numbers all slices of the step.
        Raises MismatchError for a keyword of the batch that no stage takes, and for a change in place of what shares memory.
        """
        keeps_graph = with_backward and not self.is_frozen
        arguments = microbatch, inputs, seed, keeps_graph, split_backward and keeps_graph, sequence_slice
        if sequence_slice is None and torch.is_grad_enabled() == with_backward:  # the common case needs no contexts
            return self._forward(*arguments, None)

        # The gradient mode is set in a frozen stage too: a layer may compute gradients of its own.
        attention = None if sequence_slice is None else self._begin_slice(sequence_slice, keeps_graph)
        with torch.set_grad_enabled(with_backward), _attention_context(attention):
            output = self._forward(*arguments, attention)
        if sequence_slice is not None and sequence_slice.is_last and not keeps_graph:
            del self._sliced_attention[sequence_slice.microbatch]
        return output

    def _forward(
        self,
        microbatch: int,
        inputs: Sequence[Any],
        seed: int | None,
        with_backward: bool,
        split_backward: bool,
        sequence_slice: SequenceSlice | None,
        attention: SlicedAttention | None,
    ) -> Any:
        deferred = self._splitter.begin_microbatch() if split_backward else None
        if self._splitter.has_tied_parameters:
            self._clear_autocast_cache()
        shared_parameters = record_versions(self._messages.shared_parameters) if self._messages.shared_parameters else ()
        aliased_inputs: Versions = ()

        with AuxiliaryLossCollector() as auxiliary_losses:
            # 1. From messages to arguments.
            if self.index == 0:
                arguments, received = self._signature.arguments_from_batch(*inputs), _NOTHING_RECEIVED
            else:
                messages, aliased_inputs = unwrap_aliased_messages(inputs)
                values, received = self._messages.attach_inputs(messages)
                arguments = self._signature.arguments_from_values(values)

            # 2. The module; if the backward is split, stand-ins replace its parameters.
            if deferred is None and not received.borrowed_parameters:
                output = self._runner.run(seed, arguments.args, arguments.kwargs)
            else:
                with _parameter_replacement(deferred, received):
                    output = self._runner.run(seed, arguments.args, arguments.kwargs)
            output = map_tensors(Tensor.detach, output) if self.is_frozen else output
        self.auxiliary_losses = [loss.detach() for loss in auxiliary_losses] if auxiliary_losses else []

        # 3. Check what must not change; write back parameter data that did.
        if aliased_inputs or shared_parameters:
            check_unchanged(aliased_inputs, self.index, ALIASED_VALUE)
            check_unchanged(shared_parameters, self.index, SHARED_PARAMETER)
        if deferred is not None:
            self._splitter.write_back_replaced_data(deferred)
        if seed is not None and self._loss_may_draw:
            self._runner.seed_loss(seed)

        # 4. From the output to messages.
        output = self._clone_output_buffers(output)
        if arguments.keywords:
            output = self._signature.add_later_keywords(output, arguments.keywords)
        output = self._messages.pack_output(output, aliased_inputs)

        # 5. What the backward needs. On the last stage it starts at the loss, which `loss` adds.
        if with_backward:
            is_last_stage = self.loss_fn is not None
            edges, graph_ends = (
                ((), ()) if is_last_stage else self._graph_outputs(self._messages.leaves_to_send(output, received))
            )
            with_graph = [loss for loss in auxiliary_losses if loss.requires_grad] if auxiliary_losses else ()
            auxiliary = [(gradient_edge(loss), loss.detach()) for loss in with_graph] if with_graph else ()
            slice_ = 0 if sequence_slice is None else sequence_slice.slice
            self.in_flight[microbatch] = InFlightMicrobatch(received, edges, graph_ends, auxiliary, deferred, attention, slice_)
        return output

    def _begin_slice(self, sequence_slice: SequenceSlice, with_backward: bool) -> SlicedAttention:
        """Return the attention of a slice's microbatch, ready for the slice's forward."""
        microbatch, slice_, lengths, dim = sequence_slice
        if slice_ == 0:
            self._sliced_attention[microbatch] = SlicedAttention(self.module, lengths, dim, self._causal_masks)
        attention = self._sliced_attention[microbatch]
        attention.begin_forward(slice_, with_backward)
        return attention

    def _clone_output_buffers(self, output: Any) -> Any:
        """Return `output` with copies of buffers: the next microbatch may change a buffer before it is sent."""
        if isinstance(output, Tensor) and output.requires_grad:  # the common case
            return output
        if self._buffer_memory is None:
            buffers = [slot.tensor for slot in buffer_slots(self.module)]
            self._buffer_memory = frozenset(storage_key(buffer) for buffer in buffers if _has_storage(buffer))
        return map_tensors(self._clone_if_buffer, output) if self._buffer_memory else output

    def _clone_if_buffer(self, value: Tensor) -> Tensor:
        is_buffer = not value.requires_grad and _has_storage(value) and storage_key(value) in (self._buffer_memory or ())
        return value.clone() if is_buffer else value

    def _graph_outputs(self, leaves: Sequence[Any]) -> tuple[tuple[GradientEdge, ...], tuple[Tensor, ...]]:
        """Return the edges that a backward from `leaves` starts at, and the graph's ends for `data_parallel`."""
        with_gradient = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        return tuple(map(gradient_edge, with_gradient)), self.data_parallel.graph_ends(with_gradient)

    def loss(self, microbatch: int, output: Any, target: Any, with_backward: bool = True, has_weight: bool = True) -> Tensor:
        """Return the loss of `output`; `with_backward`, the backward of `microbatch` starts there.

        `has_weight`: whether the piece counts in the loss; if not, its loss is 0, and `loss_fn` is not called.

        Raises ValueError if `loss_fn` does not return a floating-point scalar, or if nothing could be learned from its result.
        """
        assert self.loss_fn is not None
        attention = self.in_flight[microbatch].attention if with_backward and self._loss_may_draw else None
        loss_fn = self.loss_fn if has_weight else _zero_loss
        if attention is None and torch.is_grad_enabled() == with_backward:  # the common case needs no contexts
            loss = loss_fn(output, target)
        else:
            with torch.set_grad_enabled(with_backward), _attention_context(attention):
                loss = loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn must return a floating-point scalar tensor, got {got}")

        if with_backward:
            in_flight = self.in_flight[microbatch]
            if loss.requires_grad:
                in_flight.roots, in_flight.graph_ends = (loss,), self.data_parallel.graph_ends([loss])
            elif has_weight:
                self._check_nothing_is_trained(output, in_flight)
        return loss.detach()

    def _check_nothing_is_trained(self, output: Any, in_flight: InFlightMicrobatch) -> None:
        """Raise ValueError if a loss without a graph was computed from values with one, or from layers that are trained."""
        if any(tensor.requires_grad for tensor in tensors(output)):
            raise ValueError(
                "loss_fn returned a loss without a graph (detached, made of numbers, or under no_grad): compute it from "
                "the output, or nothing is learned"
            )
        if self.is_frozen or in_flight.auxiliary:
            return
        named_parameters = self.module.named_parameters()
        reasons = [f"{name} of the last stage is trained" for name, parameter in named_parameters if parameter.requires_grad]
        if any(message.gradients for message in in_flight.received.inputs):
            reasons.append("what the last stage receives has one")
        if reasons:
            raise ValueError(
                f"the model's output has no graph, though {reasons[0]}, so nothing is learned: leave out detach() and no_grad "
                "in the last layers, or use torch.utils.checkpoint with use_reentrant=False"
            )

    # -- backward ----------------------------------------------------------------------------------------------------

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None], is_last: bool = False, auxiliary_weight: float = 1.0
    ) -> list[Gradients]:
        """Run the backward, and return for each message that arrived the gradients of its tensors that require one.

        If the forward was given `split_backward`, the weights' gradients are left for `backward_weight`.
        `gradients`: of the outputs that require one; on the last stage of the loss, if anything requires a gradient at all.
        `is_last`: with this backward the weights' gradients of this step are complete.
        `auxiliary_weight`: the gradient of the microbatch's auxiliary losses.
        """
        in_flight = self.in_flight.pop(microbatch)
        received, deferred, attention = in_flight.received, in_flight.deferred, in_flight.attention
        roots: Sequence[GradientEdge | Tensor] = in_flight.roots
        if deferred is not None:
            deferred.check_no_inner_backward()
            self._deferred[microbatch] = deferred
        if len(roots) != len(gradients):
            raise MismatchError(
                f"stage {self.index} gets {len(gradients)} gradients for {len(roots)} values: freeze or train a parameter that "
                "stages share on all ranks that have it"
            )

        from_later_slices = () if attention is None else attention.begin_backward(in_flight.slice)
        if in_flight.auxiliary or from_later_slices or len(gradients) != 1 or gradients[0] is None:  # not in the common case
            pairs = [(root, gradient) for root, gradient in zip(roots, gradients, strict=True) if gradient is not None]
            pairs += [(edge, torch.full_like(loss, auxiliary_weight)) for edge, loss in in_flight.auxiliary]
            pairs += from_later_slices
            roots, gradients = tuple(root for root, _ in pairs), [gradient for _, gradient in pairs]

        if attention is None and self._outside_autocast is _NOTHING:  # the common case needs no contexts
            self._run_backward(roots, gradients, in_flight, is_last)
        else:
            with self._outside_autocast, _attention_context(attention):
                self._run_backward(roots, gradients, in_flight, is_last)
        if not received.inputs:  # of the first stage
            return []
        sources = zip(self.connections.sources, received.inputs, strict=True)
        return [stage_input.gradients for source, stage_input in sources if source not in self.connections.frozen_sources]

    def _run_backward(
        self,
        roots: Sequence[GradientEdge | Tensor],
        gradients: Sequence[Tensor | None],
        in_flight: InFlightMicrobatch,
        is_last: bool,
    ) -> None:
        received, deferred = in_flight.received, in_flight.deferred
        if is_last:
            self.data_parallel.before_last_backward(in_flight.graph_ends)
        if roots and deferred is None and not received.borrowed_parameters:
            run_backward(roots, gradients)
        elif roots:
            with _parameter_replacement(deferred, received):
                run_backward(roots, gradients)
        self._after_backward(is_last)

    def backward_weight(self, microbatch: int, is_last: bool = False) -> None:
        """Add the weights' gradients that `backward` has left. `is_last`: as there."""
        deferred = self._deferred.pop(microbatch, None)
        hooks = self.data_parallel
        before_last = hooks.before_last_backward if is_last and hooks.hooks_gradients else None
        with self._outside_autocast:
            self._splitter.run_weight_backward(deferred, is_last, before_last)
            self._after_backward(is_last)

    def _after_backward(self, is_last: bool) -> None:
        self._unshare_first_gradients(is_last)
        if is_last:
            self._splitter.autocast_cache.clear()
            self.data_parallel.after_last_backward()

    def _unshare_first_gradients(self, is_last: bool) -> None:
        """Copy first gradients that are views: autograd may make `.grad` a view of a gradient that is still needed.

        The next gradients are added to it in place. After the last backward, DistributedDataParallel has put it where it wants.
        """
        if self._without_gradient and not (is_last and self.data_parallel.hooks_gradients):
            with_first = [parameter for parameter in self._without_gradient if parameter.grad is not None]
            for parameter in with_first:
                if parameter.grad is not None and shares_memory(parameter.grad):
                    parameter.grad = parameter.grad.clone()
            if with_first:
                self._without_gradient = [parameter for parameter in self._without_gradient if parameter.grad is None]

    def saved_for_weight_backward(self, microbatch: int) -> list[Tensor | None]:
        """Return the tensors that `backward_weight` of `microbatch` still needs, besides parameters."""
        return self._deferred[microbatch].saved_tensors() if microbatch in self._deferred else []

    def gradient_bytes_for_earlier_slices(self, microbatch: int) -> int:
        """Return the bytes of gradients of keys and values that backwards of earlier slices of `microbatch` begin with."""
        return self._sliced_attention[microbatch].gradient_bytes()

    def _clear_autocast_cache(self) -> None:
        """Make autocast, where it is on, cast parameters anew: before a step, and where a parameter has several places.

        Inside one autocast block of the caller's, autocast casts each parameter once: that cast, a node of the graph, serves
        all microbatches. Gradients are the same as with a block for each microbatch, in less memory, except where a parameter
        is used three times, cast and not: autograd sums in the order in which nodes were made. So stages with a parameter in
        several places get fresh casts. Where one module uses its own parameter so, the last bits may differ.
        """
        if torch.is_autocast_enabled(self._device_type):
            torch.clear_autocast_cache()


def _zero_loss(output: Any, _: Any) -> Any:
    """Return 0, as the loss of `output` with a graph to all of `output`."""
    terms = [tensor.flatten()[:0].sum() for tensor in tensors(output) if tensor.is_floating_point()]
    return sum(terms[1:], terms[0]) if terms else torch.zeros(())


def _has_storage(tensor: Tensor) -> bool:
    """Return whether `tensor` has a storage; sparse ones have none."""
    return tensor.layout == torch.strided


def _parameter_replacement(deferred: DeferredGradients | None, received: ReceivedInputs) -> AbstractContextManager[None]:
    """Replace parameters in a microbatch's forward, and in its backward, which may run the forward again."""
    return replace_temporarily([*(deferred.replacements if deferred is not None else ()), *received.borrowed_parameters])


def _attention_context(attention: SlicedAttention | None) -> AbstractContextManager[Any]:
    return _NOTHING if attention is None else attention_context(attention)


_NOTHING: AbstractContextManager[Any] = nullcontext()
_NOTHING_RECEIVED = ReceivedInputs()
