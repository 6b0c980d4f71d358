"""Send a tensor from one rank to another, with a header by which the receiver checks it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from penstock import torch_private
from penstock.comms.encoding import view_as_bytes
from penstock.comms.process_groups import wait_for_work
from penstock.comms.status import LOST, explain_failure, read, status_of_error
from penstock.comms.topology import Topology, current_topology
from penstock.comms.wait_errors import WaitError, convert_errors
from penstock.errors import MismatchError, PenstockError

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
MAX_DIMENSIONS = 14
SAME_CALLS_HINT = "all ranks must make the same calls, with the same release"


def send_tensor(tensor: torch.Tensor, dest: int | None) -> None:
    """Send a tensor to another rank, which calls `recv_tensor`; wait until it has been received.

    `tensor`: of any shape (up to 14 dimensions) and memory layout, on any device. Only its values are sent, no gradient.
    `dest`: the receiving rank, as `get_next_rank()` returns it. None, at the end of the pipeline, raises PenstockError.

        hidden = ...                                            # (batch, width)
        ps.comms.send_tensor(hidden, ps.comms.get_next_rank())

    Raises PenstockError if there is no rank `dest`, MismatchError for a dtype that cannot be sent, LostRankError if the other
    rank is lost or does not receive within the timeout.
    """
    topology = current_topology()
    dest = _check_peer(topology, dest, "send to", "next")
    if tensor.dim() > MAX_DIMENSIONS or tensor.dtype not in DTYPES:
        raise MismatchError(f"cannot send a tensor of {tensor.dim()} dimensions and {tensor.dtype}")
    header = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    with _explain_failure(topology, f"to send a {_describe_tensor(tensor.shape, tensor.dtype)} to rank {dest}", dest):
        dist.send(torch.tensor(header + [0] * (MAX_DIMENSIONS + 2 - len(header)), device="cpu"), dest)
        data = view_as_bytes(tensor.detach().to(topology.transport_device).contiguous())
        _wait_for_transfer(_world_backend(topology).send([data], dest, 0), topology, dest)


def recv_tensor(
    shape: Sequence[int], src: int | None, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> torch.Tensor:
    """Receive the tensor that another rank sends by `send_tensor`, and return it, contiguous.

    `shape`, `dtype`: of the tensor that is expected.
    `src`: the sending rank, as `get_prev_rank()` returns it. None, at the start of the pipeline, raises PenstockError.
    `device`: of the returned tensor; by default this rank's.

        hidden = ps.comms.recv_tensor((batch, width), ps.comms.get_prev_rank())

    Raises MismatchError if the tensor has another shape or dtype, PenstockError if there is no rank `src`, LostRankError if
    nothing arrives within the timeout. After a MismatchError the next tensor can be received.
    """
    topology = current_topology()
    src = _check_peer(topology, src, "receive from", "previous")
    header = torch.empty(MAX_DIMENSIONS + 2, dtype=torch.int64, device="cpu")
    with _explain_failure(topology, f"for a {_describe_tensor(shape, dtype)} from rank {src}", src):
        dist.recv(header, src)
        index, dimensions, *sizes = header.tolist()
        if not (0 <= index < len(DTYPES) and 0 <= dimensions <= MAX_DIMENSIONS and min(sizes) >= 0):
            raise MismatchError(f"rank {src} sent something that is no tensor of send_tensor: {SAME_CALLS_HINT}")
        sent_shape, sent_dtype = tuple(sizes[:dimensions]), DTYPES[index]
        tensor = torch.empty(sent_shape, dtype=sent_dtype, device=topology.transport_device)
        _wait_for_transfer(_world_backend(topology).recv([view_as_bytes(tensor)], src, 0), topology, src)
    if sent_shape != tuple(shape) or sent_dtype != dtype:
        raise MismatchError(
            f"rank {topology.rank} expected a {_describe_tensor(shape, dtype)} from rank {src}, "
            f"which sent a {_describe_tensor(sent_shape, sent_dtype)}"
        )
    return tensor.to(topology.device if device is None else device)


def _world_backend(topology: Topology) -> Any:
    assert dist.group.WORLD is not None
    return torch_private.group_backend(dist.group.WORLD, topology.transport_device)


@contextmanager
def _explain_failure(topology: Topology, awaited: str, peer: int) -> Iterator[None]:
    """Raise LostRankError, which says how `peer` or another rank has ended, if the block's wait for `peer` fails."""
    try:
        with convert_errors(awaited, peer):
            yield
    except WaitError as error:
        topology.context.exit_if_launcher_is_gone()
        status = status_of_error(topology.rank, error, topology.timeout, topology.store)
        raise explain_failure(topology.store, None, range(topology.world_size), status) from None


def _wait_for_transfer(work: dist.Work, topology: Topology, peer: int) -> None:
    """Wait until the transfer is done. Raises RuntimeError once `peer` has ended without finishing it."""
    wait_for_work(
        work,
        topology,
        lambda: bool(read(topology.store, [peer])),
        lambda: any(status.kind in LOST for status in read(topology.store, [peer]).values()),
    )


def _check_peer(topology: Topology, peer: int | None, verb: str, side: str) -> int:
    if peer is None:
        raise PenstockError(f"rank {topology.rank} has nobody to {verb}: there is no {side} rank at this end")
    if not 0 <= peer < topology.world_size or peer == topology.rank:
        raise PenstockError(
            f"rank {topology.rank} cannot {verb} rank {peer}: the other ranks are among 0 to {topology.world_size - 1}"
        )
    return peer


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module: `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def _describe_tensor(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{tuple(shape)} {dtype_name(dtype)} tensor"
