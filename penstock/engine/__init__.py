"""One step of one rank, from the user's call to the loss: `step.py` is the story, read it first.

build       from what the user gives to what this rank runs
cut         the stages of this rank
comparison  what the ranks compare before they build
step        one step: split, vote, agree, run, average, conclude
batch       the call, and this rank's share of the batch
agreement   what all ranks agree on before data flows
loss        what a loss is, a mean or a sum, and what each microbatch counts in it
consumer    which function goes through `pipe.parameters()`: one that takes their norm needs all ranks'
actions     what F, B, I and W do in a step
memory      what a microbatch keeps alive, in bytes
clock       when every action ran, on a clock that all ranks share
text        text, pass after pass of forwards: what comes of each is the next one's last token
report      what a step came to
checks      what watches over a step, and takes it back where it failed
redistribute  the same model in another cut: what a rank has goes to the ranks that will have it
model_tensors  every tensor of a model by one name, whichever rank runs it
optimizers  an optimizer on each rank, as one over all of them
instead     what people try on a pipeline because modules have it
"""
