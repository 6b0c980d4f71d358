"""Checkpoints that fit any cut: everything under the uncut model's names, whole or refused, written beside the training.

A checkpoint is a folder `step-00000120`: tensors in safetensors files (`tensor_files.py`), the rest as JSON in a manifest
that holds every file's hash (`manifest.py`). Nothing is unpickled when it is loaded. The ranks agree over a control group
of their own, so a save may go on in a thread while the next steps run. All ranks must see the folder.
"""

from penstock.checkpoint.beside import Saving
from penstock.checkpoint.restore import resume
from penstock.checkpoint.saving import exists, save
from penstock.checkpoint.weights import export, export_folder, import_weights

__all__ = ["Saving", "exists", "export", "export_folder", "import_weights", "resume", "save"]
