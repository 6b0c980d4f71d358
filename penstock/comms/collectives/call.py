"""What a rank of a group was called with: in words for errors, as a number for the other ranks."""

import hashlib
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from penstock.comms.point_to_point import DTYPES, type_name

COLLECTIVES = ("broadcast", "scatter", "gather", "reduce", "all_gather", "reduce_scatter", "all_reduce", "all_to_all")
OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
DIGEST_BITS = 40


class CollectiveCall(NamedTuple):
    """What one rank was called with; the same on all ranks, or nothing is done."""

    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    root: int | None  # by its number in the group
    op: str | None
    digest: int  # that stands for all of it, the same in every process

    def __str__(self) -> str:
        tensor = f"{self.operation} of a {tuple(self.shape)} {type_name(self.dtype)} tensor"
        op = "" if self.op is None else f", op {self.op}"
        return tensor + op + ("" if self.root is None else f", root {self.root}")


@lru_cache(4096)
def call_of(operation: str, shape: tuple[int, ...], dtype: torch.dtype, root: int | None, op: str | None) -> CollectiveCall:
    """The call; kept, because a program makes the same ones again and again."""
    numbers = COLLECTIVES.index(operation), DTYPES.index(dtype), -1 if root is None else root, (None, *OPS).index(op), *shape
    digest = hashlib.blake2b(repr(tuple(map(int, numbers))).encode(), digest_size=DIGEST_BITS // 8).digest()
    return CollectiveCall(operation, shape, dtype, root, op, int.from_bytes(digest))
