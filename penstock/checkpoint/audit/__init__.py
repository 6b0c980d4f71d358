"""What training has come to, as digests by the uncut model's names: two runs, or two replicas, are compared by them.

digests     of weights, gradients and optimizer state; replicas compared by them
outputs     of what the layers give in a step
trail       the file of a run's digests, step by step
comparison  two runs compared by them, or the ranks of one
"""
