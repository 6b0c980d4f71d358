"""The program of PyTorch's pipeline tutorial, with Penstock: a transformer cut by hand or traced, on four ranks.

torchrun --nproc-per-node 4 examples/tutorial.py --cut traced --schedule looped-bfs
python examples/tutorial.py      # starts the four ranks itself
"""

import argparse
import copy
import os

import torch
from torch import Tensor, nn

import penstock as ps

VOCABULARY, WIDTH, HEADS = 1000, 64, 4


class TutorialTransformer(nn.Module):
    """Decoder layers between an embedding and a head. A stage cut by hand leaves out what the others have."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleDict({str(number): copy.deepcopy(layer) for number in range(layers)})
        self.norm: nn.Module | None = nn.LayerNorm(WIDTH)
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) tokens -> (batch, time, vocabulary) logits."""
        hidden = tokens if self.embedding is None else self.embedding(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden, hidden)
        return hidden if self.norm is None or self.head is None else self.head(self.norm(hidden))


def by_hand(model: TutorialTransformer, stages: int) -> list[nn.Module]:
    """For every stage a copy of the model without what belongs to the others."""
    parts = [copy.deepcopy(model) for _ in range(stages)]
    for stage, part in enumerate(parts):
        for number in range(len(model.layers)):
            if number * stages // len(model.layers) != stage:
                del part.layers[str(number)]
        if stage > 0:
            part.embedding = None
        if stage < stages - 1:
            part.norm = part.head = None
    return list(parts)


def tokenwise_loss(logits: Tensor, target: Tensor) -> Tensor:
    """The mean cross-entropy over all tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def train(cut: str, schedule: str, steps: int, layers: int, microbatches: int = 8) -> None:
    """What every rank runs: learn which token follows which."""
    topology = ps.comms.init_distributed()
    table = ps.schedule.build(schedule, topology.world_size, microbatches)
    torch.manual_seed(0)
    model, tokens = TutorialTransformer(layers), torch.randint(VOCABULARY, (32, 16))
    if cut == "manual":
        pipe = ps.Pipeline(by_hand(model, table.num_stages), tokenwise_loss, table)
    else:
        pipe = ps.Pipeline(model, tokenwise_loss, table, example_args=(tokens[:4],))
    optimizer = torch.optim.Adam(pipe.parameters(), lr=3e-3)
    for step in range(steps):
        loss = pipe.step(tokens, target=(tokens + 1) % VOCABULARY)
        optimizer.step()
        optimizer.zero_grad()
        if topology.rank == 0:
            print(f"step {step}  loss {loss:.6f}", flush=True)
    if topology.rank == 0:
        print(f"{schedule} over {table.num_stages} stages, bubble {pipe.report.bubble:.0%}" if pipe.report else schedule)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cut", choices=["manual", "traced"], default="manual")
    parser.add_argument("--schedule", choices=ps.schedule.names(), default="gpipe")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=8)
    given = parser.parse_args()
    options = given.cut, given.schedule, given.steps, given.layers
    if "RANK" in os.environ:
        train(*options)
    else:
        ps.launch(train, 4, *options)
