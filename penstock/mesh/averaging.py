"""The end of a step's data: the gradients become those of the whole batch, on all ranks that have the parameters."""

from collections.abc import Iterable

from penstock.comms.control import waiting
from penstock.mesh import tensor_parallel
from penstock.mesh.data_parallel import share_state
from penstock.mesh.position import MeshPosition
from penstock.stage.parameters import Parameters
from penstock.stage.stage import Stage


def average(stages: Iterable[Stage], parameters: Parameters, position: MeshPosition, training: bool) -> None:
    """Wait until gradients are averaged over replicas; sum what ranks along `tp` have of them."""
    with waiting("for the replicas to average the gradients"):
        for stage in stages:
            stage.copies.end(training)
        if position.tp is not None and training:
            tensor_parallel.complete(parameters.parameters())
        if position.dp is not None and training:
            for stage in stages:
                share_state(stage.module, position.dp.get_group())
