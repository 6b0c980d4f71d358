"""Average gradients of replicas in buckets during the backward: simulated, drawn, and measured on emulated devices."""

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
NUM_LAYERS, BACKWARD_SECONDS = 8, 0.008  # emulated layers; backward of one layer
LATENCY_SECONDS, TRANSFER_SECONDS = 0.006, 0.006  # of an all-reduce; more for each layer's gradients in it


@dataclass(frozen=True)
class Span:
    """The backward of one layer, or the all-reduce of one bucket."""

    label: str  # number of the layer or bucket
    start: float  # seconds
    end: float
    on_network: bool


def all_reduce_seconds(num_layers: int) -> float:
    """Return the seconds of an all-reduce of the gradients of `num_layers` layers."""
    return LATENCY_SECONDS + num_layers * TRANSFER_SECONDS


def plan_backward(count: int) -> list[Span]:
    """Simulate the backward in `count` buckets: a bucket is averaged once it is full and the one before it has finished."""
    spans, network_free, size = [], 0.0, NUM_LAYERS // count
    for num_done in range(1, NUM_LAYERS + 1):
        end = num_done * BACKWARD_SECONDS
        spans.append(Span(str(NUM_LAYERS - num_done), end - BACKWARD_SECONDS, end, on_network=False))
        if num_done % size == 0:
            start = max(network_free, end)
            network_free = start + all_reduce_seconds(size)
            spans.append(Span(str(num_done // size - 1), start, network_free, on_network=True))
    return spans


def draw_spans(spans: list[Span]) -> str:
    """Draw the backward of layers in one line and the all-reduces of buckets in another."""
    unit_seconds, lines = 0.002, []
    for name in ("backward", "network"):
        line = ["."] * round(spans[-1].end / unit_seconds)
        for span in spans:
            if span.on_network is (name == "network"):
                start, end = round(span.start / unit_seconds), round(span.end / unit_seconds)
                line[start:end] = span.label.ljust(end - start, "=")
        lines.append(f"  {name:9}|{''.join(line)}")
    return "\n".join(lines)


def measure_backward(count: int) -> tuple[float, Tensor, int]:
    """Run the backward in `count` buckets three times on emulated devices. Every rank calls this.

    Returns the seconds of the fastest, the summed gradients, and how many buckets were posted before the backward ended.
    """
    topology = ps.comms.init_distributed(backend="gloo")
    layers = [EmulatedLayer(DIM, 0.0, BACKWARD_SECONDS).double() for _ in range(NUM_LAYERS)]
    generator, size = torch.Generator().manual_seed(topology.rank), NUM_LAYERS // count
    inputs = torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64)
    times, num_early = [], 0
    with ThreadPoolExecutor(1) as network:  # one thread: buckets are averaged one after the other
        handles: list[Future[None]] = []

        def on_gradient(number: int, weight: Tensor) -> None:
            """Average the bucket that begins at layer `number`: the backward goes down, so it is full now."""
            nonlocal num_early
            if number == 0:  # the backward's last layer
                num_early = len(handles)
            if number % size == 0:
                handles.append(network.submit(all_reduce, layers[number : number + size]))

        for number, layer in enumerate(layers):
            layer.weight.register_post_accumulate_grad_hook(partial(on_gradient, number))
        for _ in range(3):
            loss = nn.Sequential(*layers)(inputs).square().mean()
            for layer in layers:
                layer.weight.grad = None
            handles.clear()
            dist.barrier()
            start = time.perf_counter()
            loss.backward()
            for handle in handles:
                handle.result()
            times.append(time.perf_counter() - start)
    return min(times), torch.cat([gradient(layer) for layer in layers]), num_early


def all_reduce(layers: list[EmulatedLayer]) -> None:
    """Sum a bucket's gradients over the ranks, in the seconds of the emulated network."""
    end = time.perf_counter() + all_reduce_seconds(len(layers))
    total = torch.cat([gradient(layer) for layer in layers])
    dist.all_reduce(total)
    for layer, piece in zip(layers, total.split(DIM), strict=True):
        layer.weight.grad = piece
    time.sleep(max(0.0, end - time.perf_counter()))


def gradient(layer: EmulatedLayer) -> Tensor:
    """Return the gradient of the layer's weight."""
    assert layer.weight.grad is not None
    return layer.weight.grad
