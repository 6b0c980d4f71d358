"""One stage of a model: its forward and its backward, a microbatch at a time, and all that they need of the stage's module.

`stage`           the forward, the backward in one or in two, and what a microbatch in flight keeps alive
`messages`        what comes from other stages and goes to them: values, and the parameters that stages share
`stage_input`     one message as it comes in: where it enters the graph and where its gradients come out
`arguments`       what of that the module's forward is called with, and the keywords that ride along
`layers`          the module run layer by layer: random numbers of their own, recomputation
`autocast`        a backward leaves it
`auxiliary`       losses that arise in the middle of a model
`backward/`       the backward in two: the input's gradient now, the weights' later
`graph`           the ends of a stage's part of autograd's graph
`parameter_slot`  where a module has a parameter, and what may stand in there
`copies`          what other ranks have of the stage
`neighbours`      which stages are connected to which, and which parameters they share
`tied`            parameters that several stages share, found and kept equal
`parameters`      a rank's parameters by their names in the uncut model: state, norms, clipping
`dtensor`         parameters of which a rank has a shard
`microbatch`      a batch split into microbatches, their losses weighed, their outputs joined
"""
