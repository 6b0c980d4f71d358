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

`group` is a process group of torch, as `mesh.get_group("tp")`, by default all ranks; `root` is a rank's number in the group.
Non-contiguous tensors work. What the backend cannot carry (tensors of a GPU over Gloo) goes through host memory.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceScatterOptions

from penstock.comms.collectives.calls import SUMS, Call, call_of
from penstock.comms.collectives.meeting import Meeting, meeting_of
from penstock.comms.point_to_point import DTYPES, MAX_DIMENSIONS
from penstock.comms.topology import CPU, current_topology
from penstock.errors import MismatchError, PenstockError

AS_BYTES = (torch.int16, torch.complex64, torch.complex128)  # dtypes that Gloo does not know, but can carry
NOT_SUMMED = (*AS_BYTES, torch.bool)


def broadcast(tensor: Tensor, root: int = 0, group: Any = None, check: bool = True) -> Tensor:
    """Fill `tensor` on every rank with rank `root`'s, in place; returns it."""
    meeting = _meeting(group, root)
    call = _call("broadcast", tensor, root)
    carried = _carried(tensor, meeting)
    meeting.run(call, check, lambda backend: backend.broadcast(_movable(carried), root))
    _bring_back(carried, tensor)
    return tensor


def reduce(tensor: Tensor, root: int = 0, op: str = "sum", group: Any = None, check: bool = True) -> Tensor:
    """Add up the ranks' tensors on rank `root`, in place; returns it. What the other ranks' tensors hold then is undefined.

    `op` is sum, product, min or max.
    """
    meeting = _meeting(group, root)
    call = _call("reduce", tensor, root, op)
    carried = _carried(tensor, meeting)
    meeting.run(call, check, lambda backend: backend.reduce(carried, root, SUMS[op]))
    _bring_back(carried, tensor)
    return tensor


def all_reduce(tensor: Tensor, op: str = "sum", group: Any = None, check: bool = True) -> Tensor:
    """Add up the ranks' tensors on every rank, in place; returns it. `op` is sum, product, min or max."""
    meeting = _meeting(group)
    call = _call("all_reduce", tensor, op=op)
    carried = _carried(tensor, meeting)
    meeting.run(call, check, lambda backend: backend.allreduce(carried, SUMS[op]))
    _bring_back(carried, tensor)
    return tensor


def scatter(output: Tensor, rows: Tensor | None = None, root: int = 0, group: Any = None, check: bool = True) -> Tensor:
    """Fill `output`, of shape (n, ...), on rank r with piece r of rank `root`'s `rows`, of shape (ranks * n, ...); returns it.

    The other ranks need no `rows`. Raises MismatchError on the root if the shape or dtype of `rows` does not fit.
    """
    meeting = _meeting(group, root)
    call = _call("scatter", output, root)
    carried, pieces = _carried(output, meeting), list[Tensor]()
    if meeting.rank == root:
        fitting = _gathered_shape(output, meeting.size)
        if rows is None:
            raise MismatchError(f"rank {meeting.topology.rank} is the root of this scatter: give it rows of shape {fitting}")
        if tuple(rows.shape) != fitting or rows.dtype != output.dtype:
            raise MismatchError(
                f"scatter to {meeting.size} ranks of {tuple(output.shape)} {output.dtype} each needs rows of shape {fitting}: "
                f"these are {tuple(rows.shape)} {rows.dtype}"
            )
        pieces = _pieces(_carried(rows, meeting), carried, meeting.size)
    if meeting.size == 1:
        _movable(carried).copy_(pieces[0])
    meeting.run(call, check, lambda backend: backend.scatter(_movable(carried), pieces, root))
    _bring_back(carried, output)
    return output


def gather(tensor: Tensor, root: int = 0, group: Any = None, check: bool = True, out: Tensor | None = None) -> Tensor | None:
    """On rank `root` the tensors of all ranks, each of shape (n, ...), as one of shape (ranks * n, ...); None elsewhere."""
    meeting = _meeting(group, root)
    call = _call("gather", tensor, root)
    carried, gathered, pieces = _carried(tensor, meeting), None, list[Tensor]()
    if meeting.rank == root:
        gathered = _result(carried, _gathered_shape(tensor, meeting.size), out, meeting)
        pieces = _pieces(gathered, carried, meeting.size)
    if meeting.size == 1:
        pieces[0].copy_(_movable(carried))
    meeting.run(call, check, lambda backend: backend.gather(pieces, _movable(carried), root))
    return None if gathered is None else _handed_over(gathered, out, tensor)


def all_gather(tensor: Tensor, group: Any = None, check: bool = True, out: Tensor | None = None) -> Tensor:
    """The tensors of all ranks, each of shape (n, ...), as one of shape (ranks * n, ...), on every rank."""
    meeting = _meeting(group)
    call = _call("all_gather", tensor)
    carried = _carried(tensor, meeting)
    gathered = _result(carried, _gathered_shape(tensor, meeting.size), out, meeting)
    if meeting.size == 1:
        gathered.copy_(carried)
    meeting.run(call, check, lambda backend: backend._allgather_base(_movable(gathered), _movable(carried)))
    return _handed_over(gathered, out, tensor)


