"""The fastest step that fits: a model's layers measured, and cut, schedule, microbatches and recomputation chosen for them.

`layers`      what each layer of a model costs, for any number of rows; read from JSON and written
`measuring`   the same measured, as the engine would run each layer alone
`beside`      what a step takes beside its layers, measured
`estimating`  the same estimated, by counting operations; and of a run, from its measured steps
`grouping`    which rows of a batch share a microbatch
`stages`      what stages of such layers cost a rank: time, activations, what is there all the time
`timing`      a table as numbers, to be timed again and again
`candidate`   one table with its cut, and the recomputation that makes it fit
`bounds`      what no plan can be below, and what bounds this one
`result`      a plan, as an object and as JSON
`request`     what it is asked for, checked, and what is said where nothing fits
`planning`    the search for it
"""

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.plan.beside import Overheads, overheads
    from penstock.plan.estimating import estimate, of_transformers
    from penstock.plan.grouping import group_rows
    from penstock.plan.layers import Layer, Layers
    from penstock.plan.measuring import measure
    from penstock.plan.planning import plan
    from penstock.plan.request import bytes_of
    from penstock.plan.result import Plan, is_plan, load, read, robustness, says_plan

__all__ = [
    "Layer",
    "Layers",
    "Overheads",
    "Plan",
    "bytes_of",
    "estimate",
    "group_rows",
    "is_plan",
    "load",
    "measure",
    "of_transformers",
    "overheads",
    "plan",
    "read",
    "robustness",
    "says_plan",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        **dict.fromkeys(("Layer", "Layers"), "layers"),
        **dict.fromkeys(("Plan", "is_plan", "load", "read", "robustness", "says_plan"), "result"),
        **dict.fromkeys(("Overheads", "overheads"), "beside"),
        **dict.fromkeys(("estimate", "of_transformers"), "estimating"),
        "bytes_of": "request",
        "group_rows": "grouping",
        "measure": "measuring",
        "plan": "planning",
    },
)
