"""The error of a wait that ends because another rank failed. Only this file reads what torch, Gloo, NCCL and the system say."""

from contextlib import ContextDecorator

import torch.distributed as dist

from penstock.comms.system import error_text, explain_error, is_out_of_resources
from penstock.errors import PenstockError, ResourceError


class WaitError(PenstockError):
    """A wait for another rank failed. Users never see it: the error that `explain_failure` returns is raised instead.

    `awaited`: what the rank waited for, as text. `peer`: which rank, None for any. `cause`: the transport's error.
    """

    def __init__(self, awaited: str, peer: int | None, cause: BaseException) -> None:
        super().__init__(awaited)
        self.awaited, self.peer, self.cause = awaited, peer, cause


class convert_errors(ContextDecorator):
    """A context manager that raises Penstock's error for the block's, if another rank or a limit of this system has caused it.

    `awaited`, `peer`: of the WaitError if another rank has caused it; empty if the block waits for none.
    `failure`: the text of the ResourceError (`rank 1 could not ..`) if this system refused something.
    """

    def __init__(self, awaited: str = "", peer: int | None = None, failure: str = "") -> None:
        self._awaited, self._peer, self._failure = awaited, peer, failure

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        converted = error and _convert_error(error, self._awaited, self._peer, self._failure)
        if converted is not None and converted is not error:
            raise converted from error


def _convert_error(error: BaseException, awaited: str, peer: int | None, failure: str) -> BaseException:
    """Return Penstock's error for `error`; `error` itself for any other cause."""
    if failure and is_out_of_resources(error):
        return ResourceError(f"{failure}: {explain_error(error)}")
    return WaitError(awaited, peer, error) if awaited and is_transport_error(error) else error


def is_transport_error(error: BaseException) -> bool:
    """Return whether `error` is from an operation of a group that failed because of another rank."""
    text = error_text(error)
    return isinstance(error, dist.DistError) or any(
        part in text for part in ("gloo/transport", "gloo/rendezvous", "pair closure")
    )


def has_timed_out(error: BaseException) -> bool:
    """Return whether the transport's `error` says that a wait took longer than its timeout."""
    return "timed out" in error_text(error).lower()
