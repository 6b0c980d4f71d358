"""How it is with the ranks: what each tells of its own end, and how the others hear of it.

reports  what ranks tell each other when a step fails
signals  preemption: signals that ask the program to save and leave
"""
