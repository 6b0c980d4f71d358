"""Collectives, which begin only when all ranks of their group are in the same call.

call           what a rank was called with, in words and as a number
call_board     memory in which the ranks of one machine write that
checked_group  the ranks of a group, who compare their calls and end together
operations     the eight collectives, by torch's names
"""
