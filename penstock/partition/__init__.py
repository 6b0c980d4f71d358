"""A model cut into stages: an `nn.Sequential` between its layers, any other along a graph of its forward.

`inputs`        what a cut model's forward takes, and whether a batch is like the example
`model_graph`   what a model does, as two graphs of its units: of training and of evaluation
`trace`         such graphs, followed symbolically by torch.fx
`opaque_units`  units as single operations while a forward is exported
`export`        such graphs, exported on an example by torch.export
`graph_stage`   a stage of them, and which values go from which stage to which
`materialise`   from the meta device to memory, with the values of one process
`unit_times`    what each unit's forward and backward cost, measured
`attributes`    which plain attributes a followed forward read, and all of them put back afterwards
`rows`          which dimension of a tensor is its rows
`balance`       the cut whose dearest stage is the cheapest
`cutting`       `split` and `run`: the units a model can be cut between, and the stages it is cut into
"""

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.partition.cutting import (
        CuttableModel,
        as_cuttable,
        model_names_of_stages,
        run,
        shared_parameters,
        split,
        uncompiled_names,
    )

__all__ = ["CuttableModel", "as_cuttable", "model_names_of_stages", "run", "shared_parameters", "split", "uncompiled_names"]

__getattr__, __dir__ = lazy_exports(__name__, dict.fromkeys(__all__, "cutting"))  # `balance` needs no torch
