"""Draw the pictures of the course, in docs/images/learn.

    python tools/course_pictures.py        # draws all again; make test says if one is not as this file draws it

A picture is a list of shapes, as of `penstock show --svg`. All are 360 pixels wide, so that a phone shows them in full size.
Their background is white in dark pages too. Colours also differ in lightness, and actions, phases and axes have texts.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from penstock.learn.equal_stages import simulate_equal_stages
from penstock.learn.labs.lab17_hardware import LINK_GB_PER_SECOND
from penstock.schedule import Costs, Timeline, build, simulate
from penstock.view.figure.shapes import INK_COLOR, MUTED_COLOR, Box, Figure, Line, Shape, Text, tint
from penstock.view.figure.svg import svg
from penstock.view.figure.timeline_figure import KIND_COLORS, KIND_TEXT_COLORS

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images" / "learn"
WIDTH, LEFT, RIGHT = 360.0, 46.0, 354.0  # of a picture; of its rows, to the right of their labels
SIZE, SMALL_SIZE = 11.0, 9.0  # of texts
ROW_HEIGHT = 16.0
IDLE_COLOR, PALE_COLOR, BLUE_COLOR, GREEN_COLOR, YELLOW_COLOR = "#f0f1f4", "#e3e7ee", "#bcd5f0", "#19653f", "#e9d49a"
PICTURES: dict[str, Callable[[], Figure]] = {}


def picture(draw: Callable[[], tuple[str, float, Sequence[Shape]]]) -> Callable[[], Figure]:
    """Add a picture, named as its function, which returns title, height and shapes."""

    def draw_figure() -> Figure:
        title, height, shapes = draw()
        return Figure(title, WIDTH, height, tuple(shapes))

    PICTURES[draw.__name__.replace("_", "-")] = draw_figure
    return draw_figure


# ---- parts of pictures


def text(x: float, y: float, words: str, anchor: str = "middle", size: float = SIZE, color: str = INK_COLOR) -> Text:
    """Return a text, by default centred at x."""
    return Text(x, y, words, size, anchor, color)


def labelled(x: float, y: float, width: float, height: float, words: str, color: str = PALE_COLOR) -> list[Shape]:
    """Return a box with a text in its middle."""
    return [Box(x, y, width, height, color, MUTED_COLOR), text(x + width / 2, y + height / 2, words)]


def arrow(x: float, y: float, to_x: float, to_y: float, color: str = INK_COLOR) -> list[Shape]:
    """Return an arrow."""
    length = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5
    back_x, back_y = 6 * (x - to_x) / length, 6 * (y - to_y) / length
    sides = ((back_x - back_y / 2, back_y + back_x / 2), (back_x + back_y / 2, back_y - back_x / 2))
    return [Line(x, y, to_x, to_y, color), *(Line(to_x, to_y, to_x + dx, to_y + dy, color) for dx, dy in sides)]


def legend(y: float, *items: tuple[str, str, str]) -> list[Shape]:
    """Return squares with their texts, in one line: (colour, hatch, text)."""
    shapes: list[Shape] = []
    x = 8.0
    for color, hatch, words in items:
        shapes += [Box(x, y - 5, 10, 10, color, MUTED_COLOR, hatch), text(x + 14, y, words, "start")]
        x += 26 + 5.6 * len(words)
    return shapes


def rows(timeline: Timeline, top: float, scale: float, show_stage: bool = False) -> Iterator[Shape]:
    """Draw a row for each rank, `scale` pixels for a unit of time; an action's text is its microbatch, or its name in full."""
    for rank, row in enumerate(timeline.rows):
        y = top + rank * (ROW_HEIGHT + 2)
        yield text(LEFT - 6, y + ROW_HEIGHT / 2, f"rank {rank}", "end")
        yield Box(LEFT, y, timeline.makespan * scale, ROW_HEIGHT, IDLE_COLOR)
        for event in row:
            kind, stage, microbatch, _ = event.action
            x, width = LEFT + event.start * scale, (event.end - event.start) * scale
            upper = stage >= timeline.ranks  # the rank's second stage: paler
            color = KIND_COLORS[kind.name]
            yield Box(x, y, width, ROW_HEIGHT, tint(color, 0.45) if upper else color, "#ffffff")
            words = f"{stage}{kind.name}{microbatch}" if show_stage else str(microbatch)
            if width > 5.4 * len(words):
                ink = INK_COLOR if upper else KIND_TEXT_COLORS[kind.name]
                yield text(x + width / 2, y + ROW_HEIGHT / 2, words, size=SMALL_SIZE, color=ink)


