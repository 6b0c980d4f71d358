"""What watches over a step, and takes it back where it failed or something in it was not finite.

before     what a step changes, as it was: gradients, and where a batch may be taken back buffers and random state too
nonfinite  the first value on a rank that is not finite, by its place
verdict    what all ranks' findings come to: one place, one cause
guard      what follows: the step is raised, skipped, or run once more
"""
