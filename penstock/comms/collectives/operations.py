"""Collectives: what all ranks of a group do together, checked before data flows.

They have torch's names. Where torch works in place (broadcast, reduce, all_reduce) they do too, and return the tensor; the
others return a new one, or `out` filled, which spares large results the page faults of new memory. Pieces lie in one tensor,
one after the other along its first dimension ("rows"; a scalar is one row): piece r is for rank r, or from it. So
`all_reduce(x)` is `all_gather(reduce_scatter(x))`.

On every rank they must be called in the same order, with the same shape, dtype, root and op. If not, every rank raises
MismatchError, which says what each was called with, and the group has ended; a rank that was done before the one that
disagrees came (it has the right data) raises it at its next call. `check=False`, on all ranks, leaves that out: then a
difference gives garbage, or ends a process. A rank that is lost is a LostRankError on the others. What a rank can see by
itself (a root that is not there, rows that do not divide) it refuses before anything is sent; ranks that do not refuse it too
wait for it.

`group` is a process group of torch, as `mesh.get_group("tp")`, by default all ranks; `root` is a rank's number in the group;
`op` is sum, product, min or max. Non-contiguous tensors work. What the backend cannot carry (tensors of a GPU over Gloo) goes
through host memory.

    group = mesh.get_group("tp")
    ps.comms.all_reduce(loss, group=group)                      # in place
    rows = ps.comms.all_gather(hidden, group=group)             # (n, ...) on each rank -> (ranks * n, ...) on all
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.comms.collectives.call import OPS, call_of
from penstock.comms.collectives.checked_group import checked_group
from penstock.comms.encoding import as_bytes
from penstock.comms.point_to_point import DTYPES, MAX_DIMENSIONS
from penstock.comms.topology import current_topology
from penstock.errors import MismatchError, PenstockError
from penstock.torch_private import all_gather_into, reduce_scatter_into

AS_BYTES = (torch.int16, torch.complex64, torch.complex128)  # dtypes that Gloo does not know, but can carry
NOT_SUMMED = (*AS_BYTES, torch.bool)


def broadcast(tensor: Tensor, root: int = 0, group: Any = None, check: bool = True) -> Tensor:
    """Fill `tensor` on every rank with rank `root`'s, in place; returns it."""
    this = _Collective("broadcast", tensor, group, root)
    this.run(check, lambda backend: backend.broadcast(_movable(this.carried), root))
    return _bring_back(this.carried, tensor)


def reduce(tensor: Tensor, root: int = 0, op: str = "sum", group: Any = None, check: bool = True) -> Tensor:
    """Add up the ranks' tensors on rank `root`, in place; returns it. What the other ranks' tensors hold then is undefined."""
    this = _Collective("reduce", tensor, group, root, op)
    this.run(check, lambda backend: backend.reduce(this.carried, root, OPS[op]))
    return _bring_back(this.carried, tensor)


def all_reduce(tensor: Tensor, op: str = "sum", group: Any = None, check: bool = True) -> Tensor:
    """Add up the ranks' tensors on every rank, in place; returns it."""
    this = _Collective("all_reduce", tensor, group, op=op)
    this.run(check, lambda backend: backend.allreduce(this.carried, OPS[op]))
    return _bring_back(this.carried, tensor)


def scatter(output: Tensor, rows: Tensor | None = None, root: int = 0, group: Any = None, check: bool = True) -> Tensor:
    """Fill `output`, of shape (n, ...), on rank r with piece r of rank `root`'s `rows`, of shape (ranks * n, ...); returns it.

    The other ranks need no `rows`. Raises MismatchError on the root if the shape or dtype of `rows` does not fit.
    """
    this = _Collective("scatter", output, group, root)
    whole = this.to_carrier(this.fitting(rows, output)) if this.group.rank == root else None
    pieces = this.pieces(whole)
    this.run(check, lambda backend: backend.scatter(_movable(this.carried), pieces, root), whole, this.carried)
    return _bring_back(this.carried, output)


def gather(tensor: Tensor, root: int = 0, group: Any = None, check: bool = True, out: Tensor | None = None) -> Tensor | None:
    """On rank `root` the tensors of all ranks, each of shape (n, ...), as one of shape (ranks * n, ...); None elsewhere."""
    this = _Collective("gather", tensor, group, root)
    gathered = this.result(this.gathered_shape, out) if this.group.rank == root else None
    pieces = this.pieces(gathered)
    this.run(check, lambda backend: backend.gather(pieces, _movable(this.carried), root), this.carried, gathered)
    return None if gathered is None else _handed_over(gathered, out, tensor)


def all_gather(tensor: Tensor, group: Any = None, check: bool = True, out: Tensor | None = None) -> Tensor:
    """The tensors of all ranks, each of shape (n, ...), as one of shape (ranks * n, ...), on every rank."""
    this = _Collective("all_gather", tensor, group)
    gathered = this.result(this.gathered_shape, out)
    this.run(check, lambda on: all_gather_into(on, _movable(gathered), _movable(this.carried)), this.carried, gathered)
    return _handed_over(gathered, out, tensor)


def reduce_scatter(tensor: Tensor, op: str = "sum", group: Any = None, check: bool = True, out: Tensor | None = None) -> Tensor:
    """Add up the ranks' tensors of shape (ranks * n, ...); on rank r piece r of that, of shape (n, ...).

    Raises MismatchError if the rows do not divide by the ranks.
    """
    this = _Collective("reduce_scatter", tensor, group, op=op)
    piece = this.result(this.piece_shape(), out)
    this.run(check, lambda on: reduce_scatter_into(on, piece, this.carried, OPS[op]), this.carried, piece)
    return _handed_over(piece, out, tensor)


