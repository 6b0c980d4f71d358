"""The memory sum.

Does a model fit? For each parameter, training stores the weight, its gradient, and the optimizer's state: two numbers for
Adam. For each microbatch in flight (its forward is done, its backward is not) it stores the activations of the rank's layers.

Write `bytes_needed(..)` for one rank that trains with Adam in float32, at 4 bytes a number.

Target: 1e9 parameters, 50e6 activation numbers per microbatch, 4 microbatches in flight: 16.8 GB.
"""

from penstock.learn.puzzles.check_helpers import CheckFailed, CheckPassed, require_answer, solution


@solution
def bytes_needed(parameters: float, activations: float, in_flight: int) -> float:
    """Return the bytes of a rank. `parameters`, `activations`: how many numbers; `activations` are those of one microbatch."""
    weight = gradient = 4 * parameters
    adam = 2 * 4 * parameters
    return weight + gradient + adam + 4 * activations * in_flight


HINTS = (
    "Each parameter has four numbers: the weight, its gradient, and Adam's two averages.",
    "In GPipe all M microbatches are in flight, in 1F1B only P - r on rank r: that is the whole difference in memory.",
)
EXPLANATION = """16 bytes for each parameter, and 4 for each activation number that waits for its backward. Cutting the model
makes the first term smaller on every rank; the schedule decides the second. `penstock show NAME` prints how many
microbatches are in flight."""


def check(answers: object) -> CheckPassed:
    """Check some sums. Raises CheckFailed."""
    for parameters, activations, in_flight in ((1e9, 50e6, 4), (1e9, 0, 1), (0, 1e6, 8), (3e8, 2e7, 16)):
        num_bytes = 16 * parameters + 4 * activations * in_flight
        call = f"bytes_needed({parameters:g}, {activations:g}, {in_flight})"
        answer = require_answer(answers.bytes_needed(parameters, activations, in_flight), call)  # type: ignore[attr-defined]
        if abs(answer - num_bytes) > 1:
            if abs(answer - num_bytes + 4 * parameters) <= 1 and parameters:
                difference = f"{4 * parameters / 1e9:g} GB too few"
                raise CheckFailed(
                    f"{call} is {answer / 1e9:g} GB, {difference}: are the gradients or one of Adam's averages missing?"
                )
            raise CheckFailed(f"{call} is {answer / 1e9:g} GB, it should be {num_bytes / 1e9:g} GB")
    return CheckPassed("1e9 parameters, 50e6 numbers and 4 microbatches in flight take 16.8 GB")
