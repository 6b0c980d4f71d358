"""`penstock doctor`: list devices, backends, message times and missing extras."""

import importlib.util
import platform
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import penstock
from penstock import comms
from penstock.comms.process_groups import ProcessGroups
from penstock.comms.system import count_cores
from penstock.comms.transport.channels import open_receiver, open_sender
from penstock.comms.transport.group_transport import PendingSends
from penstock.comms.transport.message_spec import message_spec_of
from penstock.comms.transport.send_thread import SendFailure
from penstock.distribution import other_distribution_problem
from penstock.launcher.launch import launch
from penstock.torch_private import NEWEST_RELEASE, parse_release
from penstock.trees import flatten

SIZES = (1, 16_384, 1_048_576)  # floats
ROUNDS = 50
Transfer = Callable[[Tensor], Any]  # sends or receives the tensor
EXTRAS = {  # module -> its use
    "sklearn": "penstock train --model mlp (pip install 'penstock-pipeline[mlp]')",
    "tensorboard": "metrics in TensorBoard (pip install 'penstock-pipeline[tensorboard]')",
    "PIL": "penstock show --png (pip install 'penstock-pipeline[png]')",
    "werkzeug": "penstock studio (pip install 'penstock-pipeline[studio]')",
    "ortools": "penstock search --effort optimal (pip install 'penstock-pipeline[optimal]')",
}


def examine() -> None:
    """Print what this machine offers; a minus sign marks what is missing."""
    print(f"+ Python {platform.python_version()}, torch {torch.__version__}, penstock {penstock.__version__}")
    _warn_if_untested(torch.__version__)
    if problem := other_distribution_problem():
        print(f"- {problem}")
    print(f"+ {count_cores()} processor cores: more ranks than cores share them, and actions take longer than the table says")
    _devices()
    _print_item(dist.is_gloo_available(), "Gloo, for CPUs", "Gloo: this build of torch does not have it")
    _print_item(dist.is_nccl_available(), "NCCL, for GPUs", "NCCL: this build of torch does not have it")
    for module, use in EXTRAS.items():
        _print_item(importlib.util.find_spec(module) is not None, f"{module}, for {use}", f"{module}, needed for {use}")
    begin = time.perf_counter()
    launch(_do_nothing, 2)
    print(f"+ two ranks start in {time.perf_counter() - begin:.2f} s, the first time in a program")
    begin = time.perf_counter()
    launch(_do_nothing, 2)
    print(f"+ two ranks start in {time.perf_counter() - begin:.2f} s, later")
    for device in ["cpu", *["cuda"] * torch.cuda.is_available()]:
        for transport, times in launch(ping_pong, 2, device)[0].items():
            for floats, seconds in times.items():
                size = floats * 4
                print(f"+ {transport}, {size:>9,} bytes take {seconds * 1e6:6.0f} us, {size / seconds / 1e9:.2f} GB/s")


def _print_item(is_present: bool, present: str, absent: str) -> None:
    print(f"+ {present}" if is_present else f"- {absent}")


def _warn_if_untested(version: str) -> None:
    if parse_release(version) > NEWEST_RELEASE:
        print(
            f"- Penstock is tested with torch up to {'.'.join(map(str, NEWEST_RELEASE))}: "
            f"differences of {version} are not known"
        )


def _devices() -> None:
    if not torch.cuda.is_available():
        print("- no CUDA GPU that torch can use: stages live on the CPU")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        print(f"+ cuda:{index} {properties.name}, {properties.total_memory / 1e9:.0f} GB")
    if torch.backends.mps.is_available():
        print("+ mps: Apple's GPU (messages go through host memory)")


def _do_nothing() -> None:
    pass


def ping_pong(device: str) -> dict[str, dict[int, float]]:
    """Return for each transport: floats of a message on `device` -> seconds, half of the median round trip."""
    topology = comms.init_distributed("gloo", device=device)
    groups, peer = ProcessGroups(topology, "doctor"), 1 - topology.rank
    pending = PendingSends(SendFailure(groups))
    if topology.rank == 0:
        outgoing, incoming = open_sender(groups, "forth", peer, pending), open_receiver(groups, "back", peer)
    else:
        incoming, outgoing = open_receiver(groups, "forth", peer), open_sender(groups, "back", peer, pending)

    def send(tensor: Tensor) -> None:
        spec = message_spec_of(*flatten(tensor))
        outgoing.send([tensor], spec, spec)

    def receive(tensor: Tensor) -> None:
        incoming.receive(incoming.post_receive(message_spec_of(*flatten(tensor))))
        torch.get_device_module(topology.device).synchronize()
        pending.finish_step()

    own_transport = f"a message on {topology.device.type} by {outgoing.medium}"
    transports: dict[str, tuple[Transfer, Transfer]] = {own_transport: (send, receive)}
    if device == "cpu":
        transports["a message by Gloo"] = partial(dist.send, dst=peer), partial(dist.recv, src=peer)
    sends_first, own_device = topology.rank == 0, topology.device
    result = {
        transport: {floats: _seconds(sends_first, torch.zeros(floats, device=own_device), *transfers) for floats in SIZES}
        for transport, transfers in transports.items()
    }
    groups.close()
    return result


def _seconds(sends_first: bool, tensor: Tensor, send: Transfer, receive: Transfer) -> float:
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for transfer in (send, receive) if sends_first else (receive, send):
            transfer(tensor)
        times.append((time.perf_counter() - begin) / 2)
    return median(times)
