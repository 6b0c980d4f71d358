"""What watches over a step, and takes it back where it failed or came to nothing.

before  what a step changes, as it was: gradients, and where a batch may be taken back buffers and random state too
"""
