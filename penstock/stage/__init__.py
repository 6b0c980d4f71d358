"""One stage of a model: its forward and its backward, a microbatch at a time, and all that they need of the stage's module.

`stage`           the forward, the backward in one or in two, and what a microbatch in flight keeps alive
`exchange`        what it exchanges with other stages, and what its forward is called with
`layers`          the module run layer by layer: random numbers of their own, recomputation
`auxiliary`       losses that arise in the middle of a model
`backward/`       the backward in two: the input's gradient now, the weights' later
`graph`           the ends of a stage's part of autograd's graph: where values enter it, where gradients come out
`parameter_slot`  where a module has a parameter, and what may stand in there
`copies`          what other ranks have of the stage
`tied`            parameters that several stages share, found and kept equal
`parameters`      a rank's parameters by their names in the uncut model: state, norms, clipping
`dtensor`         parameters of which a rank has a shard
`microbatch`      a batch split into microbatches, their losses weighed, their outputs joined
"""
