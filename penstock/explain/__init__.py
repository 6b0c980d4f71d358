"""Where a measured step's time went, and what would make it shorter: another order, another schedule, another cut.

`explanation`  the explanation of a step, in numbers and in words
`explain`      finds it, from the step's timeline
"""
