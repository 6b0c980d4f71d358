"""What watches over a step, and takes it back where it failed, or something in it was not finite.

nonfinite    the first value that is not finite, by its place, and where it came from
digest       copies of a tied parameter that have other values; and what such comparisons compare
factor       by what a rank has multiplied its gradients between two steps: all ranks must do it alike
hidden_uses  a parameter that a stage uses from where it is not registered, an attribute that a loss reads of a layer elsewhere
undo         what a step has changed, put back
trained_elsewhere  parts of a model object, or of two pipelines, that other ranks have trained since
"""


def is_power_of_two(count: int) -> bool:
    """1, 2, 4, 8, ..; and 0: when a check is made that costs too much for every step."""
    return not count & (count - 1)
