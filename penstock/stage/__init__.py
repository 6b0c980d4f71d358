"""One stage: its forward and backward, layer by layer, and its parameters."""
