"""What watches over a step, and takes it back where it failed, or something in it was not finite or not the same twice.

nonfinite  the first value on a rank that is not finite, by its place
audit      now and then one microbatch of a stage computed once more on another rank
skeleton   a stage without its values, which a rank keeps for that
parcels    what goes to that rank
copies     a tied parameter whose owners have other values
digest     what such comparisons compare
strays     a parameter that a stage uses from where it is not registered: its gradient would be lost
together   what a user may ask for, these as one, and what all ranks come to
guard      what follows: the step is raised, skipped, or run once more; what it has changed is put back
"""