def reduce_scatter(tensor: Tensor, op: str = "sum", group: Any = None, check: bool = True, out: Tensor | None = None) -> Tensor:
    """Add up the ranks' tensors of shape (ranks * n, ...); on rank r piece r of that, of shape (n, ...).

    Raises MismatchError if the rows do not divide by the ranks.
    """
    meeting = _meeting(group)
    call = _call("reduce_scatter", tensor, op=op)
    carried = _carried(tensor, meeting)
    piece = _result(carried, _scattered_shape(call, meeting), out, meeting)
    if meeting.size == 1:
        piece.copy_(carried)
    options = ReduceScatterOptions()
    options.reduceOp = SUMS[op]
    meeting.run(call, check, lambda backend: backend._reduce_scatter_base(piece, carried, options))
    return _handed_over(piece, out, tensor)


def all_to_all(tensor: Tensor, group: Any = None, check: bool = True, out: Tensor | None = None) -> Tensor:
    """Send piece r of `tensor`, of shape (ranks * n, ...), to rank r; returns the pieces that come, in the same shape.

    Piece r of what comes is from rank r. Raises MismatchError if the rows do not divide by the ranks.
    """
    meeting = _meeting(group)
    call = _call("all_to_all", tensor)
    _scattered_shape(call, meeting)
    carried = _carried(tensor, meeting)
    received = _result(carried, tuple(tensor.shape), out, meeting)
    if meeting.size == 1:
        received.copy_(carried)
    meeting.run(call, check, lambda backend: backend.alltoall_base(_movable(received), _movable(carried), [], []))
    return _handed_over(received, out, tensor)


def _meeting(group: Any, root: int = 0) -> Meeting:
    meeting = meeting_of(group, current_topology())
    if not 0 <= root < meeting.size:
        raise PenstockError(f"root {root} is not in this group of {meeting.size}: its ranks are 0 to {meeting.size - 1}")
    return meeting


def _call(operation: str, tensor: Tensor, root: int | None = None, op: str | None = None) -> Call:
    """What this rank was called with. Raises PenstockError for what cannot be done with this tensor."""
    if tensor.dtype not in DTYPES or tensor.dim() > MAX_DIMENSIONS:
        raise PenstockError(f"{operation} cannot carry a tensor of {tensor.dim()} dimensions and {tensor.dtype}")
    if op is not None:
        if op not in SUMS:
            raise PenstockError(f"{operation} knows no op {op!r}: use {', '.join(SUMS)}")
        if tensor.dtype in NOT_SUMMED:
            raise PenstockError(f"{operation} cannot take the {op} of {tensor.dtype}: convert it first, as with .float()")
    return call_of(operation, tensor.shape, tensor.dtype, root, op)


def _gathered_shape(tensor: Tensor, ranks: int) -> tuple[int, ...]:
    rows, *others = tensor.shape or (1,)
    return ranks * rows, *others


def _scattered_shape(call: Call, meeting: Meeting) -> tuple[int, ...]:
    if not call.shape or call.shape[0] % meeting.size:
        rows = f"{call.shape[0]} rows do" if call.shape else "a scalar does"
        raise MismatchError(
            f"{call.operation}: {rows} not divide into pieces for {meeting.size} ranks: "
            f"pad the first dimension to a multiple of {meeting.size}"
        )
    return call.shape[0] // meeting.size, *call.shape[1:]


def _carried(tensor: Tensor, meeting: Meeting) -> Tensor:
    """`tensor` in one piece, where the backend can take it from; the very same memory if it is so already."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    carrier = meeting.topology.device if meeting.topology.backend == "nccl" else CPU
    return (tensor if tensor.device == carrier else tensor.to(carrier)).contiguous()


def _bring_back(carried: Tensor, tensor: Tensor) -> None:
    if carried is not tensor and (carried.data_ptr() != tensor.data_ptr() or carried.device != tensor.device):
        tensor.detach().copy_(carried)


def _movable(tensor: Tensor) -> Tensor:
    """`tensor` with a dimension at least, as bytes where the backend does not know its dtype."""
    if tensor.dtype in AS_BYTES:
        return tensor.view(-1).view(torch.uint8)
    return tensor if tensor.dim() else tensor.view(1)


def _pieces(tensor: Tensor, like: Tensor, ranks: int) -> list[Tensor]:
    """The pieces for or from each rank, each as `_movable(like)`."""
    return list(_movable(tensor).view(ranks, *_movable(like).shape))


def _result(carried: Tensor, shape: tuple[int, ...], out: Tensor | None, meeting: Meeting) -> Tensor:
    """Where the backend can put a result of this shape: new memory, or that of `out`."""
    if out is None:
        return torch.empty(shape, dtype=carried.dtype, device=carried.device)
    if tuple(out.shape) != shape or out.dtype != carried.dtype:
        raise MismatchError(f"out is {tuple(out.shape)} {out.dtype}, but the result is {shape} {carried.dtype}")
    return _carried(out, meeting)


def _handed_over(result: Tensor, out: Tensor | None, tensor: Tensor) -> Tensor:
    """The result in `out`, or where `tensor` is."""
    if out is None:
        return result if result.device == tensor.device else result.to(tensor.device)
    _bring_back(result, out)
    return out
