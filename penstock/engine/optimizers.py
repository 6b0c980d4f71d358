"""An optimizer on each rank, as one over all of them: what must be alike, and what it may not have."""

from collections.abc import Mapping
from typing import Any

from penstock.errors import MismatchError

MEMBERS = ("params", "param_names")  # what of a group is no option


def options_of(group: Mapping[str, Any]) -> dict[str, str]:
    """The options of a group, in words by which those of ranks are compared."""
    return {key: repr(value) for key, value in group.items() if key not in MEMBERS}


def check_known(optimizer: Any, names: Mapping[int, str], rank: int) -> None:
    """Raises MismatchError for a parameter that is none of this rank's, whose ids are in `names`."""
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names and parameter.numel():  # an empty one stands for nothing to train
                raise MismatchError(
                    f"rank {rank}: parameter {position} of the optimizer's group {number} is not one of the pipeline's: "
                    "make the optimizer of pipe.parameters()"
                )


def check_same_options(expected: Mapping[str, str], got: Mapping[str, str], number: int, rank: int) -> None:
    """Raises MismatchError unless the group of this `number` has on `rank` the options that it has on a rank before."""
    for key in {**expected, **got}:
        if expected.get(key) != got.get(key):
            raise MismatchError(
                f"the optimizer's group {number} has {key} {got.get(key)} on rank {rank}, but {expected.get(key)} on a rank "
                "before: give all ranks the same options"
            )
