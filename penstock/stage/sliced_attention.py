r"""The attention of a microbatch whose tokens come in slices, one forward each: keys and values stay for later slices.

    0F0    0F0.1    0F0.2    0B0.2    0B0.1    0B0        0F0.1 attends to the keys and values of 0F0 and to its own
      \------\--------\        /--------/------/          0B0.1 begins at the gradient of its output, and at those that
       keys and values         their gradients            0B0.2 has left for its keys and values

Keys and values stay as leaves, detached from the graph of their slice: each slice has a backward of its own.
"""

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention

from penstock.errors import MismatchError
from penstock.stage.attention import CHECKPOINTS, LOOKS_AHEAD, TIME, AttentionContext, WeightsPart, attend
from penstock.stage.backward.autograd_edges import gradient_edge
from penstock.torch_private import DisableTorchFunction, causal_bias, saved_tensor_hooks, tensor_version

RUNNER = "penstock.stage.module_runner"  # the module that calls layers


class SequenceSlice(NamedTuple):
    """A slice of a microbatch's tokens."""

    microbatch: int
    slice: int
    lengths: Sequence[int]  # the tokens of each slice of the microbatch
    dim: int  # that has the tokens

    @property
    def is_last(self) -> bool:
        """Whether it is the microbatch's last slice."""
        return self.slice == len(self.lengths) - 1


class _SavedTensor(NamedTuple):
    """A key or value that later slices attend to."""

    leaf: Tensor
    version: int
    edge: GradientEdge | None  # of what it was detached from, if that has a graph


class _SavedKeyValue(NamedTuple):
    """Key, value and padding of one call of `attention` for one slice."""

    key: _SavedTensor
    value: _SavedTensor
    padding: Tensor | None


