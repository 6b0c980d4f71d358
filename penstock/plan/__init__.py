"""The fastest step that fits: a model's layers measured, and cut, schedule, microbatches and recomputation chosen for them.

`layers`      what each layer of a model costs, for any number of rows; read from JSON and written
`measuring`   the same measured, as the engine would run each layer alone
`stages`      what stages of such layers cost a rank: time, activations, what is there all the time
`timing`      a table as numbers, to be timed again and again
`candidate`   one table with its cut, and the recomputation that makes it fit
`bounds`      what no plan can be below, and what bounds this one
`result`      a plan, as an object and as JSON
`planning`    the search for it
`advice`      what is told of memory, and where nothing fits
"""

from typing import TYPE_CHECKING

from penstock.lazy import face

if TYPE_CHECKING:
    from penstock.plan.advice import bytes_of, told_bytes
    from penstock.plan.layers import Layer, Layers
    from penstock.plan.measuring import measure
    from penstock.plan.planning import plan
    from penstock.plan.result import Plan, is_plan, load, robustness

__all__ = ["Layer", "Layers", "Plan", "bytes_of", "is_plan", "load", "measure", "plan", "robustness", "told_bytes"]

__getattr__, __dir__ = face(
    __name__,
    {
        **dict.fromkeys(("Layer", "Layers"), "layers"),
        **dict.fromkeys(("Plan", "is_plan", "load", "robustness"), "result"),
        **dict.fromkeys(("bytes_of", "told_bytes"), "advice"),
        "measure": "measuring",
        "plan": "planning",
    },
)
