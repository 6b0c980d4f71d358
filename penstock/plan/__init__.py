"""The fastest step that fits: a model's layers measured, and cut, schedule, microbatches and recomputation chosen for them.

`model_profile`     the costs that a plan is made for: of each layer of a model, for any number of rows; a JSON file
`measuring`         profile a model by running its layers in turn, each as a stage of the engine
`overheads`         measure the engine's time for an action, and messages
`estimating`        profile a model by counting operations
`recut`             profile a model from the steps of a run, and a faster cut at these costs
`stage_costs`       the cost of a stage of consecutive layers: time, activations, parameters
`dependency_graph`  what the actions of a table wait for, in an order in which all can run
`schedule_timer`    a fast makespan of one table for many costs
`slice_lengths`     lengths of a microbatch's slices, from a step that ran in slices
`microbatch_order`  the order of unequal microbatches that makes a step short
`microbatch_costs`  what microbatches of other sizes take, fitted to steps over lists
`group_search`      the search for the groups that cost least
`grouping`          rows of different lengths grouped into microbatches
`search/`           the search for tables, for any costs within a limit on memory
`partition_search`  partitions of the layers for one table, with the recomputation that makes them fit
`step_bound`        a lower bound of a step, and why a plan is above it
`teacher_cut`       a teacher's ranks, and cuts of both models, by what each rank has idle
`result`            a plan, as an object and as JSON
`argument_checks`   checks of the arguments of `plan`, and the error when nothing fits
`planning`          `plan`: the search
"""

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.plan.argument_checks import parse_memory_size
    from penstock.plan.estimating import estimate, estimate_transformers
    from penstock.plan.grouping import group_rows
    from penstock.plan.measuring import measure
    from penstock.plan.model_profile import LayerCost, ModelProfile
    from penstock.plan.overheads import Overheads, measure_overheads
    from penstock.plan.planning import plan
    from penstock.plan.result import Plan, is_plan_file, is_plan_text, load, parse_plan, robustness
    from penstock.plan.slice_lengths import plan_slices

__all__ = [
    "LayerCost",
    "ModelProfile",
    "Overheads",
    "Plan",
    "estimate",
    "estimate_transformers",
    "group_rows",
    "is_plan_file",
    "is_plan_text",
    "load",
    "measure",
    "measure_overheads",
    "parse_memory_size",
    "parse_plan",
    "plan",
    "plan_slices",
    "robustness",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        **dict.fromkeys(("LayerCost", "ModelProfile"), "model_profile"),
        **dict.fromkeys(("Plan", "is_plan_file", "is_plan_text", "load", "parse_plan", "robustness"), "result"),
        **dict.fromkeys(("Overheads", "measure_overheads"), "overheads"),
        **dict.fromkeys(("estimate", "estimate_transformers"), "estimating"),
        "group_rows": "grouping",
        "measure": "measuring",
        "parse_memory_size": "argument_checks",
        "plan": "planning",
        "plan_slices": "slice_lengths",
    },
)
