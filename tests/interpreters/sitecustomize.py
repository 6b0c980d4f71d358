"""What every interpreter that a test starts reads first: a third of its time would go into looking through what torch imports.

The server that ranks are forked from is left as it is, and so are they; pytest's own workers too.
"""

import atexit
import gc
import sys

if not any("forkserver" in word or "stdin.readline" in word for word in sys.orig_argv):
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
