"""Ranges in torch.profiler's traces: each action under its cell, `2F3`, each message under PyTorch's name, `2RECV_F3`.

Whether a profiler runs is asked once a step. While none does, nothing of this is called.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.profiler import record_function

from penstock.comms.transport.channels import ReceiveChannel, SendChannel
from penstock.engine.actions import ActionFunctions
from penstock.schedule.program import Transfer
from penstock.schedule.table import Action, Kind


def action_ranges(functions: ActionFunctions) -> ActionFunctions:
    """Return the functions of a step's actions, with a range around each call."""
    return {kind: partial(_run_in_range, function) for kind, function in functions.items()}


def _run_in_range(function: Callable[..., Any], action: Action, values: Sequence[Any]) -> Any:
    with record_function(str(action)):
        return function(action, values)


class ProfiledReceiveChannel:
    """The receiving end of a channel, with a range around every wait for a message."""

    def __init__(self, incoming: ReceiveChannel) -> None:
        self._incoming, self.post_receive = incoming, incoming.post_receive

    def receive(self, transfer: Transfer, device: torch.device) -> Any:
        """As `ReceiveChannel.receive`."""
        kind, stage, *_ = transfer.action
        receiver = transfer.skip_stage if transfer.skip_stage is not None else stage + 1 if kind is Kind.F else stage - 1
        with record_function(f"{receiver}RECV_{_direction(kind)}{transfer.action.microbatch_text}"):
            return self._incoming.receive(transfer, device)


class ProfiledSendChannel:
    """The sending end of a channel, with a range around every hand-over of a message."""

    def __init__(self, outgoing: SendChannel) -> None:
        self._outgoing = outgoing

    def send(self, transfer: Transfer, value: Any) -> None:
        """As `SendChannel.send`."""
        kind, stage, *_ = transfer.action
        with record_function(f"{stage}SEND_{_direction(kind)}{transfer.action.microbatch_text}"):
            self._outgoing.send(transfer, value)


def message_ranges(
    incoming: Mapping[int, ReceiveChannel], outgoing: Mapping[int, SendChannel]
) -> tuple[dict[int, ProfiledReceiveChannel], dict[int, ProfiledSendChannel]]:
    """Return both ends of the channels with a range around every message, by rank."""
    receives = {rank: ProfiledReceiveChannel(end) for rank, end in incoming.items()}
    return receives, {rank: ProfiledSendChannel(end) for rank, end in outgoing.items()}


def _direction(kind: Kind) -> str:
    """Return PyTorch's letter for the message of an action: F for an output, B for a gradient."""
    return "F" if kind is Kind.F else "B"
