"""Every block of code runs: those of README, of docs/ and of docstrings; and prints what stands below it."""

import sys
from contextlib import nullcontext

import pytest
import torch.distributed as dist
from blocks import PAGES, CodeBlock, Listing, docstrings, page, run

import penstock as ps
from penstock.plan.search import table_search

LISTINGS = [listing for path in PAGES if (listing := page(path)).blocks]
TESTED = {  # pages whose programs have a test of their own, which runs them on ranks
    "README.md": "tests/house/test_readme.py",
    "docs/howto/data.md": "tests/engine/test_batch.py",
    "docs/howto/inference.md": "tests/engine/test_generation.py",
    "docs/howto/recovery.md": "tests/launcher/test_restarts.py",
}
MOST_LEFT_OUT = 17  # blocks that say why they cannot run here

# What the example of a docstring takes from the reader's program.
READERS = """
import os, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import penstock as ps
from penstock import checkpoint
from penstock.model import GPT, GPTConfig, ShardedMLP
from penstock.partition import run, split
from penstock.plan import measure, plan
from penstock.schedule import *

torch.manual_seed(0)
model, loss_fn = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)], nn.Linear(8, 2)), nn.functional.mse_loss
inputs, targets = torch.randn(64, 8), torch.randn(64, 2)
dataset = TensorDataset(inputs, targets)
batches, folder = [(inputs, targets)] * 2, "runs/a"
pipe = ps.Pipeline(model, loss_fn, microbatches=4)
optimizer = torch.optim.Adam(pipe.parameters())
pipe.step(inputs, target=targets), optimizer.step(), optimizer.zero_grad()
"""
TEXTS = """
model, tokens = GPT(GPTConfig(context=96, width=8, layers=3)), torch.randint(256, (8, 16))
loss_fn, target = (lambda output, target: output.float().mean()), tokens
"""
LISTS = """
lengths = [1 + row % 5 for row in range(64)]
for _ in range(2):
    pipe.step_microbatches([inputs[:9], inputs[9:12]], [targets[:9], targets[9:12]])
"""
BESIDE = {  # and what these take besides, by the end of their names
    "import_weights": 'checkpoint.export(pipe, "Llama-3.2-1B")',
    "ShardedMLP": "topology = ps.comms.init_distributed()",
    "partition.cutting.split": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(8)])
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
model, tokens = Model(), torch.randn(16, 4)
""",
    "MicrobatchCosts": LISTS,
    "stage.attention.attention": "query, key, value = torch.randn(3, 2, 4, 6, 8)",
    "microbatch_costs.step_costs": LISTS + "costs = pipe.plan_costs()",
    "pipeline.plan_costs": LISTS,
    "sampler.batches": 'dataset = [{"input_ids": [1] * (1 + row % 5)} for row in range(70)]',
    "GroupingCollator": "from penstock.integrations.transformers import GroupingCollator; collate = list",
    "pipeline.generate": TEXTS + "pipe, prompt = ps.Pipeline(model), tokens[:1]",
    "measuring.measure": TEXTS,
    "rows.Rows": """
class LastOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 2)
    def forward(self, frames):
        return self.lstm(frames)[0][-1]
model, frames, labels = nn.Sequential(LastOutput(), nn.Linear(2, 2)), torch.randn(5, 16, 8), torch.randn(16, 2)
""",
    "rows.Replicated": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(256, 8), nn.Embedding(512, 8), nn.Linear(8, 2)
    def forward(self, tokens, position_ids):
        return self.head(self.tokens(tokens) + self.places(position_ids))
pipe, tokens, targets = ps.Pipeline(Model(), loss_fn, cuts=[]), torch.randint(256, (8, 512)), torch.randn(8, 512, 2)
""",
    "planning.plan": TEXTS,
    "init_mesh": "model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)], nn.Linear(8, 2))",
}
RANKS = {"init_mesh": 4}
LEFT_OUT = {  # and why
    "penstock.checkpoint.weights.export": "needs a model of transformers; its tests do the same",
    "penstock.comms.preemption.catch_preemption": "catches signals for good",
    "penstock.comms.point_to_point.send_tensor": "one half of what docs/learn/processes.md runs",
    "penstock.comms.point_to_point.recv_tensor": "the other half",
    "penstock.launcher.launch.launch": "as every program of docs/ does",
}


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """A folder for what is written, short searches, and no process group afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setitem(table_search.EFFORTS, "quick", 100_000)  # steps: enough to find a table
    before = set(sys.modules)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in set(sys.modules) - before:
        if name.endswith("_md") or name.startswith("penstock_"):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("listing", LISTINGS, ids=[listing.name for listing in LISTINGS])
def test_the_blocks_of_a_page_run_and_print_what_it_says(listing: Listing) -> None:
    run(listing, mains=listing.name not in TESTED)


def test_few_blocks_are_left_out() -> None:
    left_out = [(listing.name, block.code) for listing in LISTINGS for block in listing.blocks if not block.runs]
    assert len(left_out) <= MOST_LEFT_OUT, left_out


EXAMPLES = dict(docstrings())


def test_no_example_is_left_out_that_is_not_there() -> None:
    assert set(LEFT_OUT) <= set(EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in LEFT_OUT])
def test_the_example_of_a_docstring_runs(name: str) -> None:
    setup = "\n".join([READERS, *(code for end, code in BESIDE.items() if name.endswith(end))])
    ranks = next((ranks for end, ranks in RANKS.items() if name.endswith(end)), 1)
    expected = pytest.raises(ps.PenstockError) if "# raises" in EXAMPLES[name] else nullcontext()
    with expected:
        run(Listing(name, ranks, [CodeBlock("setup", setup), CodeBlock("python", EXAMPLES[name])]))