class SlicedAttention(AttentionContext):
    """The attention of one microbatch on one stage.

    `module`: the stage's. `lengths`: the tokens of each slice, in dimension `dim`. `masks`: of the step, see `_causal_mask`.
    """

    def __init__(self, module: nn.Module, lengths: Sequence[int], dim: int, masks: dict[Any, Tensor]) -> None:
        if "torch._dynamo" in sys.modules:  # which takes a second to import
            _exclude_from_compilation()
        self._module, self.lengths, self.sequence_dim, self._masks = module, lengths, dim, masks
        self._calls: list[list[_SavedKeyValue]] = []  # call of a forward -> its slices
        self._in_backward = self._with_backward = False

    def begin_forward(self, slice_: int, with_backward: bool) -> None:
        """Set the slice of the forward that comes next."""
        self.part, self._in_backward, self._with_backward = slice_, False, with_backward
        self.num_calls = 0

    def begin_backward(self, slice_: int) -> list[tuple[GradientEdge, Tensor]]:
        """Set the slice of the backward that comes next; recomputation may run its forward again.

        Return where the backward starts besides the outputs: at keys and values, with the gradients from later slices.
        """
        self.part, self._in_backward = slice_, True
        self.num_calls = -1  # not known before the forward runs again
        for leaf, version, _ in (tensor for slices in self._calls for part in slices for tensor in (part.key, part.value)):
            if tensor_version(leaf) != version:
                raise RuntimeError(
                    f"a key or value {list(leaf.shape)} given to ps.attention was modified by an inplace operation after it"
                )
        later = [tensor for slices in self._calls for part in slices[slice_:] for tensor in (part.key, part.value)]
        for slices in self._calls:
            del slices[slice_:]
        return [(edge, leaf.grad) for leaf, _, edge in later if edge is not None and leaf.grad is not None]

    def gradient_bytes(self) -> int:
        """Return the bytes of the gradients that later slices have left."""
        parts = (part for slices in self._calls for part in slices)
        leaves = (tensor.leaf for part in parts for tensor in (part.key, part.value))
        return sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)

    def count_and_attend(self, *args: Any) -> Tensor:
        """As of any context. `RandomnessByPosition` is not asked: `attend` draws the numbers of the slice's part by itself.

        On a GPU it is: without `__torch_function__` torch would not know what to do with a `causal_bias`.
        """
        with _NO_CONTEXT if args[0].is_cuda else DisableTorchFunction():
            return super().count_and_attend(*args)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float | None, dropout: float
    ) -> Tensor:
        """Return the attention of this slice's tokens to those of earlier slices and to each other."""
        earlier = self._earlier_slices(self.num_calls - 1)
        if not causal:
            raise self._error(LOOKS_AHEAD)
        if query.shape[TIME] != key.shape[TIME]:
            raise self._error(f"has {query.shape[TIME]} queries for {key.shape[TIME]} keys, which are not of the same tokens")
        is_padding = mask is not None and mask.dim() == 2

        # 1. Keep what later slices attend to.
        if not self._in_backward:
            if self._with_backward and _is_in_checkpoint():
                raise self._error(CHECKPOINTS)
            padding = mask if is_padding else None
            self._calls[self.num_calls - 1].append(_SavedKeyValue(_save_tensor(key), _save_tensor(value), padding))
        part = WeightsPart(query.shape[1], sum(self.lengths), 0, self.first_position)

        # 2. All tokens so far. A mask for the keys of the whole sequence has columns of later ones too.
        keys, values = [part.key.leaf for part in earlier], [part.value.leaf for part in earlier]
        lengths = [tensor.shape[TIME] for tensor in (*keys, key)]
        num_keys = sum(lengths)
        if mask is not None and not is_padding and mask.shape[-1] == part.tokens:
            mask = mask[..., :num_keys]
        if not earlier:
            return attend(query, key, value, causal, mask, scale, dropout, part)
        joined_key, joined_value = torch.cat([*keys, key], TIME), torch.cat([*values, value], TIME)
        if is_padding or (mask is None and any(part.padding is not None for part in earlier)):
            paddings = [*(part.padding for part in earlier), mask]
            mask = torch.cat(
                [
                    torch.ones(len(key), length, dtype=torch.bool, device=key.device) if padding is None else padding
                    for padding, length in zip(paddings, lengths, strict=True)
                ],
                1,
            )
        elif mask is not None and mask.shape[-1] != num_keys:
            raise self._error(
                f"has a mask of {tuple(mask.shape)} over queries and keys, which are {num_keys} with those of earlier slices: "
                "give ps.attention one of (batch, time), or the slice's rows of one for the whole sequence"
            )

        # 3. Attention. A checkpoint keeps nothing of it.
        saves_tensors = torch.is_grad_enabled() and saved_tensor_hooks() is None
        parts = [(joined_key, (*keys, key.detach())), (joined_value, (*values, value.detach()))]
        with _save_parts_instead_of_joined(parts) if saves_tensors else _NO_CONTEXT:
            if mask is not None or query.shape[TIME] == 1 or dropout:
                return attend(query, joined_key, joined_value, causal, mask, scale, dropout, part)
            enable_gqa, bias = query.shape[1] != key.shape[1], self._causal_mask(query, num_keys)
            return scaled_dot_product_attention(*(query, joined_key, joined_value, bias), scale=scale, enable_gqa=enable_gqa)

    def _earlier_slices(self, call: int) -> Sequence[_SavedKeyValue]:
        """Return what earlier slices have left in this call. Raise MismatchError if it is unclear which call this is."""
        if self._in_backward:
            if call < 0:
                raise self._error(CHECKPOINTS)
            return self._calls[call][: self.part]
        if call == len(self._calls):
            self._calls.append([])
        slices = self._calls[call]
        if len(slices) != self.part:
            raise self._error(f"calls ps.attention for slice {self.part}, but did not for each slice before")
        return slices[: self.part]

    def _causal_mask(self, query: Tensor, num_keys: int) -> Tensor:
        """Return what lets the queries, which are the last tokens, see themselves and those before.

        A GPU's kernels need no tensor for it. Elsewhere views of one serve all slices, layers and microbatches of a step:

            query 0   0 0 0 . . .      the mask of the last slice; that of an earlier one,
            query 1   0 0 0 0 . .      with fewer keys before it, begins further to the right
        """
        num_queries = query.shape[TIME]
        if query.is_cuda:
            return causal_bias(num_queries, num_keys)
        size, most_earlier = max(num_queries, *self.lengths), max(num_keys - num_queries, sum(self.lengths[:-1]))
        key = size, most_earlier, query.dtype, query.device
        if key not in self._masks:
            visible = torch.ones(size, most_earlier + size, dtype=torch.bool, device=query.device).tril(most_earlier)
            self._masks[key] = torch.zeros_like(visible, dtype=query.dtype).masked_fill_(~visible, -torch.inf)[None, None]
        first = most_earlier - (num_keys - num_queries)
        return self._masks[key][:, :, :num_queries, first : first + num_keys]

    def _error(self, finding: str) -> MismatchError:
        """Return an error that names the layer that has called `attention`."""
        frame: FrameType | None = inspect.currentframe()
        while frame is not None and not isinstance(frame.f_locals.get("self"), nn.Module):
            frame = frame.f_back
        layer = None if frame is None else frame.f_locals["self"]
        names = [f"{name}, a {type(layer).__name__}," for name, module in self._module.named_modules() if module is layer]
        return MismatchError(f"tokens cannot be cut into slices: {(names or ['a layer of the model'])[0]} {finding}")


