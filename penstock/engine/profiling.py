"""Ranges in torch.profiler's traces: each action under its cell, `2F3`, each message under PyTorch's name, `2RECV_F3`.

Whether a profiler runs is asked once a step. While none does, nothing of this is called.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.profiler import record_function

from penstock.engine.actions import ActionFunctions
from penstock.schedule.program import Transfer
from penstock.schedule.table import Action, Kind

Receive = Callable[[Transfer], Any]
Send = Callable[[Transfer, Any], None]


def action_ranges(functions: ActionFunctions) -> ActionFunctions:
    """Return the functions of a step's actions, with a range around each call."""
    return {kind: partial(_run_in_range, function) for kind, function in functions.items()}


def _run_in_range(function: Callable[..., Any], action: Action, values: Sequence[Any]) -> Any:
    with record_function(str(action)):
        return function(action, values)


def message_ranges(receive: Receive, send: Send) -> tuple[Receive, Send]:
    """Return the functions that wait for a message and hand one over, with a range around each call."""
    return partial(_receive_in_range, receive), partial(_send_in_range, send)


def _receive_in_range(receive: Receive, transfer: Transfer) -> Any:
    kind, stage, *_ = transfer.action
    receiver = transfer.skip_stage if transfer.skip_stage is not None else stage + 1 if kind is Kind.F else stage - 1
    with record_function(f"{receiver}RECV_{_direction(kind)}{transfer.action.microbatch_text}"):
        return receive(transfer)


def _send_in_range(send: Send, transfer: Transfer, value: Any) -> None:
    kind, stage, *_ = transfer.action
    with record_function(f"{stage}SEND_{_direction(kind)}{transfer.action.microbatch_text}"):
        send(transfer, value)


def _direction(kind: Kind) -> str:
    """Return PyTorch's letter for the message of an action: F for an output, B for a gradient."""
    return "F" if kind is Kind.F else "B"
