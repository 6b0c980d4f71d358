"""One stage of a model: its forward and backward, a microbatch at a time, and what these need from the stage's module.

`stage`            the forward, the backward whole or in two, and what a microbatch in flight keeps alive
`forward_arguments` what the module's forward is called with
`messages`         what a stage exchanges with other stages
`connections`      which stages these are, and which parameters it shares with them
`aliasing`         in-place changes that would be lost where values no longer share memory
`module_runner`    how the module is run: layer by layer, random numbers seeded for each
`recompute`        a forward that runs again in the backward
`attention`        `ps.attention`, and the context in which it finds the tokens of other parts of a sequence
`sliced_attention` the keys and values that slices of a microbatch leave for later ones
`auxiliary`        losses that arise inside a model
`backward/`        the backward in two: the input's gradient now, the weights' later
`hooks`            what data parallelism does around a stage's forwards and backwards
`tied_parameters`  parameters that several stages share, found and kept equal
`rank_parameters`  a rank's parameters by their names in the uncut model: state, norms, clipping
`dtensor`          parameters of which a rank has a shard
"""
