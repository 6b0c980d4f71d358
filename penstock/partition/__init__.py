"""Cut a model into stages.

An `nn.Sequential` is cut between its layers. Any other model is cut between its units (`units.py`), along a graph of its
forward (`trace.py`, `export.py`, `graph_stage.py`), so that it need not be a chain.
"""

from penstock.partition.cutting import Whole, names_of, plain, run, split, whole

__all__ = ["Whole", "names_of", "plain", "run", "split", "whole"]
