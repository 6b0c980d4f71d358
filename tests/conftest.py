"""The tests compute on one thread, since bits depend on how many there are; their tiers are marks, listed in pyproject.toml."""

import torch

torch.set_num_threads(1)