def time_axis(y: float, scale: float, end: float, step: int) -> Iterator[Shape]:
    """Draw a time axis with a tick every `step` units."""
    yield Line(LEFT, y, LEFT + end * scale, y)
    yield text(LEFT - 6, y + 10, "time", "end", color=MUTED_COLOR)
    for tick in range(0, int(end) + 1, step):
        yield Line(LEFT + tick * scale, y, LEFT + tick * scale, y + 4)
        yield text(LEFT + tick * scale, y + 11, str(tick), size=SMALL_SIZE, color=MUTED_COLOR)


def orders(parts: Mapping[str, Timeline], step: int, show_stage: bool = False, end: float = 0) -> tuple[float, list[Shape]]:
    """Draw timelines one below the other at one time scale, each with its makespan. Return height and shapes."""
    longest = max(end, *(timeline.makespan for timeline in parts.values()))
    scale, y = (RIGHT - LEFT) / longest, 14.0
    shapes: list[Shape] = []
    for name, timeline in parts.items():
        shapes += [text(LEFT, y, f"{name}: {timeline.makespan:g} units", "start"), *rows(timeline, y + 10, scale, show_stage)]
        y += 10 + timeline.ranks * (ROW_HEIGHT + 2) + 18
    kinds = {event.action.kind.name for timeline in parts.values() for event in timeline.events}
    names = {"F": "F forward", "B": "B backward", "I": "I input", "W": "W weights"}
    items = [(KIND_COLORS[kind], "", name) for kind, name in names.items() if kind in kinds]
    return y + 36, [*shapes, *time_axis(y - 10, scale, longest, step), *legend(y + 22, *items)]


class Phase(NamedTuple):
    """A piece of one process's time, and the memory that each kind of tensor takes in it."""

    duration: float
    name: str
    kind: str  # of KIND_COLORS, or empty
    memory: tuple[float, ...]


def memory_chart(
    phases: Sequence[Phase], colors: Sequence[tuple[str, str]], top: float, scale: float, unit: float
) -> Iterator[Shape]:
    """Draw phases in a row, and below it the memory over time, stacked; `unit`: pixels for 1. `colors`: colour and hatch."""
    bottom = top + 22 + unit * max(sum(phase.memory) for phase in phases)
    x = LEFT
    for phase in phases:
        width, y = phase.duration * scale, bottom
        yield Box(x, top, width, ROW_HEIGHT, KIND_COLORS.get(phase.kind, PALE_COLOR), "#ffffff")
        yield text(x + width / 2, top + 8, phase.name, size=SMALL_SIZE, color=KIND_TEXT_COLORS.get(phase.kind, INK_COLOR))
        for amount, (color, hatch) in zip(phase.memory, colors, strict=True):
            y -= amount * unit
            yield Box(x, y, width, amount * unit, color, hatch=hatch)
        x += width
    yield Line(LEFT, bottom, x, bottom)
    yield text(LEFT - 6, top + 22 + (bottom - top - 22) / 2, "memory", "end", SMALL_SIZE, MUTED_COLOR)


# ---- 1. one process


