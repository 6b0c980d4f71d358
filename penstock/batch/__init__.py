"""A call of the user's: the pieces that are run, and what all ranks know of them before data flows.

`call`       what the user gave, and this rank's share of it
`pieces`     the ways to cut a batch: by rows, by the entries of a list, by tokens; outputs joined
`ahead`      a batch that a teacher runs before its step
`agreement`  what all ranks know of a step: a row of numbers each time, a description in the first step of a kind
"""
