"""A model cut into stages: an `nn.Sequential` between its layers, any other along a graph of its forward.

`cutting`       `split` and `run`: the units a model can be cut between, and the stages it is cut into
`balance`       the cut whose most expensive stage is the cheapest
`unit_times`    the seconds of each unit's forward and backward, measured
`model_graph`   what a model does, as two graphs of its units: of training and of evaluation
`trace`         graphs traced by torch.fx, without data
`export`        graphs exported by torch.export, on an example
`runtime_functions`  functions around the layers that an export calls as they are, in each forward
`opaque_units`  units as single operations while a forward is exported
`graph_inputs`  what a cut model's forward takes, and whether a batch fits the example
`graph_stage`   a stage of a graph: it runs the nodes between two cuts
`graph_cutting` which nodes each stage runs, and which values go from which stage to which
`attributes`    which plain attributes a traced forward has read, and all of them restored afterwards
`materialise`   from the meta device to memory, with the values of one process
"""

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.partition.cutting import (
        CuttableModel,
        as_cuttable,
        model_names_of_stages,
        run,
        split,
        stages_by_shared_parameter,
        state_names_without_compile_prefix,
    )

__all__ = [
    "CuttableModel",
    "as_cuttable",
    "model_names_of_stages",
    "run",
    "split",
    "stages_by_shared_parameter",
    "state_names_without_compile_prefix",
]

__getattr__, __dir__ = lazy_exports(__name__, dict.fromkeys(__all__, "cutting"))  # `balance` needs no torch
