"""What is on the disk: folders of files, each as it was written or refused; nothing here knows of ranks.

manifest          a checkpoint's folder: what must be in it, byte for byte, and which folders there are
schema            what a manifest may say
reading           only regular files are opened, and what is wrong is told in a sentence
tensor_files      tensors in safetensors files
packing           state as JSON with the tensors aside, and back
json_lines        a file of JSON, a line for each record of a step
transformers_form what transformers keeps in files in another form than in memory
"""
