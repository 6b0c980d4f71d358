"""The backward of replicas whose gradients travel in buckets while it goes on: planned, drawn, and run on emulated devices."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock as ps
from penstock.learn.devices import EmulatedLayer

DIM, ROWS = 16, 3
DEEP, BACKWARD = 8, 0.008  # emulated layers, and the seconds of the backward of one
LATENCY, TRANSFER = 0.006, 0.006  # seconds of an all-reduce, and for each layer's gradients in it


@dataclass(frozen=True)
class Span:
    """A piece of work of the backward or of the network."""

    what: str
    start: float  # seconds
    end: float
    on_wire: bool


def wire(layers: int) -> float:
    """The seconds of an all-reduce of these layers' gradients."""
    return LATENCY + layers * TRANSFER


def planned(count: int) -> list[Span]:
    """The backward in `count` buckets, by arithmetic: a bucket is sent when it is full, and the one before is through."""
    spans, free, size = [], 0.0, DEEP // count
    for num_done in range(1, DEEP + 1):
        spans.append(Span(str(DEEP - num_done), (num_done - 1) * BACKWARD, num_done * BACKWARD, on_wire=False))
        if num_done % size == 0:
            start = max(free, num_done * BACKWARD)
            free = start + wire(size)
            spans.append(Span(str(num_done // size - 1), start, free, on_wire=True))
    return spans


def drawn(spans: list[Span]) -> str:
    """The backward's layers in one line, the network's buckets in the other."""
    unit, lines = 0.002, []
    for name in ("backward", "network"):
        line = ["."] * round(spans[-1].end / unit)
        for span in spans:
            if span.on_wire is (name == "network"):
                start, end = round(span.start / unit), round(span.end / unit)
                line[start:end] = span.what.ljust(end - start, "=")
        lines.append(f"  {name:9}|{''.join(line)}")
    return "\n".join(lines)


def measured(count: int) -> tuple[float, Tensor, int]:
    """The seconds of the least disturbed backward in `count` buckets, the summed gradients, and the buckets sent early."""
    topology = ps.comms.init_distributed(backend="gloo")
    layers = [EmulatedLayer(DIM, 0.0, BACKWARD).double() for _ in range(DEEP)]
    generator, size = torch.Generator().manual_seed(topology.rank), DEEP // count
    inputs = torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64)
    times, early = [], 0
    with ThreadPoolExecutor(1) as network:  # one wire: it carries one bucket after the other
        sending: list[Future[None]] = []

        def ready(number: int, weight: Tensor) -> None:
            """Layer `number` has its gradient; where it is the first of a bucket, the bucket is full."""
            nonlocal early
            if number == 0:  # the backward's last layer
                early = len(sending)
            if number % size == 0:
                sending.append(network.submit(all_reduce, layers[number : number + size]))

        for number, layer in enumerate(layers):
            layer.weight.register_post_accumulate_grad_hook(partial(ready, number))
        for _ in range(3):
            loss = nn.Sequential(*layers)(inputs).square().mean()
            for layer in layers:
                layer.weight.grad = None
            sending.clear()
            dist.barrier()
            start = time.perf_counter()
            loss.backward()
            for handle in sending:
                handle.result()
            times.append(time.perf_counter() - start)
    return min(times), torch.cat([gradient(layer) for layer in layers]), early


def all_reduce(layers: list[EmulatedLayer]) -> None:
    """One all-reduce of a bucket, which takes as long as the emulated network."""
    until = time.perf_counter() + wire(len(layers))
    total = torch.cat([gradient(layer) for layer in layers])
    dist.all_reduce(total)
    for layer, piece in zip(layers, total.split(DIM), strict=True):
        layer.weight.grad = piece
    time.sleep(max(0.0, until - time.perf_counter()))


def gradient(layer: EmulatedLayer) -> Tensor:
    """Of the layer's weight."""
    assert layer.weight.grad is not None
    return layer.weight.grad
