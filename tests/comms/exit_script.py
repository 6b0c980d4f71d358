"""A script as users write them, all at the top of the module, that ends in one of several ways: `exit_script.py HOW FOLDER`."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock as ps
from penstock import checkpoint

how, folder = sys.argv[1:]
torch.manual_seed(0)
width = 1100  # a message has more than a megabyte, so that a thread copies it
mesh = ps.comms.init_mesh() if how == "end" else None
pipe = ps.Pipeline(nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]), nn.functional.mse_loss, "1f1b", 2, mesh=mesh)
optimizer = torch.optim.Adam(pipe.parameters())
torch.last_to_go = pipe  # which it is in some scripts: when the modules that it is made of are gone already
rows = TensorDataset(torch.randn(1024, width), torch.randn(1024, width))
loader = DataLoader(rows, 512, sampler=pipe.sampler(rows), num_workers=how == "end", persistent_workers=how == "end")
for inputs, target in loader:
    loss = pipe.step(inputs, target=target)
    optimizer.step()
    optimizer.zero_grad()
outputs = pipe.eval(inputs)
saving = checkpoint.save(folder, pipe, optimizer, wait=False)
if how == "end" and pipe.topology.world_size > 1:
    replicas = ps.comms.init_mesh(dp=pipe.topology.world_size)
    other = ps.Pipeline(nn.Sequential(nn.Linear(4, 4)), nn.functional.mse_loss, "1f1b", 1, mesh=replicas, data_parallel="fsdp")
    other.step(torch.randn(4, 4), target=torch.randn(4, 4))
if how == "raise":
    raise ValueError("the script's own")
if how == "one raises" and pipe.topology.rank == 1:
    raise ValueError("the script's own")
if how == "one raises":
    pipe.step(inputs, target=target)
if how == "one saves" and pipe.topology.rank == 0:
    checkpoint.save(folder, pipe, optimizer)
if how == "exit":
    sys.exit(3)