@picture
def one_step() -> tuple[str, float, Sequence[Shape]]:
    """Four layers: activations grow in the forward and shrink in the backward, gradients grow."""
    layers, weights, averages = 4, 2.0, 4.0
    phases = [Phase(1, f"F{n}", "F", (weights, averages, 0, n + 1)) for n in range(layers)]
    phases += [
        Phase(2, f"B{n}", "B", (weights, averages, weights * (layers - n) / layers, n + 1)) for n in reversed(range(layers))
    ]
    phases.append(Phase(2.4, "optimizer", "", (weights, averages, weights, 0)))
    colors = [(YELLOW_COLOR, ""), ("#c79a3b", "-"), (GREEN_COLOR, ""), (BLUE_COLOR, "/")]
    names = ("weights", "Adam's averages", "gradients", "activations")
    chart = memory_chart(phases, colors, 10, (RIGHT - LEFT) / 14.4, 12)
    items = [(*color, name) for color, name in zip(colors, names, strict=True)]
    return "Memory over one training step of four layers", 198, [*chart, *legend(182, *items)]


# ---- 2. the cut


@picture
def autograd_at_the_cut() -> tuple[str, float, Sequence[Shape]]:
    """Forward and backward of two halves, with what crosses the cut."""
    shapes: list[Shape] = [text(88, 14, "stage 0"), text(272, 14, "stage 1"), text(180, 14, "cut", color=MUTED_COLOR)]
    shapes += [Line(180, y, 180, y + 5) for y in range(24, 190, 10)]
    for y, color in ((34, KIND_COLORS["F"]), (118, KIND_COLORS["B"])):
        ink = INK_COLOR if y == 34 else "#ffffff"
        for x, name in ((12, "first"), (236, "second")):
            shapes += [Box(x, y, 56, 26, color), text(x + 28, y + 13, name, color=ink)]
    forward = [*arrow(68, 47, 88, 47), *arrow(130, 47, 192, 47), *arrow(226, 47, 236, 47), *arrow(292, 47, 312, 47)]
    backward = [*arrow(312, 131, 292, 131), *arrow(236, 131, 226, 131), *arrow(192, 131, 130, 131), *arrow(88, 131, 68, 131)]
    shapes += [*forward, *backward]
    shapes += [text(109, 47, "output"), text(330, 47, "loss"), text(330, 131, "loss")]
    shapes += [
        Box(194, 38, 32, 18, PALE_COLOR, MUTED_COLOR),
        text(210, 47, "leaf"),
        Box(194, 122, 32, 18, PALE_COLOR, MUTED_COLOR),
    ]
    shapes += [text(210, 131, ".grad"), text(109, 131, "output")]
    shapes += [text(170, 72, "numbers without history:", "end", color=MUTED_COLOR)]
    shapes += [text(170, 87, "detach()", "end"), text(190, 72, "received, a new leaf:", "start", color=MUTED_COLOR)]
    shapes += [text(190, 87, "requires_grad_()", "start"), text(190, 156, "loss.backward() ends", "start", color=MUTED_COLOR)]
    shapes += [text(190, 171, "here, in received.grad", "start", color=MUTED_COLOR)]
    shapes += [text(170, 156, "begins again here:", "end", color=MUTED_COLOR), text(170, 171, "output.backward(grad)", "end")]
    return "Forward and backward at the cut: only numbers cross it", 194, shapes


# ---- 3. messages


@picture
def both_send() -> tuple[str, float, Sequence[Shape]]:
    """Two ranks that both send first: each send waits for a receive that stands behind the other send."""
    shapes: list[Shape] = [text(75, 14, "rank 0"), text(285, 14, "rank 1")]
    for x, peer in ((20, 1), (230, 0)):
        shapes += labelled(x, 28, 110, 28, f"send to {peer}", YELLOW_COLOR)
        shapes += labelled(x, 100, 110, 28, f"receive from {peer}")
        shapes += [*arrow(x + 55, 100, x + 55, 56), text(x + 61, 78, "behind", "start", color=MUTED_COLOR)]
    shapes += [*arrow(130, 42, 230, 114), *arrow(230, 42, 130, 114), text(180, 34, "each send"), text(180, 48, "waits for")]
    shapes.append(text(180, 122, "its receive"))
    return "Two ranks that both send first wait in a cycle", 142, shapes


# ---- 4. microbatches


