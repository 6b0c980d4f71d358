"""How it is with the ranks: what each tells of its own end, and how the others hear of it.

reports    what ranks tell each other when a step fails, and who is to blame
heartbeat  a thread of each rank that beats, and watches another rank
lives      what is known for sure of the other ranks
process    a process as its system sees it
doing      what this rank is doing, for others to read
signals    preemption: signals that ask the program to save and leave
"""
