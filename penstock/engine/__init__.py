"""One step of one rank, from the user's call to the loss: `step.py` is the story, read it first.

build       from what the user gives to what this rank runs
cut         the stages of this rank
comparison  what the ranks compare before they build
step        one step: split, vote, agree, run, average, conclude
batch       the call, and this rank's share of the batch
agreement   what all ranks agree on before data flows
loss        what a loss is, a mean or a sum, and what each microbatch counts in it
optimizers  an optimizer on each rank, as one over all of them; and who goes through `pipe.parameters()`
actions     what F, B, I and W do in a step
memory      what a microbatch keeps alive, in bytes
profiling   actions and messages as ranges in torch.profiler's traces
clock       when every action ran, on a clock that all ranks share
report      what a step came to
last_step   what a user reads of the last step
checks      what watches over a step
generation  text, pass after pass of forwards: what comes of each is the next one's last token
cache       what layers keep of earlier tokens meanwhile
redistribute  the same model in another cut: what a rank has goes to the ranks that will have it
source      the model that a rank was given, and by names every tensor of it, whichever rank runs it
instead     what people try on a pipeline because modules have it
"""