def gpipe(microbatches: int, unit: float, name: str = "gpipe") -> Timeline:
    """Simulate a schedule on four ranks with F = `unit` and B = 2 `unit`."""
    return simulate(build(name, 4, microbatches), Costs(unit, unit, unit))


@picture
def one_microbatch() -> tuple[str, float, Sequence[Shape]]:
    """The whole batch as one microbatch, passed down four ranks and back."""
    height, shapes = orders({"naive, one microbatch": gpipe(1, 4)}, 8, show_stage=True)
    return "The naive schedule: one rank works, three wait", height, shapes


@picture
def four_microbatches() -> tuple[str, float, Sequence[Shape]]:
    """The same batch as four microbatches, at the time scale of `one_microbatch`."""
    height, shapes = orders({"gpipe, four microbatches": gpipe(4, 1)}, 8, end=48)
    return "GPipe with four microbatches, at the same time scale", height, shapes


# ---- 5. one forward, one backward


@picture
def memory_over_time() -> tuple[str, float, Sequence[Shape]]:
    """GPipe above 1F1B, with the microbatches that rank 0 holds over time."""
    shapes: list[Shape] = []
    scale, unit, y = (RIGHT - LEFT) / 33, 6.0, 14.0
    for name in ("gpipe", "1f1b"):
        timeline = gpipe(8, 1, name)
        shapes += [text(LEFT, y, f"{name}: rank 0 holds at most {timeline.peak_in_flight[0]}", "start")]
        shapes += rows(timeline, y + 10, scale)
        bottom = y + 88 + 8 * unit
        curve = [*timeline.memory(0), (timeline.makespan, 0)]
        for (start, amount), (end, _) in pairwise(curve):
            shapes.append(Box(LEFT + start * scale, bottom - amount * unit, (end - start) * scale, amount * unit, YELLOW_COLOR))
        shapes += [Line(LEFT, bottom, RIGHT, bottom), text(LEFT - 6, bottom - 22, "rank 0", "end", SMALL_SIZE)]
        shapes.append(text(LEFT - 6, bottom - 10, "holds", "end", SMALL_SIZE))
        y = bottom + 18
    items = [(KIND_COLORS["F"], "", "F"), (KIND_COLORS["B"], "", "B"), (YELLOW_COLOR, "", "microbatches in flight on rank 0")]
    shapes += [*time_axis(y - 8, scale, 33, 5), *legend(y + 20, *items)]
    return "Microbatches in flight over time: GPipe and 1F1B, eight microbatches", y + 34, shapes


# ---- 6. interleaving, 7. the backward in two


def placement(stages: Sequence[Sequence[int]]) -> list[Shape]:
    """Draw stages in two rows over four ranks, with arrows from each stage to the next."""
    shapes: list[Shape] = [text(90.0 + 78 * rank, 12, f"rank {rank}") for rank in range(4)]
    centres = {}
    for row, numbers in enumerate(stages):
        for rank, stage in enumerate(numbers):
            x, y = 66.0 + 78 * rank, 24.0 + 54 * row
            shapes += labelled(x, y, 48, 26, str(stage), BLUE_COLOR if row == 0 else YELLOW_COLOR)
            centres[stage] = x + 24, y + 13
    shapes += [text(8, 37, "stages", "start"), text(8, 91, "stages", "start")]
    for stage in range(7):
        (x, y), (to_x, to_y) = centres[stage], centres[stage + 1]
        if y == to_y:
            side = 24 if to_x > x else -24
            shapes += arrow(x + side, y, to_x - side, to_y)
        elif x == to_x:
            shapes += arrow(x, y + 13, to_x, to_y - 13)
        else:
            shapes += [Line(x, y + 13, x, 64, INK_COLOR), Line(x, 64, to_x, 64, INK_COLOR), *arrow(to_x, 64, to_x, to_y - 13)]
    return shapes


@picture
def stages_in_a_loop() -> tuple[str, float, Sequence[Shape]]:
    """Eight stages on four ranks: stage s on rank s mod 4."""
    return "Stages in a loop: from the last rank a microbatch goes back to the first", 114, placement([range(4), range(4, 8)])