def all_to_all(tensor: Tensor, group: Any = None, check: bool = True, out: Tensor | None = None) -> Tensor:
    """Send piece r of `tensor`, of shape (ranks * n, ...), to rank r; returns the pieces that come, in the same shape.

    Piece r of what comes is from rank r. Raises MismatchError if the rows do not divide by the ranks.
    """
    this = _Collective("all_to_all", tensor, group)
    this.piece_shape()
    received = this.result(this.call.shape, out)
    sent, into = _movable(this.carried), _movable(received)
    this.run(check, lambda backend: backend.alltoall_base(into, sent, [], []), this.carried, received)
    return _handed_over(received, out, tensor)


class _Collective:
    """One rank's part in one collective: the group, what it is called with, and its tensor where the backend can take it."""

    def __init__(self, operation: str, tensor: Tensor, group: Any, root: int | None = None, op: str | None = None) -> None:
        self.group = checked_group(group, current_topology())
        if root is not None and not 0 <= root < self.group.size:
            ranks = f"this group of {self.group.size}: its ranks are 0 to {self.group.size - 1}"
            raise PenstockError(f"root {root} is not in {ranks}")
        _check_possible(operation, tensor, op)
        self.call = call_of(operation, tensor.shape, tensor.dtype, root, op)
        self.carried = self.to_carrier(tensor)

    def run(self, check: bool, start: Callable[[Any], Any], source: Tensor | None = None, into: Tensor | None = None) -> None:
        """Do it on the group's backend by `start`; in a group of one `source`, if there is one, is copied `into`."""
        if self.group.size > 1:
            self.group.run(self.call, check, start)
        elif source is not None and into is not None:
            into.copy_(source.view(into.shape))

    def to_carrier(self, tensor: Tensor) -> Tensor:
        """`tensor` in one piece, where the backend can take it from; the very same memory if it is so already."""
        if tensor.requires_grad:
            tensor = tensor.detach()
        carrier = self.group.topology.carrier
        return (tensor if tensor.device == carrier else tensor.to(carrier)).contiguous()

    @property
    def gathered_shape(self) -> tuple[int, ...]:
        """(n, ...) -> (ranks * n, ...)."""
        rows, *others = self.call.shape or (1,)
        return self.group.size * rows, *others

    def piece_shape(self) -> tuple[int, ...]:
        """(ranks * n, ...) -> (n, ...). Raises MismatchError if there is no such n."""
        shape, ranks = self.call.shape, self.group.size
        if not shape or shape[0] % ranks:
            rows = f"{shape[0]} rows do" if shape else "a scalar does"
            raise MismatchError(
                f"{self.call.operation}: {rows} not divide into pieces for {ranks} ranks: "
                f"pad the first dimension to a multiple of {ranks}"
            )
        return shape[0] // ranks, *shape[1:]

    def fitting(self, rows: Tensor | None, output: Tensor) -> Tensor:
        """`rows`, which the root of a scatter must have given. Raises MismatchError if they do not fit `output`."""
        shape = self.gathered_shape
        if rows is None:
            raise MismatchError(f"rank {self.group.topology.rank} is the root of this scatter: give it rows of shape {shape}")
        if tuple(rows.shape) != shape or rows.dtype != output.dtype:
            raise MismatchError(
                f"scatter to {self.group.size} ranks of {tuple(output.shape)} {output.dtype} each needs rows of shape "
                f"{shape}: these are {tuple(rows.shape)} {rows.dtype}"
            )
        return rows

    def pieces(self, tensor: Tensor | None) -> list[Tensor]:
        """The pieces of `tensor` for or from each rank, each as `_movable(self.carried)`; none of None."""
        return [] if tensor is None else list(_movable(tensor).view(self.group.size, *_movable(self.carried).shape))

    def result(self, shape: tuple[int, ...], out: Tensor | None) -> Tensor:
        """Where the backend can put a result of this shape: new memory, or that of `out`."""
        dtype = self.carried.dtype
        if out is None:
            return torch.empty(shape, dtype=dtype, device=self.carried.device)
        if tuple(out.shape) != tuple(shape) or out.dtype != dtype:
            raise MismatchError(f"out is {tuple(out.shape)} {out.dtype}, but the result is {tuple(shape)} {dtype}")
        return self.to_carrier(out)


def _check_possible(operation: str, tensor: Tensor, op: str | None) -> None:
    """Raises PenstockError for what cannot be done with this tensor."""
    if tensor.dtype not in DTYPES or tensor.dim() > MAX_DIMENSIONS:
        raise PenstockError(f"{operation} cannot carry a tensor of {tensor.dim()} dimensions and {tensor.dtype}")
    if op is not None and op not in OPS:
        raise PenstockError(f"{operation} knows no op {op!r}: use {', '.join(OPS)}")
    if op is not None and tensor.dtype in NOT_SUMMED:
        raise PenstockError(f"{operation} cannot take the {op} of {tensor.dtype}: convert it first, as with .float()")


def _movable(tensor: Tensor) -> Tensor:
    """`tensor` with a dimension at least, as bytes where the backend does not know its dtype."""
    if tensor.dtype in AS_BYTES:
        return as_bytes(tensor)
    return tensor if tensor.dim() else tensor.view(1)


def _bring_back(carried: Tensor, tensor: Tensor) -> Tensor:
    """`tensor`, with what is in `carried` if that is other memory."""
    if carried is not tensor and (carried.data_ptr() != tensor.data_ptr() or carried.device != tensor.device):
        tensor.detach().copy_(carried)
    return tensor


def _handed_over(result: Tensor, out: Tensor | None, tensor: Tensor) -> Tensor:
    """The result in `out`, or where `tensor` is."""
    if out is not None:
        return _bring_back(result, out)
    return result if result.device == tensor.device else result.to(tensor.device)
