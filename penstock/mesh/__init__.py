"""Several ranks for one stage, which divide the batch's rows (`dp`), its tokens (`cp`) or the stage's products (`tp`).

position         where this rank stands in the mesh
sampler          which rows of a dataset each replica is given
grouping         which of these rows share a microbatch, where rows have lengths
ddp              a stage that DistributedDataParallel holds equal
fsdp             a stage whose parameters `fully_shard` has spread over its replicas
gradient_presence which gradients any replica has
data_parallel    the stages along `dp` and `cp`, made one of the two, or by a function of the user's
tensor_parallel  the stages along `tp`, by a plan of torch's styles
context_parallel the attention of ranks along `cp`, which have a part of the tokens each
parallelize      both of these applied to this rank's stages; the end of a step: gradients become those of the whole batch
"""