@picture
def stages_in_a_v() -> tuple[str, float, Sequence[Shape]]:
    """Eight stages on four ranks, down and back up."""
    return "Stages in a V: the last stage lies on the rank of the first", 114, placement([range(4), range(7, 3, -1)])


def equal_work(name: str) -> Timeline:
    """Simulate eight microbatches with F = I = W = 1 of a whole rank."""
    return simulate_equal_stages(build(name, 4, 8))


@picture
def smaller_stages() -> tuple[str, float, Sequence[Shape]]:
    """1F1B and interleaved 1F1B, at one time scale."""
    height, shapes = orders({name: equal_work(name) for name in ("1f1b", "interleaved-1f1b")}, 5)
    return "1F1B, and two stages of half the size on each rank: stages 4 to 7 are paler", height, shapes


@picture
def two_halves() -> tuple[str, float, Sequence[Shape]]:
    """1F1B and zero-bubble schedules, at one time scale."""
    height, shapes = orders({name: equal_work(name) for name in ("1f1b", "zb-h1", "zb-h2", "zb-v")}, 5)
    return "1F1B and three schedules that split the backward; in zb-v stages 4 to 7 are paler", height, shapes


# ---- 8. a schedule of your own


@picture
def cycle_of_a_deadlock() -> tuple[str, float, Sequence[Shape]]:
    """The refused table, and the cycle in it."""
    shapes: list[Shape] = []
    table, cycle = (("0F0", "0B0", "0F1", "0B1"), ("1F1", "1F0", "1B0", "1B1")), ("1F1", "0F1", "0B0", "1B0")
    centres = {}
    for rank, row in enumerate(table):
        y = 30.0 + 76 * rank
        shapes.append(text(LEFT - 6, y + 13, f"rank {rank}", "end"))
        for column, action in enumerate(row):
            x = LEFT + 4 + 77 * column
            shapes += labelled(x, y, 46, 26, action, YELLOW_COLOR if action in cycle else PALE_COLOR)
            centres[action] = x + 23, y + 13
    for name, waits_for in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
        (x, y), (to_x, to_y) = centres[name], centres[waits_for]
        if y != to_y:
            shapes += arrow(x, y - 13 if to_y < y else y + 13, to_x, to_y + 13 if to_y < y else to_y - 13)
        else:
            edge = y - 20 if y < 60 else y + 20
            side = -13 if y < 60 else 13
            shapes += [
                Line(x, y + side, x, edge, INK_COLOR),
                Line(x, edge, to_x, edge, INK_COLOR),
                *arrow(to_x, edge, to_x, y + side),
            ]
    shapes += [text(200, 12, "stands behind", color=MUTED_COLOR), text(150, 150, "stands behind", color=MUTED_COLOR)]
    shapes += [
        text(56, 81, "waits for", "start", color=MUTED_COLOR),
        text(346, 81, "1F1 -> 0F1 -> 0B0 -> 1B0 -> 1F1", "end", SMALL_SIZE),
    ]
    return "The cycle of a table that deadlocks: 1F1, 0F1, 0B0, 1B0", 162, shapes


# ---- 9. many ranks at once


def ring_states(ranks: int) -> list[list[list[int]]]:
    """Return after each step of a ring all-reduce how many ranks' values each rank's pieces have added up."""
    states = [[[1] * ranks for _ in range(ranks)]]
    for step in range(2 * (ranks - 1)):
        state = [list(pieces) for pieces in states[-1]]
        for rank in range(ranks):
            piece = (rank - step) % ranks if step < ranks - 1 else (rank + 1 - (step - ranks + 1)) % ranks
            peer = (rank + 1) % ranks
            sent = states[-1][rank][piece]
            state[peer][piece] = state[peer][piece] + sent if step < ranks - 1 else sent
        states.append(state)
    return states


