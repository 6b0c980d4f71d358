"""Checks of values, weights, parameters and attention, before, during and after a step.

pipeline_comparison  what all ranks are about to build: they must build the same pipeline
nonfinite            the first value that is not finite: where it is, and where it came from
observer_list        the list of them for a pipeline's engine, in their order
equal_values         values that ranks must have in common: batches, copies of tied parameters
loss_check           what steps show of a loss: a mean or a sum, microbatches that weigh alike
unequal_updates      ranks that update their weights differently from others between two steps, or not at all
frozen_stages        stages without a backward: nothing in them may be trained again
unregistered_uses    parameters that a stage uses but does not register
reachable_objects    Python objects that several stages can reach
shared_state         those that a forward changes: layers of several stages that talk through Python, or a layer and the loss
changed_weights      weights and buffers that a forward changes through `.data`, while a backward needs them
attention_check      kinds of layers that mix tokens otherwise than by `ps.attention`, where tokens are to be cut
token_mixing         in the first step: layers that mix tokens in their own code, found by running half of the tokens
tensor_snapshot      what a tensor was at an earlier time
outdated_weights     parts of a model, or of two pipelines, that other ranks have trained since
"""


def is_power_of_two_or_zero(count: int) -> bool:
    """Whether `count` is 0, 1, 2, 4, 8, ..: when to make a check that is too expensive for every step."""
    return not count & (count - 1)
