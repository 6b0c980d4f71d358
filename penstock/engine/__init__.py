"""One step of one rank, from the user's call to the loss: `step.py` is the story, read it first.

step               one step: cut, send a row, agree, run, average, report
observers          the base class of checks and measurements; numbers that ranks compare (the list: guards/observer_list.py)
actions            what F, B, I and W do in a step, and the error of one; where gradients are scaled
clock              when every action ran, on a clock that all ranks share
activation_memory  the bytes that a microbatch keeps alive
profiling          actions and messages as ranges in torch.profiler's traces
report             the result of a step
rollback           gradients, buffers and random state as they were before a failed step
last_step          what a user reads of the last step
pipeline_calls     the calls that all ranks make together on one pipeline, one at a time

build              from a pipeline's arguments to its engine
model_partition    the model that a rank was given, and the stages of it that it runs
teacher            a second, frozen model on the same ranks
loss               a mean or a sum, and the weight of each microbatch in it
optimizers         optimizers of all ranks that act as one; which function iterates over `pipe.parameters()`
hints              errors for what people try on a pipeline because modules have it

cache              what layers keep of earlier tokens while `penstock.generate` makes text
"""
