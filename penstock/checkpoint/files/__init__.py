"""Files of a checkpoint: written, read and verified, independently of ranks.

manifest      a checkpoint's folder: its manifest of sizes and checksums, its name, its replacement and deletion
schema        the rules for a manifest
disk          open regular files only, compute checksums, sync to the disk
tensor_files  tensors in safetensors files
dcp_files     folders of torch.distributed.checkpoint, read without unpickling, and written
torch_archive a tensor or a value as `torch.save` writes it
pickled       parse a pickle without running it
packing       convert state to JSON with the tensors aside, and back
json_lines    a file with one JSON record of a step in each line
"""
