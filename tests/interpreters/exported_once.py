"""What the first export of a process sets up, done once in the server that ranks are forked from; imported there alone."""

import torch
from torch import nn

torch.export.export(nn.Linear(2, 2), (torch.zeros(3, 2),), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False)
