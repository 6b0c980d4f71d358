"""What watches over a step, and takes it back where it failed, or something in it was not finite.

nonfinite  the first value on a rank that is not finite, by its place
causes     where it came from, as all ranks together know
intervals  in which steps a check is made that costs too much for each
copies     a tied parameter whose owners have other values
digest     what such comparisons compare
strays     a parameter that a stage uses from where it is not registered: its gradient would be lost
loss_reads a loss that reads what a layer of another rank leaves in an attribute
factor     by what a rank has multiplied its gradients between two steps: all ranks must do it alike
trained_elsewhere  a model object, or layers of two pipelines, whose parts other ranks have trained since
guard      what follows: the step is raised, skipped, or run once more; what it has changed is put back
"""
