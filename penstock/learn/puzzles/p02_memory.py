"""The memory sum.

Will it fit? Training keeps of every parameter the weight, its gradient and what the optimizer remembers: Adam two numbers.
And of every microbatch that is in flight (its forward done, its backward not) the activations of the rank's layers.

Write `bytes_needed(..)` for one rank that trains with Adam in float32, four bytes a number.

Target: 1e9 parameters, 50e6 numbers of activations for a microbatch, 4 microbatches in flight: 16.8 GB.
"""

from penstock.learn.puzzles.judge import Missed, Passed, written, yours


@yours
def bytes_needed(parameters: float, activations: float, in_flight: int) -> float:
    """Return the bytes of a rank with `parameters` parameters, and numbers of `activations` for each microbatch in flight."""
    weight = gradient = 4 * parameters
    adam = 2 * 4 * parameters
    return weight + gradient + adam + 4 * activations * in_flight


HINTS = (
    "Of each parameter there are four numbers: the weight, its gradient, and Adam's two averages.",
    "GPipe has all M microbatches in flight, 1F1B on rank r only P - r: that is the whole difference in memory.",
)
EXPLANATION = """16 bytes for each parameter, and 4 for each number of an activation that waits for its backward. Cutting
the model makes the first term smaller on every rank; the schedule decides the second. `penstock show NAME` tells how many
are in flight."""


def check(answers: object) -> Passed:
    """Some sums."""
    for parameters, activations, in_flight in ((1e9, 50e6, 4), (1e9, 0, 1), (0, 1e6, 8), (3e8, 2e7, 16)):
        num_bytes = 16 * parameters + 4 * activations * in_flight
        call = f"bytes_needed({parameters:g}, {activations:g}, {in_flight})"
        answer = written(answers.bytes_needed(parameters, activations, in_flight), call)  # type: ignore[attr-defined]
        if abs(answer - num_bytes) > 1:
            if abs(answer - num_bytes + 4 * parameters) <= 1 and parameters:
                difference = f"{4 * parameters / 1e9:g} GB too few"
                raise Missed(f"{call} is {answer / 1e9:g} GB, {difference}: the gradients, or one of Adam's averages")
            raise Missed(f"{call} is {answer / 1e9:g} GB, it should be {num_bytes / 1e9:g} GB")
    return Passed("1e9 parameters, 50e6 numbers and 4 microbatches in flight take 16.8 GB")
