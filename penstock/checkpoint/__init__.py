"""Checkpoints that fit any cut: all state under the uncut model's names, complete or refused, written while training continues.

A checkpoint is a folder `step-00000120`: tensors in safetensors files, the rest as JSON in a manifest with every file's
checksum. Loading unpickles nothing. All ranks must see the folder. Checkpoints have a control group of their own, so that a
thread can write one while the next steps run.

    files/            files on the disk: a folder and its manifest, safetensors files, state as JSON
    training_digests  digests of weights, gradients and optimizer state, to compare replicas and runs
    training_state    the optimizer by parameter names, random states
    collective        steps that all ranks take together: raise the same error, write, find the newest complete checkpoint
    restore           `resume` and `exists`
    saving            `save`
    folder_lock       a lock on a folder, so that one process writes to it
    importing         `import_weights`: from safetensors files, or from a folder of torch.distributed.checkpoint
    dcp               weights and optimizers by torch.distributed.checkpoint's names
    weights           `export`, `export_checkpoint`: one file, a folder for `from_pretrained`, or one for torch
"""

from penstock.checkpoint.collective import SaveHandle
from penstock.checkpoint.importing import import_weights
from penstock.checkpoint.restore import exists, resume
from penstock.checkpoint.saving import save
from penstock.checkpoint.training_digests import DigestLog, digests
from penstock.checkpoint.weights import export, export_checkpoint

__all__ = ["DigestLog", "SaveHandle", "digests", "exists", "export", "export_checkpoint", "import_weights", "resume", "save"]
