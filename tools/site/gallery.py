"""The gallery: a page for each schedule of the catalogue, with its rule, its pictures and its numbers."""

import json
import re
import runpy
from inspect import getdoc
from pathlib import Path

import playground
from docstrings import from_docstring
from steps import RESULTS

from penstock.learn.equal_stages import simulate_equal_stages
from penstock.schedule import Timeline, build, names
from penstock.schedule.catalog import FAMILIES
from penstock.view.figure.curves import curves
from penstock.view.figure.svg import svg
from penstock.view.figure.timeline_figure import figure
from penstock.view.record import Record

RULES = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "priorities.py"), run_name="priorities")["RULES"]
COUNTS = (4, 8, 16, 32, 64)  # microbatches
AXES = "microbatches", "", {float(count): str(count) for count in COUNTS}


def timeline(name: str, ranks: int, microbatches: int) -> Timeline:
    """What the table takes where F = I = W = 1 of a whole rank, however many stages it has."""
    return simulate_equal_stages(build(name, ranks, microbatches))


def timeline_picture(name: str, ranks: int, microbatches: int) -> str:
    """The same, drawn as `penstock show` draws it: SVG."""
    return svg(figure(Record((timeline(name, ranks, microbatches),))))


def bubble(name: str, ranks: int) -> list[tuple[float, float]]:
    """Idle time in percent of the step, for each number of microbatches."""
    return [(count, 100 * timeline(name, ranks, count).bubble) for count in COUNTS]


def schedule_pages(has_playground: bool) -> dict[str, str]:
    """The pages, and the pictures on them."""
    made = {"schedules/bubbles.svg": bubbles()}
    for rule in RULES:
        made[f"schedules/{rule.__name__}.svg"] = svg(figure(Record((simulate_equal_stages(rule(4, 8)),))))
    for name in names():
        series = {f"{ranks} ranks": bubble(name, ranks) for ranks in (2, 4, 8)}
        series["4, measured"] = [(count, 100 - 300 * count / makespan) for count, makespan in measured(name).items()]
        made[f"schedules/{name}.md"] = page(name, opened(name) if has_playground else "")
        made[f"schedules/{name}.svg"] = timeline_picture(name, 4, 8)
        made[f"schedules/{name}-bubble.svg"] = svg(curves(f"{name}: idle share of the step, in percent", series, *AXES))
    return made


def measured(name: str) -> dict[int, float]:
    """The makespan of a step that ran on four emulated devices, in units of F, by the number of microbatches."""
    return {int(count): makespan for count, makespan in json.loads(RESULTS.read_text(encoding="utf-8"))[name].items()}


def opened(name: str) -> str:
    """A link that opens what the picture shows in the playground, at the same costs."""
    share = 4 / build(name, 4, 8).num_stages
    costs = json.dumps(dict.fromkeys(("forward", "backward_input", "backward_weight"), share))
    return playground.link("schedules/", "Open it in the playground", schedule=name, ranks=4, microbatches=8, costs=costs)


def page(name: str, link: str) -> str:
    """One schedule; `link` opens it in the playground, if there is one."""
    family = FAMILIES[name]
    rows = []
    for count in COUNTS:
        of = timeline(name, 4, count)
        held = max(of.peak_in_flight) * 4 / build(name, 4, count).num_stages
        took = f"{measured(name)[count]:g}" if count in measured(name) else ""
        bubbles = f"{of.bubble:.1%} | {of.bubble_by_span:.1%}"
        rows.append(f"| {count} | {of.makespan:g} | {bubbles} | {held:g} | {took} |")
    return f"""# {name}

{family.summary}.

![{name} over four ranks with eight microbatches: a row for each rank, time runs to the right]({name}.svg)

{link}

| stages on a rank | idle time of a rank | microbatches in flight on rank r |
|---|---|---|
| {family.stages_per_rank_text} | {family.bubble} | {family.in_flight} |

P ranks, V stages on each, M microbatches. F, I and W are the times of forward, backward to the input and backward to the
weights of one microbatch on one rank; B = I + W and T = F + B. Sends cost nothing here. The rule says where the formula holds.

## The rule

{from_docstring(getdoc(family.rule) or "")}

## In numbers

Four ranks, F = I = W = 1: as simulated when this page was made, and the makespan of a step that ran, on devices that sleep
instead of computing. That step shared two busy cores with other programs, so some of the difference is the machine's.

| microbatches | makespan | bubble | bubble by span | most microbatches in flight | makespan, measured |
|---|---|---|---|---|---|
{chr(10).join(rows)}

![the bubble of {name} for two, four and eight ranks, and measured on four]({name}-bubble.svg)

```sh
penstock show {name} --ranks 4 --microbatches 8
```
"""


def bubbles() -> str:
    """All schedules with a bubble of their own, against the number of microbatches."""
    shown = [name for name in names() if name not in ("naive", "gpipe", "looped-bfs")]
    series = {name: bubble(name, 4) for name in shown}
    return svg(curves("idle share of the step on four ranks, in percent", series, *AXES))


def with_gallery(page: str) -> str:
    """The page of all schedules: names lead to their pages, and the curves of all stand at the end."""
    page = re.sub(r"^\| `([\w-]+)` \| (?=\d)", r"| [`\1`](\1.md) | ", page, flags=re.MULTILINE)
    menu = "\n".join(names())
    picture = "![the bubble of nine schedules against the number of microbatches](bubbles.svg)"
    rules = "\n\n".join(f"![{rule.__name__} over four ranks with eight microbatches]({rule.__name__}.svg)" for rule in RULES)
    return f"{page}\n{rules}\n\n## All of them\n\n{picture}\n\n```{{toctree}}\n:hidden:\n\n{menu}\n```\n"
