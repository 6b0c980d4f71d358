"""Where a value that is not finite came from: the parameters, the batch, or the step's own computation."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.comms.control import Control
from penstock.engine.batch import Batch
from penstock.engine.checks.nonfinite import Watch, in_tree, value_of
from penstock.engine.report import Verdict
from penstock.stage.parameters import Parameters

STATE, DATA, COMPUTED = "parameters", "data", "computed"


def verdict(control: Control, watch: Watch, parameters: Parameters, batch: Batch) -> Verdict:
    """What all ranks come to once one of them has found something; all call it, when all have ended the step."""
    rank = control.topology.rank
    state, data = ([f"rank {rank}: {each}" for each in told] for told in (_state(parameters), _data(batch)))
    everyone = control.gather_objects((watch.found, state, data), "to tell what is not finite")
    first = min((found for found, *_ in everyone if found), key=lambda each: each[:2])
    for cause, told in ((STATE, [each for _, each, _ in everyone]), (DATA, [each for *_, each in everyone])):
        if several := [each for mine in told for each in mine]:
            more = f" (and {len(several) - 1} more)" if len(several) > 1 else ""
            return Verdict(cause, f"{several[0]}{more}; first seen in {first}", first.place)
    return Verdict(COMPUTED, str(first), first.place)


def _state(parameters: Parameters) -> Iterator[str]:
    """What cannot have come of this step, since no step changes a parameter."""
    for name, parameter in parameters.named_parameters():
        if value := value_of(parameter):
            yield f"{name} has {value} since the last optimizer step, or was loaded so"


def _data(batch: Batch) -> Iterator[str]:
    given: Mapping[str, Sequence[Any]] = {"inputs": batch.inputs, "target": batch.targets}
    for what, microbatches in given.items():
        for number, each in enumerate(microbatches):
            if value := in_tree(each):
                yield f"the batch's {what} in microbatch {number} have {value}"
