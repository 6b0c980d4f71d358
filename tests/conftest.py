"""Bits depend on the number of threads, so the tests compute on one, as launched ranks do."""

import torch

torch.set_num_threads(1)