@cache
def _exclude_from_compilation() -> None:
    """Have compiled layers call a slice's attention as it is: what it keeps are nodes of autograd's graph."""
    attend_uncompiled = torch.compiler.disable(SlicedAttention.count_and_attend)
    SlicedAttention.count_and_attend = attend_uncompiled  # type: ignore[method-assign]


def _is_in_checkpoint() -> bool:
    """Return whether a checkpoint inside of the model has called the layer: not one of `recompute=`, which calls the runner."""
    if torch.is_grad_enabled() and saved_tensor_hooks() is None:
        return False
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") not in ("torch.utils.checkpoint", RUNNER):
        frame = frame.f_back
    return frame is not None and frame.f_globals["__name__"] != RUNNER


def _save_tensor(tensor: Tensor) -> _SavedTensor:
    """Return a key or value for later slices, without memory of others that would be freed otherwise."""
    edge = gradient_edge(tensor) if tensor.requires_grad and torch.is_grad_enabled() else None
    leaf = tensor.detach()
    frees_others = not torch.is_grad_enabled() or saved_tensor_hooks() is not None
    if frees_others and type(leaf) is Tensor and leaf.untyped_storage().nbytes() > leaf.nbytes:
        leaf = leaf.clone()
    return _SavedTensor(leaf.requires_grad_(edge is not None), tensor_version(leaf), edge)


@contextmanager
def _save_parts_instead_of_joined(parts: list[tuple[Tensor, tuple[Tensor, ...]]]) -> Iterator[None]:
    """Run an operation inside. Instead of a joined tensor it saves the parts, which are kept anyway, for its backward."""

    def pack(saved: Tensor) -> Any:
        for joined, tensors in parts:
            if type(saved) is Tensor and saved.data_ptr() == joined.data_ptr() and saved.stride() == joined.stride():
                return tensors if saved.shape == joined.shape else saved
        return saved

    def unpack(packed: Any) -> Tensor:
        with DisableTorchFunction(), torch.no_grad():
            return packed if isinstance(packed, Tensor) else torch.cat(packed, TIME)

    with saved_tensors_hooks(pack, unpack):
        yield
    parts.clear()  # the graph keeps `pack`


_NO_CONTEXT: AbstractContextManager[None] = nullcontext()
