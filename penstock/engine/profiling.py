"""Ranges in torch.profiler's traces: each action under its cell, `2F3`, each message under PyTorch's name, `2RECV_F3`.

Whether a profiler runs is asked once a step. While none does, nothing of this is called.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.profiler import record_function

from penstock.engine.observers import ObservedStep, Observer, StepFunctions
from penstock.schedule.program import Transfer
from penstock.schedule.table import Action, Kind
from penstock.torch_private import profiler_is_active


class ProfilerRanges(Observer):
    """Puts a range around each action and each message, while a profiler runs."""

    def wrap(self, step: ObservedStep, functions: StepFunctions) -> StepFunctions:
        """Return the functions, with a range around each call."""
        if not profiler_is_active():
            return functions
        actions = {kind: partial(_run_in_range, function) for kind, function in functions.actions.items()}
        return StepFunctions(actions, partial(_receive_in_range, functions.receive), partial(_send_in_range, functions.send))


def _run_in_range(function: Callable[..., Any], action: Action, values: Sequence[Any]) -> Any:
    with record_function(str(action)):
        return function(action, values)


def _receive_in_range(receive: Callable[[Transfer], Any], transfer: Transfer) -> Any:
    kind, stage, *_ = transfer.action
    receiver = transfer.skip_stage if transfer.skip_stage is not None else stage + 1 if kind is Kind.F else stage - 1
    with record_function(f"{receiver}RECV_{_direction(kind)}{transfer.action.microbatch_text}"):
        return receive(transfer)


def _send_in_range(send: Callable[[Transfer, Any], None], transfer: Transfer, value: Any) -> None:
    kind, stage, *_ = transfer.action
    with record_function(f"{stage}SEND_{_direction(kind)}{transfer.action.microbatch_text}"):
        send(transfer, value)


def _direction(kind: Kind) -> str:
    """Return PyTorch's letter for the message of an action: F for an output, B for a gradient."""
    return "F" if kind is Kind.F else "B"
