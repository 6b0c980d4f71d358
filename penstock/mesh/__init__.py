"""Several ranks for one stage, which divide the batch's rows (`dp`), its tokens (`cp`) or the stage's products (`tp`).

position          this rank's place in the mesh
sampler           the rows of a dataset that each replica gets
ddp               a stage that DistributedDataParallel replicates
fsdp              a stage that `fully_shard` shards over its replicas
gradient_presence which gradients any replica has
data_parallel     applies one of these two, or a function of the user, to stages along `dp` and `cp`
tensor_parallel   applies a plan of torch's parallel styles to stages along `tp`
context_parallel  attention between ranks along `cp`, each of which has a part of the tokens
parallelize       applies data and tensor parallel to this rank's stages, and averages gradients at the end of a step
"""
