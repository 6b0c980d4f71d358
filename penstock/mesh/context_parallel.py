"""Context parallel: each rank along the mesh's axis `cp` has a part of a sequence's tokens; they communicate in attention.

Each rank has all heads of some tokens. If the numbers of query and key heads divide by the number of ranks, an all-to-all gives
each rank some heads of all tokens, and a second one gives the tokens back (Jacobs et al. 2023, "DeepSpeed Ulysses"). For shape
(batch, heads, tokens, width) over C ranks, a rank sends (C - 1) / C of its queries, keys, values and outputs in a forward, and
as much in a backward. If the numbers do not divide, each rank gathers the keys and values of all tokens.

Ranks along `cp` run the same table, so these collectives have the same order on all of them.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import MismatchError
from penstock.stage.attention import AttentionContext, WeightsPart, attend, check_mask_can_be_cut


class ContextParallelAttention(AttentionContext):
    """Attention over a sequence whose tokens are spread over the ranks of `group`. `index`: this rank's index in the group."""

    def __init__(self, group: dist.ProcessGroup, index: int) -> None:
        self._group, self.part = group, index

    def begin_action(self, lengths: Sequence[int], dim: int) -> None:
        """Set each rank's tokens of a microbatch (`lengths`), and the dimension of the stage's tensors that has the tokens."""
        self.lengths, self.sequence_dim = lengths, dim

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float | None, dropout: float
    ) -> Tensor:
        """Return the attention of this rank's tokens to those of all ranks. All ranks of the group call it.

        `query`, `key`, `value`: (batch, heads, this rank's tokens, width). Returns (batch, query heads, tokens, value width).
        """
        ranks, length = len(self.lengths), self.lengths[self.part]
        if not query.shape[2] == key.shape[2] == length:
            raise MismatchError(
                f"attention of {query.shape[2]} tokens to {key.shape[2]}, but this rank has {length} of its sequence: along cp "
                "tokens attend to those of the same sequence"
            )
        check_mask_can_be_cut(mask)
        if mask is not None:
            [mask] = self._gather_tokens([mask[:, None].to(torch.uint8)])
            mask = mask[:, 0].bool()

        heads, total = query.shape[1], sum(self.lengths)
        if all(tensor.shape[1] % ranks == 0 for tensor in (query, key)):
            query, key, value = self._gather_tokens_scatter_heads([query, key, value])
            part = WeightsPart(heads, total, self.part * query.shape[1], 0)
            attended = attend(query, key, value, causal, mask, scale, dropout, part)
            return self._gather_heads_scatter_tokens(attended)

        key, value = self._gather_tokens([key, value])
        part = WeightsPart(heads, total, 0, self.first_position)
        visible_length = self.first_position + length if causal else total
        mask = None if mask is None else mask[:, :visible_length]
        return attend(query, key[:, :, :visible_length], value[:, :, :visible_length], causal, mask, scale, dropout, part)

    def _gather_tokens_scatter_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return each tensor with all tokens, but this rank's heads only, by an all-to-all."""
        head_chunks = zip(*[tensor.chunk(len(self.lengths), 1) for tensor in tensors], strict=True)
        return self._gather_tokens_by_rank([list(heads) for heads in head_chunks])

    def _gather_heads_scatter_tokens(self, attended: Tensor) -> Tensor:
        """Return the tensor with all heads, but this rank's tokens only, by an all-to-all."""
        parts = attended.split(list(self.lengths), 2)
        shape = parts[self.part].shape
        return torch.cat([heads for [heads] in self._all_to_all_tensors([[part] for part in parts], [[shape]] * len(parts))], 1)

    def _gather_tokens(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return each tensor with the tokens of all ranks, which are in dimension 2."""
        return self._gather_tokens_by_rank([tensors] * len(self.lengths))

    def _gather_tokens_by_rank(self, tensors_by_rank: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Send each rank its list of tensors; return the tensors that were sent here, joined along the tokens."""
        shapes = [
            [(*tensor.shape[:2], length, *tensor.shape[3:]) for tensor in tensors_by_rank[self.part]] for length in self.lengths
        ]
        return [torch.cat(parts, 2) for parts in zip(*self._all_to_all_tensors(tensors_by_rank, shapes), strict=True)]

    def _all_to_all_tensors(
        self, tensors_by_rank: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Sequence[int]]]
    ) -> list[Sequence[Tensor]]:
        """Send each rank its list of tensors; return the lists that the ranks have sent here, which have these `shapes`."""
        sizes = [[prod(shape) for shape in row] for row in shapes]
        flat = torch.cat([tensor.reshape(-1) for row in tensors_by_rank for tensor in row])
        send_sizes = [sum(tensor.numel() for tensor in row) for row in tensors_by_rank]
        received = _AllToAll.apply(flat, send_sizes, list(map(sum, sizes)), self._group)
        parts = iter(received.split([size for row in sizes for size in row]))
        return [[next(parts).view(tuple(shape)) for shape in row] for row in shapes]


class _AllToAll(torch.autograd.Function):
    """An all-to-all of a flat tensor. Its backward is the reverse all-to-all of the gradient."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, send_sizes: list[int], receive_sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.arguments = receive_sizes, send_sizes, group
        return _all_to_all(flat, send_sizes, receive_sizes, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradient.contiguous(), *ctx.arguments), None, None, None


def _all_to_all(flat: Tensor, send_sizes: list[int], receive_sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    received = flat.new_empty(sum(receive_sizes))
    dist.all_to_all_single(received, flat, receive_sizes, send_sizes, group=group)
    return received
