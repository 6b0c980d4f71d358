"""`own_hash_seed.py PROGRAM ..`, as torchrun starts it: the program, in an interpreter with the rank as its hash seed."""

import os
import sys

os.execve(sys.executable, [sys.executable, *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": os.environ["RANK"]})
