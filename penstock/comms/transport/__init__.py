"""Messages between stages: sent without waiting, received ahead, described once and then bare memory.

wire           what a message looks like: a tree of tensors, its description and its bytes
shared_memory  memory that two processes see, and where messages lie in it
worker         a thread that sends beside the compute, and what becomes of its errors
memory_line    a line between two processes of one machine, and how its two ends find each other
group_line     a line over process groups: between machines, between GPUs
channels       the transfers from one rank to a neighbour, in order, over a line
"""
