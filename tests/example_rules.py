"""The rules of `examples/priorities.py`: functions of (ranks, microbatches) that make a table from a priority."""

import runpy
from pathlib import Path

RULES = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "priorities.py"), run_name="priorities")["RULES"]
