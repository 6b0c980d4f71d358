"""What is on the disk: folders of files, each as it was written or refused; nothing here knows of ranks.

manifest      a checkpoint's folder: what must be in it, byte for byte, and which folders there are
schema        what a manifest may say
disk          only regular files are opened, errors are sentences, and what is written outlasts a failure
tensor_files  tensors in safetensors files
packing       state as JSON with the tensors aside, and back
json_lines    a file of JSON, a line for each record of a step
"""
