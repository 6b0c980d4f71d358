"""Checkpoints that fit any cut: all state under the uncut model's names, complete or refused, written while training continues.

A checkpoint is a folder `step-00000120`: tensors in safetensors files, the rest as JSON in a manifest with every file's
checksum. Loading unpickles nothing. The ranks agree over a control group for checkpoints only, so a thread may go on with a
save while the next steps run. All ranks must see the folder.

    files/            the disk: a folder and its manifest, safetensors files, state as JSON
    training_digests  digests of weights, gradients and optimizer state: compare replicas, and runs
    training_state    the optimizer by parameter names, random states
    collective        what all ranks do together: write, fail, find the newest complete checkpoint
    restore           `resume` and `exists`
    saving            `save`
    folder_lock       one writer to a folder
    importing         `import_weights`: from one file, or several and their index
    weights           `export`, `export_checkpoint`: the weights alone, as one file or as a folder for `from_pretrained`
"""

from penstock.checkpoint.collective import SaveHandle
from penstock.checkpoint.importing import import_weights
from penstock.checkpoint.restore import exists, resume
from penstock.checkpoint.saving import save
from penstock.checkpoint.training_digests import DigestLog, digests
from penstock.checkpoint.weights import export, export_checkpoint

__all__ = ["DigestLog", "SaveHandle", "digests", "exists", "export", "export_checkpoint", "import_weights", "resume", "save"]
