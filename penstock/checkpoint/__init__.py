"""Checkpoints that fit any cut: everything under the uncut model's names, whole or refused, written beside the training.

A checkpoint is a folder `step-00000120`: tensors in safetensors files, the rest as JSON in a manifest that holds every file's
checksum. Nothing is unpickled when it is loaded. The ranks agree over a control group of their own, so a save may go on in a
thread while the next steps run. All ranks must see the folder.

    files/          what is on the disk: the folder and its manifest, safetensors files, state as JSON
    audit           digests of what training has come to, by which replicas and runs are compared
    training_state  the optimizer by names, random numbers
    together        what the ranks do as one: write, fail, find the newest whole checkpoint
    restore         `resume` and `exists`
    saving          `save`
    lock            one writer to a folder
    importing       `import_weights`: from one file, or several and their index
    weights         `export`, `export_folder`: the weights alone, as one file or as a folder for `from_pretrained`
"""

from penstock.checkpoint.audit import Trail, digests
from penstock.checkpoint.importing import import_weights
from penstock.checkpoint.restore import exists, resume
from penstock.checkpoint.saving import save
from penstock.checkpoint.together import Saving
from penstock.checkpoint.weights import export, export_folder

__all__ = ["Saving", "Trail", "digests", "exists", "export", "export_folder", "import_weights", "resume", "save"]
