"""What a backward in two costs beside a full one: (I + W) / B of one stage, in one process, on both engines."""

import time
from collections.abc import Iterable
from statistics import median
from typing import Any, Protocol

import torch
from explain import ratio
from subjects import Perceptron, Subject, TransformerSubject
from tables import Row, show
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight

import penstock as ps
from penstock.comms.topology import CPU
from penstock.model import GPTConfig
from penstock.stage.stage import Stage

MICROBATCHES = 8  # of the batch
CUT = 4  # stages of the model; the second of them is measured
WIDE = TransformerSubject(name="gpt 256", config=GPTConfig(width=256))
TURNS: dict[Subject, int] = {Perceptron(): 20, TransformerSubject(): 20, WIDE: 8, Perceptron(dim=16): 500}  # for each repeat

Lap = tuple[float, float]  # seconds of a forward, and of its backward


def split(repeats: int) -> list[Row]:
    """Measure and print."""
    (rows,) = ps.launch(_compare, 1, repeats)
    print("\nThe backward in two, one process of one thread, a microbatch at a time: (I + W) / B; B and I + W in ms.")
    print("'our F': our forward that prepares for it, beside an ordinary one.")
    show(rows, "stage", "our (I+W)/B", "peer's (I+W)/B", "our B", "peer's B", "our I+W", "peer's I+W", "our F")
    return rows


class StageEngine(Protocol):
    """Runs one stage, one microbatch at a time."""

    def forward(self, value: Tensor) -> None:
        """With what the backward needs."""

    def backward(self, gradient: Tensor) -> None:
        """Full, or I and W."""

    def end(self) -> None:
        """Of a step."""


class Ours:
    """`penstock.stage.stage.Stage`."""

    def __init__(self, module: nn.Module, divided: bool, device: torch.device = CPU) -> None:
        self.stage, self.divided = Stage(1, module, device, in_order=True), divided
        self.stage.begin_step()  # as before a step

    def forward(self, value: Tensor) -> None:
        """With what the backward needs."""
        self.stage.forward(0, [value], split_backward=self.divided)

    def backward(self, gradient: Tensor) -> None:
        """Full, or I and W."""
        self.stage.backward(0, [gradient])
        if self.divided:
            self.stage.backward_weight(0)

    def end(self) -> None:
        """Of a step."""
        self.stage.begin_step()


class Theirs:
    """The functions that the peer's stages call."""

    def __init__(self, module: nn.Module, divided: bool, device: torch.device = CPU) -> None:
        self.module, self.divided = module, divided

    def forward(self, value: Tensor) -> None:
        """With what the backward needs."""
        self.leaf = value.detach().requires_grad_()
        self.output = self.module(self.leaf)

    def backward(self, gradient: Tensor) -> None:
        """Full, or I and W."""
        if self.divided:
            _, owed = stage_backward_input([self.output], [gradient], [self.leaf], self.module.parameters())
            stage_backward_weight(self.module.parameters(), owed)
        else:
            stage_backward((self.output,), (gradient,), [self.leaf])

    def end(self) -> None:
        """Nothing to do."""


def _compare(repeats: int) -> list[Row]:
    return [_row(subject, turns * repeats) for subject, turns in TURNS.items()]


def _row(subject: Subject, turns: int) -> Row:
    before, module = subject.stages(CUT)[:2]
    with torch.no_grad():
        value = before(subject.batch(MICROBATCHES)[0].chunk(MICROBATCHES)[0]).requires_grad_()
        gradient = torch.randn_like(module(value))
    makers: dict[str, Any] = {"our": Ours, "peer's": Theirs}
    engines: dict[Any, StageEngine] = {
        (name, divided): make(module, divided) for name, make in makers.items() for divided in (False, True)
    }
    _check(engines.values(), module, value, gradient)
    laps: dict[Any, list[Lap]] = {key: [] for key in engines}
    for turn in range(turns):
        for key in engines if turn % 2 else reversed(engines):  # nobody always goes first
            laps[key].append(_lap(engines[key], value, gradient))
    row: Row = {"stage": subject.name}
    for name in makers:
        (full_forwards, full), (forwards, halves) = (zip(*laps[name, divided], strict=True) for divided in (False, True))
        row |= {f"{name} (I+W)/B": ratio(full, halves), f"{name} F": ratio(full_forwards, forwards)}
        row |= {f"{name} B": 1e3 * median(full), f"{name} I+W": 1e3 * median(halves)}
    return row


def _check(engines: Iterable[StageEngine], module: nn.Module, value: Tensor, gradient: Tensor) -> None:
    """All make the same gradients, which stay: in what is timed each microbatch adds to them."""
    found = []
    for engine in engines:
        module.zero_grad()
        _lap(engine, value, gradient)
        engine.end()
        found.append([parameter.grad for parameter in module.parameters()])
    for result in found[1:]:
        torch.testing.assert_close(result, found[0])


def _lap(engine: StageEngine, value: Tensor, gradient: Tensor) -> Lap:
    start = time.perf_counter()
    engine.forward(value)
    between = time.perf_counter()
    engine.backward(gradient)
    return between - start, time.perf_counter() - between
