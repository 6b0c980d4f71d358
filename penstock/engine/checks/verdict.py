"""What all ranks say of a step in which something was not finite, and the one place and cause that follow from it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.comms.control import Control
from penstock.engine.batch import Batch
from penstock.engine.checks.nonfinite import Finding, Watch, in_tree, value_of
from penstock.engine.report import Verdict
from penstock.stage.parameters import Parameters

STATE, DATA, COMPUTED = "parameters", "data", "computed"  # causes, by what is blamed first


def verdict(control: Control, watch: Watch, parameters: Parameters, batch: Batch) -> Verdict:
    """What all ranks come to; they are asked only if one of them has found something."""
    rank = control.topology.rank
    mine = (
        watch.found,
        [f"rank {rank}: {each}" for each in _state(parameters)],
        [f"rank {rank}: {each}" for each in _data(batch)],
    )
    everyone = control.gather_objects(mine, "to tell what is not finite")
    first = min((Finding(*found) for found, *_ in everyone if found), key=lambda each: each[:2])
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
