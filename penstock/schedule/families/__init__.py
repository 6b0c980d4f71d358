"""Families of schedules: a function each, its docstring the rule and its source.

`one_f_one_b`          from naive over GPipe and 1F1B to zero bubble, with one stage a rank or several
`two_chunks`           two stages a rank, down and back up: zero bubble, or a forward and a backward at the same time
`controllable_memory`  the same placement in about half or a third of the memory
"""
