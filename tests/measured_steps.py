"""Tables drawn as text, and steps of them as an engine would have measured them."""

import re
from dataclasses import replace

import pytest

from penstock.schedule import Action, Costs, Schedule, Timeline, build, from_rows, simulate
from penstock.schedule.transform import with_full_backwards

LAYERS = 24


def runs(name: str, ranks: int, microbatches: int) -> Schedule:
    """The table as the engine runs it."""
    return replace(with_full_backwards(build(name, ranks, microbatches)), overlaps=frozenset())


def even(stages: int) -> list[int]:
    return [LAYERS // stages] * stages


def ran(schedule: Schedule, layers: list[int], send: float = 0.0, engine: float = 0.0) -> Timeline:
    """A step of layers that take 4, 3 and 2 (F, I, W), on an engine that takes its time after every action."""
    forward, inputs, weights = ([unit * size + engine for size in layers] for unit in (4, 3, 2))
    full = tuple(5 * size + engine for size in layers)
    timeline = simulate(schedule, Costs(forward, inputs, weights, send, backward=full))
    rows = tuple(tuple(event._replace(end=event.end - engine) for event in row) for row in timeline.rows)
    return Timeline(f"{schedule.name}, measured", rows)


def close(value):
    return pytest.approx(value, rel=1e-9, abs=1e-9)


def table(text: str, placement="loop") -> Schedule:
    """The table drawn in `text`: a line for each rank, pairs as `{0F1 0B0}`."""
    rows = [re.findall(r"\{(\S+) (\S+)\}|(\S+)", line) for line in text.strip().splitlines()]
    cells = [[Action.parse(c) if c else (Action.parse(a), Action.parse(b)) for a, b, c in row] for row in rows]
    return from_rows("drawn", cells, placement)