@picture
def ring() -> tuple[str, float, Sequence[Shape]]:
    """The pieces of four ranks after each step of a ring all-reduce."""
    shades = {1: "#ffffff", 2: "#dbe8f6", 3: "#a9c9ec", 4: "#2a5f9c"}
    shapes: list[Shape] = []
    states = ring_states(4)
    for part, (name, first) in enumerate((("reduce-scatter: add what comes", 0), ("all-gather: take what comes", 3))):
        top = 14.0 + 120 * part
        shapes.append(text(LEFT, top, name, "start"))
        for column in range(4):
            left = LEFT + 78 * column
            step = first + column
            shapes.append(text(left + 34, top + 94, f"after step {step}" if step else "at first", color=MUTED_COLOR))
            for rank, pieces in enumerate(states[step]):
                y = top + 12 + 18 * rank
                shapes.extend([text(LEFT - 6, y + 8, f"rank {rank}", "end")] * (column == 0))
                for piece, count in enumerate(pieces):
                    ink = "#ffffff" if count == 4 else INK_COLOR
                    x = left + 17 * piece
                    shapes += [
                        Box(x, y, 17, 16, shades[count], MUTED_COLOR),
                        text(x + 8.5, y + 8, str(count), size=SMALL_SIZE, color=ink),
                    ]
    return "A ring all-reduce of four ranks: how many ranks' values each piece has added up", 246, shapes


@picture
def column_times_row() -> tuple[str, float, Sequence[Shape]]:
    """Two layers over two ranks: the first cut by columns, the second by rows."""
    shapes: list[Shape] = [text(x, 14, name) for x, name in ((66, "x"), (130, "A"), (194, "h"), (258, "B"), (326, "sum"))]
    for rank in range(2):
        y = 28.0 + 70 * rank
        shapes.append(text(LEFT - 8, y + 20, f"rank {rank}", "end"))
        shapes += [Box(50, y, 32, 40, BLUE_COLOR, MUTED_COLOR)]  # x, whole on both
        shapes += [Box(110, y, 40, 40, "#ffffff", MUTED_COLOR), Box(110 + 20 * rank, y, 20, 40, YELLOW_COLOR, MUTED_COLOR)]
        shapes += [Box(174, y, 40, 40, "#ffffff", MUTED_COLOR), Box(174 + 20 * rank, y, 20, 40, BLUE_COLOR, MUTED_COLOR)]
        shapes += [Box(238, y, 40, 40, "#ffffff", MUTED_COLOR), Box(238, y + 20 * rank, 40, 20, YELLOW_COLOR, MUTED_COLOR)]
        shapes += [Box(310, y, 32, 40, BLUE_COLOR, MUTED_COLOR, "/")]
        shapes += [text(96, y + 20, "x"), text(162, y + 20, "="), text(226, y + 20, "x"), text(294, y + 20, "=")]
    shapes += [*arrow(326, 68, 326, 98), *arrow(326, 98, 326, 68), text(318, 83, "all-reduce", "end")]
    shapes += [text(130, 83, "columns", color=MUTED_COLOR), text(226, 83, "rows", color=MUTED_COLOR)]
    shapes += [
        text(66, 83, "whole", color=MUTED_COLOR),
        text(8, 158, "Nothing is sent between the two products: a rank's columns", "start"),
    ]
    shapes.append(text(8, 173, "of h are what its rows of B need. Only the sums are added.", "start"))
    return "Tensor parallel: columns of A times rows of B", 186, shapes


