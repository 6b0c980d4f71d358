"""A pipeline made by hand, one step a lab: from one process to a schedule of your own, and to all axes a training has.

`mini`      the whole idea in one file, to be read first: any table, on plain torch.distributed, with the engine's bits
`catalog`   which labs there are, and how one prints its story
`labs/`     a script for each, which checks itself and ends with what it measured
`puzzles/`  a stub, a target and a check each: to be solved by writing
`story`     what every lab needs: ranks to run on, a voice that speaks once, checks that can fail
`emulated_device`   a stage that sleeps in the place of a device that is not there
`devices`   devices that are not there: compute that sleeps, memory with a limit
`buckets`   gradients that travel in buckets while the backward goes on
`by_hand`   the collectives, from sends and receives
`picture`   a timeline drawn so that every action has room for its name
`written`   a schedule somebody wrote as a Python function, read into a table
"""