@picture
def gather_and_free() -> tuple[str, float, Sequence[Shape]]:
    """One rank's weights over a step of FSDP: its share of all layers, and one layer whole at a time."""
    layers, ranks = 4, 4
    share, whole = layers / ranks, 1 - 1 / ranks
    phases = [Phase(1, f"F{n}", "F", (share, 0.0, whole)) for n in range(layers)]
    phases += [Phase(2, f"B{n}", "B", (share, (layers - n - 1) / ranks, whole)) for n in reversed(range(layers))]
    scale, unit = (RIGHT - LEFT) / 12, 34.0
    colors = [(YELLOW_COLOR, ""), (GREEN_COLOR, ""), (BLUE_COLOR, "/")]
    shapes = list(memory_chart(phases, colors, 40, scale, unit))
    x = LEFT
    for phase in phases:
        shapes += arrow(x + 6, 22, x + 6, 38)
        x += phase.duration * scale
        shapes += arrow(x - 6, 38, x - 6, 22, MUTED_COLOR) if phase.kind == "B" else []
        shapes.append(Line(x, 62, x, 62 + 2.75 * unit, "#ffffff"))
    shapes.append(text(LEFT, 12, "down: gather a layer; up: reduce-scatter its gradient", "start"))
    items = [(*color, name) for color, name in zip(colors, ("own share", "its gradients", "gathered, then freed"), strict=True)]
    return "FSDP on four ranks, four layers: one layer is whole at a time", 184, [*shapes, *legend(170, *items)]


@picture
def ladder() -> tuple[str, float, Sequence[Shape]]:
    """Bandwidths of a GPU's links, on a logarithmic scale from 0.05 GB/s."""
    shapes: list[Shape] = []
    for number, (name, bandwidth) in enumerate(LINK_GB_PER_SECOND.items()):
        y, digits = 16.0 + 22 * number, f"{bandwidth:,g} GB/s"
        length = 24 * math.log10(bandwidth / 0.05)
        shapes += [text(8, y, name.replace(", its own", ", own").replace(", to another GPU", ", GPU to GPU"), "start")]
        shapes += [Box(146, y - 7, length, 14, BLUE_COLOR, MUTED_COLOR), text(146 + length + 5, y, digits, "start", SMALL_SIZE)]
    return "Bandwidths of a GPU's memories and links, on a logarithmic scale", 22.0 * len(LINK_GB_PER_SECOND) + 12, shapes


# ---- 10. real systems


@picture
def recomputation() -> tuple[str, float, Sequence[Shape]]:
    """Activations of four blocks over time, stored and recomputed, at one time scale."""
    blocks, kept = 4, 0.15  # of a block's activations: its input
    store = [Phase(1, f"F{n}", "F", (n + 1.0,)) for n in range(blocks)]
    store += [Phase(2, f"B{n}", "B", (n + 1.0,)) for n in reversed(range(blocks))]
    again = [Phase(1, f"F{n}", "F", (kept * (n + 1),)) for n in range(blocks)]
    for n in reversed(range(blocks)):
        again += [Phase(1, f"F{n}", "F", (kept * n + 1,)), Phase(2, f"B{n}", "B", (kept * n + 1,))]
    scale, color = (RIGHT - LEFT) / 16, [(BLUE_COLOR, "")]
    shapes: list[Shape] = [text(LEFT, 14, "store: 12 units", "start"), *memory_chart(store, color, 24, scale, 18)]
    shapes += [text(LEFT, 138, "recompute: 16 units", "start"), *memory_chart(again, color, 148, scale, 18)]
    shapes += legend(216, (BLUE_COLOR, "", "activations of one microbatch"))
    return "Activations stored, and recomputed block by block, at one time scale", 230, shapes


# ---- 11. rows have lengths


@picture
def orders_of_lengths() -> tuple[str, float, Sequence[Shape]]:
    """Six microbatches of unlike cost in three orders."""
    costs = {"as they arrive": [4, 1, 2, 1, 1, 2], "sorted": [1, 1, 1, 2, 2, 4], "cheap first and last": [1, 2, 4, 2, 1, 1]}
    table = build("1f1b", 4, 6)
    parts = {
        f"{name} ({' '.join(map(str, order))})": simulate(table, Costs(microbatch_factors=order))
        for name, order in costs.items()
    }
    height, shapes = orders(parts, 10)
    return "Six microbatches of unlike cost in three orders, at one time scale", height, shapes


def main() -> None:
    """Draw all pictures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(svg(draw()), encoding="utf-8")
    print(f"{len(PICTURES)} pictures in {FOLDER}")


if __name__ == "__main__":
    main()
